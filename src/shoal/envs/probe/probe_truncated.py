"""1 each step for ever, cut off every 5 steps and never terminated: V = 1 / (1 - gamma) everywhere.

Whoever takes the cut for a death learns 2.6 instead of 10 at gamma 0.9, the mean over the five steps.
The step is not shown, or the cut would be a state of its own. With `stagger` rows are cut at different times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Crowd, Idle
from shoal.spec import Frame, Pay, UserError


class ProbeTruncated(Idle):
    @dataclass(frozen=True)
    class Config(Crowd):
        length: int = 5  # steps until the cut
        stagger: bool = False  # begin at a random step, so that rows are cut at different times

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.length < 1:
                raise UserError(f"--env.length is {self.length}: an episode needs at least one step.")

    def setup(self) -> None:
        self.assemble(obs=1, horizon=self.config.length)
        self.one = self.tensor(1.0).expand(self.rows, self.config.n)
        self.fixed_length, self.noise_begin = not self.config.stagger, int(self.config.stagger)

    def begin(self, noise: Tensor) -> State:
        if not self.config.stagger:
            return {"step": torch.zeros(self.rows, dtype=torch.long, device=self.device)}
        return {"step": (noise[:, 0] * self.config.length).long().clamp(max=self.config.length - 1)}

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        step = state["step"] + 1
        return Move({"step": step}, {"agents": Pay(self.one, self.never(self.config.n))}, step >= self.config.length)

    def observe(self, state: State) -> Frame:
        return Frame({"agents": self.view(torch.zeros_like(self.one)[..., None], state["clock"])})

    @property
    def answer(self) -> Answer:
        steps = (self.config.length + 1) / 2 if self.config.stagger else float(self.config.length)
        return Answer({"agents": steps}, {"agents": steps})

    def states(self) -> State:
        return {"clock": self.index([0]), "step": self.index([0])}

    def values(self, gamma: float) -> dict[str, Tensor]:
        return self.all_agents(self.tensor([1 / (1 - gamma)]))
