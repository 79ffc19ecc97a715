"""The Python API: what the command line does, as functions."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shoal.envs.base import Environment
from shoal.envs.grouping import text_of
from shoal.envs.limits import refuse_more_than_fits
from shoal.flags import build
from shoal.ids import id_of, slug
from shoal.log.console import Board
from shoal.policy import Policy
from shoal.spec import NotFiniteError, UserError
from shoal.training import several
from shoal.training.evaluate import MOST_EPISODES, Episodes, rows_for
from shoal.training.evaluate import evaluate as play_episodes
from shoal.training.hooks import Hook
from shoal.training.loop import Loop
from shoal.training.players import frozen_players, policy_name, record, trusted
from shoal.training.run import Run
from shoal.training.seeds import generator, global_seed
from shoal.training.settings import Resolved, RunConfig, Settings, choose_device, make_env, resolve
from shoal.training.several import Ended, Job, SeedsFailedError, Several
from shoal.training.shapers import PYTHON, Shapers
from shoal.training.start import begin
from shoal.training.start import resume as resume_loop
from shoal.training.trust import sign

if TYPE_CHECKING:
    from shoal.tools.check import Report


def make(
    env: Any, rows: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32, regroup: Any = "", **config: Any
) -> Environment:
    """An environment by id, path or class, or by a function that makes one, with its own settings as keywords. `regroup`: who
    is in which group, as `--regroup` of `shoal train`."""
    if not isinstance(rows, int) or rows < 1:
        raise UserError(f"rows is {rows!r}: it takes a whole number, at least 1.")
    return make_env(id_of("envs", env), rows, choose_device(device), dtype, text_of(regroup), **config)


def check(env: Any, steps: int = 1000, rows: int = 4, timeout: float = 20.0, **config: Any) -> Report:
    """Look an environment over, by id, path or class, with its own settings as keywords: what it is and what is wrong."""
    from shoal.tools import check as tool

    options = build(tool.CheckOptions, {"steps": steps, "rows": rows, "timeout": timeout}, "check")
    return tool.check(id_of("envs", env), options, config)


def train(
    algorithm: Any,
    environment: Any,
    /,
    *,
    algo: dict[str, Any] | None = None,
    net: dict[str, Any] | None = None,
    env: dict[str, Any] | None = None,
    eval: dict[str, Any] | None = None,
    save: dict[str, Any] | None = None,
    log: dict[str, Any] | None = None,
    groups: dict[str, dict[str, dict[str, Any]]] | None = None,
    team: dict[str, str] | None = None,
    hook: Hook | None = None,
    shaper: Shapers = None,
    trust: bool = False,
    **run: Any,
) -> Any:
    """Train, and return the run; with seeds=4, four of them in a list. The two are ids, paths or classes of your own, and the
    environment may be a function that makes one; workers and `resume` must be able to import them. Keywords are the flags:
    steps=..., algo=dict(lr=...), team=dict(adversary="random"). `shaper` is a function (reward, obs, step, steps) -> reward of
    what learners are paid, for all groups or {group: function}. Several seeds with a hook or a shaper share this process and
    take turns, and the hook hears of every loop; without they are processes on the CPU. `trust`: run the code that runs named
    in `team` bring along, though this user did not make them."""
    algo, groups = _with_shaper(shaper, algo, groups)
    sections = {"algo": algo, "net": net, "env": env, "eval": eval, "save": save, "log": log}
    run = {k: text_of(v) if k == "regroup" else _word(v) for k, v in run.items()}
    words, team = (id_of("algos", algorithm), id_of("envs", environment)), {g: _word(who) for g, who in (team or {}).items()}
    if trust:
        trusted((), team)
    settings = Settings(*words, run, {k: dict(v) for k, v in sections.items() if v}, groups or {}, team)
    if seeds_of(settings) > 1:
        return _runs(start_several(settings, hook, shaper))
    return start(settings, hook, shaper)[0]


def _with_shaper(shaper: Shapers, algo: Any, groups: Any) -> tuple[Any, Any]:
    """Settings that say by which function rewards are shaped, so that the run records it."""
    if shaper is None or not isinstance(shaper, dict):
        return algo if shaper is None else {**(algo or {}), "shaper": _name_of(shaper)}, groups
    groups = {g: {k: dict(v) for k, v in s.items()} for g, s in (groups or {}).items()}
    for g, f in shaper.items():
        groups.setdefault(g, {}).setdefault("algo", {})["shaper"] = _name_of(f)
    return algo, groups


def _name_of(f: Any) -> str:
    """How a function is found again: by import where that works, else it must be handed over again."""
    if not callable(f):
        raise UserError(f"shaper is {f!r:.60}: it takes a function (reward, obs, step, steps) -> reward.")
    module, name = getattr(f, "__module__", "__main__"), getattr(f, "__qualname__", type(f).__name__)
    found = getattr(sys.modules.get(module), name, None) is f and module != "__main__"
    return f"{module}:{name}" if found else f"{PYTHON}{name}"


def _runs(done: Several) -> list[Run]:
    if done.failures:
        raise SeedsFailedError(" ".join(done.failures))
    return [e.run for e in done.ended]


def seeds_of(settings: Settings) -> int:
    return build(RunConfig, {k: v for k, v in settings.run.items() if k == "seeds"}, "run").seeds


def _word(x: Any) -> Any:
    """A path or a run as the command line would have it."""
    return str(x.path) if isinstance(x, Run) else str(x) if isinstance(x, Path) else x


def start(settings: Settings, hook: Hook | None = None, shaper: Shapers = None) -> tuple[Run, Loop]:
    """Check everything, and only then make the run's folder; train."""
    resolved = resolve(settings)
    loop = _make(partial(_loop, resolved, hook, shaper))
    loop.folder = Run.create(loop.resolved, record(loop.players), loop.env)
    loop.run()
    return loop.folder, loop


def start_several(settings: Settings, hook: Hook | None = None, shaper: Shapers = None) -> Several:
    """As `start`, for `seeds` runs. Before a folder is made, loops are made: all, or one where the rest are like it."""
    whole = resolve(settings)
    each = [resolve(s) for s in several.branch(whole.settings, whole.run)]
    here = _here(whole, hook or shaper)
    streams = several.streams(whole.device, len(each) if here else 1)
    loops = [_make(partial(_loop, r, hook, shaper), stream) for r, stream in zip(each, streams, strict=False)]
    players, score_name, world = record(loops[0].players), loops[0].score_name, loops[0].env
    runs = [Run.create(r.decided(reward=loops[0].config.reward), players, world) for r in each]
    if not here:
        loops.clear()  # each has a process of its own
    for loop, run in zip(loops, runs, strict=False):
        loop.folder = run
    jobs = [Job(r.run.seed, str(run.path), fresh=True) for r, run in zip(each, runs, strict=True)]
    return _drive(whole.run, score_name, dict.fromkeys(jobs, 0), loops, streams)


def _here(resolved: Resolved, mine: Any) -> bool:
    """Whether several seeds share this process: on CUDA, and where a hook or a shaper of the caller's serves them all."""
    here = resolved.device.type == "cuda" or mine is not None
    if here and resolved.log.wandb:
        raise UserError("--log.wandb takes one seed at a time where they share a process (on CUDA, or with a hook or shaper).")
    return here


def _loop(resolved: Resolved, hook: Hook | None, shaper: Shapers) -> Loop:
    loop = Loop(resolved, hooks_of(resolved, hook), shaper=shaper)
    refuse_more_than_fits(loop.env.spec, loop.env.device, loop.env.rows, loop.rollout)
    if any(a.id.endswith(".py") for a in loop.players.algorithms):
        _try_acting(loop)
    return loop


@torch.no_grad()
def _try_acting(loop: Loop) -> None:
    """Ask for actions once, which changes nothing: what an algorithm of the user's own cannot take is said before a folder is
    made."""
    players, rows, device = loop.players, loop.env.rows, loop.env.device
    with global_seed(0, "try", device=device):
        noise = players.noise(generator(0, "try", device=device), rows)
        players.act(loop.collector.frame, players.memory(rows, device), noise, explore=False, greedy=True)


def _make(work: Callable[[], Loop], stream: Any = None) -> Loop:
    """A loop, on a stream of its own perhaps, or a sentence where there is no room for it."""
    try:
        with torch.cuda.stream(stream):
            return work()
    except (RuntimeError, MemoryError) as e:
        if no_room(e):
            raise UserError(NO_ROOM) from None
        raise


NO_ROOM = (
    "there is not enough memory for so much: take fewer --envs, a shorter --algo.rollout, smaller nets or, where there is a "
    "replay, a smaller --algo.capacity."
)


# what PyTorch says, in a plain RuntimeError, of tensors that no memory can hold
TOO_LARGE = ("DefaultCPUAllocator: ", "Storage size calculation overflowed", "numel: integer multiplication overflow")


def no_room(e: Exception) -> bool:
    """Whether it was memory that ran out."""
    return isinstance(e, MemoryError | torch.OutOfMemoryError) or (
        type(e) is RuntimeError and any(x in str(e) for x in TOO_LARGE)
    )


def _drive(config: RunConfig, score_name: str, jobs: dict[Job, int], loops: list[Loop], streams: list[Any]) -> Several:
    """Loops that were made here take turns; else every job, of which so many steps are done, is a process."""
    board, began = Board({j.seed: n for j, n in jobs.items()}, config.steps, config.quiet), time.perf_counter()
    try:
        ended: list[Ended] = (
            several.run_together(loops, board, streams)
            if loops
            else several.run_apart(list(jobs), board, several.room(config.threads))
        )
    finally:
        board.close()
    return Several(ended, score_name, config, time.perf_counter() - began)


def child() -> None:
    """The whole of a process that `several.run_apart` begins."""
    words = json.loads(sys.argv[1])
    teller = several.Teller(words.pop("pipe"))
    job = Job(**words)

    def make() -> Loop:
        run = Run(job.folder)
        resolved = run.resolve(job.device)
        hooks = hooks_of(resolved, None)
        return (
            begin(run, resolved, hooks)
            if job.fresh
            else resume_loop(run.path, job.steps, hooks, False, job.device, source=job.source)
        )

    several.run_in_child(make, teller)


def hooks_of(resolved: Resolved, hook: Hook | None) -> list[Hook]:
    if hook is not None and not isinstance(hook, Hook):
        raise UserError(f"hook is {hook!r:.60}: it takes an instance of a class that derives from shoal.Hook.")
    hooks = [hook] if hook is not None else []
    if resolved.run.render:
        from shoal.tools.watch import ClipHook, require_drawing

        require_drawing(resolved.make_env(1), resolved.settings.env)
        hooks.append(ClipHook())
    return hooks


def resume(
    run: str | Path | Run,
    steps: int | None = None,
    hook: Hook | None = None,
    quiet: bool = False,
    device: str | None = None,
    shaper: Shapers = None,
    checkpoint: str | Path = "last",
    trust: bool = False,
) -> Any:
    """Go on with a run from its last checkpoint, as if it had never stopped; `steps` sets a new total. Of a folder with
    the runs of several seeds, with all of them; it returns their list. `checkpoint` is another one to go on from, best, a
    step's number or a file: later lines of the logs are cut off, later checkpoints are moved to checkpoints/left, and a replay
    begins empty. `trust`: run the code that the run brings along, though this user did not make it."""
    found, source = [run] if isinstance(run, Run) else several.runs_in(run), str(checkpoint)
    if trust:
        trusted(r.path for r in found)
    if len(found) > 1:
        return _runs(go_on_several(found, steps, hook, quiet, device, shaper, source))
    return go_on(found[0], steps, hook, quiet, device, shaper, source).folder


def go_on(
    run: Run,
    steps: int | None,
    hook: Hook | None,
    quiet: bool,
    device: str | None,
    shaper: Shapers = None,
    source: str = "last",
) -> Loop:
    loop = resume_loop(run.path, steps, hooks_of(run.resolve(device), hook), quiet, device, shaper, source)
    loop.run()
    return loop


def go_on_several(
    runs: list[Run],
    steps: int | None,
    hook: Hook | None,
    quiet: bool,
    device: str | None,
    shaper: Shapers = None,
    source: str = "last",
) -> Several:
    """Go on with all of these, which differ by the seed; all are looked at before any is written to."""
    if source.endswith(".pt"):
        raise UserError(f"{source} is a checkpoint of one run, and these are {len(runs)}: name one of them, or best or a step.")
    asked, seeds = {(r.recorded.algo, r.recorded.env) for r in runs}, {r.recorded.run.get("seed", 0) for r in runs}
    if len(seeds) < len(runs) or len(asked) > 1:
        raise UserError(f"{runs[0].path.parent} holds runs that differ by more than the seed: resume them one at a time.")
    here = _here(runs[0].resolve(device), hook or shaper)
    streams = several.streams(runs[0].resolve(device).device, len(runs))
    loops, jobs, config, score_name = [], {}, RunConfig(), ""
    for run, stream in zip(runs, streams, strict=True):
        hooks = hooks_of(run.resolve(device), hook)
        loop = _make(partial(resume_loop, run.path, steps, hooks, quiet, device, shaper, source), stream)
        config, score_name = loop.config, loop.score_name
        loops += [loop] if here else []
        sign(run.path)  # for the process that goes on with it
        jobs[Job(loop.config.seed, str(run.path), False, steps, device, source)] = loop.step
    return _drive(config, score_name, jobs, loops, streams)


def evaluate(
    run: str | Path | Run,
    episodes: int = 100,
    sampled: bool = False,
    seed: int | None = None,
    checkpoint: str = "auto",
    team: dict[str, str] | None = None,
    device: str = "cpu",
    longest: int | None = None,
    trust: bool = False,
    regroup: Any = None,
) -> Episodes:
    """Play a run's policies, greedily or sampled, on fresh seeds. `team` sets who plays a group or team instead, and `regroup`
    which agents are a group, where others than those that learnt together are to be played; `longest` is how many steps an
    episode may last, in place of the run's --eval.longest. `trust`: run the code that the runs bring along,
    though this user did not make them."""
    if not isinstance(episodes, int) or not 1 <= episodes <= MOST_EPISODES:
        raise UserError(f"--episodes is {episodes!r}: it takes a whole number from 1 to {MOST_EPISODES:,}.")
    checkpoint, team = str(checkpoint), {g: _word(who) for g, who in (team or {}).items()}
    run = run if isinstance(run, Run) else Run(run)
    if trust:
        trusted([run.path], team)
    resolved, regroup = run.resolve(device), None if regroup is None else text_of(regroup)
    torch.set_num_threads(resolved.run.threads or 1)
    rows, each = rows_for(episodes, resolved.env_entry.load().widest)
    env = resolved.make_env(rows, regroup=regroup)
    players = frozen_players(run, env.spec, env.device, checkpoint, team)
    if longest is not None and longest < 1:
        raise UserError(f"--longest is {longest}: it is a number of steps, at least 1.")
    seed, longest = (resolved.run.seed if seed is None else seed) + 1_000_003, longest or resolved.eval.longest
    try:
        return play_episodes(env, players, each, seed, sampled, longest=longest)
    except NotFiniteError as e:
        raise UserError(f"{slug(run.recorded.env)} gave a number that is not finite: {e}.") from None
    finally:
        env.close()


def load(run: str | Path | Run, checkpoint: str = "auto", device: str = "cpu", seed: int = 0, trust: bool = False) -> Policy:
    """What a run learnt, ready to act; draws are of `seed`. Neither its environment nor that one's library is needed. `trust`:
    run the code that it brings along, though this user did not make it."""
    run = run if isinstance(run, Run) else Run(run)
    if trust:
        trusted([run.path])
    place = choose_device(device)
    players = frozen_players(run, run.spec, place, checkpoint, {})
    name = f"{run.recorded.algo} on {run.recorded.env}, checkpoint {policy_name(run, checkpoint)}"
    return Policy(players, run.conversions, place, seed, name)
