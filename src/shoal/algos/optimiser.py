"""The one place that descends: an optimiser over one vector of parameters.

`descend(loss, count, keep)` is three steps: the gradient of the mean loss, its sum over machines if there are several (`join`),
and the step, which is taken only where `keep` holds. To stop the descent is `keep`; a loss times zero is not, for Adam goes on
moving by its moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from shoal.ops.kernels import find
from shoal.spec import UserError

ADAM: dict[str, Any] = {"fused": True, "amsgrad": False, "beta1": 0.9, "beta2": 0.999, "eps": 1e-5, "maximize": False}


class Optimiser(nn.Module):
    """AdamW over the parameters of some modules, laid end to end in one vector.

    One vector makes zeroing, clipping, stepping (and summing across machines) one operation each. Adam's moments and the
    rate are buffers: saved with the modules, restored in place, so that a captured graph goes on pointing at them.
    """

    first: Tensor
    second: Tensor
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
    ):
        super().__init__()
        params = [p for m in modules for p in m.parameters() if p.requires_grad]
        if not params:
            raise UserError("there is nothing to learn: the net has no parameters that want gradients.")
        device = params[0].device
        flat = torch.cat([p.detach().reshape(-1) for p in params])
        lay_end_to_end(params, flat)
        self.clip, self.decay = clip, decay
        self.register_buffer("first", torch.zeros_like(flat))
        self.register_buffer("second", torch.zeros_like(flat))
        self.register_buffer("steps", torch.zeros((), device=device))
        self.register_buffer("rate", torch.tensor(rate, device=device))
        self.register_buffer("broken", torch.zeros((), dtype=torch.bool, device=device))
        self._params, self._flat = tuple(params), (flat,)  # in tuples: the modules' own parameters, not others to save
        take = kernels and flat.dtype == torch.float32
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
        moments = [self.first], [self.second], [], [self.steps]  # type: ignore[var-annotated]
        adamw([self._flat[0]], [grad], *moments, **ADAM, found_inf=stop.float(), lr=self.rate, weight_decay=self.decay)
        return norm


def lay_end_to_end(params: list[nn.Parameter], flat: Tensor) -> None:
    """Make each parameter a view of its part of one vector."""
    assert sum(p.numel() for p in params) == flat.numel(), "a target follows all that its optimiser moves"
    at = 0
    for p in params:
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
