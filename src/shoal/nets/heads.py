"""Actor and critic: perceptrons with what comes before and after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.nets.layers import MLP, NetConfig
from shoal.ops import distributions
from shoal.spec import Box, Space


class Actor(nn.Module):
    """Observations [..., N, O] -> a distribution over actions. Continuous ones have a standard deviation that is learnt
    and does not depend on the observation."""

    def __init__(
        self,
        width: int,
        space: Space,
        n: int,
        net: NetConfig,
        generator: torch.Generator,
        squash: bool = False,
        log_std: float = 0.0,
    ):
        super().__init__()
        self.space, self.squash = space, squash
        self.body = MLP(width, distributions.params_of(space), n, net, generator, gain=0.01)
        if isinstance(space, Box):
            rows = n if net.share == "none" else 1
            self.log_std = nn.Parameter(torch.full((rows, len(space.low)), log_std))

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Any:
        log_std = self.log_std.clamp(-5, 2) if isinstance(self.space, Box) else None
        return distributions.make(self.space, self.body(obs), legal, log_std, self.squash, self.body.fused)


class Critic(nn.Module):
    """A value for each agent: [..., N]. `central`: all agents' values from one input [..., S] that they share; else each
    from its own [..., N, O]."""

    def __init__(self, width: int, n: int, net: NetConfig, generator: torch.Generator, central: bool):
        super().__init__()
        self.central, self.n = central, n
        self.together = central and net.share != "none"  # one net with a head an agent
        if self.together:
            self.body = MLP(width, n, 1, net, generator)
        else:
            self.body = MLP(width, 1, n, net, generator)

    def forward(self, x: Tensor) -> Tensor:
        if self.together:
            return self.body(x[..., None, :])[..., 0, :]
        if self.central:
            x = x[..., None, :].expand(*x.shape[:-1], self.n, x.shape[-1])
        return self.body(x)[..., 0]
