"""The settings of nets (`--net.*`)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from shoal.flags import refuse_huge
from shoal.ids import near
from shoal.spec import UserError


@dataclass(frozen=True)
class NetConfig:
    hidden: tuple[int, ...] = (64, 64)  # widths of the hidden layers, of actor and critic
    critic_hidden: tuple[int, ...] | None = None  # widths of the critic's; none: the same, after a shared trunk its last
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = "tanh"  # between layers
    layer_norm: bool = False  # normalise each hidden layer before its activation
    init: Literal["orthogonal", "xavier"] = "orthogonal"  # first weights
    gain: float | None = None  # of the first hidden weights; none: 5/3 for tanh, else the root of 2
    gain_actor: float = 0.01  # of the first weights that put out actions: small, so that all are as likely
    gain_critic: float = 1.0  # of the first weights that put out values
    share: str = "id"  # agents of a group: id (one net, with ids), plain (without), none (a net each), or agent_0=a,agent_1=b
    trunk: Literal["own", "shared"] = "own"  # shared: actor and critic are one net, with one optimiser and one gradient clip
    memory: Literal["none", "gru", "lstm"] = "none"  # what carries over from step to step, in actor and critic
    memory_width: int = 64  # numbers an agent remembers
    attention: Literal["none", "actor", "critic", "both"] = "none"  # over the entities one sees; a central critic: over agents
    attention_width: int = 64  # numbers an entity is made into
    heads: int = 4  # of the attention
    convolutions: str = "auto"  # for images: channels x kernel / stride of each layer, as 32x8/4,64x4/2,64x3/1; auto: by size
    precision: Literal["float32", "bf16"] = "float32"  # of the nets' products; weights, actions and densities stay float32
    module: str | None = None  # your own nn.Module in place of the perceptrons: package.module:Class or file.py:Class

    def __post_init__(self) -> None:
        for name in ("hidden", "critic_hidden"):
            if any(h < 1 for h in getattr(self, name) or ()):
                given = ",".join(map(str, getattr(self, name)))
                raise UserError(f"--net.{name.replace('_', '-')} is {given}: a layer needs at least one unit.")
            refuse_huge(max(getattr(self, name) or (0,)), f"--net.{name.replace('_', '-')}")
        for name in ("memory_width", "attention_width"):
            refuse_huge(getattr(self, name), f"--net.{name.replace('_', '-')}")
        for name in ("memory_width", "attention_width", "heads", "gain", "gain_actor", "gain_critic"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise UserError(f"--net.{name.replace('_', '-')} is {getattr(self, name)}: it must be more than zero.")
        if self.convolutions != "auto":
            layers_of(self.convolutions)
        if self.attention_width % self.heads:
            raise UserError(f"--net.heads is {self.heads}: it must divide the --net.attention-width of {self.attention_width}.")
        if self.share not in ("id", "plain", "none") and "=" not in self.share:
            raise UserError(
                f"--net.share is {self.share!r}{near(self.share, ('id', 'plain', 'none'))}: it takes id, plain, none, or sets "
                "of weights by name: agent_0=a,agent_1=b."
            )

    @property
    def hidden_gain(self) -> float:
        return self.gain or (5 / 3 if self.activation == "tanh" else math.sqrt(2))

    @property
    def one_set(self) -> bool:
        return self.share in ("id", "plain")

    def owners(self, agents: tuple[str, ...] | int) -> tuple[int, ...]:
        """Which set of weights each agent has. Agents without names must not be mapped by name."""
        n = agents if isinstance(agents, int) else len(agents)
        if self.one_set or self.share == "none":
            return (0,) * n if self.one_set else tuple(range(n))
        if isinstance(agents, int):
            raise UserError(
                f"--net.share {self.share} needs an algorithm that gives its nets the agents' names, and this one gives their "
                "number: take id, plain or none, or hand spec[group].agents to them."
            )
        pairs = [[word.strip() for word in pair.partition("=")[::2]] for pair in self.share.split(",")]
        given = dict(pairs)
        if len(given) < len(pairs):
            raise UserError(f"--net.share is {self.share}: it names an agent twice.")
        for name in given:
            if name not in agents:
                raise UserError(
                    f"--net.share names {name!r}{near(name, agents)}, who is not here: there are {', '.join(agents)}."
                )
        if missing := [a for a in agents if not given.get(a)]:
            raise UserError(f"--net.share says nothing of {', '.join(missing)}: it must name a set for every agent.")
        sets = list(dict.fromkeys(given[a] for a in agents))
        return tuple(sets.index(given[a]) for a in agents)


def layers_of(convolutions: str) -> list[tuple[int, ...]]:
    """32x8/4,64x4/2 -> (channels, kernel, stride) of each layer."""
    out = []
    for layer in convolutions.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)/([1-9]\d*)\s*", layer)
        if match is None:
            raise UserError(f"--net.convolutions has {layer!r}: a layer is channels x kernel / stride, such as 32x8/4.")
        if max(map(len, match.groups())) > 6:
            raise UserError(f"--net.convolutions has {layer!r:.60}: there is not enough memory for so many.")
        out.append(tuple(map(int, match.groups())))
    return out
