"""Evaluation: whole episodes on rows of their own, from seeds of their own, a fixed number in every row.

The starts and draws of an evaluation depend on the run's seed alone, so that two evaluations differ by the policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.envs.base import Environment
from shoal.spec import EnvSpec, UserError
from shoal.training.collect import Players, play
from shoal.training.seeds import generator
from shoal.training.tally import returns_of

LONGEST = 100_000  # steps a row may take for one episode


@dataclass(frozen=True)
class EvalConfig:
    every: Literal["auto"] | int = "auto"  # environment steps between evaluations; auto: a twentieth of the run; 0: never
    episodes: int = 64  # episodes an evaluation
    sampled: bool = False  # act as in training; else greedily

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise UserError(f"--eval.episodes is {self.episodes}: an evaluation needs at least one.")
        if self.every != "auto" and self.every < 0:
            raise UserError(f"--eval.every is {self.every}: it is a number of steps, 0 for never.")


@dataclass
class Episodes:
    """What an evaluation saw, an episode a line."""

    returns: dict[str, Tensor]  # [episodes, N]
    lengths: Tensor  # [episodes]
    stats: dict[str, Tensor]  # [episodes]

    def each(self) -> Tensor:
        """Every agent's mean return, in the world's order of groups."""
        return torch.cat([x.mean(0) for x in self.returns.values()])

    def spread(self) -> float:
        """Standard deviation over episodes of the mean over agents."""
        return float(torch.cat(list(self.returns.values()), -1).mean(-1).std(correction=0))

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
) -> Episodes:
    """`each` episodes in every row of `env`. `watch(env, total)` is called before every step, with the returns so far."""
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
    fixed = each * (spec.horizon or 0) if env.fixed_length else None
    for t in range(fixed or each * LONGEST):
        if watch is not None:
            watch(env, torch.cat([now[g.name] for g in spec.groups], -1))
        noise = players.noise(draw, rows)
        actions, memory, _ = players.act(frame, memory, noise, explore=sampled, greedy=not sampled)
        outcome = play(env, actions, uniform())
        frame, over = outcome.frame, outcome.over
        for g, pay in outcome.pays.items():
            now[g] += pay.reward
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
        if fixed is None and t % 8 == 7 and bool((count >= each).all()):
            break
    else:
        if fixed is None:
            raise UserError(f"an episode of this world did not end within {LONGEST} steps, so it cannot be evaluated.")
    flat = {k: x.flatten(0, 1) for k, x in kept.items()}
    means = {s: flat[f"stat/{s}"] / (flat["length"] if how == "mean" else 1) for s, how in spec.stats.items()}
    return Episodes({g.name: flat[g.name] for g in spec.groups}, flat["length"], means)
