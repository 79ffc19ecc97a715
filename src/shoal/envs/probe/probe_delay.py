"""Two steps: the first shows a sign and pays nothing, the second shows and pays it. V = gamma * sign, then sign.

A value that does not reach back through the first step is wrong in the bootstrap or in the trace. Observation: the
sign, and 0 or 1 for the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Idle
from shoal.spec import Frame, Result


class ProbeDelay(Idle):
    def setup(self) -> None:
        self.assemble(obs=2, horizon=2, common=False)
        self.noise_begin = self.config.n

    def begin(self, noise: Tensor) -> State:
        return {"sign": self.sign(noise)}  # [B, N]

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        sign, last = state["sign"], self.last(state)[:, None]
        return Move(state, {"agents": Result(sign * last, last.expand_as(sign))})

    def observe(self, state: State) -> Frame:
        sign = state["sign"]
        step = state["clock"].to(self.dtype)[:, None].expand_as(sign)
        return Frame({"agents": self.view(torch.stack((sign, step), -1), state["clock"])})

    @property
    def answer(self) -> Answer:
        return Answer({"agents": 0.0}, {"agents": 0.0})

    def states(self) -> State:
        clock, sign = self.every([0, 1], self.signs(self.config.n))
        return {"clock": clock, "sign": sign}

    def values(self, gamma: float) -> dict[str, Tensor]:
        s = self.states()
        return {"agents": s["sign"] * gamma ** (1 - s["clock"]).to(self.dtype)[:, None]}
