"""The suite that the defaults are judged by: every algorithm, without a flag, on every task that it takes.

    python benchmarks/defaults.py run --seeds 3-7 --jobs 2      train and play; what is there is not run again
    python benchmarks/defaults.py table                         scores by task and algorithm
    python benchmarks/defaults.py show                          tasks, budgets, scales

A run is `shoal train ALGO TASK --steps N --seed S` with the task's own words (`--net.memory gru` where there is something to
remember), and nothing else. What counts is its last checkpoint, played for 1,000 episodes from seeds that training never saw;
the best one is played on the same seeds, and a last one far below it is a defect of the defaults. Scores are normalised: 0 is
what random actions get, 1 the best known, which `TASKS` names with its source. Seeds 0 to 2 chose the defaults (`--with FLAGS`
tries others; give it an `--out` of its own), 3 to 7 confirm them; tasks that are `held_out` were fixed before anything was
chosen, and are looked at once, at the end. Results are a line a run in `benchmarks/results/defaults.jsonl`; `make readme` puts
them into docs/defaults.md. Seconds are those of a processor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
RESULTS = Path(__file__).parent / "results" / "defaults.jsonl"
CONFIRM = range(3, 8)  # seeds that the defaults were not chosen with

VALUES = ("dqn", "ddqn", "iql", "vdn", "qmix")
ACTORS = ("ddpg", "td3", "sac", "maddpg", "matd3", "masac")
POLICIES = ("a2c", "maa2c", "ppo", "ippo", "mappo", "coma")
ALGORITHMS = (*VALUES, *ACTORS, *POLICIES)
LONE = ("dqn", "ddqn", "ddpg", "td3", "sac", "a2c", "ppo")  # of one agent these; of teams all but dqn, ddqn, ppo
TEAMS = ("iql", "vdn", "qmix", "coma", "ddpg", "td3", "sac", "maddpg", "matd3", "masac", "a2c", "maa2c", "ippo", "mappo")
DISCRETE_ALONE = ("dqn", "ddqn", "iql", "vdn", "qmix", "coma")


@dataclass(frozen=True)
class Task:
    words: str  # the environment and the task's own words
    metric: str
    random: float  # measured over 1,000 episodes of random actions
    best: float
    source: str  # who reached `best`
    replay: int  # environment steps for those who learn from a replay
    rollout: int  # and for those who learn from what just happened
    continuous: bool = False
    teams: bool = False
    held_out: bool = False
    episodes: int = 1000

    def takes(self, algorithm: str) -> bool:
        if self.continuous and algorithm in DISCRETE_ALONE:
            return False
        return algorithm in (TEAMS if self.teams else LONE)

    def steps(self, algorithm: str) -> int:
        return self.rollout if algorithm in POLICIES else self.replay


AGENTS = "return/agents"
GRU = "--net.memory gru"
TASKS = {
    "cartpole": Task("CartPole-v1", AGENTS, 22, 500, "the most there is", 300_000, 300_000),
    "acrobot": Task("Acrobot-v1", AGENTS, -499, -73, "rl-baselines3-zoo", 200_000, 500_000),
    "mountain-car": Task("MountainCar-v0", AGENTS, -200, -101, "rl-baselines3-zoo", 300_000, 1_000_000),
    "pendulum": Task("Pendulum-v1", AGENTS, -1225, -145, "Shoal", 50_000, 300_000, continuous=True),
    "mountain-car-continuous": Task(
        "MountainCarContinuous-v0", AGENTS, -33, 95, "rl-baselines3-zoo", 100_000, 300_000, continuous=True
    ),
    "lunar-lander": Task("LunarLander-v3", AGENTS, -180, 270, "Shoal", 500_000, 500_000),
    "spread": Task("simple_spread", AGENTS, -26, -7.0, "Shoal, HARL", 1_000_000, 2_000_000, teams=True),
    "spread-continuous": Task(
        "simple_spread --env.actions continuous", AGENTS, -26, -7.6, "Shoal", 1_000_000, 2_000_000, continuous=True, teams=True
    ),
    "speaker-listener": Task(
        "simple_speaker_listener", "return/listener", -41, -7.9, "an oracle", 1_000_000, 2_000_000, teams=True
    ),
    "reference": Task("simple_reference", AGENTS, -40, -9, "Shoal", 1_000_000, 2_000_000, teams=True),
    "tag": Task("simple_tag --team.agent random", "return/adversary", 1.5, 40, "Shoal", 1_000_000, 2_000_000, teams=True),
    "adversary": Task(
        "simple_adversary --team.adversary random", "return/agent", 2, 15, "Shoal", 1_000_000, 2_000_000, teams=True
    ),
    "foraging": Task("lbforaging/Foraging-8x8-2p-3f-v3", AGENTS, 0.0, 0.5, "the most there is", 500_000, 1_000_000, teams=True),
    "matrix": Task("probe_matrix --env.payoff penalty", AGENTS, -6, 10, "the most there is", 20_000, 50_000, teams=True),
    "memory": Task(f"probe_memory {GRU}", AGENTS, 0, 1, "the most there is", 100_000, 200_000),
    "taxi": Task("gymnasium/Taxi-v3", AGENTS, -770, 8, "", 500_000, 1_000_000, held_out=True),
    "bipedal-walker": Task(
        "gymnasium/BipedalWalker-v3", AGENTS, -100, 320, "", 300_000, 1_000_000, continuous=True, held_out=True
    ),
    "line": Task("simple_line", AGENTS, 0, 0, "", 1_000_000, 2_000_000, teams=True, held_out=True),
    "treasure": Task("collect_treasure", AGENTS, 0, 0, "", 1_000_000, 2_000_000, teams=True, held_out=True),
}


@dataclass(frozen=True)
class Job:
    algorithm: str
    task: str
    seed: int
    words: str = ""  # flags that stand in for defaults, while they are chosen
    steps: int | None = None
    episodes: int | None = None
    device: str = "cpu"

    @property
    def key(self) -> tuple[Any, ...]:
        return self.algorithm, self.task, self.seed, self.words, self.steps or TASKS[self.task].steps(self.algorithm)


def run(job: Job) -> dict[str, Any]:
    """Train, then play the last and the best checkpoint on the same fresh seeds."""
    import torch

    from shoal import api

    torch.set_num_threads(1)
    folder, began = Path(tempfile.mkdtemp(prefix="defaults-")), time.process_time()
    try:
        done, _ = api.start(settings(job, folder / "run"))
        return result(job, done, time.process_time() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def settings(job: Job, folder: Path) -> Any:
    """What the command line would make of the job's words."""
    from shoal.training.settings import from_flags

    task, steps = TASKS[job.task], job.steps or TASKS[job.task].steps(job.algorithm)
    environment, *own = task.words.split()
    words = [*own, *job.words.split(), "--steps", str(steps), "--seed", str(job.seed), "--out", str(folder)]
    words += ["--quiet", "--threads", "1", "--device", job.device, "--log.tensorboard", "false", "--save.keep", "0"]
    flags: dict[str, str | None] = {}
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            flags[name] = None
        else:
            flags[name] = word
    if "/" in task.words or "Lunar" in task.words:
        flags.setdefault("env.workers", "0")  # a core is all that a run has
    return from_flags(job.algorithm, environment, flags)


def result(job: Job, done: Any, seconds: float) -> dict[str, Any]:
    import shoal

    task, played = TASKS[job.task], {}
    lines = done.evaluations()
    best_step = max((line for line in lines), key=lambda line: line[task.metric])["step"]
    for checkpoint in ("last", "best"):
        if checkpoint == "best" and (best_step == lines[-1]["step"] or not (done.checkpoints / "best.pt").exists()):
            played["best"] = played["last"]
            continue
        episodes = shoal.evaluate(
            done, job.episodes or task.episodes, seed=900_000 + job.seed, checkpoint=checkpoint, device=job.device
        )
        x = episodes.returns[task.metric.removeprefix("return/")].double().mean(-1)
        played[checkpoint] = [float(x.mean()), 1.96 * float(x.std()) / math.sqrt(len(x))]
    curve = [round(line[task.metric], 3) for line in lines]
    ended = {"best_step": best_step, "remarks": [r.replace(str(done.path), "RUN") for r in done.remarks], "curve": curve}
    return {**vars(job), "steps": done.recorded.run["steps"], "seconds": round(seconds), **played, **ended}


def run_streams(jobs: list[Job], out: Path) -> None:
    """All jobs at once in this process, each on a CUDA stream of its own. Seconds are those of all of them."""
    import torch

    from shoal.log.console import Board
    from shoal.training import several
    from shoal.training.loop import Loop
    from shoal.training.players import record
    from shoal.training.run import Run
    from shoal.training.settings import resolve

    folder, began = Path(tempfile.mkdtemp(prefix="defaults-")), time.perf_counter()
    streams, loops = several.streams(torch.device(jobs[0].device), len(jobs)), []
    for k, (job, stream) in enumerate(zip(jobs, streams, strict=True)):
        with torch.cuda.stream(stream):
            loop = Loop(resolve(settings(job, folder / str(k))))
        loop.folder = Run.create(loop.resolved, record(loop.players), loop.env)
        loops.append(loop)
    several.run_together(loops, Board({job.seed: 0 for job in jobs}, 1, True), streams)
    seconds = time.perf_counter() - began
    for job, loop in zip(jobs, loops, strict=True):
        tell(job, {"key": job.key, **result(job, loop.folder, seconds)}, out, began)
    shutil.rmtree(folder, ignore_errors=True)


def run_processes(todo: list[Job], out: Path, processes: int, limit: float) -> None:
    began = time.perf_counter()
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        futures = {pool.submit(run, j): j for j in todo}
        try:
            for future in as_completed(futures, timeout=limit):
                job = futures[future]
                try:
                    tell(job, {"key": job.key, **future.result()}, out, began)
                except Exception as e:  # a run that failed is a result as well
                    tell(job, {"key": job.key, **vars(job), "error": f"{type(e).__name__}: {e}"}, out, began)
        except TimeoutError:
            print("the time is up", flush=True)
            for process in list(pool._processes.values()):
                process.kill()
            os._exit(0)


def tell(job: Job, result: dict[str, Any], out: Path, began: float) -> None:
    with out.open("a") as file:
        file.write(json.dumps(result) + "\n")
    last, best = (result.get(k, [math.nan])[0] for k in ("last", "best"))
    took, error = result.get("seconds", 0), result.get("error", "")
    print(
        f"{time.perf_counter() - began:5.0f} s {job.algorithm:7} {job.task:24} {job.seed} {last:9.2f} "
        f"best {best:9.2f} {took:4} s  {job.words} {error}",
        flush=True,
    )


def cost(job: Job) -> float:
    """Which take long, roughly: those begin first."""
    steps = job.steps or TASKS[job.task].steps(job.algorithm)
    return steps * (1 if job.algorithm in POLICIES else 5)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def normalised(task: Task, score: float) -> float:
    return (score - task.random) / (task.best - task.random) if task.best != task.random else math.nan


def numbers(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return [int(x) for x in text.split(",")] if "," in text else list(range(int(first), int(last or first) + 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("run")
    verb.add_argument("--out", type=Path, default=RESULTS)
    verb.add_argument("--algos", default=",".join(ALGORITHMS))
    verb.add_argument("--tasks", default=",".join(k for k, t in TASKS.items() if not t.held_out))
    verb.add_argument("--seeds", default="3-7")
    verb.add_argument("--jobs", type=int, default=2)
    verb.add_argument("--with", dest="words", default="", help="flags that stand in for defaults, while they are chosen")
    verb.add_argument("--steps", type=int)
    verb.add_argument("--episodes", type=int)
    verb.add_argument("--device", default="cpu")
    verb.add_argument("--streams", action="store_true", help="all at once in this process, each on a CUDA stream")
    verb.add_argument("--limit", type=float, default=1e9, help="seconds after which no more is waited for")
    verb.add_argument("--list", help="a file of jobs: ALGO TASK SEEDS [FLAGS], a line each")
    verb = verbs.add_parser("table")
    verb.add_argument("file", nargs="?", type=Path, default=RESULTS)
    verbs.add_parser("show")
    args = parser.parse_args()
    if args.verb == "show":
        for name, t in TASKS.items():
            bounds, steps = f"{t.random:8} to {t.best:6} ({t.source})", f"{t.replay:,} / {t.rollout:,} steps"
            print(f"{name:24} {t.words:50} {t.metric:16} {bounds}, {steps}")
        return 0
    if args.verb == "table":
        for row in [COLUMNS, *rows(read(args.file))]:
            print("| " + " | ".join(row) + " |")
        return 0
    jobs = []
    if args.list:
        for line in Path(args.list).read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                algorithm, task, seeds, *words = line.split(maxsplit=3)
                for a in algorithm.split(","):
                    for t in task.split(","):
                        jobs += [
                            Job(a, t, s, *words, steps=args.steps, episodes=args.episodes, device=args.device)
                            for s in numbers(seeds)
                        ]
    else:
        for a in args.algos.split(","):
            for t in args.tasks.split(","):
                if TASKS[t].takes(a):
                    jobs += [Job(a, t, s, args.words, args.steps, args.episodes, args.device) for s in numbers(args.seeds)]
    known = {tuple(r["key"]) for r in read(args.out)} if args.out.exists() else set()
    todo = sorted({j for j in jobs if j.key not in known}, key=lambda j: (j.seed, -cost(j)))
    if args.streams and todo:
        run_streams(todo, args.out)
    else:
        run_processes(todo, args.out, args.jobs, args.limit)
    return 0


def confirmed(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those without a flag, of the seeds that confirm."""
    return [r for r in results if not r["words"] and r["seed"] in CONFIRM]


COLUMNS = ("task", "algorithm", "steps", "score", "share", "least", "below its best", "seeds", "seconds")


def rows(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """By task, algorithm, budget and flags: the last checkpoint's mean over seeds with its 95 % interval, as a share of the way
    from random to the best known, that of the worst seed, and how much of that way the best checkpoint was above the last."""
    import torch

    from shoal.training.ending import mean_and_interval

    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in results:
        cells.setdefault((list(TASKS).index(r["task"]), r["algorithm"], r["key"][4], r["words"]), []).append(r)
    out = []
    for (at, algorithm, steps, words), rs in sorted(cells.items()):
        name, task = list(TASKS.items())[at]
        who = f"{algorithm} {words}".strip()
        if failed := [r["error"] for r in rs if "error" in r]:
            out.append((name, who, f"{steps:,}", f"{len(failed)} failed: {failed[0]}".replace("|", "/"), *[""] * 5))
        rs = [r for r in rs if "error" not in r]
        if not rs:
            continue
        last, best = (torch.tensor([r[k][0] for r in rs]) for k in ("last", "best"))
        mean, half = mean_and_interval(last)
        shares = [normalised(task, x) for x in (mean, float(last.min()), mean + float((best - last).mean()))]
        score = f"{mean:.2f}" + (f" ± {half:.2f}" if math.isfinite(half) else "")
        share, least, highest = (f"{x:.2f}" if math.isfinite(x) else "" for x in shares)
        fall = f"{max(shares[2] - shares[0], 0):.2f}" if highest else ""
        took = f"{max(r['seconds'] for r in rs)}"
        out.append((name, who, f"{steps:,}", score, share, least, fall, str(len(rs)), took))
    return out


if __name__ == "__main__":
    sys.exit(main())
