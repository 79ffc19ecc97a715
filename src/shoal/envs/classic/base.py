"""What the classic-control worlds share: one agent, one group, a horizon at which the episode is cut off.

They follow Gymnasium 1.4's steps, which are those that scores in the literature were measured on. Gymnasium computes in
float64 and shows float32; here all is of the world's dtype, float32 unless told otherwise, so that a long episode drifts
from Gymnasium's by rounding, and a step does not.
"""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoal.envs.base import Move, State, World
from shoal.spec import EnvSpec, Frame, Group, Result, Space, UserError

GREY, DARK, BLUE, GREEN, RED = (0.6, 0.62, 0.68), (0.2, 0.22, 0.28), (0.35, 0.35, 0.85), (0.3, 0.7, 0.4), (0.85, 0.35, 0.35)


class Solo(World, ABC):
    @dataclass(frozen=True)
    class Config:
        horizon: int = 200  # steps after which an episode is cut off

        def __post_init__(self) -> None:
            if self.horizon < 1:
                raise UserError(f"--env.horizon is {self.horizon}: an episode needs at least one step.")

    names: ClassVar[dict[str, dict[str, Any]]] = {}
    sees: ClassVar[int]  # numbers in an observation
    space: ClassVar[Space]

    def setup(self) -> None:
        agents = Group("agents", "agents", ("agent_0",), (self.sees,), self.space)
        self.spec = EnvSpec((agents,), common=True, horizon=self.config.horizon)

    def move(self, state: State, reward: Tensor, ended: Tensor | None = None) -> Move:
        """reward [B], ended [B]."""
        gone = self.never(1) if ended is None else ended[:, None]
        return Move(state, {"agents": Result(reward[:, None], gone)}, ended)

    def show(self, state: State, *seen: Tensor) -> Frame:
        """seen: [B] each."""
        return Frame({"agents": self.view(torch.stack(seen, -1)[:, None], state["clock"])})


def wrapped(angle: Tensor) -> Tensor:
    """The same angle, in [-pi, pi)."""
    return angle - 2 * math.pi * (angle / (2 * math.pi) + 0.5).floor()
