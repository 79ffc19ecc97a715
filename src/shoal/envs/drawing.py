"""What `Environment.draw` gives the renderer: circles and lines in world coordinates, text, or a picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Color = tuple[float, float, float]  # red, green, blue in [0, 1]


@dataclass(frozen=True)
class Circle:
    x: float
    y: float
    radius: float
    color: Color
    label: str = ""
    solid: bool = True  # false: an outline, for what cannot be touched


@dataclass(frozen=True)
class Line:
    """Straight, with round ends."""

    x0: float
    y0: float
    x1: float
    y1: float
    width: float
    color: Color


@dataclass(frozen=True)
class Sketch:
    """Circles, the line segments beneath them, and lines of text."""

    circles: tuple[Circle, ...]
    lines: tuple[str, ...] = ()
    extent: float = 1.0  # the half-width that is always in view
    segments: tuple[Line, ...] = ()
    picture: np.ndarray | None = None  # [H, W, 3] in the place of all that, where somebody else has drawn it
