"""Exploration: noise that policies act by."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.ops.distributions import make
from shoal.ops.values import taken
from shoal.spec import Box, Discrete, MultiDiscrete, Space

EDGE = 1e-7  # uniform numbers are kept so far from 0 and 1


def random_action(space: Space, noise: Tensor, legal: Tensor | None) -> Tensor:
    """Any action, each as likely. noise [..., A], or of continuous actions [..., D]."""
    return noise * 2 - 1 if isinstance(space, Box) else make(space, torch.zeros_like(noise), legal).sample(noise)


def random_draw(space: Space, noise: Tensor, legal: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same, and its log-probability [...]."""
    action = random_action(space, noise, legal)
    if isinstance(space, Box):  # even over [-1, 1] in each dimension
        return action, noise.new_full(noise.shape[:-1], -noise.shape[-1] * math.log(2))
    return action, make(space, torch.zeros_like(noise), legal).log_prob(action)


def correlated(noise: Tensor, before: Tensor, start: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """Uniform numbers that remember: z_t = keep z_{t-1} + sqrt(1 - keep^2) xi_t, xi normal, of which the uniform ones are made
    again. Each is distributed as before, so densities stay what they are, but neighbours in time are alike and exploration
    goes somewhere: an Ornstein-Uhlenbeck process. noise, before [..., N, D], start [..., N] where it begins; returns z too."""
    fresh = torch.special.ndtri(noise.clamp(EDGE, 1 - EDGE))
    z = torch.where(start[..., None], fresh, keep * before + (1 - keep**2) ** 0.5 * fresh)
    return torch.special.ndtr(z), z


def perturbed(action: Tensor, noise: Tensor, spread: float | Tensor, limit: float | None = None) -> Tensor:
    """clip(a + sigma e, -1, 1) with e normal, and sigma e held within +- `limit` where there is one. noise [..., D]."""
    e = spread * torch.special.ndtri(noise.clamp(EDGE, 1 - EDGE))
    return (action + (e if limit is None else e.clamp(-limit, limit))).clamp(-1, 1)


def epsilon_greedy(
    greedy: Tensor, noise: Tensor, epsilon: Tensor, space: Discrete | MultiDiscrete, legal: Tensor | None
) -> Tensor:
    """`greedy`, or with probability `epsilon` any legal action: tossed for each row and agent. noise [..., A + 1]."""
    coin, u = noise[..., 0], noise[..., 1:]
    random = coin < epsilon
    return random_action(space, u, legal).where(random if space.shape == () else random[..., None], greedy)


def epsilon_keeping(
    greedy: Tensor,
    noise: Tensor,
    epsilon: Tensor,
    keep: float,
    before: Tensor,
    space: Discrete | MultiDiscrete,
    legal: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `epsilon_greedy`, but a random action goes on for another step with probability `keep`, where it is legal still
    (Dabney et al., 2021, https://arxiv.org/abs/2006.01782): exploration goes somewhere. It is begun less often, so that the
    share of random steps stays `epsilon`. noise [..., A + 2]; `before`, and what is returned beside the action, is
    [..., 1 + D]: whether the last action was random, and which."""
    coin, stay, u = noise[..., 0], noise[..., 1], noise[..., 2:]
    single, old = space.shape == (), before[..., 1:]
    goes_on = (before[..., 0] > 0) & (stay < keep)
    if legal is not None:
        goes_on = goes_on & (taken(legal.float(), old[..., 0] if single else old, space) == 1)
    random = goes_on | (coin < epsilon * (1 - keep) / (1 - epsilon * keep))
    anything = random_action(space, u, legal)
    sample = old.where(goes_on[..., None], anything[..., None] if single else anything)
    action = (sample[..., 0] if single else sample).where(random if single else random[..., None], greedy)
    return action, torch.cat((random[..., None].long(), sample), -1)


def floored(probability: Tensor, epsilon: Tensor, space: Discrete | MultiDiscrete, legal: Tensor | None) -> Tensor:
    """(1 - epsilon) pi + epsilon uniform over what is legal, in each dimension: [..., A]."""
    there = torch.ones_like(probability) if legal is None else legal.to(probability.dtype)
    even = [x / x.sum(-1, keepdim=True) for x in there.split(space.sizes, -1)]
    return probability.lerp(torch.cat(even, -1), epsilon)
