"""Processes, read from /proc: a bare machine has no `ps`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def processes() -> dict[int, tuple[int, str]]:
    """The parent and the command line of every process that has not ended."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]  # names may have brackets in them
            if state != "Z":
                found[int(folder.name)] = int(parent), (folder / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:  # it has gone since
            continue
    return found


def alive(pid: int) -> bool:
    return pid in processes()


def children(of: int | None = None) -> dict[int, str]:
    """The command lines of the processes that a process (default: this one) began."""
    return {pid: line for pid, (parent, line) in processes().items() if parent == (of or os.getpid())}


def wait_for(condition: Callable[[], object], seconds: float = 120, pause: float = 0.01) -> bool:
    """Until it holds, however busy the machine is. Whether it did in the end."""
    deadline = time.monotonic() + seconds
    while not (held := bool(condition())) and time.monotonic() < deadline:
        time.sleep(pause)
    return held
