"""Values of choices, [..., A]: those of all discrete dimensions end to end, as logits are.

An action of several dimensions is worth the mean of what its choices are worth, so that the best action is the best choice in
each dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.spec import Box, Discrete, MultiDiscrete, Space

Choices = Discrete | MultiDiscrete


def one_hot(action: Tensor, space: Choices) -> Tensor:
    """[...] or [..., D] long -> [..., A]. What is no choice is all zeros: nothing here looks at the numbers."""
    each = action[..., None] if space.shape == () else action
    parts = [each[..., d, None] == torch.arange(n, device=action.device) for d, n in enumerate(space.sizes)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).float()


def as_vector(action: Tensor, space: Space) -> Tensor:
    """An action as critics take it, [..., A]: one-hot where it is a choice, else its numbers, as the world takes them."""
    return action.clamp(-1, 1) if isinstance(space, Box) else one_hot(action, space)


def first_choice(space: Choices, device: torch.device) -> Tensor:
    """[A] bool: the first choice in each dimension."""
    return torch.cat([torch.arange(n, device=device) == 0 for n in space.sizes])


def best(q: Tensor, space: Choices, legal: Tensor | None = None) -> Tensor:
    """The action of the highest value among those that are legal."""
    q = q if legal is None else q.masked_fill(~legal, -math.inf)
    parts = [x.argmax(-1) for x in q.split(space.sizes, -1)]
    return parts[0] if space.shape == () else torch.stack(parts, -1)


def taken(q: Tensor, action: Tensor, space: Choices) -> Tensor:
    """What an action is worth: [...]."""
    if space.shape == ():
        return q.gather(-1, action[..., None])[..., 0]
    parts = [x.gather(-1, action[..., d, None]) for d, x in enumerate(q.split(space.sizes, -1))]
    return torch.cat(parts, -1).mean(-1)


def double_q(chooser: Tensor, scorer: Tensor, space: Choices, legal: Tensor | None = None) -> Tensor:
    """The value of a state: what `scorer` says of the action that `chooser` prefers (van Hasselt et al., 2016,
    https://arxiv.org/abs/1509.06461); where both are one, its maximum."""
    return taken(scorer, best(chooser, space, legal), space)


def dueling(advantage: Tensor, value: Tensor, space: Choices) -> Tensor:
    """Q = V + A - mean A in each dimension (Wang et al., 2016, https://arxiv.org/abs/1511.06581). value [..., D]."""
    parts = zip(advantage.split(space.sizes, -1), value.unbind(-1), strict=True)
    return torch.cat([v[..., None] + a - a.mean(-1, keepdim=True) for a, v in parts], -1)


def expected(q: Tensor, probability: Tensor, space: Choices) -> Tensor:
    """What a policy is worth: its probabilities [..., A] times the values."""
    return (q * probability).sum(-1) / len(space.sizes)


def counterfactual(q: Tensor, probability: Tensor, played: Tensor, space: Choices) -> Tensor:
    """What an agent's action added (Foerster et al., 2018): its value less that of its policy, the others' actions being as
    they were. q, probability and `played`, one-hot, are [..., A]."""
    return expected(q, played, space) - expected(q, probability, space)


def td_priority(error: Tensor, mask: Tensor | None, share: float = 0.9) -> Tensor:
    """How much is to be learnt from each sequence, [T, B, N] -> [B]: `share` of the largest error (mean over agents) and the
    rest of the mean over time (Kapturowski et al., 2019). Of a single step: its error."""
    error = error.detach().abs()
    if mask is None:
        each = error.mean(-1)
        return share * each.amax(0) + (1 - share) * each.mean(0)
    error, there = torch.where(mask, error, 0), mask.any(-1)
    each = error.sum(-1) / mask.sum(-1).clamp(min=1)
    return share * each.amax(0) + (1 - share) * each.sum(0) / there.sum(0).clamp(min=1)
