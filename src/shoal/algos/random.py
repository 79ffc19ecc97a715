"""Random: every legal action as likely as any other. The baseline that everything must beat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.algos.base import Algorithm, Rollout
from shoal.ops.distributions import Choice, noise_of
from shoal.spec import Batch, Box, EnvSpec, Frame


class Random(Algorithm):
    learns = False
    greedy = False

    def __init__(self, spec: EnvSpec, groups: tuple[str, ...], *args: Any, **kwargs: Any):
        super().__init__(spec, groups, *args, **kwargs)
        self.feed = Rollout(25)
        self.noise = noise_of(self.space)

    def act(
        self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]:
        actions = {}
        for g in self.groups:
            view, space = frame[g], self.spec[g].action
            shape = (*view.active.shape, self.noise)
            u = torch.full(shape, 0.5, device=view.active.device) if noise is None else noise[g]
            if isinstance(space, Box):
                actions[g] = u * 2 - 1
            else:
                actions[g] = Choice(torch.zeros_like(u), space.sizes, view.legal, space.shape == ()).sample(u)
        return actions, memory, {g: {} for g in self.groups}

    def update(self, batch: Batch) -> dict[str, Tensor]:
        return {}
