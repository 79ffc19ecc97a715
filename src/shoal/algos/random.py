"""Random: every legal action as likely as any other. The baseline that everything must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.algos.base import Acted, Algorithm, Rollout, Seat
from shoal.algos.samples import Samples
from shoal.ops.distributions import Choice, noise_of
from shoal.spec import Box, Frame


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
            view, space = frame[g], self.spec[g].action
            shape = (*view.active.shape, self.noise)
            u = torch.full(shape, 0.5, device=view.active.device) if noise is None else noise[g]
            if isinstance(space, Box):
                actions[g] = u * 2 - 1
            else:
                actions[g] = Choice(torch.zeros_like(u), space.sizes, view.legal, space.shape == ()).sample(u)
        return Acted(actions, memory, {g: {} for g in self.groups})

    def update(self, samples: Samples) -> dict[str, Tensor]:
        return {}
