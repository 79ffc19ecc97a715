"""What those who learn from a replay have in common: their settings, how long the sequences are, and what is learnt towards.

A batch is [T, B, N]: `burn_in` steps that only bring memory up to date, `chunk` steps that are learnt from, and `n_step` - 1
that are there for their rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.algos import base
from shoal.algos.base import AfterDeath, Algorithm, Replay, bounded
from shoal.ops import losses
from shoal.ops.returns import n_step, turn_values, unsettled_turns
from shoal.spec import Batch, UserError, tree_map


@dataclass(frozen=True)
class ReplayConfig:
    """Settings of all who learn from a replay."""

    rollout: int = 4  # steps of every row between updates
    every: float = 16  # environment steps, all rows counted, for each update
    batch: int = 256  # sequences (without memory: single moments) an update
    capacity: int = 500_000  # environment steps that are remembered
    learning_starts: int = 5_000  # environment steps before the first update
    chunk: int | None = None  # steps of a sequence that are learnt from; none: 1, with memory 16
    burn_in: int | None = None  # steps before them that only bring memory up to date; none: 0, with memory 4
    n_step: int = 1  # rewards before values take over
    gamma: float = 0.99  # discount
    time_limit: bool = True  # bootstrap where an episode was cut off; false: as if it had terminated
    after_death: AfterDeath = "auto"  # a return ends with the agent (own) or its team's episode; auto: team if pay is common
    prioritised: bool = False  # draw what was predicted badly more often
    priority: float = 0.6  # exponent of priorities; 0 is even
    priority_weight: float = 0.4  # first exponent of the importance weights; 1 at the run's end
    target_every: int = 200  # updates between those of the target
    target_tau: float = 1.0  # share by which it follows; 1: copied
    huber: float | None = 1.0  # errors beyond this count linearly; none: squared errors
    lr: float = 5e-4  # learning rate
    lr_schedule: str = "constant"  # linear, cosine, exponential, exponential:0.999/update or /step, module:Class
    lr_last: float = 0.0  # share of the learning rate that its schedule ends at
    weight_decay: float = 0.0  # decoupled, as in AdamW
    grad_clip: float | None = 10.0  # norm beyond which gradients are scaled down; none: never
    normalise_obs: bool = True  # observations and states of mean 0 and deviation 1, by running statistics
    normalise_reward: bool = False  # rewards divided by their running root mean square
    normaliser: str | None = None  # your own in place of the running one: package.module:Class or file.py:Class
    reward_scale: float = 1.0  # rewards are multiplied by it before anything is learnt; reported returns stay raw
    shaper: str | None = None  # your own function (reward, obs, step, steps) -> reward, as module:name or file.py:name

    def __post_init__(self) -> None:
        whole = ("rollout", "every", "batch", "capacity", "chunk", "n_step", "target_every")
        bounds: dict[str, tuple[float, float]] = {
            **dict.fromkeys(("gamma", "target_tau", "lr_last", "priority_weight"), (0, 1)),
            **dict.fromkeys(("weight_decay", "learning_starts", "burn_in", "priority"), (0, 1e30)),
        }
        bounded(self, bounds, (*whole, "lr", "huber", "grad_clip", "reward_scale"))


def lengths(owner: Algorithm) -> tuple[int, int]:
    """Steps that are learnt from, and those that warm memory up before them."""
    c, recurrent = owner.config, owner.net.memory != "none"
    chunk = c.chunk or (16 if recurrent else 1)
    if owner.spec.turns:
        if c.n_step > 1:
            raise UserError("--algo.n-step counts steps of the world, and here agents wait for their turn: it takes 1.")
        chunk = max(chunk, 2 * sum(g.n for g in owner.spec.groups))  # until everybody's next turn is seen
    return chunk, 0 if not recurrent else 4 if c.burn_in is None else c.burn_in


def feed(config: Any, chunk: int, burn_in: int) -> Replay:
    c = config
    ranked = c.priority if c.prioritised else None
    length = burn_in + chunk + c.n_step - 1
    return Replay(c.batch, length, c.learning_starts, c.every, c.capacity, c.rollout, ranked, c.priority_weight)


def later(batch: Batch, burn_in: int) -> Batch:
    """What of a batch goes by steps, after the burn-in."""
    whole = Batch(batch.frame, batch.next, batch.actions, batch.results, batch.over, {}, {}, batch.learner_reward)
    return tree_map(lambda x: x[burn_in:], whole) if burn_in else whole


def unrolled(net: Callable[..., tuple[Any, Any]], burn_in: int, x: Any, state: Any, *moment: Any) -> tuple[Any, Any]:
    """What a net with memory says after the burn-in, and its state after each of those steps. `moment`: where agents start, and
    whose memory goes on."""
    if burn_in:
        with torch.no_grad():
            warm, *then = tree_map(lambda t: t[:burn_in], (x, *moment))
            state = tree_map(lambda t: t[-1], net(warm, state, *then)[1])
    x, *moment = tree_map(lambda t: t[burn_in:], (x, *moment))
    return net(x, state, *moment)


def weigh(owner: Any, batch: Batch) -> None:
    """Let the statistics of rewards move by what was collected."""
    if owner.reward_norm is not None:
        there = owner.cat_groups(lambda g: batch.frame[g].alive, 2) if owner.has_inactive else None
        owner.reward_norm.update(owner.cat_groups(batch.learner_reward.__getitem__, 2), there)


def reward(owner: Any, batch: Batch) -> Tensor:
    """[T, B, N] what is learnt from of what was paid."""
    learner_reward = owner.earned(batch) * owner.config.reward_scale
    return learner_reward if owner.reward_norm is None else owner.reward_norm.divide(learner_reward)


def goes_on(owner: Algorithm, batch: Batch) -> Tensor:
    """[T, B, N] who has a next moment that may be worth something."""
    return owner.cat_groups(lambda g: base.goes_on(batch, g), 2)


def targets(
    owner: Algorithm, batch: Batch, reward: Tensor, value_tp1: Tensor, value_t: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What is learnt towards, [T, B, N], and which of it counts; none: all. Of agents that are valued `as_one` [T, B, 1].
    `value_t` is asked for where agents move in turn."""
    c, mask = owner.config, owner.valued(batch)
    terminated, cut = owner.ends(batch)
    if owner.as_one:  # they end when nobody goes on; what they are paid while none of them is to move counts as well
        there = owner.cat_groups(lambda g: batch.frame[g].alive, 2) if owner.has_inactive else None
        there = None if there is None else there | ~there.any(-1, keepdim=True)  # of those who are all gone: as the team is
        reward = losses.masked_mean(reward, there, (2,))
        terminated, cut = terminated.all(-1, keepdim=True), cut.all(-1, keepdim=True)
        mask = None if mask is None else mask.any(-1, keepdim=True)
    if not owner.spec.turns:
        return n_step(reward, value_tp1, terminated, cut, c.gamma, c.n_step), mask
    assert mask is not None
    assert value_t is not None
    told = owner.turn_tp1(batch)
    told = told.any(-1, keepdim=True) if owner.as_one else told
    unsettled = unsettled_turns(terminated, terminated | cut, mask, told)
    return turn_values(reward, value_t, value_tp1, terminated, cut, c.gamma, mask), mask & ~unsettled
