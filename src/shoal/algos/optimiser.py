"""The one place that descends: an optimiser over one vector of parameters.

`descend(loss, count, keep)` is three steps: the gradient of the mean loss, its sum over machines if there are several (`join`),
and the step, which is taken only where `keep` holds. To stop the descent is `keep`; a loss times zero is not, for Adam goes on
moving by its moments.

The step is PyTorch's own of the same name, `--algo.optimiser`:

    adamw      w -= rate (decay w + m / (sqrt(v) + eps)),   m, v: means of g and of its square, without their bias to zero
    adam       the same without decay, where g + decay w takes the place of g
    rmsprop    w -= rate b,   b = momentum b + g / (sqrt(v) + eps),   v = beta2 v + (1 - beta2) g^2
    sgd        w -= rate b,   b = momentum b + g
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from shoal.ops.kernels import find
from shoal.spec import UserError

OptimiserName = Literal["adamw", "adam", "rmsprop", "sgd"]
TAKES: dict[str, tuple[str, ...]] = {  # which settings each has
    "adamw": ("beta1", "beta2", "eps"),
    "adam": ("beta1", "beta2", "eps"),
    "rmsprop": ("beta2", "eps", "momentum"),
    "sgd": ("momentum",),
}


@dataclass(frozen=True)
class StepRule:
    """How a gradient becomes a step."""

    name: OptimiserName = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-5
    momentum: float = 0.0


class Optimiser(nn.Module):
    """AdamW, or another rule, over the parameters of some modules, laid end to end in one vector.

    One vector makes zeroing, clipping, stepping (and summing across machines) one operation each. Moments and the rate are
    buffers: saved with the modules, restored in place, so that a captured graph goes on pointing at them.
    """

    first: Tensor  # the mean gradient, or what has momentum
    second: Tensor  # the mean square
    steps: Tensor
    rate: Tensor
    broken: Tensor
    join: Callable[[Tensor, Tensor | int], tuple[Tensor, Tensor | int]] | None = None  # (gradient, count) -> of all machines

    def __init__(
        self,
        modules: Iterable[nn.Module],
        rate: float,
        decay: float = 0.0,
        clip: float | None = None,
        kernels: bool = False,  # take one kernel for the step, where there is one
        rule: StepRule | None = None,  # none: AdamW's
    ):
        super().__init__()
        params = [p for m in modules for p in m.parameters() if p.requires_grad]
        if not params:
            raise UserError("there is nothing to learn: the net has no parameters that want gradients.")
        device = params[0].device
        flat = torch.cat([p.detach().reshape(-1) for p in params])
        lay_end_to_end(params, flat)
        self.clip, self.decay, self.rule = clip, decay, rule or StepRule()
        self.register_buffer("first", torch.zeros_like(flat))
        self.register_buffer("second", torch.zeros_like(flat))
        self.register_buffer("steps", torch.zeros((), device=device))
        self.register_buffer("rate", torch.tensor(rate, device=device))
        self.register_buffer("broken", torch.zeros((), dtype=torch.bool, device=device))
        self._params, self._flat = tuple(params), (flat,)  # in tuples: the modules' own parameters, not others to save
        take = kernels and flat.dtype == torch.float32 and self.rule == StepRule()
        self._kernel: Callable[..., Tensor] | None = find("adamw", device) if take else None

    @property
    def vector(self) -> Tensor:
        """All parameters, end to end."""
        return self._flat[0]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """What is computed meanwhile takes no gradients of these parameters."""
        for p in self._params:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in self._params:
                p.requires_grad_(True)

    def descend(self, loss: Tensor, count: Tensor | int, keep: Tensor | None = None) -> Tensor:
        """One step down the mean `loss / count`, where `loss` is a sum over `count` active samples. The step is taken only
        where `keep` is true and somebody is active, and never along a gradient that is not finite; that is remembered in
        `broken`, and no further step is taken. Returns the norm of the gradient before clipping."""
        grad = self.gradient(loss, count)
        if self.join is not None:
            grad, count = self.join(grad, count)
        if isinstance(count, Tensor):
            keep = count > 0 if keep is None else keep & (count > 0)
        return self.take_step(grad, keep)

    def gradient(self, loss: Tensor, count: Tensor | int) -> Tensor:
        """Of the mean `loss / count`, in one vector."""
        mean = loss / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))
        grads = torch.autograd.grad(mean, self._params, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            return torch.cat([g.reshape(-1) for g in grads])

    @torch.no_grad()
    def take_step(self, grad: Tensor, keep: Tensor | None) -> Tensor:
        """Clip and step; returns the norm."""
        if self._kernel is not None:
            state = self.first, self.second, self.steps, self.rate, self.broken
            return self._kernel(self._flat[0], grad, *state, keep, self.clip, self.decay)
        norm = grad.norm()
        if self.clip is not None:
            grad.mul_((self.clip / (norm + 1e-6)).clamp(max=1))
        self.broken |= ~norm.isfinite()
        stop = self.broken if keep is None else self.broken | ~keep
        if self.rule.name in ("adamw", "adam"):
            self._adam(grad, stop)
        else:
            self._momentum(grad, stop)
        return norm

    def _adam(self, grad: Tensor, stop: Tensor) -> None:
        r, step = self.rule, adamw if self.rule.name == "adamw" else adam
        moments = [self.first], [self.second], [], [self.steps]  # type: ignore[var-annotated]
        how: dict[str, Any] = {"fused": True, "amsgrad": False, "maximize": False, "weight_decay": self.decay, "lr": self.rate}
        how |= {"beta1": r.beta1, "beta2": r.beta2, "eps": r.eps}
        step([self._flat[0]], [grad], *moments, **how, found_inf=stop.float())

    def _momentum(self, grad: Tensor, stop: Tensor) -> None:
        r, weights = self.rule, self._flat[0]
        grad = grad + self.decay * weights if self.decay else grad
        square = self.second
        if r.name == "rmsprop":
            square = square.lerp(grad.square(), 1 - r.beta2)
            grad = grad / (square.sqrt() + r.eps)
        moving = grad if not r.momentum else r.momentum * self.first + grad
        new = weights - self.rate * moving, moving, square, self.steps + 1
        for x, then in zip((weights, self.first, self.second, self.steps), new, strict=True):
            x.copy_(x.where(stop, then))


def lay_end_to_end(params: list[nn.Parameter], flat: Tensor) -> None:
    """Make each parameter a view of its part of one vector."""
    assert sum(p.numel() for p in params) == flat.numel(), "a target follows all that its optimiser moves"
    at = 0
    for p in params:
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
