"""A rollout: what happened in the last T steps, gathered into tensors that keep their addresses."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import torch
from torch import Tensor

from shoal.spec import UserError
from shoal.tree import tree_map


class RolloutBuffer:
    """Trees of [B, ...] in, one tree of [T, B, ...] out.

    Records are held until the rollout is whole and then stacked, a leaf in one operation: whoever makes a record makes new
    tensors each step. A tensor that is the same object in every record is a constant, and is widened instead of copied.
    """

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.rooms: dict[int, Tensor] = {}  # place of a leaf in the tree -> where it is stacked

    def put(self, record: Any) -> None:
        self.records.append(record)

    def take(self) -> Any:
        """The records since the last take. What it returned before is written over."""
        records, self.records, place = self.records, [], count()
        return tree_map(lambda *xs: self._stacked(next(place), xs), *records)

    def _stacked(self, place: int, xs: tuple[Tensor, ...]) -> Tensor:
        times = Counter(map(id, xs))
        if len(times) < len(xs) and any(x._version for x in xs if times[id(x)] > 1):
            raise UserError("a world returned one tensor in several steps and wrote to it: it must return new ones each step.")
        if len(times) == 1:
            return xs[0].expand(len(xs), *xs[0].shape)
        shape, room = (len(xs), *xs[0].shape), self.rooms.get(place)
        if room is None or room.shape != shape:
            room = self.rooms[place] = xs[0].new_empty(shape)
        return torch.stack(xs, out=room)
