"""1 each step, terminated after 5: V_t = (1 - gamma ** (5 - t)) / (1 - gamma), with step t shown one-hot.

Whoever bootstraps past a death learns more than that, up to 1 / (1 - gamma). With `stagger` rows begin at a random t and
so end at different times: an end in one row must not leak into another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Answer, Crowd, Idle, annuity
from shoal.spec import Frame, Pay, UserError


class ProbeTerminated(Idle):
    @dataclass(frozen=True)
    class Config(Crowd):
        length: int = 5  # steps until the death
        stagger: bool = False  # begin at a random step, so that rows end at different times

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.length < 1:
                raise UserError(f"--env.length is {self.length}: an episode needs at least one step.")

    def setup(self) -> None:
        self.assemble(obs=self.config.length, horizon=self.config.length)
        self.one = self.tensor(1.0).expand(self.rows, self.config.n)
        self.fixed_length, self.noise_begin = not self.config.stagger, int(self.config.stagger)

    def begin(self, noise: Tensor) -> State:
        if not self.config.stagger:
            return {"step": torch.zeros(self.rows, dtype=torch.long, device=self.device)}
        return {"step": (noise[:, 0] * self.config.length).long().clamp(max=self.config.length - 1)}

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        step = state["step"] + 1
        dead = step >= self.config.length
        return Move({"step": step}, {"agents": Pay(self.one, dead[:, None].expand_as(self.one))}, dead)

    def observe(self, state: State) -> Frame:
        shown = self.onehot(state["step"], self.config.length)[:, None].expand(-1, self.config.n, -1)
        return Frame({"agents": self.view(shown, state["clock"])})

    @property
    def answer(self) -> Answer:
        steps = (self.config.length + 1) / 2 if self.config.stagger else float(self.config.length)
        return Answer({"agents": steps}, {"agents": steps})

    def states(self) -> State:
        step = torch.arange(self.config.length, device=self.device)
        return {"clock": step, "step": step}

    def values(self, gamma: float) -> dict[str, Tensor]:
        return self.all_agents(annuity(gamma, (self.config.length - self.states()["step"]).to(self.dtype)))
