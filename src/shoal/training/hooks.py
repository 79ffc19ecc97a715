"""Hooks: code of the user's own in a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.spec import UserError
from shoal.training.evaluate import Episodes

if TYPE_CHECKING:
    from shoal.training.loop import Loop


class Hook:
    """Each method may return metrics: those of an evaluation are logged with it, the others with the next line of training;
    `loop.stop(why)` stops."""

    def before_iteration(self, loop: Loop) -> dict[str, Any] | None:
        return None

    def after_iteration(self, loop: Loop) -> dict[str, Any] | None:
        return None

    def on_evaluation(self, loop: Loop, episodes: Episodes) -> dict[str, Any] | None:
        return None


class Hooks:
    """All hooks of a run, and the metrics that they want logged with the next line."""

    def __init__(self, hooks: Sequence[Hook]):
        self.hooks = list(hooks)
        self.metrics: dict[str, list[Tensor]] = {}

    def call(self, method: str, loop: Loop, *args: Any) -> dict[str, Tensor]:
        answers = [(getattr(hook, method)(loop, *args) or {}).items() for hook in self.hooks]
        try:
            return {k: torch.as_tensor(x) for items in answers for k, x in items}
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"a hook's {method} returned something that is no number: it takes a dict of numbers.") from None

    def note(self, method: str, loop: Loop) -> None:
        """Call them, and keep what they return for the next line."""
        for k, x in self.call(method, loop).items():
            self.metrics.setdefault(k, []).append(x)

    def take(self, device: torch.device) -> dict[str, Tensor]:
        """Means since the last line; then begin anew."""
        means = {k: torch.stack([x.to(device) for x in xs]).double().mean() for k, xs in self.metrics.items()}
        self.metrics.clear()
        return means
