"""Signals and --time in the middle of an evaluation: it is abandoned, the run saved, and what was due is done after a resume.
The worlds signal themselves, at a step of the evaluation's rows."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import leaves, metrics

import shoal
from shoal.cli import main
from shoal.spec import StoppedError, TerminatedError
from shoal.training.run import Run
from shoal.training.signals import on_signals

TROUBLE = '''
import os, time
from pathlib import Path

def trouble(config, step):
    """At a step of an evaluation's rows: signals, once; after each: a nap."""
    if config.folder:
        Path(config.folder, "step").write_text(str(step))
    if config.nap:
        Path(config.folder, "naps").touch()
        time.sleep(config.nap)
    if step == config.at and config.number:
        mark = Path(config.folder, "signalled")
        if not mark.exists():
            mark.touch()
            try:
                os.kill(os.getpid(), config.number)
            finally:  # the first is raised here
                for _ in range(config.times - 1):
                    os.kill(os.getpid(), config.number)
'''
FIELDS = """
        length: int = 8  # of an episode
        number: int = 0  # the signal
        at: int = 5  # at which step of the evaluations
        times: int = 1
        nap: float = 0.0  # seconds a step
        folder: str = ""
"""
NATIVE = f'''
"""One agent that walks."""
from dataclasses import dataclass
from shoal.envs.base import Move, World
from shoal.envs.drawing import Sketch
from shoal.spec import Discrete, EnvSpec, Frame, Group, Result
{TROUBLE}
class Walk(World):
    fixed_length = True
    noise_begin = 1

    @dataclass(frozen=True)
    class Config:{FIELDS}
    def setup(self):
        self.spec = EnvSpec((Group("agents", "agents", ("a_0",), (1,), Discrete(2)),), horizon=self.config.length)
        self.steps = 0

    def begin(self, noise):
        return {{"x": noise}}

    def advance(self, state, actions, noise):
        self.steps += 1
        if self.rows == 5:
            trouble(self.config, self.steps)
        x = state["x"] + actions["agents"]
        return Move({{"x": x}}, {{"agents": Result(x, self.never(1))}})

    def observe(self, state):
        return Frame({{"agents": self.view(state["x"][..., None], state["clock"])}})

    def draw(self, row=0):
        return Sketch(())
'''
HOST = f'''
"""One agent that walks."""
from dataclasses import dataclass
from shoal.envs.rows import Row
from shoal.envs.vector import Host, HostConfig
from shoal.spec import Discrete, EnvSpec, Group
{TROUBLE}
MADE = 0

class WalkRow(Row):
    def __init__(self, config):
        global MADE
        MADE += 1
        self.config, self.steps, self.evaluates = config, 0, MADE > 4  # one for each world to look at, and two that train
        self.spec = EnvSpec((Group("agents", "agents", ("a_0",), (1,), Discrete(2)),), horizon=config.length)

    def reset(self, seed, out):
        self.x, self.clock = seed % 7, 0
        out.obs["agents"][:] = self.x

    def step(self, actions, out):
        self.steps += 1
        if self.evaluates:
            trouble(self.config, self.steps)
        self.x, self.clock = self.x + int(actions["agents"][0]), self.clock + 1
        out.obs["agents"][:] = out.reward["agents"][:] = self.x
        return self.clock >= self.config.length

class Walk(Host):
    @dataclass(frozen=True)
    class Config(HostConfig):{FIELDS}
    @classmethod
    def row(cls, config, drawn=False):
        return WalkRow(config)
'''
QUICK: dict[str, Any] = {
    "steps": 120,
    "envs": 2,
    "quiet": True,
    "compile": "off",
    "algo": {"rollout": 5, "epochs": 1, "minibatches": 1},
    "eval": {"every": 40, "episodes": 5},
    "log": {"tensorboard": False, "every": 20},
    "save": {"every": 40, "keep": 0},
}


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A file of its own for each test: modules are loaded once."""
    path = tmp_path / "walk.py"
    path.write_text(HOST if getattr(request, "param", "native") == "host" else NATIVE)
    return str(path)


def steps_of(run: Run) -> list[str]:
    return [x.partition(",")[0].split()[-1] for x in (run.path / "train.log").read_text().splitlines() if x.startswith("Step:")]


@pytest.mark.parametrize(
    ("world", "at", "first", "done"),
    [("native", 3, [], 0), ("native", 11, ["0"], 40), ("native", 27, ["0", "40", "80"], 120), ("host", 11, ["0"], 40)],
    indirect=["world"],
)
def test_an_evaluation_that_was_abandoned_is_done_after_the_resume(
    world: str, tmp_path: Path, at: int, first: list[str], done: int
) -> None:
    """In the first evaluation, in the second, and in the one after the last step: 8 steps each."""
    env = {"number": int(signal.SIGTERM), "at": at, "folder": str(tmp_path)}
    here = {"workers": 0} if "Host" in Path(world).read_text() else {}
    whole = shoal.train("ppo", shutil.copy(world, tmp_path / "same.py"), env=here, out=tmp_path / "whole", **QUICK)
    run = shoal.train("ppo", world, env={**here, **env}, out=tmp_path / "run", **QUICK)
    assert int((tmp_path / "step").read_text()) == at  # not one step more
    state = run.load("last")
    assert (state["step"], state["evaluation_due"]) == (done, True)
    assert steps_of(run) == first == [str(x["step"]) for x in run.evaluations()]
    shoal.resume(run, quiet=True)
    assert steps_of(run) == steps_of(whole) == ["0", "40", "80", "120"]
    assert metrics(run.path) == metrics(whole.path)
    a, b = leaves(whole.load("last")), leaves(run.load("last"))
    tensors = [k for k, x in a.items() if isinstance(x, torch.Tensor)]
    assert len(tensors) > 20
    assert [k for k in tensors if not torch.equal(a[k], b[k])] == []
    assert b["/evaluation_due"] is False


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("times", [1, 2])
def test_the_status_of_one_signal_and_of_two(
    world: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, status: int, times: int
) -> None:
    words = "--steps 400 --envs 2 --eval.episodes 5 --compile off --quiet --log.tensorboard false --env.length 1000".split()
    words += ["--env.number", str(int(number)), "--env.times", str(times), "--env.folder", str(tmp_path)]
    assert main(["train", "random", world, *words, "--out", str(tmp_path / "run")]) == status
    assert (tmp_path / "step").read_text() == "5"
    name = {130: "interrupted", 143: "terminated"}[status]
    assert capsys.readouterr().err == ("" if times == 1 else f"shoal: {name}.\n")
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists() == (times == 1)


@pytest.mark.parametrize("world", ["host"], indirect=True)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_does_not_wait_for_a_world_that_takes_its_time(world: str, tmp_path: Path, workers: int) -> None:
    """A step of the evaluation takes minutes."""
    env = {"nap": 300.0, "folder": str(tmp_path), "workers": workers, "timeout": 900.0, "start": "auto"}

    def tell() -> None:
        while not (tmp_path / "naps").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    began = time.monotonic()
    run = shoal.train("ppo", world, env=env, out=tmp_path / "run", **QUICK)
    assert time.monotonic() - began < 100
    assert run.load("last")["evaluation_due"]


def test_a_second_signal_is_raised_as_what_it_is() -> None:
    for number, error in ((signal.SIGTERM, TerminatedError), (signal.SIGINT, KeyboardInterrupt)):
        heard: list[int] = []
        with on_signals(heard.append):
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt) as e:
                signal.raise_signal(number)
        assert (type(e.value), heard) == (error, [signal.SIGINT])


def test_time_is_up_in_the_middle_of_an_evaluation(world: str, tmp_path: Path) -> None:
    """An evaluation would take 20 s."""
    env, began = {"length": 1000, "nap": 0.02, "folder": str(tmp_path)}, time.monotonic()
    run = shoal.train("ppo", world, env=env, time="0.3s", out=tmp_path / "run", **QUICK)
    assert time.monotonic() - began < 15
    assert int((tmp_path / "step").read_text()) >= 1
    state = run.load("last")
    assert (state["step"], state["evaluation_due"], run.evaluations()) == (0, True, [])
    assert state["seconds"] >= 0.3


def test_a_hook_that_stops_does_not_abandon(world: str, tmp_path: Path) -> None:
    class Stop(shoal.Hook):
        def after_iteration(self, loop: Any) -> None:
            if loop.step == 40:
                loop.stop("enough")

    run = shoal.train("ppo", world, hook=Stop(), out=tmp_path / "run", **QUICK)
    assert steps_of(run) == ["0", "40"]
    assert run.load("last")["evaluation_due"] is False


def test_an_episode_longer_than_the_longest_stops_the_run(world: str, tmp_path: Path) -> None:
    quick = {**QUICK, "eval": {"every": 40, "episodes": 5, "longest": 99}}
    with pytest.raises(StoppedError, match=r"did not end within 99 steps, so it cannot be evaluated: .*--eval\.longest"):
        shoal.train("ppo", world, env={"length": 100}, out=tmp_path / "run", **quick)
    assert Run(tmp_path / "run").load("last")["evaluation_due"]
    run = shoal.train("ppo", world, env={"length": 99}, out=tmp_path / "other", **quick)
    assert steps_of(run) == ["0", "40", "80", "120"]
    assert main(["eval", str(run.path), "--episodes", "2", "--longest", "98"]) == 2
    assert main(["eval", str(run.path), "--episodes", "2", "--longest", "99"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("verb", [["eval"], ["watch"]])
def test_eval_and_watch_leave_at_once(world: str, tmp_path: Path, verb: list[str], number: int, status: int) -> None:
    env = {"length": 8, "folder": str(tmp_path)}
    run = shoal.train("ppo", world, env=env, out=tmp_path / "run", **QUICK)
    config = run.path / "config.json"
    config.write_text(config.read_text().replace('"length": 8', '"length": 90000').replace('"nap": 0.0', '"nap": 0.01'))
    (tmp_path / "step").unlink()
    line = [sys.executable, "-c", "from shoal.cli import script; script()", *verb, str(run.path), "--episodes", "5"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 120
    while not (tmp_path / "step").exists() and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (status, f"shoal: {'terminated' if status == 143 else 'interrupted'}.\n")
    assert not (run.path / "media" / "watch.gif").exists()
