"""A rollout in minibatches. What they are made of is chunks: so many steps of a row that stay together."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from shoal.spec import tree_map


def minibatches(
    data: dict[str, Any], steps: int, rows: int, chunk: int, count: int, order: Tensor | None
) -> list[dict[str, Any]]:
    """Trees of [T, B, ...] -> `count` trees of [chunk, chunks, ...], taken in `order`, or as they are where it is none. Of
    `memory`, what there was before each chunk's first step, [chunks, ...]."""

    def chunks(x: Tensor) -> Tensor:
        if chunk == 1 and order is not None:  # one dimension less to select along: faster
            return x.flatten(0, 1).index_select(0, order)[None]
        x = x.unflatten(0, (-1, chunk)).transpose(0, 1).flatten(1, 2)
        return x if order is None else x.index_select(1, order)

    def before(x: Tensor) -> Tensor:
        x = x[::chunk].flatten(0, 1)
        return x if order is None else x.index_select(0, order)

    chosen = {k: tree_map(before if k == "memory" else chunks, x) for k, x in data.items()}
    return [
        {k: tree_map(lambda x, k=k: x[a:b] if k == "memory" else x[:, a:b], x) for k, x in chosen.items()}  # noqa: B023
        for a, b in spans(steps // chunk * rows, count)
    ]


def spans(count: int, pieces: int) -> list[tuple[int, int]]:
    """`count` things in at most so many pieces, as equal as can be: where each begins and ends."""
    pieces = min(count, pieces)
    return list(pairwise(count * k // pieces for k in range(pieces + 1)))
