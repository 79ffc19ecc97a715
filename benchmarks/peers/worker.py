"""One side of a comparison, in an interpreter of its own: reads a JSON object a line, and answers each with one.

    {"verb": "prepare", "file": PEER.py, "work": {...}}  ->  {"ready": description}
    {"verb": "measure", "seconds": 4}                    ->  {"steps": n, "seconds": s, "idle": CPU seconds of the wait}
    {"verb": "quit"}                                     ->  ends

or {"error": sentence}. Standard library only, for every peer's interpreter runs it. A peer's file has `prepare(work)`, which
returns a description and a function that does a piece of the work and says how many environment steps it was, or how many
updates where the work is updates alone. It may write into the folder it runs in, which is thrown away. Between two lines a
side waits in a read, so that it takes nothing from the one that is measured.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


def load(file: str | Path) -> types.ModuleType:
    """A peer's file, by its path: its name is often that of the package it imports."""
    spec = importlib.util.spec_from_file_location(f"peer_{Path(file).stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where processes that the peer starts look for what it pickles
    spec.loader.exec_module(module)
    return module


def pin(cores: int) -> None:
    """Keeps this process, and all that it starts, on the first so many of its cores; 0: on all."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def prepare(file: str, work: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], int]]:
    pin(work["threads"])
    sys.path.extend([*work["path"], str(Path(__file__).parent / "adapters")])  # behind what is installed
    began = time.perf_counter()
    description, piece = load(file).prepare(types.SimpleNamespace(**work))
    built = time.perf_counter()
    piece()
    ended = time.perf_counter()
    times = {"prepare_seconds": round(built - began, 2), "warm_up_seconds": round(ended - built, 2)}
    return {"python": sys.version.split()[0], **description, **times}, piece


def measure(piece: Callable[[], int], seconds: float) -> dict[str, float]:
    """Whole pieces, until the seconds are over; time and steps are of all of them."""
    steps, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        steps += piece()
    return {"steps": steps, "seconds": passed}


def serve(lines: TextIO, answer: Callable[[dict[str, Any]], None]) -> None:
    piece: Callable[[], int] | None = None
    used = time.process_time()
    for line in lines:
        message = json.loads(line)
        idle = time.process_time() - used
        try:
            if message["verb"] == "prepare":
                ready, piece = prepare(message["file"], message["work"])
                reply: dict[str, Any] = {"ready": ready}
            elif message["verb"] == "measure":
                assert piece is not None, "measure comes after prepare"
                reply = {**measure(piece, message["seconds"]), "idle": idle}
            else:
                return
        except Exception as e:
            reply = {"error": " ".join(f"{type(e).__name__}: {e}".split())}
            import traceback

            traceback.print_exc()
        used = time.process_time()
        answer(reply)


def main() -> None:
    here = str(Path(__file__).parent)
    sys.path[:] = [p for p in sys.path if p and str(Path(p).resolve()) != here]  # `import skrl` means the package
    lines, out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what peers print goes with their errors

    def answer(reply: dict[str, Any]) -> None:
        out.write(json.dumps(reply) + "\n")
        out.flush()

    serve(lines, answer)


if __name__ == "__main__":
    main()
