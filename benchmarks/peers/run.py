"""Shoal and its peers at the same work, side by side: IPPO, MAPPO or QMIX on simple_spread, trained end to end.

    python benchmarks/peers/run.py --peers jaxmarl --jaxmarl CHECKOUT --install
    python benchmarks/peers/run.py --peers jaxmarl --jaxmarl CHECKOUT --sizes 16x128,1024x128 --json result.json
    python benchmarks/peers/run.py --peers xuance --algo qmix --part update

Each side is a process in an interpreter of its own (`.peers/NAME`, made by --install; Shoal's is the one that runs this), and
they take turns within every repeat, so that what slows the machine down slows all of them. What is the same and what differs
is in README.md beside this file. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OURS = "shoal"
REPLAYS = ("qmix", "maddpg")  # algorithms that learn from a replay
NO_PEERS = {"run", "worker", "shoal_side"}


class UsageError(Exception):
    """What is wrong and what to do, in one sentence."""


def known_peers(folder: Path = HERE) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.glob("*.py")) if file.stem not in NO_PEERS}


def load(file: Path) -> ModuleType:
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"peer_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- one side ---


@dataclass
class Side:
    name: str
    file: Path
    python: Path | str
    description: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    idle: float = 0.0  # CPU seconds that it burnt while others were measured
    error: str | None = None
    process: subprocess.Popen[str] | None = None
    log: IO[str] | None = None
    folder: tempfile.TemporaryDirectory[str] | None = None  # where it runs, for what it may write

    def start(self, threads: int) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `stop`
        command = [str(self.python), "-u", str(HERE / "worker.py")]
        self.folder = tempfile.TemporaryDirectory(prefix=f"peers-{self.name}-", ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment(threads),
            cwd=self.folder.name,
        )

    def ask(self, **message: Any) -> dict[str, Any] | None:
        """Its answer; none, with `error` set, where it has none."""
        if self.error is not None:
            return None
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": f"it ended without an answer: {self.last_words()}"}
        self.error = answer.get("error")
        return answer if self.error is None else None

    def last_words(self) -> str:
        assert self.log is not None
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"

    def stop(self) -> None:
        if self.process is not None:
            if self.process.poll() is None and self.process.stdin is not None:
                try:
                    self.process.stdin.write('{"verb": "quit"}\n')
                    self.process.stdin.close()
                    self.process.wait(20)
                except (OSError, subprocess.TimeoutExpired):
                    self.process.kill()
            self.process.wait()
            self.process = None
        if self.log is not None:
            self.log.close()
        if self.folder is not None:
            self.folder.cleanup()


def environment(threads: int) -> dict[str, str]:
    """The same limits for every side, by whichever name its libraries know them."""
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "WANDB_MODE": "disabled"}
    if threads:
        for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM"):
            env[f"{name}_NUM_THREADS"] = str(threads)
        if threads == 1:
            flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
            env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flags}".strip()
    return env


# --- the comparison ---


def compare(sides: list[Side], work: dict[str, Any], repeats: int, seconds: float, say: Any = lambda text: None) -> None:
    """Starts every side, then measures them in turn, `repeats` times round. Fills in their rates, or why there are none."""
    try:
        for side in sides:
            say(f"{side.name}: preparing {work['rows']}x{work['steps']}")
            side.start(work["threads"])
            answer = side.ask(verb="prepare", file=str(side.file), work=work)
            side.description = answer["ready"] if answer else {}
            say(f"{side.name}: {side.error or 'ready'}")
        for repeat in range(repeats):
            for side in sides:
                answer = side.ask(verb="measure", seconds=seconds)
                if answer:
                    side.rates.append(answer["steps"] / answer["seconds"])
                    side.idle += answer["idle"]
                    say(f"{side.name}: repeat {repeat + 1} of {repeats}, {short(side.rates[-1])} {unit(work)}")
    finally:
        for side in sides:
            side.stop()


def summary(side: Side, ours: Side) -> dict[str, Any]:
    """Medians, spread, and how many times as fast Shoal was: the ratio of medians, and the range of ratios by repeat."""
    out: dict[str, Any] = {
        "description": side.description,
        "rates": side.rates,
        "error": side.error,
        "idle": round(side.idle, 2),
    }
    if side.error is None and side.rates:
        out |= {"median": statistics.median(side.rates), "lowest": min(side.rates), "highest": max(side.rates)}
        if side is not ours and ours.error is None and len(ours.rates) == len(side.rates):
            pairs = [mine / its for mine, its in zip(ours.rates, side.rates, strict=True)]
            ratio = statistics.median(ours.rates) / out["median"]
            out |= {"ratio": ratio, "ratio_lowest": min(pairs), "ratio_highest": max(pairs)}
    return out


COLUMNS = ("size", "side", "steps/s (median)", "lowest", "highest", "Shoal is, times as fast")


def unit(work: dict[str, Any]) -> str:
    """What the rates count: environment steps, or updates where those alone are measured."""
    return "updates/s" if work.get("part") == "update" else "steps/s"


def table(result: dict[str, Any]) -> str:
    heads = tuple(head.replace("steps/s", unit(result["settings"])) for head in COLUMNS)
    rows = [heads, tuple("---" for _ in COLUMNS)]
    for size in result["sizes"]:
        for name, r in size["sides"].items():
            rates = [short(r[k]) for k in ("median", "lowest", "highest")] if "median" in r else ["-", "-", "-"]
            ratio = f"{r['ratio']:.2f} ({r['ratio_lowest']:.2f} to {r['ratio_highest']:.2f})" if "ratio" in r else "-"
            rows.append((f"{size['rows']}x{size['steps']}", name, *rates, "not measured" if r["error"] else ratio))
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join(lines)


def notes(result: dict[str, Any]) -> list[str]:
    """What each side is, what differs in its work, and what went wrong."""
    out = []
    for size in result["sizes"]:
        for name, r in size["sides"].items():
            if r["error"]:
                out.append(f"{name}, {size['rows']}x{size['steps']}: not measured: {r['error']}")
            if r["idle"] > 0.05 * result["settings"]["seconds"] * max(len(r["rates"]), 1):
                out.append(
                    f"{name}, {size['rows']}x{size['steps']}: used {r['idle']:.1f} CPU seconds while it should have waited"
                )
    for name in result["sizes"][0]["sides"]:
        d = next((d for size in result["sizes"] if (d := size["sides"][name]["description"])), None)
        if d:
            versions = ", ".join(f"{k} {v}" for k, v in d["versions"].items())
            out.append(f"{name}: {versions}; {d['precision']}, threads {d['threads'] or 'free'}; {d['measured']}")
            out += [f"{name}: {text}" for text in d["differs"]]
    return out


def short(x: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.3g}{letter}" if x < 100 * size else f"{x / size:.0f}{letter}"
    return f"{x:.3g}"


# --- environments ---


def install(name: str, file: Path, folder: Path, base: str) -> None:
    """Makes the peer's environment and installs what its file names, one `pip install` after another."""
    print(f"{name}: making {folder}", flush=True)
    if base == sys.executable:
        venv.create(folder, with_pip=True, clear=True)
    else:
        subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    for words in load(file).INSTALL:
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
        print(f"{name}: pip install {' '.join(words)}", flush=True)
        if subprocess.run(command).returncode:
            raise UsageError(f"{name} could not be installed: `pip install {' '.join(words)}` failed.")
    (folder / "installed").touch()


def interpreter(name: str, given: dict[str, str], here: bool) -> Path | str:
    if name in given:
        if shutil.which(given[name]) is None:
            raise UsageError(f"--python {name}={given[name]}: there is no such interpreter.")
        return os.path.abspath(given[name]) if os.sep in given[name] else given[name]
    if name == OURS or here:
        return sys.executable
    folder = ROOT / ".peers" / name
    if not (folder / "installed").exists():
        raise UsageError(f"{name} has no environment in {folder.relative_to(ROOT)}: run this with --install first.")
    return folder / "bin" / "python"


# --- the command ---


def parse(words: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--peers", default=",".join(known_peers()), help="whom to compare with, commas between")
    p.add_argument("--algo", default="ippo", choices=["ippo", "mappo", *REPLAYS])
    p.add_argument("--rows", type=int, default=16, help="worlds side by side")
    p.add_argument("--steps", type=int, default=128, help="steps of each between updates; with a replay: in a piece, about")
    p.add_argument("--sizes", help="several, instead of --rows and --steps: 16x128,1024x128")
    p.add_argument("--hidden", default="64,64", help="widths of the hidden layers")
    p.add_argument("--epochs", type=int, default=4, help="passes over a rollout")
    p.add_argument("--minibatches", type=int, default=4, help="pieces of a pass")
    p.add_argument("--batch", type=int, default=256, help="with a replay: transitions of the whole team in a gradient step")
    p.add_argument("--every", type=int, default=25, help="with a replay: environment steps, of all rows, between two updates")
    p.add_argument("--part", default="train", choices=["train", "update"], help="with a replay: all of it, or updates alone")
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--threads", type=int, help="cores that every side is kept on; none: 1 on the CPU, all with a GPU")
    p.add_argument("--precision", choices=["tf32", "float32"], help="of matrix products; none: tf32 on a GPU, float32 without")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--seconds", type=float, default=4.0, help="how long a repeat lasts at least")
    p.add_argument("--jaxmarl", metavar="CHECKOUT", help="a checkout of JaxMARL")
    p.add_argument("--install", action="store_true", help="make the peers' environments anew in .peers/, and end")
    p.add_argument(
        "--python", action="append", default=[], metavar="SIDE=PATH", help="an interpreter for a side, or for --install"
    )
    p.add_argument("--here", action="store_true", help="use the running interpreter for every side")
    p.add_argument("--path", action="append", default=[], metavar="FOLDER", help="for every side, at the end of its sys.path")
    p.add_argument("--json", metavar="FILE", help="write the whole result there")
    return p.parse_args(words)


def sizes_of(args: argparse.Namespace) -> list[tuple[int, int]]:
    if args.sizes is None:
        return [(args.rows, args.steps)]
    try:
        return [(int(rows), int(steps)) for rows, steps in (size.split("x") for size in args.sizes.split(","))]
    except ValueError:
        raise UsageError(f"--sizes is {args.sizes!r}: it takes rows x steps with commas between, as 16x128,1024x128.") from None


def main(words: list[str]) -> int:
    args = parse(words)
    known = known_peers()
    names = [name for name in args.peers.split(",") if name]
    for name in names:
        if name not in known:
            raise UsageError(f"there is no peer {name!r}: --peers takes {', '.join(known)}.")
    for item in args.python:
        if item.partition("=")[0] not in (OURS, *names) or "=" not in item:
            raise UsageError(f"--python {item}: it takes SIDE=PATH, where a side is one of {', '.join((OURS, *names))}.")
    pythons = dict(item.split("=", 1) for item in args.python)
    if args.install:
        for name in names:
            install(name, known[name], ROOT / ".peers" / name, pythons.get(name, sys.executable))
        return 0

    precision = args.precision or ("tf32" if args.device == "cuda" else "float32")
    if precision == "tf32" and args.device == "cpu":
        raise UsageError("--precision tf32 is a GPU's: on the CPU it is float32.")
    if args.part != "train" and args.algo not in REPLAYS:
        raise UsageError(f"--part {args.part} is for --algo {' and '.join(REPLAYS)}: {args.algo} is measured end to end.")
    threads = args.threads if args.threads is not None else (1 if args.device == "cpu" else 0)
    try:
        hidden = [int(width) for width in args.hidden.split(",")]
    except ValueError:
        raise UsageError(f"--hidden is {args.hidden!r}: it takes widths with commas between, as 64,64.") from None
    fixed = {
        **{"algo": args.algo, "hidden": hidden, "epochs": args.epochs, "minibatches": args.minibatches},
        **{"device": args.device, "threads": threads, "precision": precision},
        **{"jaxmarl": args.jaxmarl and os.path.abspath(args.jaxmarl), "path": [str(Path(p).resolve()) for p in args.path]},
    }
    unsaid = {"jaxmarl", "path"}  # no settings of the work
    if args.algo in REPLAYS:
        fixed |= {"batch": args.batch, "every": args.every, "part": args.part}
        unsaid |= {"epochs", "minibatches"}
    files = {OURS: HERE / "shoal_side.py", **{name: known[name] for name in names}}
    works = [{**fixed, "rows": rows, "steps": steps} for rows, steps in sizes_of(args)]
    for work in works:
        if (
            min(work["rows"], work["steps"], args.epochs, args.minibatches, args.batch, args.every, args.repeats, *hidden) < 1
            or args.seconds <= 0
        ):
            raise UsageError(
                "rows, steps, widths, epochs, minibatches, batch, every, repeats and seconds must be more than zero."
            )
        for file in files.values():
            if why := load(file).refuse(SimpleNamespace(**work)):
                raise UsageError(why)
    interpreters = {name: interpreter(name, pythons, args.here) for name in files}

    result: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/peers/run.py", *words]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0)), "system": platform.system()},
        "settings": {
            **{k: v for k, v in fixed.items() if k not in unsaid},
            "repeats": args.repeats,
            "seconds": args.seconds,
        },
        "sizes": [],
    }
    for work in works:
        sides = [Side(name, file, interpreters[name]) for name, file in files.items()]
        compare(sides, work, args.repeats, args.seconds, lambda text: print(text, file=sys.stderr, flush=True))
        of = {side.name: summary(side, sides[0]) for side in sides}
        result["sizes"].append({"rows": work["rows"], "steps": work["steps"], "sides": of})
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")  # after every size: a long run may be cut off
    print(table(result), *notes(result), sep="\n")
    return 1 if any(r["error"] for size in result["sizes"] for r in size["sides"].values()) else 0


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as e:
        sys.exit(f"error: {e}")
