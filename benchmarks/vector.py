"""Rows of ordinary Python environments: Shoal's worker processes beside Gymnasium's and beside no workers at all.

    python benchmarks/vector.py [--workers 2] [--rows 2,16] [--seconds 1] [--repeats 5] [--json FILE]

CartPole is cheap (the trip costs more than the step), football dear. All step with the same fixed actions, interleaved in one
run; ratios are of medians. "Shoal, workers" sends and receives rows in halves, as training does, "Shoal, in step" all at once.
"shared" and "pipes" are Gymnasium's AsyncVectorEnv with shared memory and without: it has a process a row, Shoal `--workers` in
all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, MultiDiscrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import shoal
from shoal.envs.rows import Slots, arrays

FOOTBALL = "academy_3_vs_1_with_keeper"


class Football(gymnasium.Env):
    """Shoal's football row as an environment of Gymnasium's, so that all step the same engine."""

    def __init__(self) -> None:
        from shoal.envs.football import Football as Adapter

        self.row: Any = Adapter.row(Adapter.Config(id=FOOTBALL))
        n = self.row.spec.groups[0].n
        self.observation_space, self.action_space = Box(-9, 9, (n, 115), np.float32), MultiDiscrete([19] * n)
        self.whole, self.episode = arrays(self.row, 1), 0
        self.out = Slots(self.row.spec, self.whole, 0, "now")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode += 1
        self.row.reset(self.episode if seed is None else seed, self.out)
        return self.out.obs["agents"].copy(), {}

    def step(self, action: Any) -> Any:
        over = self.row.step({"agents": action}, self.out)
        terminated = bool(self.out.terminated["agents"][0])
        return self.out.obs["agents"].copy(), float(self.out.reward["agents"][0]), terminated, over and not terminated, {}


def ours(id: str, rows: int, workers: int, in_halves: bool = False) -> Callable[[], None]:
    env = shoal.make(id, rows=rows, workers=workers)
    generator = torch.Generator().manual_seed(0)
    g = env.spec.groups[0]
    actions = {g.name: torch.randint(0, g.action.sizes[0], (rows, g.n), generator=generator)}
    noise = itertools.cycle(torch.rand(1000, rows, env.noise, generator=generator).unbind())
    env.reset(next(noise))
    if not in_halves:
        return lambda: env.step(actions, next(noise)) and None

    def send(k: int) -> None:
        half = env.halves[k]
        env.send(k, {g: a[half] for g, a in actions.items()}, now[half])

    def step() -> None:
        nonlocal now
        now = next(noise)
        for k in range(len(env.halves)):
            env.receive(k)
            send(k)

    now = next(noise)
    for k in range(len(env.halves)):
        send(k)
    return step


def theirs(make: Callable[[], gymnasium.Env], rows: int, kind: str) -> Callable[[], None]:
    same = AutoresetMode.SAME_STEP
    env: Any = (
        SyncVectorEnv([make] * rows, autoreset_mode=same)
        if kind == "serial"
        else AsyncVectorEnv([make] * rows, shared_memory=kind == "shared", autoreset_mode=same)
    )
    env.action_space.seed(0)
    env.reset(seed=0)
    actions = env.action_space.sample()
    return lambda: env.step(actions) and None


def rate(step: Callable[[], None], rows: int, seconds: float) -> float:
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        step()
        count += rows
    return count / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", default="2,16")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tasks", default="cartpole,football")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    tasks: dict[str, tuple[str, Callable[[], gymnasium.Env]]] = {
        "cartpole": ("gymnasium/CartPole-v1", lambda: gymnasium.make("CartPole-v1")),
        "football": (f"football/{FOOTBALL}", Football),
    }
    for task in options.tasks.split(","):
        id, make = tasks[task]
        for rows in map(int, options.rows.split(",")):
            works = {  # processes are forked before this one has an engine
                "Shoal, workers": ours(id, rows, options.workers, in_halves=True),
                "Shoal, in step": ours(id, rows, options.workers),
                "Gymnasium, shared": theirs(make, rows, "shared"),
                "Gymnasium, pipes": theirs(make, rows, "pipes"),
                "Shoal, serial": ours(id, rows, 0),
                "Gymnasium, serial": theirs(make, rows, "serial"),
            }
            rates: dict[str, list[float]] = {name: [] for name in works}
            for repeat in range(options.repeats + 1):
                for name, step in works.items():
                    x = rate(step, rows, options.seconds)
                    rates[name] += [x] if repeat else []  # the first is to warm up
            medians = {name: statistics.median(xs) for name, xs in rates.items()}
            results[f"{task}, {rows} rows"] = {"rates": rates, "medians": medians}
            print(f"{id}, {rows} rows, {options.workers} workers")
            for name, x in medians.items():
                low, high = min(rates[name]), max(rates[name])
                print(f"  {name:18} {x:>9,.0f} steps/s ({low:,.0f} to {high:,.0f})  x{x / medians['Gymnasium, shared']:.2f}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"workers": options.workers, "results": results}, f, indent=1)


if __name__ == "__main__":
    main()
