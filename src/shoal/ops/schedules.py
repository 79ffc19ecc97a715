"""Numbers that change as a run goes on. `progress` is the share of the run that is done, in [0, 1]."""

from __future__ import annotations

import math
from typing import Literal

Shape = Literal["constant", "linear", "cosine", "exponential"]


def scheduled(shape: Shape, first: float, last: float, progress: float) -> float:
    """From `first` at progress 0 to `last` at progress 1."""
    progress = min(max(progress, 0.0), 1.0)
    if shape == "constant":
        return first
    if shape == "linear":
        return first + (last - first) * progress
    if shape == "cosine":
        return last + (first - last) * 0.5 * (1 + math.cos(math.pi * progress))
    return first * (max(last, first / 1000) / first) ** progress if first else 0.0  # it never reaches zero: a thousandth
