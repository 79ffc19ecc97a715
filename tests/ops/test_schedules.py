"""Schedules by hand: from 8 to 2, at the start, a quarter, half and the end."""

from __future__ import annotations

import math

import pytest

from shoal.ops.schedules import scheduled

AT = (0.0, 0.25, 0.5, 1.0)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", (8.0, 8.0, 8.0, 8.0)),
        ("linear", (8.0, 6.5, 5.0, 2.0)),
        ("cosine", (8.0, 5 + 3 * math.sqrt(0.5), 5.0, 2.0)),  # 2 + 6 (1 + cos(pi p)) / 2
        ("exponential", (8.0, 8 * 0.25**0.25, 4.0, 2.0)),  # 8 (1/4)^p: half-way is the geometric mean
    ],
)
def test_shapes(shape: str, expected: tuple[float, ...]) -> None:
    for progress, value in zip(AT, expected, strict=True):
        assert scheduled(shape, 8.0, 2.0, progress) == pytest.approx(value, rel=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "exponential"])
def test_progress_is_held_within_the_run(shape: str) -> None:
    assert scheduled(shape, 8.0, 2.0, -1.0) == 8.0  # type: ignore[arg-type]
    assert scheduled(shape, 8.0, 2.0, 7.0) == pytest.approx(8.0 if shape == "constant" else 2.0)  # type: ignore[arg-type]


def test_upwards() -> None:
    assert scheduled("linear", 0.0, 1.0, 0.25) == 0.25
    assert scheduled("cosine", 0.0, 1.0, 0.5) == pytest.approx(0.5)
    assert scheduled("exponential", 1.0, 4.0, 0.5) == pytest.approx(2.0)


def test_exponential_to_zero_ends_at_a_thousandth() -> None:
    assert scheduled("exponential", 1.0, 0.0, 1.0) == pytest.approx(1e-3)
    assert scheduled("exponential", 1.0, 0.0, 1 / 3) == pytest.approx(0.1)
    assert scheduled("exponential", 0.0, 0.0, 0.5) == 0.0
    assert scheduled("linear", 1.0, 0.0, 1.0) == 0.0
    assert scheduled("cosine", 1.0, 0.0, 1.0) == pytest.approx(0.0, abs=1e-15)
