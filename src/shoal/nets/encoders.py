"""Encoders: observations of any form become numbers in a row, [..., N, width].

    Image            pixels [..., N, C, H, W], uint8 scaled on the device, through convolutions
    Entities         a flat observation whose `layout` says which numbers are which entities, by attention, in any order
    Encoder          a group's observation: its vector, its images, or both
    JointEncoder     the observations of several groups side by side, for a central critic
    AgentAttention   the same by attention over agents, whose order does not matter

What comes in was prepared by `nets/parts.py` and normalised.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from shoal.nets.config import NetConfig, layers_of
from shoal.nets.layers import ACTIVATIONS, affine
from shoal.nets.parts import VECTOR, images_of, vector_width
from shoal.spec import Group, Shape, UserError

LARGE = 36  # pixels from which on an image is large
CONVOLUTIONS = {True: "32x8/4,64x4/2,64x3/1", False: "16x3/1,32x3/2"}  # large: those of Mnih et al. (2015)


class Image(nn.Module):
    """Convolutions over [..., N, C, H, W]; `width` numbers come out."""

    def __init__(self, shape: Shape, agents: tuple[str, ...], net: NetConfig, generator: torch.Generator):
        super().__init__()
        channels, *size = shape
        text = net.convolutions if net.convolutions != "auto" else CONVOLUTIONS[min(size) >= LARGE]
        owners = net.owners(agents)
        self.n, self.sets, self.activation, self.strides = len(agents), max(owners) + 1, ACTIVATIONS[net.activation], []
        self.bf16 = net.precision == "bf16"
        weights, biases = [], []
        for out, kernel, stride in layers_of(text):
            size = [(s - kernel) // stride + 1 for s in size]
            if min(size) < 1:
                raise UserError(f"--net.convolutions is {text}: an image of {shape[1]} x {shape[2]} is too small for it.")
            each = [torch.empty(out, channels * kernel * kernel) for _ in range(self.sets)]
            for w in each:
                nn.init.orthogonal_(w, 2**0.5, generator=generator)
            weights.append(nn.Parameter(torch.stack(each).reshape(self.sets * out, channels, kernel, kernel)))
            biases.append(nn.Parameter(torch.zeros(self.sets * out)))
            self.strides.append(stride)
            channels = out
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)
        self.width = channels * size[0] * size[1]
        self.register_buffer("owners", torch.tensor(owners) if self.sets > 1 else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        lead = x.shape[:-3]
        x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
        side_by_side = x.shape[-3] * (1 if self.sets == 1 else self.n)
        x = x.reshape(-1, side_by_side, *x.shape[-2:])  # [M, C, H, W]; or [M, N C, H, W], agents side by side
        for w, b, stride in zip(self.weights, self.biases, self.strides, strict=True):
            if self.sets > 1:
                w = w.unflatten(0, (self.sets, -1))[self.owners].flatten(0, 1)
                b = b.unflatten(0, (self.sets, -1))[self.owners].flatten()
            if self.bf16:
                x, w, b = x.bfloat16(), w.bfloat16(), b.bfloat16()
            x = self.activation(nn.functional.conv2d(x, w, b, stride, groups=1 if self.sets == 1 else self.n))
        return x.float().reshape(*lead, self.width)

    def of_agent(self, i: int) -> dict[str, Tensor]:
        """As that of an `MLP`, where that of one agent is asked for."""
        named = {f"{k}.{n}": x for k, xs in (("weights", self.weights), ("biases", self.biases)) for n, x in enumerate(xs)}
        return {k: x.unflatten(0, (self.sets, -1))[i] for k, x in named.items()} if self.sets > 1 else {}


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al., 2017) of one query an agent, [..., N, W], over E keys and values [..., N, E, W], or
    [..., 1, E, W] that all agents look at. Which entity is which follows from its numbers alone."""

    def __init__(self, agents: tuple[str, ...] | int, net: NetConfig, generator: torch.Generator):
        super().__init__()
        width, self.heads = net.attention_width, net.heads
        self.query, self.out = (affine(width, width, agents, net, generator) for _ in range(2))

    def forward(self, own: Tensor, keys: Tensor, values: Tensor, there: Tensor | None = None) -> Tensor:
        """`there` [..., 1, E]: which of them are to be looked at; where none is, all are."""
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (self.query(own)[..., None, :], keys, values))
        score = (q * k).sum(-1) / k.shape[-1] ** 0.5  # [..., N, E, heads]
        if there is not None:
            score = score.masked_fill(~there[..., None], -1e9)
        return self.out((score.softmax(-2)[..., None] * v).sum(-3).flatten(-2))


def kinds_of(group: Group) -> dict[str, list[int]]:
    """Entity -> the indices of its numbers in a flat observation, those of one after those of the other; what belongs to none
    is the agent's own, `self`. Blocks of one name are of the same entities, in the same order."""
    assert not isinstance(group.obs, dict)
    kinds: dict[str, list[int]] = {}
    for entity, blocks in groupby(sorted(group.layout, key=lambda s: s.entity), key=lambda s: s.entity):
        slots = list(blocks)
        if entity != "self":
            if len({s.count for s in slots}) > 1:
                raise UserError(f"the layout of {group.name!r} has unequal numbers of {entity!r}.")
            kinds[entity] = [s.start + i * s.width + j for i in range(slots[0].count) for s in slots for j in range(s.width)]
    taken = {i for indices in kinds.values() for i in indices}
    return {"self": [i for i in range(vector_width(group.obs)) if i not in taken], **kinds}


def counts_of(group: Group) -> dict[str, int]:
    return {s.entity: s.count for s in group.layout}


def ties(group: Group) -> list[list[int]]:
    """Numbers of a flat observation that mean the same of different entities: their statistics are one, or their order would
    matter after all."""
    counts, out = counts_of(group), []
    for kind, at in kinds_of(group).items():
        if kind != "self":
            width = len(at) // counts[kind]
            out += [at[j::width] for j in range(width)]
    return out


class Entities(nn.Module):
    """Attention over the entities that a flat observation is made of, by `layout`; the agent's own numbers ask."""

    def __init__(self, group: Group, agents: tuple[str, ...], net: NetConfig, generator: torch.Generator):
        super().__init__()
        if not any(s.entity != "self" for s in group.layout):
            raise UserError(
                f"the observations of {group.name!r} have no layout of entities to attend to: take --net.attention none."
            )
        self.counts, kinds = {**counts_of(group), "self": 1}, kinds_of(group)
        width = net.attention_width
        self.embed = nn.ModuleDict(
            {
                k: affine(
                    max(1, len(at) // self.counts[k]), (2 + (k == "self")) * width, agents, net, generator, 2**0.5, last=True
                )
                for k, at in kinds.items()
            }
        )  # a key and a value, and of oneself what asks
        self.attention, self.width = Attention(agents, net, generator), 2 * width
        for k, at in kinds.items():
            self.register_buffer(f"at_{k}", torch.tensor(at, dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = {k: x[..., getattr(self, f"at_{k}")] for k in self.embed}
        own = parts.pop("self")
        own, key, value = self.embed["self"](own if own.shape[-1] else torch.ones_like(x[..., :1])).chunk(3, -1)  # [..., N, W]
        keys, values = [key[..., None, :]], [value[..., None, :]]
        for k, part in parts.items():
            # [..., E, N, w]: agents where layers want them
            entities = part.unflatten(-1, (self.counts[k], -1)).transpose(-2, -3)
            key, value = self.embed[k](entities).transpose(-2, -3).chunk(2, -1)  # [..., N, E, W]
            keys, values = [*keys, key], [*values, value]
        return torch.cat((own, self.attention(own, torch.cat(keys, -2), torch.cat(values, -2))), -1)


class Encoder(nn.Module):
    """One group's prepared observation -> [..., N, width]. `plain`: there is nothing to encode."""

    def __init__(self, group: Group, agents: tuple[str, ...], net: NetConfig, generator: torch.Generator, attend: bool = False):
        super().__init__()
        vector, images = vector_width(group.obs), images_of(group.obs)
        if attend and (images or isinstance(group.obs, dict)):
            raise UserError(
                f"--net.attention takes flat observations, and those of {group.name!r} are pictures or named parts."
            )
        self.entities = Entities(group, agents, net, generator) if attend else None
        encoders = {k: Image(s, agents, net, generator) for k, s in images.items()}
        self.images = nn.ModuleDict(encoders)
        self.width = (vector if self.entities is None else self.entities.width) + sum(m.width for m in encoders.values())

    @property
    def plain(self) -> bool:
        return self.entities is None and not self.images

    def forward(self, x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return x if self.entities is None else self.entities(x)
        parts = [x[VECTOR]] if VECTOR in x else []
        return torch.cat([*parts, *(m(x[k]) for k, m in self.images.items())], -1)


class WithLastAction(nn.Module):
    """An encoded observation and the last action, one-hot: (observation, action) -> [..., N, width + choices]."""

    def __init__(self, encoder: Encoder, choices: int):
        super().__init__()
        self.encoder, self.width = encoder, encoder.width + choices

    def forward(self, x: tuple[Any, Tensor]) -> Tensor:
        return torch.cat((self.encoder(x[0]), x[1]), -1)


class JointEncoder(nn.Module):
    """Several groups' observations, each encoded, end to end: [..., S]. `x` is {group: (prepared, alive or none)}."""

    def __init__(self, groups: tuple[Group, ...], net: NetConfig, generator: torch.Generator):
        super().__init__()
        encoders = {g.name: Encoder(g, g.agents, _alike(net), generator) for g in groups}
        self.encoders = nn.ModuleDict(encoders)
        self.width = sum(g.n * encoders[g.name].width for g in groups)

    def forward(self, x: dict[str, tuple[Any, Tensor | None]]) -> Tensor:
        parts = []
        for name, (obs, alive) in x.items():
            seen = self.encoders[name](obs)
            parts.append((seen if alive is None else torch.where(alive[..., None], seen, 0)).flatten(-2))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class AgentAttention(nn.Module):
    """Each of our agents looks at the agents of all `groups` by attention: [..., N, width]. The dead are not looked at."""

    def __init__(self, groups: tuple[Group, ...], ours: tuple[str, ...], net: NetConfig, generator: torch.Generator):
        super().__init__()
        self.ours, one, width = ours, _alike(net), net.attention_width
        encoders = {g.name: Encoder(g, g.agents, one, generator) for g in groups}
        embed = {g.name: affine(encoders[g.name].width, 3 * width, g.n, one, generator, 2**0.5, last=True) for g in groups}
        self.encoders, self.embed = nn.ModuleDict(encoders), nn.ModuleDict(embed)
        self.attention, self.width = Attention(1, one, generator), 2 * width

    def forward(self, x: dict[str, tuple[Any, Tensor | None]]) -> Tensor:
        tokens = {g: self.embed[g](self.encoders[g](obs)).chunk(3, -1) for g, (obs, _) in x.items()}
        own = torch.cat([tokens[g][0] for g in self.ours], -2)  # [..., N, W]
        keys, values = (torch.cat([t[i] for t in tokens.values()], -2)[..., None, :, :] for i in (1, 2))  # [..., 1, E, W]
        there = None
        if any(alive is not None for _, alive in x.values()):
            each = [torch.ones_like(tokens[g][0][..., 0], dtype=torch.bool) if a is None else a for g, (_, a) in x.items()]
            there = torch.cat(each, -1)[..., None, :]
        return torch.cat((own, self.attention(own, keys, values, there)), -1)


def _alike(net: NetConfig) -> NetConfig:
    """What looks at others has one set of weights a group."""
    return replace(net, share="plain")
