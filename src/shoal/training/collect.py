"""Collecting: policies act, the world steps, and a rollout of it comes back. The only caller of `env.step`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.algos.base import Algorithm
from shoal.buffers.rollout import RolloutBuffer
from shoal.envs.base import Environment
from shoal.spec import Batch, Box, EnvSpec, Frame, Outcome, Space, tree_map, where_rows


class Players:
    """Who plays a world: algorithms that together hold every group."""

    def __init__(self, spec: EnvSpec, algorithms: list[Algorithm]):
        self.spec, self.algorithms = spec, algorithms
        self.of = {g: a for a in algorithms for g in a.groups}
        assert set(self.of) == {g.name for g in spec.groups}, "every group needs somebody who plays it"

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        return {g: m for a in self.algorithms for g, m in a.memory(rows, device).items()}

    def noise(self, generator: torch.Generator, *lead: int) -> dict[str, Tensor]:
        """Uniform numbers to act with, [*lead, N, K] for each group."""
        return {
            g.name: torch.rand(*lead, g.n, self.of[g.name].noise, generator=generator, device=generator.device)
            for g in self.spec.groups
        }

    def act(
        self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor], explore: bool, greedy: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]:
        """Actions, memory and extras of all groups. Memory is zeroed where an agent starts."""
        fresh = {g: where_rows(frame[g].start, tree_map(torch.zeros_like, m), m) for g, m in memory.items()}
        actions: dict[str, Tensor] = {}
        after: dict[str, Any] = {}
        extras: dict[str, dict[str, Tensor]] = {}
        for a in self.algorithms:
            quiet = greedy and a.greedy
            mine = {g: fresh[g] for g in a.groups}
            acted, remembered, left = a.act(frame, mine, None if quiet else {g: noise[g] for g in a.groups}, explore)
            actions.update(acted)
            after.update(remembered)
            extras.update(left)
        return actions, after, extras


def to_space(space: Space, action: Tensor) -> Tensor:
    """A policy's action in the space's own units: continuous ones are clipped to [-1, 1] and scaled to the bounds."""
    if not isinstance(space, Box):
        return action
    low, high = action.new_tensor(space.low), action.new_tensor(space.high)
    return low + (action.clamp(-1, 1) + 1) * 0.5 * (high - low)


def play(env: Environment, actions: dict[str, Tensor], noise: Tensor) -> Outcome:
    """One step of every row."""
    return env.step({g.name: to_space(g.action, actions[g.name]) for g in env.spec.groups}, noise)


class Collector:
    """Owns a world that is being played: the frame to act on, the memory, the generator, and what episodes add up to."""

    def __init__(self, env: Environment, players: Players, generator: torch.Generator):
        self.env, self.players, self.generator = env, players, generator
        self.frame = env.reset(self._uniform(env.rows, env.noise))
        self.memory = players.memory(env.rows, env.device)
        self.buffers: dict[int, RolloutBuffer] = {}
        self.tally = Tally(env)

    @torch.no_grad()
    def collect(self, steps: int) -> Batch:
        env = self.env
        world_noise = self._uniform(steps, env.rows, env.noise)
        noise = self.players.noise(self.generator, steps, env.rows)
        buffer = self.buffers.setdefault(steps, RolloutBuffer(steps))
        memory = self.memory
        for t in range(steps):
            now = {g: x[t] for g, x in noise.items()}
            actions, self.memory, extras = self.players.act(self.frame, self.memory, now, explore=True)
            outcome = play(env, actions, world_noise[t])
            record = (self.frame, outcome.next, actions, outcome.pays, outcome.over, extras, outcome.stats)
            buffer.put(t, record)
            self.frame = outcome.frame
        batch = Batch(*buffer.data[:-1], memory)  # type: ignore[call-arg]
        self.tally.count({g: p.reward for g, p in batch.pays.items()}, batch.over, buffer.data[-1])
        return batch

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.generator.device)

    # --- exact resume ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "env": self.env.get_state(),
            "memory": self.memory,
            "generator": self.generator.get_state(),
            "tally": self.tally.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.frame = self.env.set_state(state["env"])
        self.memory = tree_map(lambda x: x.to(self.env.device), state["memory"])
        self.generator.set_state(state["generator"].cpu())
        self.tally.load_state_dict(state["tally"])


class Tally:
    """What the episodes that ended since the last look added up to, kept on the device."""

    def __init__(self, env: Environment):
        self.spec, device = env.spec, env.device
        zero = lambda *shape: torch.zeros(shape, dtype=torch.float64, device=device)  # noqa: E731
        self.carry = {g.name: zero(env.rows, g.n) for g in env.spec.groups}  # of the episodes that are under way
        self.carry.update({f"stat/{s}": zero(env.rows) for s in env.spec.stats})
        self.carry["length"] = zero(env.rows)
        self.done = {k: zero(*x.shape[1:]) for k, x in self.carry.items()}
        self.episodes = zero()
        self.reward = {g.name: zero(g.n) for g in env.spec.groups}  # all that was earned, ended or not

    def count(self, rewards: dict[str, Tensor], over: Tensor, stats: dict[str, Tensor]) -> None:
        """rewards [T, B, N], over [T, B], stats [T, B]. A row's steps are added up episode by episode: the k-th to be seen
        here into slot k, the one under way among them, without a look at the data."""
        steps, rows = over.shape
        slot = over.long().cumsum(0) - over.long()  # [T, B] ends before this step
        ended = over.long().sum(0)  # [B] so many slots are whole; the next is under way
        whole = torch.arange(steps + 1, device=over.device)[:, None] < ended  # [T + 1, B]
        tracks = {"length": torch.ones_like(over, dtype=torch.float64), **rewards}
        for name, how in self.spec.stats.items():
            tracks[f"stat/{name}"] = stats[name] * over if how == "last" else stats[name]
        lengths = None
        for name, x in tracks.items():
            wide = (...,) + (None,) * (x.dim() - 2)
            sums = torch.zeros(steps + 1, *x.shape[1:], dtype=torch.float64, device=x.device)
            sums[0] = self.carry[name]
            sums.scatter_add_(0, slot[wide].expand_as(x), x.double())
            lengths = sums if lengths is None else lengths
            self.carry[name].copy_(sums.gather(0, ended[wide][None].expand(1, *x.shape[1:]))[0])
            if self.spec.stats.get(name.removeprefix("stat/")) == "mean":
                sums = sums / lengths.clamp(min=1)
            self.done[name] += torch.where(whole[wide], sums, 0).sum((0, 1))
        for name, reward in rewards.items():
            self.reward[name] += reward.double().sum((0, 1)) / rows
        self.episodes += over.sum()

    def take(self) -> dict[str, Tensor]:
        """Means since the last take, as metrics; then begin anew. NaN where no episode ended."""
        n = torch.where(self.episodes > 0, self.episodes, torch.nan)
        out = {"episodes": self.episodes.clone(), "episode_length": self.done["length"] / n}
        for g in self.spec.groups:
            out.update(returns_of(g.name, self.done[g.name][None] / n))
            out[f"reward_total/{g.name}"] = self.reward[g.name].clone()
        out.update({name: self.done[f"stat/{name}"] / n for name in self.spec.stats})
        for x in (*self.done.values(), *self.reward.values(), self.episodes):
            x.zero_()
        return out

    def state_dict(self) -> dict[str, Any]:
        state = {"carry": self.carry, "done": self.done, "reward": self.reward, "episodes": self.episodes}
        return tree_map(torch.clone, state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, theirs in ((self.carry, "carry"), (self.done, "done"), (self.reward, "reward")):
            for k, x in mine.items():
                x.copy_(state[theirs][k])
        self.episodes.copy_(state["episodes"])


def returns_of(group: str, returns: Tensor) -> dict[str, Tensor]:
    """Episode returns [episodes, N] under their three names, so that nobody mixes scales."""
    mean = returns.mean(0)
    out = {f"return/{group}": mean.mean(), f"return_sum/{group}": mean.sum()}
    out.update({f"return/{group}/{i}": x for i, x in enumerate(mean)})
    return out
