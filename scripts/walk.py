"""How much one reads to follow an iteration, from collecting to the optimiser's step: `make walk`.

One iteration of `shoal train ALGO simple_spread --compile off` is traced. For each algorithm:

    files       of Shoal that it runs through, and all of their lines
    peers       the same lines as other projects are counted: without the world, encoders, schedules and statistics for the log
    functions   lines of the functions that it visits
    changes     of file, from one function to the next, when functions are listed as they are first visited
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import shoal

ROOT = Path(shoal.__file__).parent
APART = (
    "envs/",
    "nets/encoders.py",
    "nets/parts.py",
    "ops/schedules.py",
    "training/stats.py",
    "training/metrics.py",
    "training/stats.py",
)
ALGORITHMS = {"mappo": {}, "qmix": {"reward": "team-mean"}, "maddpg": {"env": {"actions": "continuous"}}}


class Walk:
    """Functions in the order of their first visits, from collecting to the last step of an optimiser."""

    def __init__(self) -> None:
        self.seen: dict[CodeType, None] = {}
        self.visited: dict[CodeType, None] = {}
        self.collecting = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<"):
            self.collecting = self.collecting or code.co_name == "collect"
            if self.collecting:
                self.seen.setdefault(code)
        elif event == "return" and code.co_name == "descend":
            self.visited = dict(self.seen)  # what comes after the last step of an optimiser is not part of the way

    def report(self) -> dict[str, int]:
        names = [Path(c.co_filename).relative_to(ROOT).as_posix() for c in self.visited]
        lines = {n: len((ROOT / n).read_text().splitlines()) for n in names}
        return {
            "files": len(lines),
            "lines": sum(lines.values()),
            "peers": sum(k for n, k in lines.items() if not n.startswith(APART)),
            "functions": sum(max(x[2] or 0 for x in c.co_lines()) - c.co_firstlineno + 1 for c in self.visited),
            "changes": sum(a != b for a, b in itertools.pairwise(names)),
        }


def walk(algorithm: str, **settings: Any) -> Walk:
    """One iteration, the third: by then what is made lazily is made."""
    walk, rows = Walk(), 4
    algo = {} if algorithm == "mappo" else {"learning_starts": 1, "every": 16, "batch": 8}

    class Trace(shoal.Hook):
        laps = 0

        def before_iteration(self, loop: Any) -> None:
            self.laps += 1
            sys.setprofile(walk if self.laps == 3 else None)

        def after_iteration(self, loop: Any) -> None:
            sys.setprofile(None)

    with tempfile.TemporaryDirectory() as out:
        steps = 3 * rows * (25 if algorithm == "mappo" else 4)
        shoal.train(
            algorithm, "simple_spread", algo=algo, eval={"every": 0}, compile="off", envs=rows, steps=steps, hook=Trace(),
            quiet=True, out=f"{out}/run", **settings,
        )  # fmt: skip
    return walk


def main() -> None:
    print(f"| {'':7} | files | lines | peers | functions | changes |\n|---|---:|---:|---:|---:|---:|")
    for algorithm, settings in ALGORITHMS.items():
        one = walk(algorithm, **settings)
        r = one.report()
        print(f"| {algorithm:7} | {r['files']:5} | {r['lines']:5} | {r['peers']:5} | {r['functions']:9} | {r['changes']:7} |")
        if "-v" in sys.argv:
            for c in one.visited:
                where = Path(c.co_filename).relative_to(ROOT)
                size = max(x[2] or 0 for x in c.co_lines()) - c.co_firstlineno + 1
                print(f"    {where}:{c.co_firstlineno} {c.co_qualname} ({size})")


if __name__ == "__main__":
    main()
