"""A rollout in minibatches. What they are made of is chunks: so many steps of a row that stay together, or whole episodes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import TypeVar

import torch
from torch import Tensor

from shoal.tree import tree_map

Rollout = TypeVar("Rollout")


def minibatches(
    rollout: Rollout, steps: int, rows: int, chunk: int, count: int, order: Tensor | None, memories: bool = False
) -> list[Rollout]:
    """A dataclass of trees of [T, B, ...] -> `count` of them, of [chunk, chunks, ...], taken in `order`; none: as they are.
    Of the field `memory`, what there was before each chunk's first step, [chunks, ...]; with `memories` before every step."""
    chunks = cache(partial(_chunks, chunk=chunk, order=order))  # what stands in two fields is taken once
    whole = tree_map(chunks, rollout if memories else replace(rollout, memory=None))  # type: ignore[type-var]
    at = [slice(a, b) for a, b in spans(steps // chunk * rows if order is None else len(order), count)]
    parts = [tree_map(itemgetter((slice(None), k)), whole) for k in at]
    if memories:
        return parts
    memory = tree_map(partial(_before, chunk=chunk, order=order), rollout.memory)  # type: ignore[attr-defined]
    return [replace(part, memory=tree_map(itemgetter(k), memory)) for part, k in zip(parts, at, strict=True)]


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


def end_to_end(orders: Tensor, size: int) -> list[tuple[Tensor, int]]:
    """Passes over things in these orders, [passes, things], end to end in minibatches of exactly `size`, or of all where those
    are fewer; what is left at the end is left out. For each pass the things in the minibatches that begin in it, and how many
    minibatches that are."""
    passes, things = orders.shape
    size, stream = min(size, things), orders.flatten()
    first = [min(-(-things * k // size), passes * things // size) for k in range(passes + 1)]  # that begins in each pass
    return [(stream[a * size : b * size], b - a) for a, b in pairwise(first) if a < b]


def episode_steps(over: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of a rollout [T, B] whose rows each begin with `count` whole episodes of at most T / count steps: where the steps of
    these episodes are among the T * B, [T / count, count * B], and whether that is a step of theirs, not one after the end."""
    steps, rows = over.shape
    which = over.long().cumsum(0) - over.long()  # [T, B] of its row's episodes, that of each step
    length = torch.zeros_like(which).scatter_add_(0, which, torch.ones_like(which))[:count]
    later = torch.arange(steps // count, device=over.device)[:, None, None]  # steps since an episode began
    step = (length.cumsum(0) - length + later).clamp(max=steps - 1)  # [T / count, count, B]
    place = step * rows + torch.arange(rows, device=over.device)
    return place.flatten(1), (later < length).flatten(1)
