"""Numbers that change as a run goes on: learning rates, weights of the entropy, clips.

constant
linear, cosine, exponential        from the first value to the last, over the run
exponential:0.999/update           times so much at each update; or at each environment step: exponential:0.99999/step
kl, kl:0.01                        learning rates alone: smaller where the policy moved too far, larger where too little
StepLR:step_size=100,gamma=0.5     PyTorch's of torch.optim.lr_scheduler, by name and arguments, a step for each update; never
                                   below the last value, and once it has ended (OneCycleLR) it stays
package.module:Class               your own, or file.py:Class: made as Class(first, last), called with a `Now`; or one that
                                   derives from PyTorch's LRScheduler: made as Class(optimiser)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shoal.flags import arguments, refuse_unknown
from shoal.ids import near, own_object
from shoal.spec import UserError

SHAPES = ("constant", "linear", "cosine", "exponential")
KL = 0.008  # the divergence that an adaptive rate aims at, unless told
PYTORCH = (  # of its schedulers those that are made of numbers
    *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR", "MultiStepLR"),
    *("OneCycleLR", "PolynomialLR", "StepLR"),
)


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
    name, _, words = text.partition(":")
    if name in PYTORCH:
        given = arguments(words, flag, text, "StepLR:step_size=100,gamma=0.5")
        refuse_unknown(given, getattr(lr_scheduler, name), f"{flag} is {text}", ("optimizer", "last_epoch"))
        return _stepped(text, partial(getattr(lr_scheduler, name), **given), first, last, flag)
    if "=" in words:
        raise UserError(f"{flag} is {text!r}, and PyTorch has no {name!r}{near(name, PYTORCH)}: it has {', '.join(PYTORCH)}.")
    if ":" in text and not text.startswith(("exponential:", "kl:")):
        return _own(text, first, last, flag)
    if text == "kl" or text.startswith("kl:"):
        raise UserError(f"{flag} is {text!r}: what adapts to the divergence is the learning rate of PPO's family alone.")
    raise UserError(
        f"{flag} is {text!r}{near(text, (*SHAPES, 'kl', *PYTORCH))}: it takes {', '.join(SHAPES)}, exponential:0.999/update "
        "(or /step), for learning rates kl or kl:0.01, PyTorch's own as StepLR:step_size=100, or package.module:Class."
    )


def _own(text: str, first: float, last: float, flag: str) -> Schedule:
    cls = own_object(text, flag)
    if isinstance(cls, type) and issubclass(cls, LRScheduler):
        return _stepped(text, cls, first, last, flag)
    try:
        schedule = cls(first, last)
        float(schedule(Now(0, 1, 0)))
    except Exception as e:  # whatever the user's class does
        raise UserError(
            f"{flag} is {text}, which was made with ({first:g}, {last:g}) and gave no number: {type(e).__name__}: {e}."
        ) from e
    return schedule


class Stepped:
    """A scheduler of PyTorch's as a schedule: it makes a step for each update. What it is after so many follows from their
    number alone, so that nothing of it needs to be saved. It moves the rate alone, no momentum."""

    def __init__(self, scheduler: Callable[..., LRScheduler], first: float, last: float, asked: str):
        self.scheduler, self.first, self.last, self.asked = scheduler, first, last, asked
        self._begin()

    def _begin(self) -> None:
        self.optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.first)
        self.made, self.updates = self.scheduler(self.optimiser), 0
        self.ends: float = getattr(self.made, "total_steps", math.inf) - 1  # OneCycleLR's; its first step is made when it is

    def __call__(self, now: Now) -> float:
        if now.updates < self.updates:
            self._begin()
        try:
            while self.updates < min(now.updates, self.ends):
                self.updates += 1
                self.optimiser.step()  # of no gradient: PyTorch warns of schedulers whose optimiser stands still
                self.made.step()
        except Exception as e:  # arguments of a wrong type, a user's own class, a step that takes a loss
            raise UserError(f"{self.asked}, which gave no rate after {self.updates} updates: {type(e).__name__}: {e}.") from e
        return max(float(self.optimiser.param_groups[0]["lr"]), self.last)


def _stepped(text: str, scheduler: Callable[..., LRScheduler], first: float, last: float, flag: str) -> Schedule:
    try:
        schedule = Stepped(scheduler, first, last, f"{flag} is {text}")
    except Exception as e:  # arguments that are missing, unknown or wrong
        raise UserError(f"{flag} is {text}, and PyTorch could make no schedule of it: {type(e).__name__}: {e}.") from e
    schedule(Now(0, 1, 2))
    return schedule


def kl_target(text: str, flag: str) -> float | None:
    """The divergence that `kl` or `kl:0.01` aims at; none for any other word."""
    if text != "kl" and not text.startswith("kl:"):
        return None
    target = KL if text == "kl" else _number(text[3:], flag)
    if not target > 0:
        raise UserError(f"{flag} is {text!r}: a divergence to aim at is more than 0.")
    return target


def kl_adapted(rate: Tensor, kl: Tensor, target: float, factor: float = 1.5, least: float = 1e-6, most: float = 1e-2) -> Tensor:
    """A rate after an epoch whose policy moved by `kl`: divided by `factor` where that is more than twice the target, times
    `factor` where it is less than half."""
    return (rate / factor).where(kl > 2 * target, (rate * factor).where(kl < target / 2, rate)).clamp(least, most)


def _number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{flag} has {text!r} where a number should be.") from None
