"""Learning from a replay: what is drawn from it, and when.

The loop keeps one replay of the whole world (`training/replay.py`). Every learner has an `OffPolicyTrainer`: it knows from host
counts how many updates are due, samples a batch, updates, and writes priorities back. All of it but asking for the `variant` is
on the device, and can be captured or recorded (`training/speedup.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.algos.base import Algorithm, Replay
from shoal.buffers.episodes import Episodes
from shoal.buffers.prioritised import Prioritised
from shoal.buffers.replay import ReplayBuffer, Uniform
from shoal.ops.schedules import Now
from shoal.spec import Batch, Result

Update = Callable[[Algorithm, Batch], Tensor | None]  # of one learner; it returns the priorities


class OffPolicyTrainer:
    def __init__(self, algorithm: Algorithm, replay: ReplayBuffer, update: Update, uniform: Callable[[int], Tensor]):
        assert isinstance(algorithm.feed, Replay)
        self.algorithm, self.feed, self.replay, self.update, self.uniform = algorithm, algorithm.feed, replay, update, uniform
        f = self.feed
        self.start = max(f.start, f.length * replay.rows)
        self.since, self.done = 0, 0  # the step at which the replay was empty, and the updates of before
        self.sampler: Uniform
        if f.whole:
            self.sampler = Episodes(replay, f.length, over_of)
        else:
            self.sampler = Uniform(replay, f.length) if f.alpha is None else Prioritised(replay, f.length, f.alpha)

    def updates_due(self, step: int) -> int:
        """Updates that so many environment steps are worth."""
        return self.done + max(0, int((step - self.since - self.start) // self.feed.every))

    def restart(self, step: int) -> None:
        """The replay is empty at this step: updates go on once it holds as much as when they began."""
        self.since, self.done = step, self.updates_due(step)

    def set_schedules(self, now: Now) -> None:
        if isinstance(self.sampler, Prioritised):
            self.sampler.beta.fill_(self.feed.beta + (1 - self.feed.beta) * now.progress)

    def __call__(self) -> None:
        """One update."""
        self.algorithm.variant()
        self.update_once()

    def update_once(self) -> None:
        """What of it is on the device."""
        sample = self.sampler.draw(self.uniform(self.sampler.draws(self.feed.batch)), self.feed.batch)
        batch = batch_of(*self.replay.windows(sample.slot, sample.row, self.feed.length))
        batch.weight, batch.filled = sample.weight, sample.filled
        self.sampler.learnt(sample, self.update(self.algorithm, batch))


def transitions_of(batch: Batch) -> tuple[Any, ...]:
    """What is kept of a rollout: rewards as they were paid at the time."""
    learner_reward = {g: x.float() for g, x in batch.learner_reward.items()}
    terminated = {g: r.terminated for g, r in batch.results.items()}
    return batch.frame, batch.next, batch.actions, learner_reward, terminated, batch.over


def over_of(transitions: tuple[Any, ...]) -> Tensor:
    return transitions[-1]


def batch_of(transitions: tuple[Any, ...], memory: dict[str, Any]) -> Batch:
    frame, next_frame, actions, learner_reward, ended, over = transitions
    results = {g: Result(learner_reward[g], ended[g]) for g in learner_reward}
    return Batch(frame, next_frame, actions, results, over, {g: {} for g in learner_reward}, memory, dict(learner_reward))
