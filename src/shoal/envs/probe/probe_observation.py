"""One step that pays what the agent sees, +1 or -1: V(obs) = obs. The smallest thing that a critic must look for."""

from __future__ import annotations

from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Idle
from shoal.spec import Frame, Result


class ProbeObservation(Idle):
    def setup(self) -> None:
        self.assemble(obs=1, horizon=1, common=False)
        self.noise_begin = self.config.n

    def begin(self, noise: Tensor) -> State:
        return {"sign": self.sign(noise)}  # [B, N] each agent its own

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        sign = state["sign"]
        return Move(state, {"agents": Result(sign, self.last(state)[:, None].expand_as(sign))})

    def observe(self, state: State) -> Frame:
        return Frame({"agents": self.view(state["sign"][..., None], state["clock"])})

    @property
    def answer(self) -> Answer:
        return Answer({"agents": 0.0}, {"agents": 0.0})

    def states(self) -> State:
        clock, sign = self.every([0], self.signs(self.config.n))
        return {"clock": clock, "sign": sign}

    def values(self, gamma: float) -> dict[str, Tensor]:
        return {"agents": self.states()["sign"]}
