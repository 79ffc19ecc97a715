"""Normal distributions of continuous actions, plain and squashed; `ops/distributions.py` says what they have in common."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

LOG_2, LOG_2PI = math.log(2), math.log(2 * math.pi)
TINY = 2.0**-24  # torch.rand gives multiples of 2^-24, zero among them
SQUASH_EDGE = 1 - 1e-6


def standard(noise: Tensor) -> Tensor:
    """Uniform numbers as normal ones."""
    return torch.special.ndtri(noise.clamp(TINY, 1 - TINY))


class Normal:
    """Independent normals. The collector clips to [-1, 1] on the way to the world; the density is of the action unclipped."""

    def __init__(self, mean: Tensor, log_std: Tensor):
        self.mean, self.log_std = mean, log_std.expand_as(mean)

    def sample(self, noise: Tensor) -> Tensor:
        """mean + std Phi^-1(u). noise [..., D]."""
        return self.mean + self.log_std.exp() * standard(noise)

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        action = self.sample(noise)
        return action, self.log_prob(action)

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        z = (action - self.mean) * (-self.log_std).exp()
        return -(0.5 * z.square() + self.log_std + 0.5 * LOG_2PI).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 * (1 + LOG_2PI)).sum(-1)

    def log_prob_and_entropy(self, action: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_prob(action), self.entropy()


class TanhNormal(Normal):
    """A normal squashed into (-1, 1) by tanh. Its entropy has no closed form; that of the normal inside stands for it."""

    def sample(self, noise: Tensor) -> Tensor:
        return super().sample(noise).tanh().clamp(-SQUASH_EDGE, SQUASH_EDGE)

    def path(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """A sample as a function of mean and deviation, to be differentiated, and its log-probability, from what is inside:

        log pi(a) = log N(u) - sum log(1 - tanh(u)^2) = log N(u) - sum 2 (log 2 - u - softplus(-2 u))
        """
        e = standard(noise)
        u = self.mean + self.log_std.exp() * e
        return u.tanh(), -(0.5 * e.square() + self.log_std + 0.5 * LOG_2PI + 2 * (LOG_2 - u - softplus(-2 * u))).sum(-1)

    def mode(self) -> Tensor:
        return self.mean.tanh()

    def log_prob(self, action: Tensor) -> Tensor:
        """log N(atanh a) - sum log(1 - a^2)."""
        inside = action.clamp(-SQUASH_EDGE, SQUASH_EDGE)
        return super().log_prob(inside.atanh()) - (1 - inside.square()).log().sum(-1)
