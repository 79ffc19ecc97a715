"""The target: a copy of what an optimiser moves, that follows it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from shoal.algos.optimiser import Optimiser, lay_end_to_end


class Target(nn.Module):
    """A copy of what an optimiser moves, that follows: once in `every` updates by the share `tau`. Hard: 200 and 1; soft: 1 and
    0.01."""

    updates: Tensor

    def __init__(self, module: nn.Module, optimiser: Optimiser, every: int, tau: float):
        super().__init__()
        self.module, self.every, self.tau = copy.deepcopy(module), every, tau
        params = [p for p in self.module.parameters() if p.requires_grad]
        self.module.requires_grad_(False).eval()
        flat = optimiser.vector.clone()
        lay_end_to_end(params, flat)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long, device=flat.device))
        self._flat, self._ahead = (flat,), (optimiser.vector,)
        self._pairs = tuple(zip(self.module.buffers(), module.buffers(), strict=True))

    def train(self, mode: bool = True) -> Target:
        """It never is: a user's module gives target values in the mode in which it acts."""
        return super().train(False)

    @torch.no_grad()
    def follow(self, stepped: Tensor | None = None) -> None:
        """`stepped`: whether the optimiser took a step, a bool tensor; where not, the clock stands still. None: it did."""
        self.updates += 1 if stepped is None else stepped
        follows = stepped  # none: always
        if self.every > 1:
            due = self.updates % self.every == 0
            follows = due if stepped is None else due & stepped
        self._flat[0].lerp_(self._ahead[0], self.tau if follows is None else follows * self.tau)
        for mine, theirs in self._pairs:
            mine.copy_(theirs if follows is None else theirs.where(follows, mine))

    @torch.no_grad()
    def lag(self) -> Tensor:
        """How far behind it is: the norm of the difference over that of the weights."""
        return torch.dist(self._ahead[0], self._flat[0]) / (self._ahead[0].norm() + 1e-8)
