"""Values above any return: overestimation, named once in a run.

The rule. A learner's mean value (`value_metric`) is compared with the most that returns can come to (`most_return`): the
largest reward so far, earned at every step; or the best stretch of an episode so far, over and over; the less of the two.
Where no reward was above zero it is the least bad of them. Rewards are those that are learnt from, in the units of the values,
and what an entropy is worth comes on top. It is named when it is above that by a tenth of it and a fiftieth of what a sum of
discounted rewards is in size, on three lines of the log in a row without falling, the first ten lines aside: nets begin
anywhere. Not asked: worlds in turns, where rewards of several steps are one; runs that began from others' weights; runs in
which nothing was ever paid.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from shoal.algos.base import Algorithm
from shoal.log.logger import read_remarks
from shoal.training.return_limits import ReturnLimit

if TYPE_CHECKING:
    from shoal.training.loop import Loop


class Overestimation:
    """The limits of all who say what their mean value is. `known`: all that their values were learnt from will be counted."""

    def __init__(self, learners: list[Algorithm], rows: int, device: torch.device, known: bool):
        asked = [a for a in learners if a.value_metric is not None and not a.spec.turns]
        self.limits = {",".join(a.groups): ReturnLimit(a, rows, device) for a in asked}
        if not known:
            self.forget()

    def forget(self) -> None:
        """Values were learnt from rewards that nobody counted."""
        for x in self.limits.values():
            x.seen["reward"].fill_(math.inf)

    def look(self, loop: Loop) -> None:
        """After a line of training metrics: name a learner whose mean value is above its limit."""
        for whose, x in self.limits.items():
            value = loop.last_train.get(f"{x.learner.groups[0]}/{x.learner.value_metric}")
            limit = x.exceeded(value if isinstance(value, float) else None)
            about = f"values of {whose}"
            if limit is None or any(r["about"] == about for r in read_remarks(loop.folder.path)):
                continue
            name = f"{whose.replace(',', ' and ')} ({x.learner.value_metric})"
            fact = f"The mean value of {name} is {value:.4g} at step {loop.step:,}"
            most = f"the rewards so far allow {limit:.4g} at most"
            loop.record(about, f"{fact}, and {most}: values are overestimated. {_advice(x.learner)}")

    def state_dict(self) -> dict[str, Any]:
        return {whose: x.state_dict() for whose, x in self.limits.items()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """None: of an older run, which counted nothing."""
        if state is None:
            return self.forget()
        for whose, x in self.limits.items():
            x.load_state_dict(state[whose])


def _advice(learner: Algorithm) -> str:
    ways = {
        "target_every": "slower targets (a larger --algo.target-every, a smaller --algo.target-tau)",
        "lr": "a smaller learning rate (--algo.lr)",
        "batch": "a larger --algo.batch",
    }
    known = [way for field, way in ways.items() if hasattr(learner.config, field)]
    return f"Try {', '.join(known[:-1])} or {known[-1]}." if len(known) > 1 else f"Try {known[0]}."
