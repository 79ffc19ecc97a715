"""Mixers: what a team is worth, of what its agents are worth.

`Monotone` is QMIX's (Rashid et al., 2018, https://arxiv.org/abs/1803.11485): a net of one hidden layer over the agents' values,
whose weights are made from the state by other nets and are never negative, so that what is best for one agent is never
worse for the team.

The state goes in at a norm of about one, and first weights are small: made of a normalised state as it is, the mixer's weights
change by a tenth of themselves in every step of Adam's, and on simple_spread values then run away upwards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.nets.layers import MLP, NetConfig


class Monotone(nn.Module):
    def __init__(self, state: int, agents: int, width: int, hyper: int, net: NetConfig, generator: torch.Generator):
        super().__init__()
        self.agents, self.width = agents, width

        def maker(out: int, hidden: int) -> MLP:
            plain = NetConfig(hidden=(hidden,) if hidden else (), activation="relu", precision=net.precision)
            made = MLP(state, out, 1, plain, generator)
            for w, b in zip(made.weights, made.biases, strict=True):
                most = w.shape[1] ** -0.5
                nn.init.uniform_(w, -most, most, generator=generator)
                nn.init.uniform_(b, -most, most, generator=generator)
            return made

        self.inner, self.outer = maker(agents * width, hyper), maker(width, hyper)  # weights in and out
        self.shift = maker(width, 0)
        self.value = maker(1, width)

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        """q [..., N], state [..., S] -> [..., 1]."""
        given = (state * state.shape[-1] ** -0.5)[..., None, :]
        inner = self.inner(given)[..., 0, :].abs().unflatten(-1, (self.agents, self.width))
        hidden = nn.functional.elu((q[..., None] * inner).sum(-2) + self.shift(given)[..., 0, :])  # [..., E]
        return (hidden * self.outer(given)[..., 0, :].abs()).sum(-1, keepdim=True) + self.value(given)[..., 0, :]
