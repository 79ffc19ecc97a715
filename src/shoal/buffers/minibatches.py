"""A rollout in minibatches. What they are made of is chunks: so many steps of a row that stay together."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeVar

from torch import Tensor

from shoal.tree import tree_map

Rollout = TypeVar("Rollout")


def minibatches(rollout: Rollout, steps: int, rows: int, chunk: int, count: int, order: Tensor | None) -> list[Rollout]:
    """A dataclass of trees of [T, B, ...] -> `count` of them, of [chunk, chunks, ...], taken in `order`; none: as they are.
    Of the field `memory`, what there was before each chunk's first step, [chunks, ...]."""
    parts: dict[str, Any] = {f.name: getattr(rollout, f.name) for f in fields(rollout)}  # type: ignore[arg-type]
    chosen: dict[int, Any] = {}  # by the part's id: what stands in two fields is taken once
    for k, part in parts.items():
        if id(part) not in chosen:
            chosen[id(part)] = tree_map(partial(_before if k == "memory" else _chunks, chunk=chunk, order=order), part)
    out = []
    for a, b in spans(steps // chunk * rows, count):
        at = {k: slice(a, b) if k == "memory" else (slice(None), slice(a, b)) for k in parts}
        out.append(type(rollout)(**{k: tree_map(itemgetter(at[k]), chosen[id(x)]) for k, x in parts.items()}))
    return out


def _chunks(x: Tensor, chunk: int, order: Tensor | None) -> Tensor:
    if chunk == 1 and order is not None:  # one dimension less to select along: faster
        return x.flatten(0, 1).index_select(0, order)[None]
    x = x.unflatten(0, (-1, chunk)).transpose(0, 1).flatten(1, 2)
    return x if order is None else x.index_select(1, order)


def _before(x: Tensor, chunk: int, order: Tensor | None) -> Tensor:
    x = x[::chunk].flatten(0, 1)
    return x if order is None else x.index_select(0, order)


def spans(count: int, pieces: int) -> list[tuple[int, int]]:
    """`count` things in at most so many pieces, as equal as can be: where each begins and ends."""
    pieces = min(count, pieces)
    return list(pairwise(count * k // pieces for k in range(pieces + 1)))
