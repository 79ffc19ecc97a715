"""A rollout in minibatches. What they are made of is chunks: so many steps of a row that stay together."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import TypeVar

from torch import Tensor

from shoal.tree import tree_map

Rollout = TypeVar("Rollout")


def minibatches(rollout: Rollout, steps: int, rows: int, chunk: int, count: int, order: Tensor | None) -> list[Rollout]:
    """A dataclass of trees of [T, B, ...] -> `count` of them, of [chunk, chunks, ...], taken in `order`; none: as they are.
    Of the field `memory`, what there was before each chunk's first step, [chunks, ...]."""
    chunks = cache(partial(_chunks, chunk=chunk, order=order))  # what stands in two fields is taken once
    whole = tree_map(chunks, replace(rollout, memory=None))  # type: ignore[type-var]
    memory = tree_map(partial(_before, chunk=chunk, order=order), rollout.memory)  # type: ignore[attr-defined]
    at = [slice(a, b) for a, b in spans(steps // chunk * rows, count)]
    return [replace(tree_map(itemgetter((slice(None), k)), whole), memory=tree_map(itemgetter(k), memory)) for k in at]


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
