"""Values above any return: overestimation, named once in a run.

The rule. A learner's mean value (`value_metric`) is compared with the most that returns can come to (`most_return`): the
largest reward so far, earned at every step; or the best stretch of an episode so far, over and over; the less of the two.
Where no reward was above zero it is the least bad of them. Rewards are those that are learnt from, in the units of the values,
and what an entropy is worth comes on top. It is named when it is above that by a tenth of it and a fiftieth of what a sum of
discounted rewards is in size, on three lines of the log in a row without falling, the first ten lines aside: nets begin
anywhere. Not asked: worlds in turns, where rewards of several steps are one; runs that began from others' weights; runs in
which nothing was ever paid.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.algos.base import Algorithm
from shoal.log.logger import read_remarks, to_numbers
from shoal.ops.returns import most_return, steps_that_count
from shoal.spec import Batch
from shoal.tree import cat_groups

if TYPE_CHECKING:
    from shoal.training.loop import Loop

ASIDE, IN_A_ROW = 10, 3  # lines of the log


class ReturnLimit:
    """What one learner's rewards allow, counted on the device: nothing is read until a line is written."""

    def __init__(self, learner: Algorithm, rows: int, device: torch.device):
        zero = lambda *shape: torch.zeros(shape, dtype=torch.float64, device=device)  # noqa: E731
        self.learner = learner
        self.under_way = {"stretch": zero(rows, learner.n), "steps": zero(rows)}  # the best stretch that ends now; the episode
        names = ("reward", "stretch", "steps", "unit", "bonus", "size", "count")
        self.seen = {k: zero() for k in names}  # the largest of each; and the sum of sizes, over so many rewards
        self.seen["reward"].fill_(-math.inf)
        self.lines, self.above, self.first = 0, 0, 0.0  # lines so far, those in a row above the limit, the value on their first

    def count(self, batch: Batch) -> None:
        a, seen, now = self.learner, self.seen, self.under_way
        reward = cat_groups(a.groups, batch.learner_reward.__getitem__, 2).double()  # [T, B, N]
        self._raise("reward", reward)
        seen["size"] += reward.abs().sum()
        seen["count"] += reward.numel()
        for r, over in zip(reward.unbind(), batch.over.unbind(), strict=True):
            self._raise("stretch", now["stretch"].clamp_(min=0).add_(r))
            self._raise("steps", now["steps"].add_(1))
            now["stretch"] *= ~over[:, None]
            now["steps"] *= ~over
        unit = torch.full_like(seen["unit"], a.config.reward_scale)
        self._raise("unit", unit if a.reward_norm is None else a.reward_norm.divide(unit))
        if (bonus := a.most_bonus()) is not None:
            self._raise("bonus", bonus)

    def _raise(self, name: str, x: Tensor) -> None:
        torch.maximum(self.seen[name], x.amax(), out=self.seen[name])

    def exceeded(self, value: float | None) -> float | None:
        """The limit, where a line's mean value completes what is to be named; else none."""
        seen, gamma = to_numbers(self.seen), self.learner.config.gamma
        if value is None or seen["reward"] is None or not seen["size"]:
            return None
        limit = seen["unit"] * most_return(seen["reward"], seen["stretch"], seen["steps"], gamma)
        limit += seen["bonus"] * steps_that_count(math.inf, gamma) if seen["bonus"] else 0.0
        size = seen["unit"] * seen["size"] / seen["count"] * steps_that_count(seen["steps"], gamma)
        self.lines += 1
        if self.lines <= ASIDE or value <= limit + 0.1 * abs(limit) + 0.02 * size:
            self.above = 0
            return None
        self.above += 1
        self.first = value if self.above == 1 else self.first
        return limit if self.above >= IN_A_ROW and value >= self.first else None

    def state_dict(self) -> dict[str, Any]:
        tensors = {k: {n: x.clone() for n, x in getattr(self, k).items()} for k in ("under_way", "seen")}
        return {**tensors, "lines": self.lines, "above": self.above, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for k in ("under_way", "seen"):
            for name, x in getattr(self, k).items():
                x.copy_(state[k][name])
        self.lines, self.above, self.first = state["lines"], state["above"], state["first"]


class Overestimation:
    """The limits of all who say what their mean value is. `known`: all that their values were learnt from will be counted."""

    def __init__(self, learners: list[Algorithm], rows: int, device: torch.device, known: bool):
        asked = [a for a in learners if a.value_metric is not None and not a.spec.turns]
        self.limits = {",".join(a.groups): ReturnLimit(a, rows, device) for a in asked}
        if not known:
            self.forget()

    def forget(self) -> None:
        """Values were learnt from rewards that nobody counted."""
        for x in self.limits.values():
            x.seen["reward"].fill_(math.inf)

    def look(self, loop: Loop) -> None:
        """After a line of training metrics: name a learner whose mean value is above its limit."""
        for whose, x in self.limits.items():
            value = loop.last_train.get(f"{x.learner.groups[0]}/{x.learner.value_metric}")
            limit = x.exceeded(value if isinstance(value, float) else None)
            about = f"values of {whose}"
            if limit is None or any(r["about"] == about for r in read_remarks(loop.folder.path)):
                continue
            name = f"{whose.replace(',', ' and ')} ({x.learner.value_metric})"
            fact = f"The mean value of {name} is {value:.4g} at step {loop.step:,}"
            most = f"the rewards so far allow {limit:.4g} at most"
            loop.record(about, f"{fact}, and {most}: values are overestimated. {_advice(x.learner)}")

    def state_dict(self) -> dict[str, Any]:
        return {whose: x.state_dict() for whose, x in self.limits.items()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """None: of an older run, which counted nothing."""
        if state is None:
            return self.forget()
        for whose, x in self.limits.items():
            x.load_state_dict(state[whose])


def _advice(learner: Algorithm) -> str:
    ways = {
        "target_every": "slower targets (a larger --algo.target-every, a smaller --algo.target-tau)",
        "lr": "a smaller learning rate (--algo.lr)",
        "batch": "a larger --algo.batch",
    }
    known = [way for field, way in ways.items() if hasattr(learner.config, field)]
    return f"Try {', '.join(known[:-1])} or {known[-1]}." if len(known) > 1 else f"Try {known[0]}."
