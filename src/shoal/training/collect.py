"""Collecting: policies act, the world steps, and a rollout of it comes back. The only caller of `env.step`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal.algos.base import Acted, Algorithm
from shoal.buffers.rollout import RolloutBuffer
from shoal.envs.base import Environment, World
from shoal.spec import Batch, Box, EnvSpec, Frame, Outcome, Space
from shoal.training.seeds import restore_generator
from shoal.training.stats import EpisodeStats
from shoal.tree import tree_leaves, tree_map, zero_where


class Players:
    """Who plays a world: algorithms that together hold every group."""

    def __init__(self, spec: EnvSpec, algorithms: list[Algorithm]):
        self.spec, self.algorithms = spec, algorithms
        self.of = {g: a for a in algorithms for g in a.groups}
        assert set(self.of) == {g.name for g in spec.groups}, "every group needs somebody who plays it"
        for a in algorithms:
            a.peers = self.of

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        return {g: m for a in self.algorithms for g, m in a.memory(rows, device).items()}

    def noise(self, generator: torch.Generator, *lead: int) -> dict[str, Tensor]:
        """Uniform numbers to act with, [*lead, N, K] for each group."""
        return {
            g.name: torch.rand(*lead, g.n, self.of[g.name].noise, generator=generator, device=generator.device)
            for g in self.spec.groups
        }

    def act(self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor], explore: bool, greedy: bool = False) -> Acted:
        """Actions, memory and extras of all groups. Memory is zeroed where an agent starts."""
        whole: tuple[dict[str, Any], ...] = ({}, {}, {})
        for a in self.algorithms:
            before = {g: zero_where(frame[g].start, memory[g]) for g in a.groups}
            u = None if greedy and a.greedy else {g: noise[g] for g in a.groups}
            acted: tuple[Any, ...] = a.act(frame, before, u, explore)
            for parts, part in zip(whole, acted, strict=True):
                parts.update(part)
        return Acted(*whole)


def to_space(space: Space, action: Tensor) -> Tensor:
    """A policy's action in the space's own units: continuous ones are clipped to [-1, 1] and scaled to the bounds."""
    if not isinstance(space, Box):
        return action
    low, width = bounds(space, action.device)
    return low + (action.clamp(-1, 1) + 1) * 0.5 * width


@cache
def bounds(space: Box, device: torch.device) -> tuple[Tensor, Tensor]:
    """The lower bounds and how far the upper ones are from them."""
    low = torch.tensor(space.low, device=device)
    return low, torch.tensor(space.high, device=device) - low


def play(env: Environment, actions: dict[str, Tensor], noise: Tensor) -> Outcome:
    """One step of every row."""
    return env.step({g.name: to_space(g.action, actions[g.name]) for g in env.spec.groups}, noise)


class Collector:
    """Owns a world that is being played: the frame to act on, the memory, the generator, and what episodes add up to."""

    def __init__(self, env: Environment, players: Players, generator: torch.Generator):
        self.env, self.players, self.generator = env, players, generator
        self.frame = env.reset(self._uniform(env.rows, env.noise))
        self.memory = players.memory(env.rows, env.device)
        self.buffer = RolloutBuffer()
        self.episode_stats = EpisodeStats(env)
        self.remembers = False  # keep the memory before every step, not before the first alone
        self.episodes: int | None = None  # of each row, whole ones, in a rollout; none: whatever there is in its steps

    @torch.no_grad()
    def collect(self, steps: int) -> Batch:
        memory, world_noise = self.memory, self._uniform(steps, self.env.rows, self.env.noise)
        noise = self.players.noise(self.generator, steps, self.env.rows)
        batch = self._steps(steps, noise, world_noise)
        batch.memory = memory
        if self.episodes is not None:
            self._end_episodes(batch, self.episodes, world_noise[-1])
        return batch

    def _end_episodes(self, batch: Batch, episodes: int, noise: Tensor) -> None:
        """Each row's first so many episodes are `filled`; the rest is padding, whose episodes count nowhere, and all rows begin
        new ones: from the `noise` of the last step, from which those that were over there have begun theirs."""
        filled = batch.over.long().cumsum(0) - batch.over.long() < episodes  # [T, B] so many ended before
        if not isinstance(self.env, World) and bool(filled.all()):  # a native world is not looked at
            return  # none ended early
        batch.over = torch.cat((batch.over[:-1], torch.ones_like(batch.over[-1:])))
        aside = batch.over & ~filled
        batch.filled, batch.lost = filled, aside if batch.lost is None else batch.lost | aside
        self.frame = self.env.reset(noise)

    def _steps(self, steps: int, noise: dict[str, Tensor], world_noise: Tensor) -> Batch:
        """So many of all rows at once."""
        for t in range(steps):
            acted = self.players.act(self.frame, self.memory, {g: x[t] for g, x in noise.items()}, explore=True)
            outcome = play(self.env, acted.actions, world_noise[t])
            self.buffer.put(self._record(self.frame, self.memory, acted, outcome))
            self.frame, self.memory = outcome.frame, acted.memory
        return self.buffer.take()

    def _record(self, frame: Frame, memory: Any, acted: Acted, o: Outcome) -> Batch:
        step = Batch(frame, o.next, acted.actions, o.results, o.over, acted.extras, {}, stats=o.stats, lost=o.lost)
        return replace(step, memories=memory) if self.remembers else step

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.generator.device)

    # --- exact resume ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "env": self.env.get_state(),
            "frame": [x.clone() for x in tree_leaves(self.frame)],  # as seen: a kernel may round otherwise than `observe`
            "memory": tree_map(torch.clone, self.memory),
            "generator": self.generator.get_state(),
            "tally": self.episode_stats.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        seen = iter(state["frame"])

        def as_seen(x: Tensor) -> Tensor:
            then = next(seen).to(x.device, x.dtype)
            return x if torch.equal(x, then) else then  # a constant of the world's stays that one object

        frame = self.env.set_state(state["env"])
        anew = self.env.begun_anew
        self.frame = tree_map(as_seen, frame) if anew is None else frame
        self.memory = tree_map(lambda x: x.to(self.env.device), state["memory"])
        restore_generator(self.generator, state["generator"])
        self.episode_stats.load_state_dict(state["tally"])
        if anew is not None:
            self.episode_stats.drop(anew)
