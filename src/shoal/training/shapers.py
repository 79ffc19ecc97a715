"""Whose rewards a shaper of the user's own changes: one that was handed over, or one that settings name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shoal.algos.base import Algorithm
from shoal.ids import near, own_object
from shoal.spec import UserError

PYTHON = "python:"  # stands before the name of a function that cannot be found by import
Shaper = Callable[[Tensor, Any, Tensor, int], Tensor]  # (reward [T, B, N], obs, step, steps) -> reward
Shapers = Shaper | dict[str, Shaper] | None  # for all groups, or for some


def shapers_of(learners: Sequence[Algorithm], given: Shapers, groups: list[str]) -> dict[str, Shaper]:
    """Group -> the user's own shaper of its rewards: one that was handed over, or the one that its settings name."""
    handed = given if isinstance(given, dict) else {} if given is None else dict.fromkeys(groups, given)
    for g in handed:
        if g not in groups:
            raise UserError(f"there is no group {g!r} here{near(g, groups)}: it has {', '.join(groups)}.")
    out = {}
    for a in learners:
        name = getattr(a.config, "shaper", None)
        for g in a.groups:
            if g in handed and name is None:
                raise UserError(f"the rewards of {g!r} were not shaped when this run began, and a run keeps its pay.")
            if g in handed:
                out[g] = handed[g]
            elif name is not None and name.startswith(PYTHON):
                raise UserError(
                    f"the rewards of {g!r} are shaped by a function that no import finds, {name.removeprefix(PYTHON)}: hand it "
                    "over again, as in shoal.resume(run, shaper=...)."
                )
            elif name is not None:
                out[g] = own_object(name, "--algo.shaper")
    return out
