"""Action distributions. Nothing here draws: `sample` turns uniform numbers in [0, 1) into an action.

    make(space, params, legal)       the distribution of a head's output [..., P]
    params_of(space), noise_of(space)  how many numbers a head puts out, and how many a sample takes
    sample(noise), draw(noise)       an action; and its log-probability
    mode(), log_prob(action), entropy(), log_prob_and_entropy(action)

Log-probabilities and entropies are summed over action dimensions: [...]. Masks go into the logits, before the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shoal.ops.kernels import for_device
from shoal.ops.normal import TINY, Normal, TanhNormal
from shoal.spec import Box, Space


def params_of(space: Space) -> int:
    return len(space.low) if isinstance(space, Box) else sum(space.sizes)


noise_of = params_of


def make(
    space: Space, params: Tensor, legal: Any = None, log_std: Any = None, squash: bool = False, fused: bool = False
) -> Any:
    """`fused`: with kernels of our own, where there are some."""
    if isinstance(space, Box):
        assert log_std is not None
        return TanhNormal(params, log_std) if squash else Normal(params, log_std)
    kind = FusedChoice if fused and legal is None and space.shape == () else Choice
    return kind(params, space.sizes, legal, single=space.shape == ())


class Choice:
    """One categorical a dimension; the logits of all dimensions end to end [..., A]."""

    def __init__(self, logits: Tensor, sizes: tuple[int, ...], legal: Tensor | None = None, single: bool = True):
        self.sizes, self.single, self.masked = sizes, single, legal is not None
        logits = logits if legal is None else logits.masked_fill(~legal, -math.inf)
        self.logits = (logits,) if len(sizes) == 1 else logits.split(sizes, -1)

    def sample(self, noise: Tensor) -> Tensor:
        """Gumbel's maximum: argmax(logits - log(-log u)) is a draw from the softmax. noise [..., A]."""
        return self._largest(self._shaken(noise))

    def relaxed(self, noise: Tensor, temperature: float) -> Tensor:
        """A draw, one-hot, whose gradient is that of the softmax of the same shaken logits over `temperature` (Jang et al.,
        2017, https://arxiv.org/abs/1611.01144): [..., A], those of all dimensions end to end."""
        parts = []
        for x in self._shaken(noise):
            soft = (x / temperature).softmax(-1)
            hard = torch.zeros_like(soft).scatter_(-1, soft.detach().argmax(-1, keepdim=True), 1)
            parts.append(hard + (soft - soft.detach()))
        return torch.cat(parts, -1)

    def _shaken(self, noise: Tensor) -> list[Tensor]:
        """Logits with Gumbel noise, of each dimension."""
        gumbel = -(-noise.clamp(TINY, 1 - TINY).log()).log()
        parts = (gumbel,) if len(self.sizes) == 1 else gumbel.split(self.sizes, -1)
        return [x + g for x, g in zip(self.logits, parts, strict=True)]

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        action = self.sample(noise)
        return action, self.log_prob(action)

    def mode(self) -> Tensor:
        return self._largest(self.logits)

    def probabilities(self) -> Tensor:
        """Of every choice, those of all dimensions end to end: [..., A]."""
        return torch.cat([x.softmax(-1) for x in self.logits], -1)

    def log_prob(self, action: Tensor) -> Tensor:
        each = action[..., None] if self.single else action
        logs = [x.log_softmax(-1).gather(-1, each[..., d, None])[..., 0] for d, x in enumerate(self.logits)]
        return logs[0] if len(logs) == 1 else torch.stack(logs).sum(0)

    def entropy(self) -> Tensor:
        each = [self._entropy(x) for x in self.logits]
        return each[0] if len(each) == 1 else torch.stack(each).sum(0)

    def log_prob_and_entropy(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one softmax: what a policy-gradient step asks for."""
        if len(self.sizes) > 1 or self.masked:
            return self.log_prob(action), self.entropy()
        log = self.logits[0].log_softmax(-1)
        each = action[..., None] if self.single else action
        return log.gather(-1, each)[..., 0], -(log.exp() * log).sum(-1)

    def _entropy(self, logits: Tensor) -> Tensor:
        log = logits.log_softmax(-1)
        if self.masked:
            log = log.clamp(min=-1e9)  # 0 log 0 is 0, and so is its gradient
        return -(log.exp() * log).sum(-1)

    def _largest(self, parts: Iterable[Tensor]) -> Tensor:
        """The choice of the largest number in each dimension."""
        each = [x.argmax(-1) for x in parts]
        return each[0] if self.single else torch.stack(each, -1)


class FusedChoice(Choice):
    """One categorical without a mask, in kernels of our own."""

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        return for_device(noise.device).choose(self.logits[0], noise)

    def log_prob_and_entropy(self, action: Tensor) -> tuple[Tensor, Tensor]:
        return for_device(action.device).log_prob_and_entropy(self.logits[0], action)
