"""Numbers that change as a run goes on: learning rates, weights of the entropy, clips.

constant
linear, cosine, exponential        from the first value to the last, over the run
exponential:0.999/update           times so much at each update; or at each environment step: exponential:0.99999/step
kl, kl:0.01                        learning rates alone: smaller where the policy moved too far, larger where too little
package.module:Class               your own, or file.py:Class: made as Class(first, last), called with a `Now`
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.ids import near, own_object
from shoal.spec import UserError

SHAPES = ("constant", "linear", "cosine", "exponential")
KL = 0.008  # the divergence that an adaptive rate aims at, unless told
SLOWEST, FASTEST = 1e-6, 1e-2  # where adaptive rates stay


@dataclass(frozen=True)
class Now:
    """How far a run has come."""

    step: int  # environment steps done
    steps: int  # of so many
    updates: int  # updates done

    @property
    def progress(self) -> float:
        return min(max(self.step / self.steps, 0.0), 1.0)


Schedule = Callable[[Now], float]


def make(text: str, first: float, last: float, flag: str) -> Schedule:
    """The schedule that a word stands for, from `first` to `last`; `flag` is for the sentence where it stands for none."""
    if text == "constant":
        return lambda now: first
    if text == "linear":
        return lambda now: first + (last - first) * now.progress
    if text == "cosine":
        return lambda now: last + (first - last) * 0.5 * (1 + math.cos(math.pi * now.progress))
    if text == "exponential":  # it never reaches zero: a thousandth
        return lambda now: first * (max(last, first / 1000) / first) ** now.progress if first else 0.0
    if match := re.fullmatch(r"exponential:([\d.eE+-]+)/(update|step)", text):
        rate, by_step = _number(match[1], flag), match[2] == "step"
        if not 0 < rate <= 1:
            raise UserError(f"{flag} is {text!r}: what a value is multiplied by is more than 0 and at most 1.")
        return lambda now: max(first * rate ** (now.step if by_step else now.updates), last)
    if ":" in text and not text.startswith(("exponential:", "kl:")):
        return _own(text, first, last, flag)
    if text == "kl" or text.startswith("kl:"):
        raise UserError(f"{flag} is {text!r}: what adapts to the divergence is the learning rate of PPO's family alone.")
    raise UserError(
        f"{flag} is {text!r}{near(text, (*SHAPES, 'kl'))}: it takes {', '.join(SHAPES)}, exponential:0.999/update (or /step), "
        "for learning rates kl or kl:0.01, or your own package.module:Class."
    )


def _own(text: str, first: float, last: float, flag: str) -> Schedule:
    cls = own_object(text, flag)
    try:
        schedule = cls(first, last)
        float(schedule(Now(0, 1, 0)))
    except Exception as e:  # whatever the user's class does
        raise UserError(
            f"{flag} is {text}, which was made with ({first:g}, {last:g}) and gave no number: {type(e).__name__}: {e}."
        ) from e
    return schedule


def kl_target(text: str, flag: str) -> float | None:
    """The divergence that `kl` or `kl:0.01` aims at; none for any other word."""
    if text != "kl" and not text.startswith("kl:"):
        return None
    target = KL if text == "kl" else _number(text[3:], flag)
    if not target > 0:
        raise UserError(f"{flag} is {text!r}: a divergence to aim at is more than 0.")
    return target


def kl_adapted(rate: Tensor, kl: Tensor, target: float) -> Tensor:
    """A rate after an epoch whose policy moved by `kl`: divided by 1.5 where that is more than twice the target, times 1.5
    where it is less than half."""
    return (rate / 1.5).where(kl > 2 * target, (rate * 1.5).where(kl < target / 2, rate)).clamp(SLOWEST, FASTEST)


def _number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{flag} has {text!r} where a number should be.") from None
