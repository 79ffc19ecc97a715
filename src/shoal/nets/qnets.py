"""Nets that put out values of actions: Q of every choice, and Q of actions that are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.nets.config import NetConfig
from shoal.nets.heads import Net, State
from shoal.nets.layers import ACTIVATIONS, MLP, affine
from shoal.nets.memory import Memory
from shoal.ops import values
from shoal.ops.explore import EDGE
from shoal.spec import Discrete, MultiDiscrete


class ActionCritic(nn.Module):
    """Q(x, a) of actions that are given: of what is seen, perhaps with a memory of it, and an action.

    `features` encodes what is seen, [..., N, F]; `forward` values [..., N] or [..., N, width_out] of features and actions.
    Memory is of what was seen alone, so that one pass over a sequence serves any number of actions. With one agent the values
    are everybody's: features [..., 1, F] and actions [..., K, A], each of the K with a value.
    """

    def __init__(
        self,
        encoder: nn.Module | int,
        actions: int,
        width_out: int,
        agents: tuple[str, ...],
        net: NetConfig,
        generator: torch.Generator,
        gain: float,
        central: bool,  # what is seen has no dimension of agents yet, [..., S]
    ):
        super().__init__()
        self.central, self.n = central, len(agents)
        net = net if net.critic_hidden is None else replace(net, hidden=net.critic_hidden)
        width: int = encoder if isinstance(encoder, int) else encoder.width  # type: ignore[assignment]
        self.encoder = None if isinstance(encoder, int) or getattr(encoder, "plain", False) else encoder
        self.memory: Memory | None = None
        if net.memory != "none":
            inside = net.hidden[0] if net.hidden else net.memory_width
            bare = replace(net, hidden=())
            self.body = MLP(width, inside, agents, bare, generator, net.hidden_gain, last=True)
            self.memory, width = Memory(inside, agents, net, generator), net.memory_width
        self.head = Net(width + actions, width_out, agents, replace(net, memory="none"), generator, gain)

    def features(
        self, x: Any, state: State | None = None, start: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Features, and the memory after: see `Net`."""
        x = x if self.encoder is None else self.encoder(x)
        if self.central:
            x = x[..., None, :] if self.n == 1 else x[..., None, :].expand(*x.shape[:-1], self.n, x.shape[-1])
        if self.memory is None:
            return x, {}
        after = self.memory(self.body(x), state, start, active)
        return after["hidden"], after

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        if self.n == 1:
            features = features.expand(*actions.shape[:-1], features.shape[-1])
            return self.head(torch.cat((features, actions), -1)[..., None, :])[0][..., 0, :]
        return self.head(torch.cat((features, actions), -1))[0]


class QNetwork(nn.Module):
    """Observations [..., N, *] -> Q of every choice, [..., N, A]: those of all dimensions end to end. First values
    are small, as `gain_actor` says: what a net makes up at random before it has learnt is what a maximum looks for.

    `dueling`: a value and advantages, which share all layers but the output's weights. `noisy`: the output's weights carry
    noise whose size is learnt, in the place of exploration by chance.
    """

    def __init__(
        self,
        encoder: nn.Module | int,
        space: Discrete | MultiDiscrete,
        agents: tuple[str, ...],
        net: NetConfig,
        generator: torch.Generator,
        dueling: bool = False,
        noisy: bool = False,
    ):
        super().__init__()
        self.space, self.dueling, self.choices = space, dueling, sum(space.sizes)
        width = self.choices + (len(space.sizes) if dueling else 0)
        if not noisy:
            self.net, self.out = Net(encoder, width, agents, net, generator, net.gain_actor), None
            return
        inside = net.hidden[-1] if net.hidden else net.memory_width
        front = net if net.memory != "none" else replace(net, hidden=net.hidden[:-1])
        self.net = Net(encoder, inside, agents, front, generator, net.hidden_gain)
        self.out = Noisy(inside, width, agents, net, generator)

    @property
    def noise(self) -> int:
        """Uniform numbers that noisy weights take, for each agent."""
        return 0 if self.out is None else self.out.noise

    def forward(self, x: Any, *memory: Any, noise: Tensor | None = None) -> tuple[Tensor, State]:
        """Values, and the memory after. `memory`: what `Net` takes of it; noise [..., self.noise], or none for the weights'
        means."""
        q, after = self.net(x, *memory)
        if self.out is not None:
            q = self.out(self.out.activation(q), noise)
        if self.dueling:
            q = values.dueling(q[..., : self.choices], q[..., self.choices :], self.space)
        return q, after


class Noisy(nn.Module):
    """A layer whose weights are w + sigma * f(e_out) f(e_in)^T with f(e) = sign(e) sqrt|e| (Fortunato et al., 2018,
    https://arxiv.org/abs/1706.10295). Factorised noise goes in and out beside the product, so that every row and agent can have
    noise of its own."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        agents: tuple[str, ...],
        net: NetConfig,
        generator: torch.Generator,
        first: float = 0.5,
    ):
        super().__init__()
        self.width_in, self.noise, self.activation = width_in, width_in + width_out, ACTIVATIONS[net.activation]
        self.mean = affine(width_in, width_out, agents, net, generator, net.gain_actor)
        self.spread = affine(width_in, width_out, agents, net, generator)
        for p in (*self.spread.weights, *self.spread.biases):
            nn.init.constant_(p, first / width_in**0.5)

    def forward(self, x: Tensor, noise: Tensor | None) -> Tensor:
        y = self.mean(x)
        if noise is None:
            return y
        e = torch.special.ndtri(noise.clamp(EDGE, 1 - EDGE))
        e = e.sign() * e.abs().sqrt()
        return y + e[..., self.width_in :] * self.spread(x * e[..., : self.width_in])
