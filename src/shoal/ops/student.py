"""Student's t: how wide an interval of a mean is that few numbers tell of."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist


@cache
def t_quantile(freedom: int, level: float = 0.95) -> float:
    """The t that a share `level` of Student's distribution lies within, by bisection."""
    if freedom > 1000:
        z = NormalDist().inv_cdf((1 + level) / 2)
        return z + (z**3 + z) / (4 * freedom)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, freedom) < level else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _t_within(angle: float, freedom: int) -> float:
    """P(|T| < t) for tan(angle) = t / sqrt(freedom): a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd, cosine = freedom % 2, math.cos(angle)
    term, total = cosine if odd else 1.0, 0.0
    for k in range(freedom // 2):
        total += term
        term *= cosine**2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total
