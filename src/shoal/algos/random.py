"""Random: every legal action as likely as any other. The baseline that everything must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.algos.base import Acted, Algorithm, Rollout, Seat
from shoal.algos.samples import Samples
from shoal.ops.distributions import noise_of
from shoal.ops.explore import random_action
from shoal.spec import Frame


class Random(Algorithm):
    learns = False
    greedy = False

    @dataclass(frozen=True)
    class Config:
        pass

    def __init__(self, seat: Seat):
        super().__init__(seat)
        self.feed = Rollout(25)
        self.noise = noise_of(self.space)

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        return {g: {} for g in self.groups}

    def act(self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool) -> Acted:
        actions = {}
        for g in self.groups:
            active = frame[g].active
            u = torch.full((*active.shape, self.noise), 0.5, device=active.device) if noise is None else noise[g]
            actions[g] = random_action(self.spec[g].action, u, frame[g].legal)
        return Acted(actions, memory, {g: {} for g in self.groups})

    def update(self, samples: Samples) -> dict[str, Tensor]:
        return {}
