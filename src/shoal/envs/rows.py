"""One row of a host world: an ordinary Python environment that writes what it sees and earns into arrays; no torch in here.

An adapter derives from `Row`. It sets `spec` when it is made, and writes:

    reset(seed, out)        begin an episode: `out.obs[group][...]`, and what else the spec speaks of
    step(actions, out)      one step, actions by group, [N, ...] in the space's own units: the same, `out.reward[group]` and
                            `out.terminated[group]` as well; true when the episode is over

`out` is a row of arrays that many rows share, in shared memory where rows live in worker processes (`serve` is the whole
life of one). What is constant is not written: groups that are not `mortal` have no `alive`, `active` and `start`, groups that
are not `masked` no `legal`. What was not written keeps its value: rewards, shaping, flags and stats of a step are zero before.
"""

from __future__ import annotations

import importlib
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.envs.conversions import Conversion
from shoal.ids import FROZEN, ROOT, load_file
from shoal.spec import EnvSpec, Group, Shape, UserError

Steps = list[dict[str, np.ndarray]]  # actions by group, a step each
Arrays = dict[tuple[str, ...], np.ndarray]  # place -> [B, ...]
SPIN_TIME = 200e-6  # seconds that whoever waits does not go to sleep
DONE, FAILED = b"k", b"e"  # a worker's answers
STEP = {0: b"0", 1: b"1", None: b"a"}  # what it is asked: to step a half of its rows, or all
RESET, FORWARD, PICTURE, QUIT = b"r", b"f", b"p", b"q"


class Row(ABC):
    """One ordinary environment."""

    spec: EnvSpec
    shapes: bool = False  # it writes shaping
    images: Any = np.uint8  # dtype of observations with three dimensions; the others are float32
    notes: tuple[str, ...] = ()  # sentences that whoever trains on it should read
    conversions: dict[str, Conversion] | None = None  # agent -> how its environment's own loop speaks; none: as the spec does

    @abstractmethod
    def reset(self, seed: int, out: Slots) -> None: ...

    @abstractmethod
    def step(self, actions: dict[str, np.ndarray], out: Slots) -> bool: ...

    def picture(self) -> np.ndarray | None:
        """What it looks like now, [H, W, 3] uint8."""
        return None

    def close(self) -> None:
        return None


# --- arrays ----------------------------------------------------------------------------------------------------------


def places(row: Row) -> Iterator[tuple[tuple[str, ...], Shape, Any]]:
    """Every array that rows write to or read from: its place, the shape of one row of it, its dtype."""
    spec = row.spec
    for g in spec.groups:
        for frame in ("now", "new"):  # what a step led to; and, where that ended the episode, what the next begins with
            for name, shape in parts(g):
                yield (frame, g.name, "obs", name), (g.n, *shape), row.images if len(shape) == 3 else np.float32
            if g.mortal or spec.turns:
                for flag in ("alive", "active", "start"):
                    yield (frame, g.name, flag), (g.n,), np.bool_
            if g.masked:
                yield (frame, g.name, "legal"), (g.n, sum(g.action.sizes)), np.bool_  # type: ignore[union-attr]
        yield ("action", g.name), (g.n, *g.action.shape), np.float32 if g.action.kind == "continuous" else np.int64
        yield ("reward", g.name), (g.n,), np.float32
        yield ("terminated", g.name), (g.n,), np.bool_
        if row.shapes:
            yield ("shaping", g.name), (g.n,), np.float32
    if spec.state is not None:
        for frame in ("now", "new"):
            yield (frame, "state"), (spec.state,), np.float32
    yield ("stats",), (len(spec.stats),), np.float32
    yield ("over",), (), np.bool_
    yield ("seed",), (), np.int64


def parts(group: Group) -> list[tuple[str, Shape]]:
    return list(group.obs.items()) if isinstance(group.obs, dict) else [("", group.obs)]


def arrays(row: Row, rows: int, buffer: Any = None) -> Arrays:
    """All arrays for so many rows, laid out in a buffer, or in memory of their own."""
    out, at = {}, 0
    buffer = np.zeros(size(row, rows), np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
    for place, shape, dtype in places(row):
        length = rows * int(np.prod(shape)) * np.dtype(dtype).itemsize
        out[place] = buffer[at : at + length].view(dtype).reshape(rows, *shape)
        at += aligned(length)
    return out


def size(row: Row, rows: int) -> int:
    return sum(aligned(rows * int(np.prod(shape)) * np.dtype(dtype).itemsize) for _, shape, dtype in places(row))


def aligned(length: int) -> int:
    return -(-length // 64) * 64


class Slots:
    """One row of the arrays, as an adapter writes it. `frame` is "now" or "new"."""

    def __init__(self, spec: EnvSpec, whole: Arrays, row: int, frame: str):
        def each(*place: str) -> dict[str, Any]:
            """Group -> its array, for those that have one."""
            return {g.name: whole[p][row] for g in spec.groups if (p := tuple(x or g.name for x in place)) in whole}

        self.obs: dict[str, Any] = {}  # group -> [N, *O], or named
        for g in spec.groups:
            named = {name: whole[frame, g.name, "obs", name][row] for name, _ in parts(g)}
            self.obs[g.name] = named if isinstance(g.obs, dict) else named[""]
        self.alive, self.active, self.start = (each(frame, "", flag) for flag in ("alive", "active", "start"))  # [N]
        self.legal = each(frame, "", "legal")  # [N, A]
        self.state = whole[frame, "state"][row] if spec.state is not None else None  # [S]
        self.action, self.reward, self.terminated, self.shaping = (
            each(name, "") for name in ("action", "reward", "terminated", "shaping")
        )
        self._stats, self._at = whole[("stats",)][row], {name: k for k, name in enumerate(spec.stats)}
        self._zero = [*self.reward.values(), *self.terminated.values(), *self.shaping.values(), self._stats]

    def stat(self, name: str, value: float) -> None:
        self._stats[self._at[name]] = value

    def clear(self) -> None:
        for x in self._zero:
            x.fill(0)


class RowRunner:
    """Rows that are stepped one after another, by whoever holds them."""

    def __init__(self, made: list[Row], at: list[int], whole: Arrays):
        self.rows = dict(zip(at, made, strict=True))
        self.now = {i: Slots(row.spec, whole, i, "now") for i, row in self.rows.items()}
        self.new = {i: Slots(row.spec, whole, i, "new") for i, row in self.rows.items()}
        self.over, self.seed = whole[("over",)], whole[("seed",)]
        self.begun: dict[int, int] = {}  # the seeds of the episodes under way

    def step(self, first: int, last: int) -> None:
        """Those of the rows from `first` to before `last`; a row whose episode is over begins the next at once."""
        for i, row in self.rows.items():
            if first <= i < last:
                now = self.now[i]
                now.clear()
                try:
                    over = self.over[i] = row.step(now.action, now)
                except (Exception, SystemExit) as e:
                    e.add_note(f"row {i}, whose episode began with seed {self.begun[i]}")
                    raise
                if over:
                    self._begin(i)

    def reset(self, rows: list[int]) -> None:
        for i in rows:
            self._begin(i)

    def _begin(self, i: int) -> None:
        self.begun[i] = int(self.seed[i])
        try:
            self.rows[i].reset(self.begun[i], self.new[i])
        except (Exception, SystemExit) as e:
            e.add_note(f"row {i}, at its reset with seed {self.begun[i]}")
            raise

    def forward(self, i: int, seed: int, steps: Steps) -> bool:
        """An episode played again: where it stands is in `new`. False where it was over before."""
        row, now, new = self.rows[i], self.now[i], self.new[i]
        self.begun[i] = seed
        row.reset(seed, new)
        for actions in steps:
            now.clear()
            if row.step(actions, new):
                return False
        return True

    def close(self) -> None:
        for row in self.rows.values():
            row.close()


# --- worker processes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Maker:
    """How a row is made, in words that any process understands."""

    module: str
    name: str  # of the class, whose `row(config)` makes one
    file: str | None  # where the module is a user's own file
    config: bytes  # pickled
    drawn: bool = False
    files: dict[str, bytes] = field(default_factory=dict)  # users' own, as they were when the world was made

    def __call__(self) -> Row:
        if self.file is not None:
            load_file(Path(self.file), self.module)
        host: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            host = getattr(host, part)
        return host.row(pickle.loads(self.config), self.drawn)


def serve(line: socket.socket, make: Maker, rows: int, at: list[int], halves: list[tuple[int, int]], parent: int) -> None:
    """The whole life of a worker that holds the rows `at`: asked over `line`, a byte at a time, it works in the arrays."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for whoever started us, who saves first and then stops us
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    line.settimeout(3600.0)
    try:
        FROZEN.update(make.files)
        made = [make() for _ in at]
        _, (fd, *_), _, _ = socket.recv_fds(line, 1, 1)
        runner = RowRunner(made, at, arrays(made[0], rows, mmap.mmap(fd, 0)))
        os.close(fd)
        while True:
            try:
                word = read_byte(line)
            except TimeoutError:
                continue
            if word in (b"", QUIT):
                break
            line.sendall(DONE + _do(runner, word, line, halves))
        runner.close()
    except ConnectionError:  # whoever started us is gone, and needs no answer
        pass
    except BaseException as e:
        line.sendall(FAILED + packed(in_words(e)))
    finally:
        sys.stdout.flush()
        os._exit(0)


def _exit_with_parent(parent: int) -> None:
    """Whoever started us is gone, by whatever way: so do we, wherever we are."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _do(runner: RowRunner, word: bytes, line: socket.socket, halves: list[tuple[int, int]]) -> bytes:
    if word == STEP[None]:
        runner.step(0, sys.maxsize)
        return b""
    if word.isdigit():
        runner.step(*halves[int(word)])
        return b""
    asked = unpacked(line)
    if word == RESET:
        runner.reset(asked)
        return b""
    if word == FORWARD:
        return packed([runner.forward(*one) for one in asked])
    return packed(runner.rows[asked].picture())


yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))


def read_byte(line: socket.socket) -> bytes:
    """The next byte, or nothing where the other side is gone; waits for as long as the line has patience. At first it only
    lets others go before: a process that sleeps is woken late, which for a cheap environment is most of a step."""
    limit = time.perf_counter() + SPIN_TIME
    while time.perf_counter() < limit:
        with suppress(BlockingIOError):
            return os.read(line.fileno(), 1)  # a line with patience does not block by itself
        yield_core()
    return line.recv(1)


def in_words(e: BaseException) -> str:
    """An exception of an environment's own, and where it was."""
    places = traceback.extract_tb(e.__traceback__)
    theirs = [p for p in places if "site-packages" not in p.filename and ROOT.as_posix() not in p.filename]
    place = (theirs or places)[-1]
    words = str(e) if isinstance(e, UserError) else f"{type(e).__name__}: {e}".removesuffix(": ")
    at = (f"{os.path.basename(place.filename)}, line {place.lineno}", *getattr(e, "__notes__", ()))
    return f"{' '.join(words.split()).removesuffix('.')} ({'; '.join(at)})"


def packed(thing: Any) -> bytes:
    data = pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)
    return struct.pack("!Q", len(data)) + data


def unpacked(line: socket.socket) -> Any:
    (length,) = struct.unpack("!Q", receive_exactly(line, 8))
    return pickle.loads(receive_exactly(line, length))


def receive_exactly(line: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = line.recv(min(length - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("the other side is gone")
        data += piece
    return bytes(data)
