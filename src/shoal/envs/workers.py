"""Who steps the rows of a host world: this process (`Serial`), or worker processes that share memory with it (`WorkerPool`).

Both are asked the same: `reset` rows, `step` a half of them and `wait` for it, play episodes `forward` again, take a `picture`.
A worker that dies or takes too long is replaced, and its rows are lost: whoever waits for a half learns which, and finds
them begun anew.
"""

from __future__ import annotations

import atexit
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.envs import rows as protocol
from shoal.envs.rows import Maker, Row, RowRunner, Steps, arrays, in_words, packed, read_byte, serve, size, unpacked
from shoal.spec import UserError

MAX_FAILURES = 3  # times in a row that a worker is replaced before it is taken for broken,
ANSWERS_PER_RESTART = 20  # or more often than at every so many of its answers
EXIT_TIME = 1.0  # seconds that workers have to leave by themselves
SHARED_MEMORY = "/dev/shm"  # a file there is memory


def cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Serial:
    """This process, one row after another."""

    sound = True

    def __init__(self, make: Maker, template: Row, rows: int, halves: list[tuple[int, int]]):
        self.whole, self.halves, self.all = arrays(template, rows), halves, list(range(rows))
        self.runner = RowRunner([attempt(make) for _ in self.all], self.all, self.whole)

    def reset(self, rows: list[int] | None = None) -> None:
        attempt(self.runner.reset, self.all if rows is None else rows)

    def step(self, k: int | None) -> None:
        attempt(self.runner.step, *(self.halves[k] if k is not None else (0, len(self.all))))

    def wait(self, k: int | None) -> list[int]:
        return []

    def forward(self, seeds: np.ndarray, steps: list[Steps]) -> list[bool]:
        return [attempt(self.runner.forward, i, int(seeds[i]), steps[i]) for i in self.all]

    def picture(self, row: int) -> np.ndarray | None:
        return attempt(self.runner.rows[row].picture)

    def close(self) -> None:
        attempt(self.runner.close)


@dataclass
class Worker:
    at: list[int]  # its rows
    process: Any
    line: socket.socket
    share: dict[int | None, list[int]]  # those of each half, and all
    lost: set[int | None]  # halves whose rows it does not have any more, or not yet
    failures: int = 0  # in a row
    answers: int = 0
    replaced: int = 0


class WorkerPool:
    """Processes that share memory with this one."""

    def __init__(
        self,
        make: Maker,
        template: Row,
        rows: int,
        halves: list[tuple[int, int]],
        workers: int,
        timeout: float,
        start: str,
        news: list[str],
    ):
        self.make, self.rows, self.halves, self.timeout, self.news = make, rows, halves, timeout, news
        method = start if start != "auto" else "fork" if sys.platform == "linux" else "spawn"  # elsewhere torch minds forks
        self.context: Any = multiprocessing.get_context(method)
        self.restarts, self.open = 0, True
        self.file = shared_file(size(template, rows))
        self.whole = arrays(template, rows, mmap.mmap(self.file.fileno(), 0))
        shares = [list(range(k, rows, workers)) for k in range(workers)]  # every worker has some of each half
        atexit.register(self.close)  # before multiprocessing asks them to leave by a signal that they do not hear
        self.workers = [self._started(Worker(at, None, None, self._share(at), set())) for at in shares]  # type: ignore[arg-type]

    def reset(self, rows: list[int] | None = None) -> None:
        asked = {id(w): [i for i in w.at if rows is None or i in rows] for w in self.workers}
        busy = [w for w in self.workers if asked[id(w)]]
        for w in busy:
            self._ask(w, protocol.RESET + packed(asked[id(w)]))
        for w in busy:
            if not self._done(w):
                self._begin(w, asked[id(w)])
            w.lost.clear()

    @property
    def sound(self) -> bool:
        """No rows are lost: all can be stepped at once."""
        return not any(w.lost for w in self.workers)

    def step(self, k: int | None) -> None:
        """The rows of half `k`, or all."""
        for w in self.workers:
            if k not in w.lost and w.share[k]:
                self._ask(w, protocol.STEP[k])

    def wait(self, k: int | None) -> list[int]:
        """The rows of half `k`, or of all, whose worker was replaced: they have begun anew."""
        lost = []
        for w in self.workers:
            mine = w.share[k]
            if mine and (k in w.lost or not self._done(w)):
                self._begin(w, mine)
                w.lost -= set(w.share) if k is None else {k}
                lost += mine
        return lost

    def forward(self, seeds: np.ndarray, steps: list[Steps]) -> list[bool]:
        same = [False] * self.rows
        for w in self.workers:
            self._ask(w, protocol.FORWARD + packed([(i, int(seeds[i]), steps[i]) for i in w.at]))
        for w in self.workers:
            patience = self.timeout * (1 + sum(len(steps[i]) for i in w.at) / 100)
            if self._done(w, patience):
                for i, ok in zip(w.at, unpacked(w.line), strict=True):
                    same[i] = ok
            w.lost.clear()  # those who are not the same are reset by whoever asked
        return same

    def picture(self, row: int) -> np.ndarray | None:
        w = next(w for w in self.workers if row in w.at)
        self._ask(w, protocol.PICTURE + packed(row))
        return unpacked(w.line) if self._done(w) else None

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        atexit.unregister(self.close)
        for w in self.workers:
            self._ask(w, protocol.QUIT)
        limit = time.monotonic() + EXIT_TIME
        for w in self.workers:
            w.process.join(max(limit - time.monotonic(), 0))
            self._stop(w)
        self.file.close()

    # --- one worker ---

    def _share(self, at: list[int]) -> dict[int | None, list[int]]:
        return {None: at, **{k: [i for i in at if first <= i < last] for k, (first, last) in enumerate(self.halves)}}

    def _started(self, w: Worker) -> Worker:
        w.line, theirs = socket.socketpair()
        args = theirs, self.make, self.rows, w.at, self.halves, os.getpid()
        w.process = self.context.Process(target=serve, args=args, name="shoal-worker")  # no daemon: it may start others
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the child of a fork runs nothing of PyTorch's
            w.process.start()
        theirs.close()
        with suppress(OSError):
            socket.send_fds(w.line, [b"m"], [self.file.fileno()])
        return w

    def _stop(self, w: Worker) -> None:
        w.process.kill()
        w.process.join()
        w.line.close()

    def _ask(self, w: Worker, word: bytes) -> None:
        with suppress(OSError):  # if it is gone, it does not answer either
            w.line.settimeout(self.timeout)
            w.line.sendall(word)

    def _done(self, w: Worker, patience: float | None = None) -> bool:
        """Wait for its answer. False: it was replaced by one that has no rows yet."""
        patience = patience or self.timeout * (1 if w.answers else 1 + len(w.at))  # at first it makes its rows
        w.line.settimeout(patience)
        try:
            answer = read_byte(w.line)
        except TimeoutError:
            return self._replace(w, f"took longer than {patience:g} s (--env.timeout)")
        except OSError:
            answer = b""
        if answer == protocol.DONE:
            w.failures = 0
            w.answers += 1
            return True
        if answer == protocol.FAILED:
            raise broken(unpacked(w.line))
        w.process.join(self.timeout)
        code = w.process.exitcode
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        return self._replace(w, f"died ({name})")

    def _replace(self, w: Worker, why: str) -> bool:
        pid = w.process.pid
        self._stop(w)
        w.failures, w.replaced = w.failures + 1, w.replaced + 1
        if w.failures > MAX_FAILURES:
            raise broken(f"its worker {why}, {w.failures} times in a row")
        if w.replaced > MAX_FAILURES and w.replaced * ANSWERS_PER_RESTART > w.answers:
            raise broken(f"its worker {why}, {w.replaced} times in {w.answers} steps")
        self.restarts += 1
        self.news.append(f"Worker {pid} {why} and was replaced: its {len(w.at)} rows are truncated and begin new episodes.")
        w.lost = {k for k, mine in w.share.items() if k is not None and mine}
        self._started(w)
        return False

    def _begin(self, w: Worker, rows: list[int]) -> None:
        """New episodes in these rows of a worker that was replaced; whatever it takes."""
        while True:
            self._ask(w, protocol.RESET + packed(rows))
            failures = w.failures
            if self._done(w):
                w.failures = failures  # only a step proves it sound
                return


def attempt(f: Callable[..., Any], *args: Any) -> Any:
    try:
        return f(*args)
    except (Exception, SystemExit) as e:
        raise broken(in_words(e)) from e


def broken(why: str) -> UserError:
    return UserError(f"the environment failed: {why}.")


def shared_file(length: int) -> Any:
    """A file without a name, in memory where there is room for it."""
    for folder in (SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None, None):
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        try:
            if hasattr(os, "posix_fallocate"):  # else a write would end the process where memory is short
                os.posix_fallocate(file.fileno(), 0, length)
            os.ftruncate(file.fileno(), length)
            return file
        except OSError:
            file.close()
    raise UserError("there is not enough memory to share with worker processes: take fewer --envs.")
