"""Mixers: Q of a team, of the Qs of its agents.

`MonotonicMixer` is QMIX's (Rashid et al., 2018, https://arxiv.org/abs/1803.11485): a net of one hidden layer over the agents'
values, whose weights are made from the state by other nets and are never negative, so that what is best for one agent is never
worse for the team.

The state goes in at a norm of about one, and first weights are small: made of a normalised state as it is, the mixer's weights
change by a tenth of themselves in every step of Adam's, and on simple_spread values then run away upwards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MonotonicMixer(nn.Module):
    """q [..., N], state [..., S] -> [..., 1]. Four hyper-networks read the state: two, with `hyper` hidden units, make the
    weights of the hidden layer (`inner`) and of the output (`outer`), one layer makes the hidden bias, and one with `width`
    hidden units the output's bias, V(s). Their first layers are one product (`look`)."""

    def __init__(self, state: int, agents: int, width: int, hyper: int, generator: torch.Generator):
        super().__init__()
        self.agents, self.width, self.hidden = agents, width, (hyper, hyper, width, width)

        def layer(fan_in: int, out: int) -> nn.ParameterList:
            most = fan_in**-0.5
            shapes = (out, fan_in), (out,)
            return nn.ParameterList(nn.init.uniform_(torch.empty(s), -most, most, generator=generator) for s in shapes)

        self.look = layer(state, sum(self.hidden))
        self.inner, self.outer, self.value = layer(hyper, agents * width), layer(hyper, width), layer(width, 1)

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        linear = nn.functional.linear
        seen = linear(state * state.shape[-1] ** -0.5, *self.look)
        inner, outer, value = seen[..., : -self.width].relu().split(self.hidden[:3], -1)
        weight = linear(inner, *self.inner).abs().unflatten(-1, (self.agents, self.width))
        mixed = nn.functional.elu((q[..., None] * weight).sum(-2) + seen[..., -self.width :])  # [..., width]
        return (mixed * linear(outer, *self.outer).abs()).sum(-1, keepdim=True) + linear(value, *self.value)
