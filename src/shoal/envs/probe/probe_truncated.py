"""1 each step for ever, cut off every 5 steps and never terminated: V = 1 / (1 - gamma) everywhere.

Whoever takes the cut for a death learns 2.6 instead of 10 at gamma 0.9, the mean over the five steps.
The step is not shown, or the cut would be a state of its own. With `stagger` rows are cut at different times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Countdown
from shoal.spec import Frame, Result


class ProbeTruncated(Countdown):
    def setup(self) -> None:
        self.count_down(obs=1)

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        step = state["step"] + 1
        return Move({"step": step}, {"agents": Result(self.one, self.never(self.config.n))}, step >= self.config.length)

    def observe(self, state: State) -> Frame:
        return Frame({"agents": self.view(torch.zeros_like(self.one)[..., None], state["clock"])})

    def states(self) -> State:
        return {"clock": self.index([0]), "step": self.index([0])}

    def values(self, gamma: float) -> dict[str, Tensor]:
        return self.all_agents(self.tensor([1 / (1 - gamma)]))
