"""A rollout: what happened in the last T steps, written step by step into tensors that keep their addresses."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from shoal.spec import tree_map


class RolloutBuffer:
    """Trees of [B, ...] in, one tree of [T, B, ...] out. The first record says what there is; floats begin as NaN, so
    that a slot that was never written betrays itself."""

    def __init__(self, steps: int):
        self.steps = steps
        self.data: Any = None

    def put(self, t: int, record: Any) -> None:
        if self.data is None:
            self.data = tree_map(self._room, record)
        tree_map(lambda whole, x: whole[t].copy_(x), self.data, record)

    def _room(self, x: Tensor) -> Tensor:
        return x.new_full((self.steps, *x.shape), math.nan if x.is_floating_point() else 0)
