"""What those who learn from a replay have in common: their settings, how long sequences are, and what values learn towards.

A sequence is [T, B, N]: `burn_in` steps that only bring memory up to date, `chunk` steps that are learnt from, and `n_step` - 1
that are there for their rewards.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from shoal.algos import defaults
from shoal.algos.base import Algorithm, LearnerConfig, Replay
from shoal.algos.checks import bounded
from shoal.algos.samples import Samples
from shoal.nets.norm import Running
from shoal.ops import losses
from shoal.ops.returns import n_step, turn_values
from shoal.ops.turns import unsettled_turns
from shoal.spec import Batch, UserError
from shoal.tree import cat_groups


@dataclass(frozen=True)
class ReplayConfig(LearnerConfig):
    """Settings of all who learn from a replay."""

    rules: ClassVar[defaults.Rules] = {
        **LearnerConfig.rules,
        "every": defaults.every,
        "learning_starts": defaults.warm,
    }

    rollout: int = 4  # steps of every row between updates
    every: float | None = None  # environment steps, all rows counted, for each update; none: 100k updates a run, from 1 to 25
    batch: int = 256  # sequences (without memory: single transitions) an update
    capacity: int = 500_000  # environment steps that are remembered
    learning_starts: int | None = None  # environment steps before the first update; none: a twentieth of the run, at most 5,000
    chunk: int | None = None  # steps of a sequence that are learnt from; none: 1, with memory 16
    burn_in: int | None = None  # steps before them that only bring memory up to date; none: 0, with memory 4
    n_step: int | None = 1  # rewards before values take over
    prioritised: bool = False  # draw what was predicted badly more often
    priority: float = 0.6  # exponent of priorities; 0 is even
    priority_weight: float = 0.4  # first exponent of the importance weights; 1 at the run's end
    target_every: int = 1  # updates between those of the target
    target_tau: float = 0.01  # share by which it follows; 1: copied
    lr: float = 1e-3  # learning rate
    grad_clip: float | None = None  # norm beyond which gradients are scaled down; none: never

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = dict.fromkeys(("target_tau", "priority_weight"), (0.0, 1.0))
        counts = dict.fromkeys(("learning_starts", "burn_in", "priority"), (0.0, 1e30))
        bounded(self, {**shares, **counts}, ("every", "batch", "capacity", "chunk", "n_step", "target_every"))


class OffPolicy(Algorithm, ABC):
    """Learns from sequences of a replay."""

    net_defaults: ClassVar[dict[str, Any]] = {"hidden": (128, 128), "activation": "relu"}

    def set_feed(self) -> None:
        """The lengths of sequences, and the feed that follows from the settings."""
        c = self.config
        self.chunk, self.burn_in = c.chunk or (16 if self.recurrent else 1), 0
        if self.spec.turns:
            if c.n_step > 1:
                raise UserError("--algo.n-step counts steps of the world, and here agents wait for their turn: it takes 1.")
            self.chunk = max(self.chunk, 2 * sum(g.n for g in self.spec.groups))  # until everybody's next turn is seen
        if self.recurrent:
            self.burn_in = 4 if c.burn_in is None else c.burn_in
        length, alpha = self.burn_in + self.chunk + c.n_step - 1, c.priority if c.prioritised else None
        self.feed = Replay(c.batch, length, c.learning_starts, c.every, c.capacity, c.rollout, alpha, c.priority_weight)
        self.reward_norm = Running() if c.normalise_reward else None

    def update_reward_norm(self, batch: Batch) -> None:
        """Let the statistics of rewards move by what was collected."""
        assert self.reward_norm is not None
        alive = cat_groups(self.groups, lambda g: batch.frame[g].alive, 2) if self.has_inactive else None
        self.reward_norm.update(cat_groups(self.groups, batch.learner_reward.__getitem__, 2), alive)

    def td_target(self, samples: Samples, value_tp1: Tensor, value_t: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What values learn towards, [T, B, N], and which of it counts; none: all. Valued `as_one`: [T, B, 1]. `value_t` is
        needed where agents move in turn."""
        reward, terminated, cut, mask = samples.reward, samples.terminated, samples.cut, samples.valued
        if self.as_one:
            reward, terminated, cut, mask = self._of_team(reward, terminated, cut, mask, samples.alive)
        if self.spec.turns:
            target, mask = self._turn_target(samples, reward, terminated, cut, mask, value_tp1, value_t)
        else:
            target = n_step(reward, value_tp1, terminated, cut, self.config.gamma, self.config.n_step)
        return self.learnt(target), None if mask is None else self.learnt(mask)

    def _of_team(
        self, reward: Tensor, terminated: Tensor, cut: Tensor, mask: Tensor | None, alive: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The same of the one value that all have, [T, B, 1]. It ends when nobody goes on; what agents are paid while none of
        them is to move counts as well."""
        alive = None if alive is None else alive | ~alive.any(-1, keepdim=True)  # where nobody is alive, the mean over all
        mask = None if mask is None else mask.any(-1, keepdim=True)
        reward = losses.masked_mean(reward, alive, (2,))
        return reward, terminated.all(-1, keepdim=True), cut.all(-1, keepdim=True), mask

    def _turn_target(
        self, samples: Samples, reward: Tensor, terminated: Tensor, cut: Tensor, mask: Any, value_tp1: Tensor, value_t: Any
    ) -> tuple[Tensor, Tensor]:
        """The same where agents move in turn: of turns alone, and of those after which somebody's next turn is seen."""
        target = turn_values(reward, value_t, value_tp1, terminated, cut, self.config.gamma, mask)
        next_turn = samples.next_turn.any(-1, keepdim=True) if self.as_one else samples.next_turn
        return target, mask & ~unsettled_turns(terminated, terminated | cut, mask, next_turn)

    def learnt(self, x: Tensor, time_at: int = 0) -> Tensor:
        """Of steps after the burn-in those that are learnt from: what follows is there for its rewards."""
        return x if x.shape[time_at] == self.chunk else x.narrow(time_at, 0, self.chunk)
