"""Turns: agents that wait for theirs. Rewards of the steps between belong to the turn before; `ops/returns.py` discounts them.

Everything is [T, B, N], `active` where an agent has its turn.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unsettled_turns(terminated: Tensor, ends: Tensor, active: Tensor, turn_tp1: Tensor) -> Tensor:
    """[T, B, N] the steps after which an agent waits until the rollout or its episode is cut off. Values are learnt in one's
    own turns alone, so that there is none to bootstrap such a turn from. `turn_tp1`: whose V(next) is learnt."""
    unsettled = ~terminated & ~turn_tp1
    for t in range(ends.shape[0] - 2, -1, -1):
        unsettled[t] = torch.where(ends[t], unsettled[t], ~active[t + 1] & unsettled[t + 1])
    return unsettled


def reward_until_turn(
    reward: Tensor, value_t: Tensor, value_tp1: Tensor, ends: Tensor, active: Tensor
) -> tuple[Tensor, Tensor]:
    """For each turn, the reward summed until the next turn and the value there; `value_tp1` is zero where terminated."""
    reward, value_tp1 = reward.clone(), value_tp1.clone()
    for t in range(reward.shape[0] - 2, -1, -1):
        waits = ~ends[t] & ~active[t + 1]  # nothing of the agent's own begins at t + 1: look through it
        value_tp1[t] = torch.where(ends[t], value_tp1[t], torch.where(active[t + 1], value_t[t + 1], value_tp1[t + 1]))
        reward[t] = reward[t] + reward[t + 1] * waits
    return reward, value_tp1
