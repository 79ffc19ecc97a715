"""Returns and advantages: the one place with arithmetic in gamma. Which steps terminate or cut a return is decided in
`algos/samples.py` and `algos/deaths.py`. With `--compile fused` GAE is done by `kernels/native.c` and `kernels/triton.py`.

Everything is [T, B, N]: what agent n of row b earned, and whether it ended, in the step from t to t + 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.ops.kernels import for_device
from shoal.ops.turns import reward_until_turn


def steps_that_count(steps: float, gamma: float) -> float:
    """1 + gamma + gamma^2 + ..., so many of them: what a reward of one at each of these steps comes to."""
    return steps if gamma == 1 else (1 - gamma**steps) / (1 - gamma)


def most_return(reward: float, stretch: float, steps: float, gamma: float) -> float:
    """The most that a return can come to where no reward is above `reward`, none of the stretches of an episode has a sum above
    `stretch`, and none is longer than so many `steps`: a discounted sum is a mean of sums of stretches, and of a longer
    time every so many steps add that again, discounted. Where no reward is above zero it ends at once, after the best."""
    if reward <= 0:
        return reward
    if gamma == 1:
        return math.inf
    return min(reward / (1 - gamma), stretch / (1 - gamma**steps))


def gae(
    reward: Tensor,
    value_t: Tensor,
    value_tp1: Tensor,
    terminated: Tensor,
    cut: Tensor,
    gamma: float,
    lam: float,
    active: Tensor | None = None,
    unsettled: Tensor | None = None,
    kernels: bool = False,
) -> Tensor:
    """Generalised advantage estimation (Schulman et al., 2016, https://arxiv.org/abs/1506.02438).

        delta_t = r_t + gamma (1 - terminated_t) V(s_{t+1}) - V(s_t),    A_t = delta_t + gamma lambda A_{t+1}

    value_tp1 is V of the true next observation. Only `terminated` stops the bootstrap; `cut` (the episode is over, or
    the agent is gone from the next frame) stops the trace. `active` and `unsettled` are for turns, see `_turn_gae`.
    """
    shape = reward.shape
    assert value_t.shape == value_tp1.shape == terminated.shape == cut.shape == shape, "gae wants everything [T, B, N]"
    reward = reward.to(value_t.dtype)  # worlds pay in any
    if active is not None:
        return _turn_gae(reward, value_t, value_tp1 * ~terminated, terminated | cut, gamma, lam, active, unsettled)
    if kernels:
        return for_device(reward.device).gae(reward, value_t, value_tp1, terminated, cut, gamma, lam)
    delta = reward + gamma * (value_tp1 * ~terminated) - value_t
    return _traced(delta, gamma * lam * (~(terminated | cut)).to(delta.dtype))


def _traced(delta: Tensor, trace: Tensor) -> Tensor:
    """A_t = delta_t + trace_t A_{t+1}."""
    advantage, later = torch.empty_like(delta), torch.zeros_like(delta[0])
    for d, w, out in reversed(list(zip(delta.unbind(), trace.unbind(), advantage.unbind(), strict=True))):
        later = torch.addcmul(d, w, later, out=out)
    return advantage


def _turn_gae(
    reward: Tensor, value_t: Tensor, value_tp1: Tensor, ends: Tensor, gamma: float, lam: float, active: Tensor, unsettled: Any
) -> Tensor:
    """Steps in which an agent waits pass its reward back to its last turn, whose next value is taken at its next turn; gamma
    counts the agent's own turns. The advantage of a step without a turn is zero, and so is that of turns that are `unsettled`,
    which nothing is known of yet."""
    reward, value_tp1 = reward_until_turn(reward, value_t, value_tp1, ends, active)
    delta = (reward + gamma * value_tp1 - value_t) * (active if unsettled is None else active & ~unsettled)
    goes_on = (~ends).to(delta.dtype)
    trace = torch.where(active, gamma * lam * goes_on, goes_on)  # waiting hands the next turn's advantage on
    return _traced(delta, trace) * active


def n_step(reward: Tensor, value_tp1: Tensor, terminated: Tensor, cut: Tensor, gamma: float, n: int) -> Tensor:
    """Returns of n steps (Sutton, 1988):

        G_t = r_t + gamma r_{t+1} + ... + gamma^{m-1} r_{t+m-1} + gamma^m (1 - terminated) V(s_{t+m})

    with m = n, or fewer where the agent's time ends (`terminated`, `cut`) or nothing later is known. value_tp1 is V of the true
    next observation, so that what was cut off is bootstrapped from there.
    """
    reward = reward.to(value_tp1.dtype)
    one = reward + gamma * value_tp1 * ~terminated
    ends, out = terminated | cut, one
    for _ in range(min(n, len(one)) - 1):
        further = reward[:-1] + gamma * out[1:]
        out = torch.cat((torch.where(ends[:-1], one[:-1], further), one[-1:]))
    return out


def td_lambda(reward: Tensor, value_tp1: Tensor, terminated: Tensor, cut: Tensor, gamma: float, lam: float) -> Tensor:
    """Returns that mix those of all lengths (Sutton, 1988):

        G_t = r_t + gamma (1 - terminated_t) ((1 - lambda) V(s_{t+1}) + lambda G_{t+1})

    and V(s_{t+1}) alone where the trace ends: at a `cut`, and where nothing later is known.
    """
    reward = reward.to(value_tp1.dtype)
    goes_on, bootstrap = (~(terminated | cut)).to(reward.dtype), gamma * value_tp1 * ~terminated
    out, later = torch.empty_like(bootstrap), value_tp1[-1]
    for t in range(len(reward) - 1, -1, -1):
        later = out[t] = reward[t] + bootstrap[t] + gamma * lam * goes_on[t] * (later - value_tp1[t])
    return out


def turn_values(
    reward: Tensor, value_t: Tensor, value_tp1: Tensor, terminated: Tensor, cut: Tensor, gamma: float, active: Tensor
) -> Tensor:
    """r + gamma (1 - terminated) V where agents move in turn: the reward summed until an agent's next turn, and the value
    there. Of steps in which it does not act, nothing is said."""
    reward, value = reward_until_turn(reward.to(value_t.dtype), value_t, value_tp1 * ~terminated, terminated | cut, active)
    return reward + gamma * value
