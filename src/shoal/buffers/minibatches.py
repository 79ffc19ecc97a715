"""A rollout in minibatches. What they are made of is chunks: so many steps of a row that stay together."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor

from shoal.tree import tree_map

Rollout = TypeVar("Rollout")


def minibatches(rollout: Rollout, steps: int, rows: int, chunk: int, count: int, order: Tensor | None) -> list[Rollout]:
    """A dataclass of trees of [T, B, ...] -> `count` of them, of [chunk, chunks, ...], taken in `order`; none: as they are.
    Of the field `memory`, what there was before each chunk's first step, [chunks, ...]."""

    done: dict[int, Tensor] = {}  # what stands in several fields is taken once

    def chunks(x: Tensor) -> Tensor:
        if id(x) not in done:
            done[id(x)] = taken(x)
        return done[id(x)]

    def taken(x: Tensor) -> Tensor:
        if chunk == 1 and order is not None:  # one dimension less to select along: faster
            return x.flatten(0, 1).index_select(0, order)[None]
        x = x.unflatten(0, (-1, chunk)).transpose(0, 1).flatten(1, 2)
        return x if order is None else x.index_select(1, order)

    def before(x: Tensor) -> Tensor:
        x = x[::chunk].flatten(0, 1)
        return x if order is None else x.index_select(0, order)

    parts = {f.name: getattr(rollout, f.name) for f in fields(rollout)}  # type: ignore[arg-type]
    chosen = {k: tree_map(before if k == "memory" else chunks, x) for k, x in parts.items()}

    def piece(a: int, b: int) -> Any:
        return {k: tree_map(lambda x: x[a:b] if k == "memory" else x[:, a:b], x) for k, x in chosen.items()}  # noqa: B023

    return [type(rollout)(**piece(a, b)) for a, b in spans(steps // chunk * rows, count)]


def spans(count: int, pieces: int) -> list[tuple[int, int]]:
    """`count` things in at most so many pieces, as equal as can be: where each begins and ends."""
    pieces = min(count, pieces)
    return list(pairwise(count * k // pieces for k in range(pieces + 1)))
