"""Actor and critic: an encoder, hidden layers, perhaps a memory, and what they put out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.nets.config import NetConfig
from shoal.nets.layers import MLP, affine
from shoal.nets.memory import Memory
from shoal.nets.own import own_module
from shoal.ops import distributions
from shoal.spec import Box, Space, UserError

State = dict[str, Tensor]
Gains = float | tuple[tuple[float, int], ...]


def _not_a_row(x: Any, width: int) -> str:
    given = f"{list(x.shape)} of {x.dtype}".replace("torch.", "") if isinstance(x, Tensor) else type(x).__name__
    return (
        f"a net that takes a row of {width} numbers an agent was given {given}: an algorithm whose worlds have pictures, or "
        "observations of other shapes, gives its nets an encoder (algos/observations.py), as algos/onpolicy.py does."
    )


class Net(nn.Module):
    """[..., N, *] -> [..., N, width_out]: what `encoder` makes of the input, hidden layers, memory, output. Without a
    `width_out` there is no output layer: features [..., N, `features`], for heads of their own."""

    def __init__(
        self,
        encoder: nn.Module | int,  # or the width of what needs none
        width_out: int | None,
        agents: tuple[str, ...] | int,
        net: NetConfig,
        generator: torch.Generator,
        gain: Gains = 1.0,
    ):
        super().__init__()
        width: int = encoder if isinstance(encoder, int) else encoder.width  # type: ignore[assignment]
        self.width = width
        self.encoder = None if isinstance(encoder, int) or getattr(encoder, "plain", False) else encoder
        self.memory: Memory | None = None
        self.out: MLP | None = None
        self.body: nn.Module
        front = replace(net, hidden=net.hidden[:-1])
        if net.memory == "none" and width_out is None:
            self.features = net.hidden[-1]
            self.body = MLP(width, self.features, agents, front, generator, front.hidden_gain, last=True)
            return
        if net.memory == "none" and width_out is not None:
            self.body = own_module(net, width, width_out, agents, generator) or MLP(
                width, width_out, agents, net, generator, gain
            )
            return
        if isinstance(agents, int):
            raise UserError(
                f"--net.memory {net.memory} needs an algorithm that gives its nets the agents' names, and this one gives their "
                "number: take --net.memory none, or hand spec[group].agents to them."
            )
        inside = net.hidden[-1] if net.hidden and net.module is None else net.memory_width
        self.body = own_module(net, width, inside, agents, generator) or MLP(
            width, inside, agents, front, generator, front.hidden_gain, last=True
        )
        self.memory, self.features = Memory(inside, agents, net, generator), net.memory_width
        if width_out is not None:
            self.out = affine(self.features, width_out, agents, net, generator, gain)

    def zero_memory(self, rows: int, device: torch.device) -> State:
        """Of agents that start: [B, N, ...]; empty without memory."""
        return {} if self.memory is None else self.memory.zero(rows, device)

    def forward(
        self, x: Any, state: State | None = None, start: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Output and the state after. Without `start` x is one step from `state`; with it [T, B, N] steps, whose states after
        each come back."""
        if self.encoder is None and not (isinstance(x, Tensor) and x.is_floating_point() and x.shape[-1] == self.width):
            raise UserError(_not_a_row(x, self.width))
        x = self.body(x if self.encoder is None else self.encoder(x))
        if self.memory is None:
            return x, {}
        after = self.memory(x, state, start, active)
        return after["hidden"] if self.out is None else self.out(after["hidden"]), after


class Actor(nn.Module):
    """Observations [..., N, *] -> a distribution over actions. Continuous ones have a standard deviation that is learnt
    and does not depend on the observation. With a shared trunk it values what it sees as well. A central critic that shares the
    trunk values its features and the state, [..., S], by a net of its own: the input then is (observations, state), and to act
    observations alone."""

    owners: Tensor | None

    def __init__(
        self,
        encoder: nn.Module | int,
        space: Space,
        agents: tuple[str, ...] | int,
        net: NetConfig,
        generator: torch.Generator,
        squash: bool = False,
        log_std: float = 0.0,
        state_width: int | None = None,  # S, with a shared trunk and a central critic
    ):
        super().__init__()
        self.space, self.squash, self.values = space, squash, net.trunk == "shared"
        self.params = distributions.params_of(space)
        self.policy: MLP | None = None
        if state_width is None:
            gain: Gains = ((net.gain_actor, self.params), (net.gain_critic, 1)) if self.values else net.gain_actor
            self.net = Net(encoder, self.params + self.values, agents, net, generator, gain)
        else:
            self.net = Net(encoder, None, agents, net, generator)
            self.policy = affine(self.net.features, self.params, agents, net, generator, net.gain_actor)
            hidden = net.hidden[-1:] if net.critic_hidden is None else net.critic_hidden
            head = replace(net, hidden=hidden, memory="none")
            self.critic = Net(self.net.features + state_width, 1, agents, head, generator, net.gain_critic)
        if isinstance(space, Box):
            owners = net.owners(agents)
            self.log_std = nn.Parameter(torch.full((max(owners) + 1, len(space.low)), log_std))
            self.register_buffer(
                "owners", torch.tensor(owners) if 1 < len(self.log_std) < len(owners) else None, persistent=False
            )

    def zero_memory(self, rows: int, device: torch.device) -> State:
        return self.net.zero_memory(rows, device)

    def forward(self, x: Any, legal: Tensor | None = None) -> Any:
        """What one without memory does."""
        return self.unroll(x, legal)[0]

    def unroll(self, x: Any, legal: Tensor | None, *memory: Any) -> tuple[Any, Tensor | None, State]:
        """The distribution, the value where the trunk is shared, and the memory after. `memory`: what `Net` takes of it."""
        if self.policy is None:
            out, after = self.net(x, *memory)
            params = out[..., : self.params].contiguous() if self.values else out
            value = out[..., self.params] if self.values else None
        else:
            own, state = x if isinstance(x, tuple) else (x, None)
            features, after = self.net(own, *memory)
            params, value = self.policy(features), None if state is None else self._central_value(features, state)
        log_std = self._log_std() if isinstance(self.space, Box) else None
        pi = distributions.make(self.space, params, legal, log_std, self.squash, getattr(self.net.body, "fused", False))
        return pi, value, after

    def of_agent(self, i: int) -> dict[str, Tensor]:
        """As that of an `MLP`; what is not of its parts."""
        return {"log_std": self.log_std[i : i + 1]} if isinstance(self.space, Box) and len(self.log_std) > 1 else {}

    def _log_std(self) -> Tensor:
        log_std = self.log_std.clamp(-5, 2)
        return log_std if self.owners is None else log_std[self.owners]

    def value(self, x: Any, *memory: Any) -> tuple[Tensor, State]:
        if self.policy is None:
            out, after = self.net(x, *memory)
            return out[..., self.params], after
        features, after = self.net(x[0], *memory)
        return self._central_value(features, x[1]), after

    def _central_value(self, features: Tensor, state: Tensor) -> Tensor:
        """[..., N] of features [..., N, F] and the state [..., S]."""
        state = state[..., None, :].expand(*features.shape[:-1], state.shape[-1])
        return self.critic(torch.cat((features, state), -1))[0][..., 0]


class Critic(nn.Module):
    """A value for each agent: [..., N]. `central`: all agents' values from one input [..., S] that they share; else each
    from its own [..., N, *]."""

    def __init__(
        self,
        encoder: nn.Module | int,
        agents: tuple[str, ...] | int,
        net: NetConfig,
        generator: torch.Generator,
        central: bool = False,
    ):
        super().__init__()
        self.central, self.n = central, agents if isinstance(agents, int) else len(agents)
        net = net if net.critic_hidden is None else replace(net, hidden=net.critic_hidden)
        self.multi_head = central and net.one_set and net.memory == "none" and net.module is None  # one net, a head an agent
        self.encoder: nn.Module | None = None
        if central and not isinstance(encoder, int):  # before agents are a dimension
            self.encoder, encoder = encoder, int(encoder.width)  # type: ignore[arg-type]
        width_out, owners = (self.n, 1) if self.multi_head else (1, agents)
        self.net = Net(encoder, width_out, owners, net, generator, net.gain_critic)

    def zero_memory(self, rows: int, device: torch.device) -> State:
        return self.net.zero_memory(rows, device)

    def forward(self, x: Any) -> Tensor:
        """What one without memory does."""
        return self.value(x)[0]

    def value(self, x: Any, *memory: Any) -> tuple[Tensor, State]:
        """Values, and the memory after. `memory`: what `Net` takes of it."""
        x = x if self.encoder is None else self.encoder(x)
        if self.multi_head:
            return self.net(x[..., None, :])[0][..., 0, :], {}
        if self.central:
            x = x[..., None, :].expand(*x.shape[:-1], self.n, x.shape[-1])
        out, after = self.net(x, *memory)
        return out[..., 0], after
