"""Evaluation: whole episodes on rows of their own, from seeds of their own, a fixed number in every row.

The starts and draws of an evaluation depend on the run's seed alone, so that two evaluations differ by the policies.
It can be abandoned, and then nothing of it is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.envs.base import Environment
from shoal.spec import Batch, EnvSpec, UserError
from shoal.training.collect import Players, play
from shoal.training.finite import FirstNotFinite
from shoal.training.seeds import generator
from shoal.training.stats import returns_of
from shoal.tree import tree_map

MOST_EPISODES = 10_000_000
LONGEST = 100_000  # steps


@dataclass(frozen=True)
class EvalConfig:
    every: Literal["auto"] | int = "auto"  # environment steps between evaluations; auto: a twentieth of the run; 0: never
    episodes: int = 64  # episodes an evaluation
    sampled: bool = False  # act as in training; else greedily
    recheck: bool = True  # at the end play last and best on fresh episodes (the time of two evaluations); say so if it fell
    longest: int = LONGEST  # steps that an episode of an evaluation may last; one that goes on is an error

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise UserError(f"--eval.episodes is {self.episodes}: an evaluation needs at least one.")
        if self.episodes > MOST_EPISODES:
            raise UserError(f"--eval.episodes is {self.episodes}: an evaluation takes {MOST_EPISODES:,} at most.")
        if self.every != "auto" and self.every < 0:
            raise UserError(f"--eval.every is {self.every}: it is a number of steps, 0 for never.")
        if self.longest < 1:
            raise UserError(f"--eval.longest is {self.longest}: it is a number of steps, at least 1.")


class AbandonedError(BaseException):  # a signal raises it wherever an evaluation is, in a world that catches Exception say
    """An evaluation was told to stop before its end."""


@dataclass
class Episodes:
    """What an evaluation saw, an episode a line."""

    returns: dict[str, Tensor]  # [episodes, N]
    lengths: Tensor  # [episodes]
    stats: dict[str, Tensor]  # [episodes]

    def each(self) -> Tensor:
        """Every agent's mean return, in the world's order of groups."""
        return torch.cat([x.mean(0) for x in self.returns.values()])

    def spread(self, spec: EnvSpec) -> list[float]:
        """For each team the standard deviation over episodes of the mean over its agents."""
        teams = [torch.cat([self.returns[g.name] for g in groups], -1) for groups in spec.teams.values()]
        return [float(x.mean(-1).std(correction=0)) for x in teams]

    def per_episode(self) -> dict[str, Tensor]:
        """Metrics that every episode has, [episodes]."""
        out: dict[str, Tensor] = {"episode_length": self.lengths, **self.stats}
        for g, x in self.returns.items():
            out |= {f"return/{g}": x.mean(-1), f"return_sum/{g}": x.sum(-1)}
            out |= {f"return/{g}/{i}": x[:, i] for i in range(x.shape[1])}
        return out

    def metrics(self) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {"episodes": torch.tensor(float(len(self.lengths))), "episode_length": self.lengths.mean()}
        for g, x in self.returns.items():
            out.update(returns_of(g, x))
            out[f"return_std/{g}"] = x.mean(-1).std(correction=0)
        return {**out, **{k: x.mean() for k, x in self.stats.items()}}


def metric_names(spec: EnvSpec) -> list[str]:
    """The names of an evaluation's metrics."""
    blank = {g.name: torch.zeros(1, g.n) for g in spec.groups}
    return list(Episodes(blank, torch.zeros(1), {s: torch.zeros(1) for s in spec.stats}).metrics())


def rows_for(episodes: int, widest: int) -> tuple[int, int]:
    """Rows, at most `widest`, and episodes in each: at least so many in all, every row alike."""
    each = math.ceil(episodes / widest)
    return math.ceil(episodes / each), each


@torch.no_grad()
def evaluate(
    env: Environment,
    players: Players,
    each: int,
    seed: int,
    sampled: bool = False,
    watch: Callable[[Environment, Tensor], Any] | None = None,
    longest: int = LONGEST,
    abandon: Callable[[], bool] = lambda: False,
) -> Episodes:
    """`each` episodes in every row of `env`, of at most `longest` steps. `watch(env, total)` is called before every step, with
    the returns so far; so is `abandon`, and where it says so AbandonedError is raised."""
    draw = generator(seed, "eval", device=env.device)
    spec, rows, device = env.spec, env.rows, env.device

    def uniform() -> Tensor:
        return torch.rand(rows, env.noise, generator=draw, device=device)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    frame, memory = env.reset(uniform()), players.memory(rows, device)
    now = {g.name: zeros(rows, g.n) for g in spec.groups}
    now.update({f"stat/{s}": zeros(rows) for s in spec.stats})
    now["length"] = zeros(rows)
    kept = {k: zeros(each, *x.shape) for k, x in now.items()}
    count, line = torch.zeros(rows, dtype=torch.long, device=device), torch.arange(rows, device=device)
    fixed = each * spec.horizon if env.fixed_length and spec.horizon else None
    endless = UserError(
        f"an episode of this world did not end within {longest:,} steps, so it cannot be evaluated: give the world a time "
        "limit, or its episodes more steps with --eval.longest (of `shoal eval`: --longest)."
    )
    if fixed and fixed > each * longest:
        raise endless
    not_finite = None if env.halves else FirstNotFinite(env)  # a world of Python environments looks for itself
    clock = torch.zeros(1, dtype=torch.long, device=device)
    for t in range(fixed) if fixed else itertools.count():
        if abandon():
            raise AbandonedError
        if watch is not None:
            watch(env, torch.cat([now[g.name] for g in spec.groups], -1))
        noise = players.noise(draw, rows)
        actions, memory, _ = players.act(frame, memory, noise, explore=sampled, greedy=not sampled)
        outcome = play(env, actions, uniform())
        if not_finite is not None:
            step = Batch(frame, outcome.next, actions, outcome.results, outcome.over, {}, {})
            not_finite.note(tree_map(lambda x: x[None], step), clock.add_(1))  # [1, B, ...]
        frame, over = outcome.frame, outcome.over
        for g, result in outcome.results.items():
            now[g] += result.reward
        now["length"] += 1
        for name, how in spec.stats.items():
            now[f"stat/{name}"] = outcome.stats[name].double() if how == "last" else now[f"stat/{name}"] + outcome.stats[name]
        ended = over if outcome.lost is None else over & ~outcome.lost  # what an accident cut off is played again
        counts = ended & (count < each)
        slot = count.clamp(max=each - 1)
        for k, x in now.items():
            wide = counts.reshape(-1, *(1,) * (x.dim() - 1))
            kept[k][slot, line] = torch.where(wide, x, kept[k][slot, line])
            now[k] = x * ~over.reshape(wide.shape)
        count += ended
        if fixed is None and t % 8 == 7:  # a look waits for the device
            most = int(((now["length"] + 1) * (count < each)).max())
            if most > longest:
                raise (not_finite and not_finite.found(" of the evaluation")) or endless
            if not most:
                break
    if not_finite is not None and (first := not_finite.found(" of the evaluation")) is not None:
        raise first
    flat = {k: x.flatten(0, 1) for k, x in kept.items()}
    means = {s: flat[f"stat/{s}"] / (flat["length"] if how == "mean" else 1) for s, how in spec.stats.items()}
    return Episodes({g.name: flat[g.name] for g in spec.groups}, flat["length"], means)
