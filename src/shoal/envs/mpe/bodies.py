"""The bodies of a particle world: agents and landmarks, how large and heavy they are, and the colours they are drawn in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.envs.drawing import Color
from shoal.spec import UserError

MOST_BODIES = 10_000  # of a kind
GREY, BLUE, GREEN, RED = (0.25, 0.25, 0.25), (0.35, 0.35, 0.85), (0.35, 0.85, 0.35), (0.85, 0.35, 0.35)


@dataclass(frozen=True)
class Body:
    name: str
    size: float = 0.05
    collides: bool = True
    color: Color = GREY
    within: float = 1.0  # starts anywhere in [-within, within]
    # agents alone:
    movable: bool = True
    silent: bool = True
    accel: float = 5.0
    max_speed: float | None = None
    mass: float = 1.0


def at_least(config: Any, least: int, *fields: str) -> None:
    """Refuse numbers of bodies that there cannot be."""
    for name in fields:
        value = getattr(config, name)
        if value is not None and not least <= value <= MOST_BODIES:
            must = f"at least {least}" if value < least else f"at most {MOST_BODIES:,}"
            raise UserError(f"--env.{name.replace('_', '-')} is {value}: it has to be {must}.")
