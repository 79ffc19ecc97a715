"""Several seeds at once: each run is bit for bit what it is alone.

On CUDA the loops share a process and take turns, each on a stream of its own: an iteration is one graph that the host only
launches, so that the device works on all of them (`run_together`). Elsewhere every run is a process, as many at a time as
there are cores for (`run_apart`); a process tells its parent how far it is, a JSON object a line, through a pipe. The first
Ctrl-C or SIGTERM stops all of them, saved, after their iterations or in the middle of their evaluations; the second at once.
A process whose parent is gone finds the pipe broken, saves and leaves. A run that fails is named, and the others go on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from shoal.envs.workers import cores
from shoal.ids import slug
from shoal.kernels import native
from shoal.log.console import Board, Place
from shoal.spec import UserError
from shoal.training.diverged import DivergedError
from shoal.training.loop import Loop
from shoal.training.run import Run, named, refuse_taken
from shoal.training.settings import RunConfig, Settings
from shoal.training.signals import SIGNALS, on_signals

LOOK = 0.5  # seconds between two looks at whether a process that says nothing is there still
TELL = 0.1  # seconds between two words of a process about how far it is


class SeedsFailedError(RuntimeError):
    """Some of the runs failed; the others went on to their ends."""


@dataclass(frozen=True)
class Ended:
    """How one of the runs ended."""

    seed: int
    run: Run
    step: int
    seconds: float
    stopped: str | None = None  # why it stopped early
    failed: str | None = None  # what went wrong

    def score(self, name: str) -> float | None:
        """Of its last evaluation."""
        found = [e[name] for e in self.run.evaluations() if e.get(name) is not None]
        return found[-1] if found else None


@dataclass(frozen=True)
class Several:
    """How all of them ended."""

    ended: list[Ended]
    score_name: str
    config: RunConfig
    seconds: float

    @property
    def signal(self) -> int | None:
        reasons = {e.stopped for e in self.ended}
        return signal.SIGINT if "interrupted" in reasons else signal.SIGTERM if "terminated" in reasons else None

    @property
    def failures(self) -> list[str]:
        return [f"seed {e.seed} failed: {e.failed}" for e in self.ended if e.failed]


def branch(settings: Settings, config: RunConfig) -> list[Settings]:
    """The settings of each of `config.seeds` runs, with a seed and a folder of its own. Folders that hold something are
    refused before any is made."""
    seeds = range(config.seed, config.seed + config.seeds)
    if config.out is not None:
        out = named(config.out)
        if os.path.exists(out / "config.json"):
            raise UserError(f"{out} is a run, and --seeds makes a folder a seed under --out: choose another --out.")
        folders = [out / f"seed{k}" for k in seeds]
        for folder in folders:
            refuse_taken(folder)
    else:
        parent, name, n = Path("runs") / slug(settings.env) / slug(settings.algo), f"{datetime.now():%Y%m%d-%H%M%S}", 1
        folders = [parent / f"{name}-seed{k}" for k in seeds]
        while any(f.exists() for f in folders):
            n += 1
            folders = [parent / f"{name}-{n}-seed{k}" for k in seeds]
    own = [{"seed": k, "seeds": 1, "out": str(f)} for k, f in zip(seeds, folders, strict=True)]
    return [dataclasses.replace(settings, run={**settings.run, **mine}) for mine in own]


def runs_in(path: str | Path, deep: bool = False) -> list[Run]:
    """The run that a path names, or else those in the folder; with `deep`, at any depth."""
    return found_in(path, deep)[0]


def found_in(path: str | Path, deep: bool = False, skip: bool = False) -> tuple[list[Run], list[UserError]]:
    """The run that a path names, or else those in the folder; with `deep`, at any depth. And of those what is wrong that cannot
    be read, where such are to be skipped."""
    path = named(path)
    runs: list[Run] = []
    bad: list[UserError] = []
    configs = [path / "config.json"] if os.path.isfile(path / "config.json") else []
    if not configs and os.path.isdir(path):
        configs = sorted(path.rglob("config.json") if deep else path.glob("*/config.json"), key=_natural)
    for config in configs:
        try:
            runs.append(Run(config.parent))
        except UserError as e:
            if not skip:
                raise
            bad.append(e)
    return (runs, bad) if runs or bad else ([Run(path)], [])  # which says that it is none


def _natural(path: Path) -> list[str | int]:
    """seed2 before seed10."""
    return [int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", str(path))]


def room(threads: int | None) -> int:
    """How many runs of so many threads there are cores for."""
    return max(1, cores() // (threads or 1))


# --- in one process --------------------------------------------------------------------------------------------------


def streams(device: torch.device, n: int) -> list[torch.cuda.Stream | None]:
    """A stream for each of n loops; none on the CPU."""
    if device.type != "cuda":
        return [None] * n
    made: list[torch.cuda.Stream | None] = []
    for _ in range(n):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        made.append(stream)
    return made


def run_together(loops: Sequence[Loop], board: Board, on: Sequence[torch.cuda.Stream | None] | None = None) -> list[Ended]:
    """An iteration of each in turn, until all are done. `on` are their streams, on which they were made."""
    stream_of = dict(zip(loops, on or [None] * len(loops), strict=True))
    failed: dict[Loop, str] = {}

    def interrupt(number: int) -> None:
        for loop in sorted(loops, key=lambda x: x.evaluating):  # at most one is, and it hears it last: that raises
            loop.interrupt(number)

    laps = {loop: loop.iterations(Place(board, loop.config.seed)) for loop in loops}
    under_way = list(loops)
    with on_signals(interrupt):
        try:
            while under_way:
                for loop in list(under_way):
                    try:
                        with torch.cuda.stream(stream_of[loop]):
                            done = next(laps[loop], "done")
                        if done:
                            under_way.remove(loop)
                    except Exception as e:
                        under_way.remove(loop)
                        failed[loop] = reason(e)
                        board.line(loop.config.seed, f"failed: {failed[loop]}")
        finally:
            for loop in under_way:  # interrupted twice: logs and locks are closed
                laps[loop].close()
    for stream in (s for s in stream_of.values() if s is not None):
        torch.cuda.current_stream(stream.device).wait_stream(stream)
    return [Ended(x.config.seed, x.folder, x.step, x.seconds, x.stopped, failed.get(x)) for x in loops]


def reason(e: Exception) -> str:
    """One sentence about what ended a run; of what nobody foresaw, the trace is printed besides."""
    if isinstance(e, DivergedError | UserError):
        return str(e)
    if isinstance(e, OSError):
        return f"the run could not be written, and stopped: {e}."
    traceback.print_exception(e)
    return f"{type(e).__name__}: {e}."


# --- in processes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a process is to do."""

    seed: int
    folder: str
    fresh: bool  # a run that begins, with all that its config.json asks; else one that is resumed
    steps: int | None = None
    device: str | None = None
    source: str = "last"  # the checkpoint to go on from


class Child:
    """A run in a process of its own. Signals wait until its loop takes them: it is born with them blocked."""

    def __init__(self, job: Job):
        self.job, self.rest, self.told = job, b"", False
        self.run = Run(job.folder)  # now: somebody may delete it meanwhile
        self.end: dict[str, Any] | None = None
        self.pipe, theirs = os.pipe()
        try:
            code = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from shoal.api import child; child()"
            words = [json.dumps({**dataclasses.asdict(job), "pipe": theirs}), json.dumps(sys.path)]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, *words],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs,),
                process_group=0,  # the terminal's Ctrl-C is the parent's to hand on
            )
        finally:
            os.close(theirs)
        os.set_blocking(self.pipe, False)

    def hear(self, board: Board) -> bool:
        """What it has to tell; false where there is nothing: at the end of the pipe, or now."""
        try:
            data = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            what, *words = json.loads(line)
            if what == "end":
                self.end = words[0]
            else:
                getattr(board, what)(self.job.seed, *words)
        return bool(data)

    def ended(self, board: Board) -> Ended:
        while self.hear(board):
            pass
        status = self.process.wait()
        os.close(self.pipe)
        board.leave(self.job.seed)
        if self.end is not None:
            return Ended(self.job.seed, self.run, **self.end)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return Ended(self.job.seed, self.run, board.steps[self.job.seed], 0.0, None, f"its process {how}.")


def run_apart(jobs: Sequence[Job], board: Board, most: int) -> list[Ended]:
    """Every job in a process, at most so many at a time."""
    waiting = deque(jobs)
    under_way: list[Child] = []
    ended: dict[int, Ended] = {}

    def interrupt(number: int) -> None:
        why = "interrupted" if number == signal.SIGINT else "terminated"
        ended.update({j.seed: Ended(j.seed, Run(j.folder), board.steps[j.seed], 0.0, why) for j in waiting})
        waiting.clear()
        told.append(number)
        pass_on()

    told: list[int] = []

    def pass_on() -> None:
        """Once to each: another thread may take a signal while a child is being made, which then is not under way yet."""
        for child in under_way:
            if not child.told:
                child.told = True
                child.process.send_signal(told[0])

    with on_signals(interrupt), selectors.DefaultSelector() as selector:
        try:
            while waiting or under_way:
                while waiting and len(under_way) < most:
                    with blocked():
                        if waiting:
                            under_way.append(Child(waiting.popleft()))
                            selector.register(under_way[-1].pipe, selectors.EVENT_READ, under_way[-1])
                            if told:
                                pass_on()
                for key, _ in selector.select(LOOK):
                    if not key.data.hear(board):
                        selector.unregister(key.fd)
                gone = [c for c in under_way if c.pipe not in selector.get_map() or c.process.poll() is not None]
                for child in gone:
                    if child.pipe in selector.get_map():
                        selector.unregister(child.pipe)
                    under_way.remove(child)
                    how = ended[child.job.seed] = child.ended(board)
                    if how.failed:
                        board.line(how.seed, f"failed: {how.failed}")
        finally:
            for child in under_way:  # interrupted twice, or something broke: nobody is left behind
                child.process.kill()
                child.process.wait()
    return [ended[j.seed] for j in jobs]


@contextmanager
def blocked() -> Iterator[None]:
    """Signals wait; a process that is made meanwhile has them wait too, until it takes them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Teller:
    """The display of a run in a process: what it would show goes to the parent's board."""

    def __init__(self, pipe: int):
        self.pipe, self.told, self.orphan = pipe, 0.0, False
        os.set_inheritable(pipe, False)

    def tell(self, *words: Any) -> None:
        try:
            data = json.dumps(words).encode() + b"\n"
            while data:
                data = data[os.write(self.pipe, data) :]
        except BrokenPipeError:
            self.orphan = True

    def advance(self, step: int, rate: float) -> None:
        if (now := time.perf_counter()) - self.told >= TELL:
            self.told = now
            self.tell("advance", step, rate)

    def scores(self, numbers: dict[str, Any], groups: list[str]) -> None:
        self.tell("scores", numbers, groups)

    def line(self, text: str) -> None:
        self.tell("line", text)

    def close(self) -> None:
        """The process's end says it."""


def run_in_child(make: Any, teller: Teller) -> None:
    """What a process of `run_apart` does, after its imports: the loop that `make` makes, told to the parent."""
    loop, failed = None, None
    try:
        loop = make()
        if loop.config.threads is None:
            native.share(1)  # there is a run for every core
        with on_signals(loop.interrupt):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            for _ in loop.iterations(teller):
                if teller.orphan:
                    loop.stop("the process that began it is gone")
    except Exception as e:
        failed = reason(e)
    step, seconds, stopped = (loop.step, loop.seconds, loop.stopped) if loop else (0, 0.0, None)
    if step:
        teller.tell("advance", step, step / max(seconds, 1e-9))
    teller.tell("end", {"step": step, "seconds": seconds, "stopped": stopped, "failed": failed})
