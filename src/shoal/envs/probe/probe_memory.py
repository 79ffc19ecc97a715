"""A sign is shown in the first frame, then nothing for `blank` frames; the choice on the last of them must match it.

+1 for a match and -1 for a miss, on the last step alone, which terminates. With memory the best is 1; without, every
policy earns 0 on average, for the last frame looks the same under both signs. Observation: the sign or 0, and 1 on the
last frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Probe, agent_group
from shoal.spec import Discrete, EnvSpec, Frame, Result, UserError


class ProbeMemory(Probe):
    @dataclass(frozen=True)
    class Config:
        n: int = 1  # agents, each with a sign of its own
        blank: int = 3  # frames through which the sign must be remembered

        def __post_init__(self) -> None:
            if not 1 <= self.n <= 1000:
                raise UserError(f"--env.n is {self.n}: this probe has 1 to 1000 agents.")
            if self.blank < 1:
                raise UserError(f"--env.blank is {self.blank}: with no blank frame there is nothing to remember.")

    def setup(self) -> None:
        n = self.noise_begin = self.config.n
        self.spec = EnvSpec((agent_group(n, 2, Discrete(2)),), common=n == 1, horizon=self.config.blank + 1)

    def begin(self, noise: Tensor) -> State:
        return {"sign": self.sign(noise)}  # [B, N]

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        last = self.last(state)[:, None]
        said = actions["agents"].to(self.dtype) * 2 - 1  # choice 0 means -1, choice 1 means +1
        return Move(state, {"agents": Result(said * state["sign"] * last, last.expand_as(said))})

    def observe(self, state: State) -> Frame:
        clock, sign = state["clock"][:, None], state["sign"]
        last = (clock == self.config.blank).to(self.dtype).expand_as(sign)
        return Frame({"agents": self.view(torch.stack((sign * (clock == 0), last), -1), state["clock"])})

    def solution(self, state: State) -> dict[str, Tensor]:
        return {"agents": (state["sign"] > 0).long()}

    @property
    def answer(self) -> Answer:
        return Answer({"agents": 1.0}, {"agents": 0.0}, slack=0.1)
