"""Each agent sees a symbol, a fresh one every step, and is paid for copying it; 8 steps, cut off, never terminated.

    discrete     1 if the choice of 3 is right            best 8    random 8 / 3
    multi        the share of two choices, of 3 and of 2  best 8    random 10 / 3
    continuous   minus the mean squared error             best 0    random -26 / 3

The continuous space is [-2, 1] x [0, 2] and the symbol is uniform in it: a slip in scaling or clipping stays visible.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import SPACES, Answer, Copying, Crowd, Probe, agent_group
from shoal.spec import EnvSpec, Frame, Result

STEPS = 8


class ProbeCopy(Probe):
    @dataclass(frozen=True)
    class Config(Crowd):
        n: int = 2  # agents

    def setup(self) -> None:
        n = self.config.n
        self.task = Copying(SPACES[self.config.actions], self)
        self.noise_begin = self.noise_step = n * self.task.draws
        self.spec = EnvSpec((agent_group(n, self.task.width, self.task.space),), common=n == 1, horizon=STEPS)

    def begin(self, noise: Tensor) -> State:
        return {"symbol": self.task.draw(noise)}  # [B, N, D]

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        reward = self.task.score(state["symbol"], actions["agents"])
        return Move({"symbol": self.task.draw(noise)}, {"agents": Result(reward, self.never(self.config.n))})

    def observe(self, state: State) -> Frame:
        return Frame({"agents": self.view(self.task.show(state["symbol"]), state["clock"])})

    def solution(self, state: State) -> dict[str, Tensor]:
        return {"agents": self.task.copy(state["symbol"])}

    @property
    def answer(self) -> Answer:
        return Answer({"agents": STEPS * self.task.best}, {"agents": STEPS * self.task.random})
