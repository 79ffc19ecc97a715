"""Mixers: what a team is worth, of what its agents are worth.

`Monotone` is QMIX's (Rashid et al., 2018, https://arxiv.org/abs/1803.11485): a net of one hidden layer over the agents' values,
whose weights are made from the state by other nets and are never negative, so that what is best for one agent is never
worse for the team.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.nets.layers import MLP, NetConfig, affine


class Monotone(nn.Module):
    def __init__(self, state: int, agents: int, width: int, hyper: int, net: NetConfig, generator: torch.Generator):
        super().__init__()
        self.agents, self.width = agents, width

        def maker(out: int, hidden: int) -> MLP:
            plain = NetConfig(hidden=(hidden,) if hidden else (), activation="relu", init=net.init, precision=net.precision)
            made = MLP(state, out, 1, plain, generator)
            for b, w in zip(made.biases, made.weights, strict=True):  # a state that is all zeros must not make a mixer of zeros
                nn.init.uniform_(b, -(w.shape[1] ** -0.5), w.shape[1] ** -0.5, generator=generator)
            return made

        self.inner, self.outer = maker(agents * width, hyper), maker(width, hyper)  # weights in and out
        self.shift = affine(state, width, 1, net, generator)
        self.value = maker(1, width)

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        """q [..., N], state [..., S] -> [..., 1]."""
        given = state[..., None, :]
        inner = self.inner(given)[..., 0, :].abs().unflatten(-1, (self.agents, self.width))
        hidden = nn.functional.elu((q[..., None] * inner).sum(-2) + self.shift(given)[..., 0, :])  # [..., E]
        return (hidden * self.outer(given)[..., 0, :].abs()).sum(-1, keepdim=True) + self.value(given)[..., 0, :]
