"""Neighbours, and the edge of the world: pure functions of tensors that scenarios share."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.envs.mpe.world import length


def fence(places: Tensor) -> Tensor:
    """What the edge of the world costs, [B, n, 2] -> [B, n]: on each axis nothing up to 0.9, 1 at 1, 10 at most beyond."""
    x = places.abs()
    return torch.where(x < 1, (x * 10 - 9).clamp(min=0), (x * 2 - 2).exp().clamp(max=10)).sum(-1)


def nearest(gaps: Tensor, k: int, *along: Tensor) -> list[Tensor]:
    """The k nearest of `gaps` [B, n, m, 2], nearest first, zeros where there are fewer; `along` is picked alike."""
    order = length(gaps).argsort(-1)[..., :k]
    out = []
    for x in (gaps, *along):
        chosen = x.gather(2, order[..., None].expand(*order.shape, x.shape[-1]))
        out.append(torch.nn.functional.pad(chosen, (0, 0, 0, k - chosen.shape[2])))
    return out
