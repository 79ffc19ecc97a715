"""Command lines of a seeded generator, right and wrong: each ends by itself with a status that is ours, in sentences, and where
it was refused nothing was written.

Every line is played by `shoal.cli.main` in a process of its own, forked from one that has imported what there is to import, so
that one that hangs or wants all memory is ended alone; some are played by the command itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shoal.cli import OPTIONS, main
from shoal.flags import flags_of
from shoal.ids import find
from shoal.training.settings import all_flags

LINES, COMMANDS, SECONDS, MEMORY = 1000, 25, 30, 10 * 2**30
STATUSES = (0, 1, 2, 130, 143)
TINY = "--steps 40 --envs 2 --eval.episodes 2 --log.tensorboard false --compile off".split()
FAST = {"algo.rollout": "5", "algo.batch": "4", "algo.epochs": "1", "algo.minibatches": "1", "algo.capacity": "200"}
VERBS = ("train", "resume", "eval", "watch", "plot", "table", "check", "envs", "algos", "runs", "bench")
ALGOS = ("mappo", "ippo", "ppo", "ddqn", "qmix", "vdn", "coma", "maddpg", "sac", "td3", "random", "./algo.py")
ENVS = (
    "simple_spread",
    "simple_tag",
    "simple",
    "cartpole",
    "probe_copy",
    "probe_image",
    "probe_teams",
    "CartPole-v1",
    "./env.py",
)
ODD = [
    *"nan inf -inf 1e30 1e18 1e400 -1 0 -0.0 0.5 1.5 2 3k 9223372036854775807 9223372036854775808 -9223372036854775808".split(),
    *"1e-400 0x10 1_0 _ 1__0 ² ٣ ½ é 漢字 🐟 true false yes none None auto own team a,b 1,2 , ,, 64, = =x x=1".split(),
    *"agent_0=a [] {} [1 \\ * ~ .. . % %s {0} $HOME ` ' -x - -- --x best last latest random mappo file.txt folder".split(),
    *"empty.json deep.json long.json run runs ./algo.py env.py:Toy env.py:nobody os:getcwd no.such.module:x a:b: :x x:".split(),
    *"simple_spread 9h 1s 0s 5 ../.. run/config.json loop dangling".split(),
    *(
        "",
        " ",
        "a b",
        "a\nb",
        "a\tb",
        '"',
        "x" * 300,
        "x" * 5000,
        "9" * 5000,
        "\udcff",
        "a/" * 600,
        "x" * 300 + ".py",
        "\x1b[31m",
    ),
]
LONG = (
    "steps",
    "until",
    "time",
    "repeats",
    "algo.epochs",
    "env.max-cycles",
    "env.horizon",
    "env.length",
    "env.blank",
    "env.skip",
)
HUGE = ("1e18", "9223372036854775807", "3k", "9h", "inf")  # right for those, and never done
ENV = """
import gymnasium, numpy as np
class Toy(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}
    def step(self, a):
        self.t += 1
        return np.zeros(2, np.float32), float(a), False, self.t >= 5, {}
"""
ALGO = "from shoal.algos.random import Random\nclass Mine(Random):\n    pass\n"


# --- where it is played: small, and the same for every line ---


def furnish(place: Path) -> None:
    """Files of every kind that a word may name."""
    place.mkdir()
    (place / "file.txt").write_text("no run")
    (place / "folder").mkdir()
    (place / "algo.py").write_text(ALGO)
    (place / "env.py").write_text(ENV)
    (place / "empty.json").write_text("{}")
    (place / "deep.json").write_text("[" * 5000 + "]" * 5000)
    (place / "long.json").write_text('{"algo": "mappo", "env": "simple", "run": {"steps": ' + "9" * 5000 + "}}")
    (place / "loop").symlink_to("loop")
    (place / "dangling").symlink_to("nowhere")
    with contextlib.chdir(place):
        assert main(["train", "ippo", "simple_tag", *TINY, "--algo.rollout", "5", "--quiet", "--out", "run"]) == 0


def listing(place: Path) -> dict[str, tuple[int, int]]:
    """All that lies there; but for locks, which say nothing."""
    found = {}
    for folder, _, names in os.walk(place):
        for name in [".", *names]:
            at = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (at.st_size, at.st_mtime_ns) if name != "." else (0, 0)
    return {k: v for k, v in found.items() if not k.endswith((".lock", ".pyc", "__pycache__/."))}


# --- the generator ---


class Speaker:
    """A user who knows the flags, and types them well or badly."""

    def __init__(self, seed: int):
        self.r = random.Random(seed)

    def line(self) -> list[str]:
        verb = self.r.choices(VERBS, (10, 2, 4, 3, 3, 3, 2, 1, 1, 1, 2))[0]
        items = [verb, *getattr(self, f"say_{verb}", self.say_list)(verb)]
        for _ in range(self.r.choice((0, 0, 0, 1, 2))):
            items = self.spoil(items)
        if verb == "train" and "--time" not in items:
            items += ["--time", "2s"]
        for k, item in enumerate(items):  # that it ends is asked of lines that can
            name, eq, value = item.removeprefix("--").partition("=")
            if name in LONG and value in HUGE:
                items[k] = f"--{name}=40"
            elif name in LONG and not eq and k + 1 < len(items) and items[k + 1] in HUGE:
                items[k + 1] = "40"
        return items

    def spoil(self, items: list[str]) -> list[str]:
        """A slip of the hand."""
        if not items:
            return items
        at = self.r.randrange(len(items))
        slip = self.r.choice(("drop", "twice", "odd", "typo", "join", "swap"))
        if slip == "drop":
            return items[:at] + items[at + 1 :]
        if slip == "twice":
            return items[: at + 1] + items[at:]
        if slip == "odd":
            return [*items[:at], self.odd(), *items[at + 1 :]]
        if slip == "typo" and items[at]:
            k = self.r.randrange(len(items[at]))
            return [*items[:at], items[at][:k] + self.r.choice("abz-._=1é") + items[at][k + 1 :], *items[at + 1 :]]
        if slip == "join" and items[at].startswith("--") and at + 1 < len(items):
            return [*items[:at], f"{items[at]}={items[at + 1]}", *items[at + 2 :]]
        other = self.r.randrange(len(items))
        items = list(items)
        items[at], items[other] = items[other], items[at]
        return items

    def odd(self) -> str:
        return self.r.choice(ODD)

    def flags(self, known: dict[str, str], count: int) -> list[str]:
        """Some flags, with a value that is odd more often than not, or with none."""
        items = []
        for name in self.r.sample(sorted(known), min(count, len(known))):
            how = self.r.random()
            value = known[name] if how < 0.4 else self.odd()
            items += [f"--{name}"] if how > 0.95 else [f"--{name}={value}"] if how > 0.85 else [f"--{name}", value]
        return items

    def say_train(self, verb: str) -> list[str]:
        algo, env = self.r.choice(ALGOS), self.r.choice(ENVS)
        sections = all_flags(find("algos", algo), find("envs", env))
        known = {n: str(f.default) for s in sections.values() for n, f in s.items() if n not in SLOW}
        fast = [x for k, v in FAST.items() if k in known for x in (f"--{k}", v)]
        extra = {"config": "run", "team.agents": "random", "algo.agents.lr": "0.1", "net.adversary.hidden": "8", "help": "true"}
        asked = self.flags({**known, **extra}, self.r.choice((0, 1, 1, 2, 3)))
        items = [algo, env, *TINY, *fast, *asked, "--out", f"made/{self.r.randrange(10**9)}"]
        return items if self.r.random() < 0.8 else [*asked, *items[: len(items) - 2]]

    def say_resume(self, verb: str) -> list[str]:
        return [self.run(), *self.flags({"steps": "60", "device": "cpu", "quiet": "true"}, self.r.randrange(3))]

    def say_eval(self, verb: str) -> list[str]:
        known = {"csv": "e.csv", "checkpoint": "last", "sampled": "true", "seed": "3", "json": "true", "device": "cpu"}
        known |= {"team.adversary": "random", "team.agent": "run", "team.x": "run", "help": "true"}
        return [self.run(), "--episodes", "2", *self.flags({**known, "episodes": "2"}, self.r.randrange(4))]

    def say_watch(self, verb: str) -> list[str]:
        known = {"gif": "w.gif", "mp4": "w.mp4", "checkpoint": "last", "seed": "3", "team.adversary": "random", "episodes": "1"}
        return [self.run(), "--episodes", "1", *self.flags(known, self.r.randrange(3))]

    def say_plot(self, verb: str) -> list[str]:
        runs = [self.run() for _ in range(self.r.choice((0, 1, 1, 2)))]
        known = {"out": "c.png", "metric": "return/agent", "statistic": "iqm", "at": "best", "normalise": "simple_tag=0:1"}
        own = {"kind": "scores", "x": "time", "smooth": "2"} if verb == "plot" else {"kind": "profile", "out": "t.md"}
        return [*runs, *self.flags({**known, **own}, self.r.randrange(3))]

    say_table = say_plot

    def say_check(self, verb: str) -> list[str]:
        known = {"rows": "2", "timeout": "5", "json": "true", "env.n": "2", "env.args": "x=1", "env.horizon": "4"}
        return [self.r.choice((*ENVS, self.odd())), "--steps", "5", *self.flags(known, self.r.randrange(3))]

    def say_bench(self, verb: str) -> list[str]:
        kind = self.r.choice(("env", "train", "update", self.odd()))
        words = [kind, "simple"] if kind == "env" else [kind, self.r.choice(("mappo", "random", self.odd())), "simple"]
        known = {"threads": "1", "device": "cpu", "json": "true", "rows": "2", "compile": "off", "hidden": "8"}
        short = ["--seconds", "0.01", "--repeats", "1", "--rows", "2", "--compile", "off"]
        return [*words, *short, *self.flags(known, self.r.randrange(3))]

    def say_list(self, verb: str) -> list[str]:
        known = {n: str(f.default) for n, f in flags_of(OPTIONS[verb]).items()}
        return [*([self.run()] if verb == "runs" and self.r.random() < 0.7 else []), *self.flags(known, self.r.randrange(2))]

    def run(self) -> str:
        return self.r.choice(("run", "run", "run", "./run/", "folder", "file.txt", ".", self.odd()))


SLOW = ("seeds", "log.wandb", "log.wandb-mode", "env.start", "env.timeout")  # that may well take long, or the network


# --- playing it ---


def play(line: list[str], told: Path) -> None:
    """In a process of its own: the line, and how it went as JSON."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    err, status, trace = io.StringIO(), None, None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            status = main(line)
        except BaseException:  # what is looked for
            trace = traceback.format_exc()
    told.write_text(json.dumps({"status": status, "trace": trace, "err": err.getvalue()[-2000:]}))


def fork(lines: Connection, place: Path, told: Path) -> None:
    """A process that has imported what there is, and no threads: it forks for every line, and tells how that went."""
    import shoal.api
    import shoal.tools.bench
    import shoal.tools.plot
    import shoal.tools.table
    import shoal.tools.watch  # noqa: F401

    os.chdir(place)
    while (line := lines.recv()) is not None:
        told.unlink(missing_ok=True)
        if not (pid := os.fork()):
            try:
                play(line, told)
            finally:
                os._exit(0)
        end, done = time.monotonic() + SECONDS, 0
        while not done and time.monotonic() < end:
            time.sleep(0.005)
            done, code = os.waitpid(pid, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with all that it started
        if not done:
            os.waitpid(pid, 0)
        ended = f"hung for {SECONDS} s" if not done else f"died: {code}"
        lines.send(json.loads(told.read_text()) if done and told.exists() else {"status": None, "trace": ended, "err": ""})


def wrong(said: dict, before: dict, after: dict) -> str | None:
    """What is wrong with how a line went."""
    if said["trace"]:
        return said["trace"]
    if said["status"] not in STATUSES or "Traceback" in said["err"]:
        return f"status {said['status']}: {said['err']}"
    if said["status"] == 2 and (
        not said["err"].startswith("shoal: ") or said["err"].count("\n") != 1 or len(said["err"]) > 1100
    ):
        return f"no sentence: {said['err']}"
    if said["status"] == 2 and before != after:
        return f"refused, and written: {sorted(before.items() ^ after.items())[:5]}; {said['err']}"
    return None


@pytest.fixture
def place(tmp_path, monkeypatch):
    """As it always is, with another that is never touched."""
    furnish(tmp_path / "place")
    shutil.copytree(tmp_path / "place", tmp_path / "again", symlinks=True)
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def tidy(place: Path) -> None:
    """As it was."""
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copytree(place.parent / "again", place, symlinks=True, dirs_exist_ok=True)


@pytest.mark.slow
def test_lines_of_all_kinds(place, tmp_path):
    found, statuses = [], Counter()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=fork, args=(there, place, tmp_path / "told.json"))
    process.start()
    speaker, before = Speaker(0), listing(place)
    for k in range(LINES):
        line = speaker.line()
        here.send(line)
        said = here.recv()
        after = listing(place)
        statuses[said["status"]] += 1
        if what := wrong(said, before, after):
            found.append(f"{k}: shoal {shlex.join(line)[:600]}\n{what[-1500:]}")
        if before != after:
            tidy(place)
            before = listing(place)
    here.send(None)
    process.join()
    print(statuses)
    assert not found, f"{len(found)} of {LINES}\n\n" + "\n\n".join(found)
    assert min(statuses[0], statuses[2]) > LINES // 10  # a generator that says something


@pytest.mark.slow
def test_some_as_commands(place):
    found, speaker = [], Speaker(1)
    for _ in range(COMMANDS):
        line, before = speaker.line(), listing(place)
        command = [sys.executable, "-m", "shoal.cli", *(os.fsencode(x) for x in line)]
        done = subprocess.run(command, cwd=place, capture_output=True, timeout=2 * SECONDS)
        said = {"status": done.returncode, "trace": None, "err": done.stderr.decode(errors="replace")}
        if what := wrong(said, before, listing(place)):
            found.append(f"shoal {shlex.join(line)[:600]}\n{what[-1500:]}")
        tidy(place)
    assert not found, "\n\n".join(found)


def test_the_generator_repeats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "algo.py").write_text(ALGO)
    (tmp_path / "env.py").write_text(ENV)
    one, two = Speaker(5), Speaker(5)
    lines = [one.line() for _ in range(20)]
    assert lines == [two.line() for _ in range(20)]
