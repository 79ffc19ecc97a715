"""1 each step, terminated after 5: V_t = (1 - gamma ** (5 - t)) / (1 - gamma), with step t shown one-hot.

Whoever bootstraps past a death learns more than that, up to 1 / (1 - gamma). With `stagger` rows begin at a random t and
so end at different times: an end in one row must not leak into another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.envs.base import Move, State
from shoal.envs.probe.base import Countdown, annuity
from shoal.spec import Frame, Result


class ProbeTerminated(Countdown):
    def setup(self) -> None:
        self.count_down(obs=self.config.length)

    def advance(self, state: State, actions: dict[str, Tensor], noise: Tensor) -> Move:
        step = state["step"] + 1
        dead = step >= self.config.length
        return Move({"step": step}, {"agents": Result(self.one, dead[:, None].expand_as(self.one))}, dead)

    def observe(self, state: State) -> Frame:
        shown = self.onehot(state["step"], self.config.length)[:, None].expand(-1, self.config.n, -1)
        return Frame({"agents": self.view(shown, state["clock"])})

    def states(self) -> State:
        step = torch.arange(self.config.length, device=self.device)
        return {"clock": step, "step": step}

    def values(self, gamma: float) -> dict[str, Tensor]:
        return self.all_agents(annuity(gamma, (self.config.length - self.states()["step"]).to(self.dtype)))
