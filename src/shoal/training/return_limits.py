"""What rewards allow returns to come to, at most. `training/overestimation.py` has the rule, and names what is above."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.algos.base import Algorithm
from shoal.log.logger import to_numbers
from shoal.ops.returns import most_return, steps_that_count
from shoal.spec import Batch
from shoal.tree import cat_groups

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
