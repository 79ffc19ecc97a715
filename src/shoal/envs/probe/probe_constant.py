"""One step, a blank observation, a reward of 1: V = 1. A critic that misses this cannot regress at all."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Idle
from shoal.spec import Frame, Result


class ProbeConstant(Idle):
    def setup(self) -> None:
        self.assemble(obs=1, horizon=1)
        self.one = self.tensor(1.0).expand(self.rows, self.config.n)

    def begin(self, noise: Tensor) -> State:
        return {}

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        return Move(state, {"agents": Result(self.one, self.last(state)[:, None].expand_as(self.one))})

    def observe(self, state: State) -> Frame:
        return Frame({"agents": self.view(torch.zeros_like(self.one)[..., None], state["clock"])})

    @property
    def answer(self) -> Answer:
        return Answer({"agents": 1.0}, {"agents": 1.0})

    def states(self) -> State:
        return {"clock": self.index([0])}

    def values(self, gamma: float) -> dict[str, Tensor]:
        return self.all_agents(self.tensor([1.0]))
