"""Distances, neighbours and indices of bodies: pure functions of tensors that worlds and scenarios share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def length(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


def span(members: Sequence[int]) -> slice:
    """Neighbouring indices as a slice: a view, where a list of indices would copy."""
    return slice(members[0], members[-1] + 1) if members else slice(0, 0)


def pick(x: Tensor, which: Tensor) -> Tensor:
    """x[:, which], [B, m, w] -> [B, *which, w]; on a CPU several times faster than indexing."""
    return x.index_select(1, which.flatten()).unflatten(1, which.shape)


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
