"""Speed, measured: medians of interleaved repeats, ours and the reference's in one process.

`bench env` steps a world at several numbers of rows, random actions drawn beforehand; `bench train` trains end to end;
`bench update` learns from one rollout again and again. Each runs as it would in training (see `--compile`) and, for
comparison, operation by operation. Beside them runs `mpe2`, one world stepped through its parallel API with random actions,
where it is installed and has the scenario. Ratios are of medians; timings of one machine at one time, so compare within a
run. `benchmarks/peers/` measures other frameworks beside this one.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from shoal.ids import find
from shoal.log.console import short
from shoal.spec import Box, UserError
from shoal.training.collect import play
from shoal.training.loop import Loop
from shoal.training.seeds import generator
from shoal.training.settings import Settings, choose_device, make_env, most_compiled, resolve
from shoal.training.speedup import Captured


@dataclass(frozen=True)
class Bench:
    seconds: float = 1.0  # how long a repeat lasts
    repeats: int = 3  # repeats of each, interleaved
    threads: int = 1  # CPU threads
    device: str = "auto"  # auto, cpu, cuda or cuda:1
    compile: Literal["auto", "off", "graph", "fused"] = "auto"  # as in training; anything but off is compared with off
    json: bool = False  # print one JSON value and nothing else

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if f.name not in ("device", "compile", "matmul", "actions", "normalise", "json") and not all(
                0 < x <= 1e9 for x in numbers
            ):
                raise UserError(f"--{f.name} is {value}: it must be more than zero.")


@dataclass(frozen=True)
class EnvBench(Bench):
    rows: tuple[int, ...] = (1, 64, 1024, 16384)  # rows to measure, with commas between


@dataclass(frozen=True)
class TrainBench(Bench):
    seconds: float = 4.0  # how long a repeat lasts
    rows: int = 256  # rows
    rollout: int = 25  # steps between updates
    epochs: int = 4  # passes over a rollout
    minibatches: int = 4  # pieces of a pass
    batch: int = 256  # of those who learn from a replay: transitions an update
    every: float = 25  # and environment steps for each update
    hidden: tuple[int, ...] = (64, 64)  # widths of the hidden layers
    matmul: Literal["tf32", "float32"] = "tf32"  # precision of matrix products on CUDA
    actions: str | None = None  # kind of actions, of worlds that offer several: as --env.actions of `shoal train`
    normalise: bool = True  # running normalisers of observations and values, where the algorithm has them


@dataclass
class Result:
    title: str
    rates: dict[str, list[float]]  # what -> environment steps a second, a number a repeat
    base: str | None  # what the others are compared with
    unit: str = "steps"

    @property
    def columns(self) -> list[str]:
        return ["what", f"{self.unit}/s (median)", "lowest", "highest", "ratio"]

    @property
    def rows(self) -> list[list[str]]:
        out = []
        for name, rates in self.rates.items():
            ratio = f"{self.ratio(name):.1f}" if self.base else "-"
            out.append([name, short(statistics.median(rates)), short(min(rates)), short(max(rates)), ratio])
        return out

    @property
    def note(self) -> str:
        return f"ratio: to {self.base}" if self.base else "nothing to compare with"

    def ratio(self, name: str) -> float:
        assert self.base is not None
        return statistics.median(self.rates[name]) / statistics.median(self.rates[self.base])

    def as_json(self) -> dict[str, Any]:
        medians = {k: statistics.median(v) for k, v in self.rates.items()}
        ratios = {k: self.ratio(k) for k in self.rates} if self.base else None
        return {"title": self.title, "rates": self.rates, "medians": medians, "base": self.base, "ratios": ratios}


def bench_env(env: str, options: EnvBench) -> Result:
    device = _prepare(options)
    works = {}
    for n in options.rows:
        for mode in (m for m in _modes(options, device) if m != "graph" or device.type == "cuda"):
            works[f"shoal, {n} rows, {mode}"] = _stepper(env, n, device, mode)
    return _measure(f"stepping {env}, {_where(options, device)}", works, _reference(env), options)


def bench_train(algo: str, env: str, options: TrainBench, part: str = "train") -> Result:
    device = _prepare(options)
    works = {f"shoal, {algo}, {mode}": trainer(algo, env, options, device, mode, part) for mode in _modes(options, device)}
    epochs = f"{options.epochs} epochs, {options.minibatches} minibatches"
    work = f"a batch of {options.batch} every {options.every:g} steps" if replays(algo) else epochs
    title = (
        f"{'training' if part == 'train' else 'updates of'} {algo} on {env}: {options.rows} rows x {options.rollout} steps, "
        f"{work}, nets {'-'.join(map(str, options.hidden))}, {_where(options, device)}"
    )
    unit = "updates" if part == "update" and replays(algo) else "steps"
    return _measure(title, works, _reference(env) if part == "train" else None, options, unit)


def _prepare(options: Bench) -> torch.device:
    torch.set_num_threads(options.threads)
    return choose_device(options.device)


def _modes(options: Bench, device: torch.device) -> list[str]:
    mode = most_compiled(device) if options.compile == "auto" else options.compile
    return list(dict.fromkeys([mode, "off"]))


def _where(options: Bench, device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {options.threads} thread(s)"
    precision = f", matrix products in {options.matmul}" if isinstance(options, TrainBench) else ""
    return torch.cuda.get_device_name(device) + precision


def _measure(
    title: str, works: dict[str, Callable[[], int]], reference: Callable[[], int] | None, options: Any, unit: str = "steps"
) -> Result:
    """Each work is a function that does a piece and says how many environment steps it was."""
    base = "mpe2, bare stepping" if reference is not None else next((w for w in works if w.endswith(", off")), None)
    if reference is not None:
        works = {**works, "mpe2, bare stepping": reference}
    rates: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()  # warm
    for _ in range(options.repeats):
        for name, work in works.items():
            steps, began = 0, time.perf_counter()
            while time.perf_counter() - began < options.seconds:
                steps += work()
            rates[name].append(steps / (time.perf_counter() - began))
    return Result(title, rates, base, unit)


def _stepper(env_id: str, rows: int, device: torch.device, mode: str) -> Callable[[], int]:
    env = make_env(env_id, rows, device)
    if mode == "fused":
        env.fuse()
    draw = generator(0, "bench", device=env.device)
    steps = 25
    noise = torch.rand(steps, rows, env.noise, generator=draw, device=env.device)
    actions = []
    for _ in range(steps):
        chosen = {}
        for g in env.spec.groups:
            shape = (rows, g.n, *g.action.shape)
            u = torch.rand(shape, generator=draw, device=env.device)
            if isinstance(g.action, Box):
                chosen[g.name] = u * 2 - 1
            else:
                chosen[g.name] = (u * u.new_tensor(g.action.sizes if g.action.shape else g.action.sizes[0])).long()
        actions.append(chosen)
    env.reset(noise[0])

    def steps_of() -> None:
        for t in range(steps):
            play(env, actions[t], noise[t])

    graph = None
    if device.type == "cuda" and mode != "off":
        env.hold(steps)
        steps_of()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps_of()

    def work() -> int:
        steps_of() if graph is None else graph.replay()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return steps * rows

    return work


def trainer(algo: str, env_id: str, o: TrainBench, device: torch.device, mode: str, part: str = "train") -> Callable[[], int]:
    """The loop's own iterations, or updates from one rollout, without logs, evaluations and checkpoints. Says how many
    environment steps it did; of updates from a replay, how many of those."""
    known = {f.name for f in dataclasses.fields(find("algos", algo).load().Config)}
    wanted: dict[str, Any] = {"rollout": o.rollout, "epochs": o.epochs, "minibatches": o.minibatches}
    wanted |= {"normalise_obs": o.normalise, "normalise_value": o.normalise}
    if replays(algo):
        wanted |= {"batch": o.batch, "every": o.every, "capacity": 100_000, "learning_starts": 1000}
    sections: dict[str, Any] = {"algo": {k: v for k, v in wanted.items() if k in known}, "net": {"hidden": o.hidden}}
    if o.actions is not None:
        sections["env"] = {"actions": o.actions}
    run = {"envs": o.rows, "device": str(device), "threads": o.threads, "compile": mode, "matmul": o.matmul, "quiet": True}
    if replays(algo):
        sections["net"]["activation"] = "relu"
    loop = Loop(resolve(Settings(algo, env_id, run, sections)))
    if part == "update" and loop.trainers:
        return lambda: _updates(loop)
    if part == "update":
        batch = loop.collector.collect(loop.rollout)
        loop.shaping(batch)

        def update() -> None:
            for a in loop.learners:
                loop.update(a, batch)

        captured = loop.on_device != loop.collect_and_update
        loop.on_device = Captured(loop, update, partial(setattr, loop, "on_device")) if captured else update

    def work() -> int:
        loop.iterate()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return loop.rollout * loop.env.rows

    return work


def replays(algo: str) -> bool:
    return "capacity" in {f.name for f in dataclasses.fields(find("algos", algo).load().Config)}


def _updates(loop: Loop, filled: int = 10_000, updates: int = 20) -> int:
    """So many updates of every learner, from a replay that has something in it."""
    while loop.step < filled:
        loop.on_device()
        loop.step += loop.rollout * loop.env.rows
    for k in range(len(loop.trainers)):
        for _ in range(updates):
            loop.on_device_updates[k]()
    if loop.env.device.type == "cuda":
        torch.cuda.synchronize()
    return updates


def _reference(env: str) -> Callable[[], int] | None:
    """One world of mpe2's, stepped with random actions."""
    try:
        versions = importlib.import_module("mpe2.all_modules").mpe_environments
    except ImportError:
        return None
    module = next((m for name, m in versions.items() if name.rpartition("/")[2].rpartition("_v")[0] == env), None)
    if module is None:
        return None
    world = module.parallel_env()
    world.reset(seed=0)
    for i, name in enumerate(world.possible_agents):
        world.action_space(name).seed(i)

    def work() -> int:
        for _ in range(25):
            if not world.agents:
                world.reset()
            world.step({name: world.action_space(name).sample() for name in world.agents})
        return 25

    return work
