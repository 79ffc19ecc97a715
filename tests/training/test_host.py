"""Training over ordinary Python environments in worker processes: exact resume, accidents on the way, and Ctrl-C."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import alive, wait_for
from test_resume import leaves, metrics

import shoal
from shoal.envs.vector import Host
from shoal.training.run import Run

TOY = '''
"""A toy that lasts 4 + seed mod 9 steps."""
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
import numpy as np
from shoal.envs.rows import Row
from shoal.envs.vector import Host, HostConfig
from shoal.spec import Discrete, EnvSpec, Group

class ToyRow(Row):
    def __init__(self, config):
        self.config, self.steps, self.draws = config, 0, 0
        plain = Group("agents", "agents", ("a_0", "a_1"), (3,), Discrete(4))
        mortal = Group("mortals", "mortals", ("m_0", "m_1"), (3,), Discrete(4), mortal=True, masked=True)
        self.spec = EnvSpec((mortal,) if config.mortal else (plain,), horizon=12, stats={"luck": "last"})
        self.name = "mortals" if config.mortal else "agents"
        if config.folder:
            Path(config.folder, f"pid-{os.getpid()}").touch()

    def reset(self, seed, out):
        self.draws += 1
        self.seed = seed if self.config.honest else seed + 7 * self.draws
        self.length, self.clock, self.last = 4 + self.seed % 9 if self.config.honest else 6, 0, 0
        self.see(out)
        if self.config.mortal:
            out.start[self.name][:] = True

    def see(self, out):
        out.obs[self.name][0] = self.seed % 7 - 3, self.clock, self.last
        out.obs[self.name][1] = self.last, self.seed % 5, -self.clock
        if self.config.mortal:
            out.alive[self.name][:] = out.active[self.name][:] = True, self.clock < 2
            out.start[self.name][:] = False
            out.legal[self.name][:] = True
            out.legal[self.name][0, self.clock % 4] = False

    def step(self, actions, out):
        self.steps += 1
        time.sleep(self.config.slow)
        self.trouble("die", lambda: os.kill(os.getpid(), signal.SIGKILL))
        self.trouble("hang", lambda: time.sleep(1000))
        self.clock += 1
        self.last = int(actions[self.name].sum())
        self.see(out)
        out.reward[self.name][:] = actions[self.name] * (self.seed % 3 - 1)
        over = self.clock >= self.length
        out.terminated[self.name][:] = over and self.seed % 2 == 0
        out.stat("luck", self.seed % 5)
        return over

    def trouble(self, kind, do):
        """Once in a run, at a step of some row's."""
        if self.steps == getattr(self.config, kind):
            try:
                Path(self.config.folder, kind).touch(exist_ok=False)
            except FileExistsError:
                return
            do()

class Toy(Host):
    @dataclass(frozen=True)
    class Config(HostConfig):
        mortal: bool = False
        honest: bool = True  # episodes follow from their seeds
        folder: str = ""  # where it leaves its traces
        die: int = 0  # at which of its steps
        hang: int = 0
        slow: float = 0.0  # seconds a step

    @classmethod
    def row(cls, config, drawn=False):
        return ToyRow(config)
'''
QUICK = {
    "steps": 240,
    "envs": 6,
    "quiet": True,
    "algo": {"rollout": 5, "epochs": 2, "minibatches": 1},
    "eval": {"every": 120, "episodes": 6},
    "log": {"tensorboard": False, "every": 1},
    "save": {"every": 0, "keep": 0},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("toy") / "toy.py"
    path.write_text(TOY)
    return str(path)


def train(toy, out, env=None, **settings):
    return shoal.train("ppo", toy, out=out, env={"workers": 2, **(env or {})}, **{**QUICK, "compile": "off", **settings})


def assert_same(a, b):
    mine, theirs = leaves(a.load("last")), leaves(b.load("last"))
    assert mine.keys() == theirs.keys()
    tensors = [k for k, x in mine.items() if isinstance(x, torch.Tensor)]
    assert len(tensors) > 30
    assert [k for k in tensors if not torch.equal(mine[k], theirs[k])] == []
    assert mine["/step"] == theirs["/step"] == 240
    assert metrics(a.path) == metrics(b.path)
    assert {line["kind"] for line in metrics(a.path)} == {"train", "eval"}


def workers_of(folder: Path) -> set[int]:
    """All that ever held a row, but for this process."""
    return {int(p.name[4:]) for p in folder.glob("pid-*")} - {os.getpid()}


# --- the same numbers ---


class Stop(shoal.Hook):
    def after_iteration(self, loop):
        loop.stop("enough")


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ({}, {"net": {"memory": "gru"}}),
        ({"mortal": True}, {"compile": "auto"}),
        ({"mortal": True, "overlap": False}, {"net": {"memory": "gru"}}),
        ({"workers": 0}, {}),
    ],
    ids=["gru", "deaths and masks", "not in halves", "here"],
)
def test_until_and_resume_equal_one_run(toy, tmp_path, env, settings):
    whole = train(toy, tmp_path / "whole", env, **settings)
    half = train(toy, tmp_path / "half", env, until=90, **settings)
    state = half.load("last")
    assert state["step"] == 90
    assert sum(len(x) > 0 for x in state["collector"]["env"]["actions"]) > 1  # in the middle of episodes
    shoal.resume(half, quiet=True, hook=Stop())
    assert half.load("last")["step"] == 120  # some of which are those of before
    assert_same(whole, shoal.resume(half, quiet=True))
    assert "did not come out the same" not in (half.path / "train.log").read_text()


def test_the_number_of_workers_changes_nothing(toy, tmp_path):
    runs = [train(toy, tmp_path / str(n), {"workers": n, "mortal": True}) for n in (1, 3)]
    assert_same(*runs)


@pytest.mark.parametrize("overlap", [True, False])
def test_halves_or_not_a_run_repeats(toy, tmp_path, overlap):
    assert_same(*[train(toy, tmp_path / name, {"overlap": overlap}) for name in "ab"])


def test_an_environment_that_does_not_repeat_goes_on_and_says_so(toy, tmp_path):
    half = train(toy, tmp_path / "half", {"honest": False}, until=90)  # 15 steps of each row: the third of its episodes
    shoal.resume(half, quiet=True)
    log = (half.path / "train.log").read_text().splitlines()
    assert [x for x in log if x.startswith("6 of 6 rows did not come out the same when their episode was played again")]
    assert half.load("last")["step"] == 240
    ended = [x["episode_length"] for x in half.metrics if x["kind"] == "train" and x["episodes"]]
    assert set(ended) == {6.0}  # none is longer for what was before


# --- accidents ---


def test_workers_that_die_and_hang_are_replaced_and_the_run_goes_on(toy, tmp_path):
    env = {"folder": str(tmp_path), "die": 12, "hang": 25, "timeout": 3.0}
    run = train(toy, tmp_path / "run", env, eval={"every": 0})
    assert run.load("last")["step"] == 240
    assert (run.metrics[-1]["step"], run.metrics[-1]["worker_restarts"]) == (240, 2)
    assert run.metrics[0]["worker_restarts"] == 0
    log = [x for x in (run.path / "train.log").read_text().splitlines() if x.startswith("Worker ")]
    end = "and was replaced: its 3 rows are truncated and begin new episodes."
    died, hung = (x.split()[1] for x in log)
    assert log == [f"Worker {died} died (SIGKILL) {end}", f"Worker {hung} took longer than 3 s (--env.timeout) {end}"]
    assert {int(died), int(hung)} < workers_of(tmp_path)
    assert len(workers_of(tmp_path)) == 4
    assert not any(map(alive, workers_of(tmp_path)))
    assert [p for p in multiprocessing.active_children() if p.name == "shoal-worker"] == []


def test_a_worker_of_the_evaluation_may_die_too(toy, tmp_path):
    run = train(toy, tmp_path / "run", {"folder": str(tmp_path), "die": 2}, eval={"every": 240, "episodes": 4})
    assert run.load("last")["step"] == 240
    assert [x["episodes"] for x in run.evaluations()] == [4, 4]
    assert "died (SIGKILL) and was replaced" in (run.path / "train.log").read_text()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_to_all_leave_no_process_and_a_checkpoint(toy, tmp_path, number, status):
    run, flags = tmp_path / "run", "--steps 50M --envs 4 --algo.rollout 5 --eval.every 0 --save.every 0 --env.workers 2"
    command = [sys.executable, "-m", "shoal.cli", "train", "ppo", toy, *flags.split(), "--env.folder", str(tmp_path)]
    command += ["--log.tensorboard", "false", "--log.every", "20", "--env.slow", "0.01", "--compile", "off", "--out", str(run)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # a group of its own, all of which a terminal tells
    assert wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (status, "")
    assert f"shoal resume {run}" in out
    assert len(workers_of(tmp_path) - {process.pid}) == 2
    assert not any(map(alive, workers_of(tmp_path)))
    done = Run(run).load("last")["step"]
    assert done >= 20
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["worker_restarts"] == 0
    shoal.resume(run, steps=done + 40, quiet=True)
    assert Run(run).load("last")["step"] == done + 40


# --- evaluation ---


def test_every_row_plays_as_many_episodes(toy, tmp_path, monkeypatch):
    run = train(toy, tmp_path / "run", {"workers": 0}, steps=30, eval={"every": 0})
    overs, step = [], Host.step
    monkeypatch.setattr(Host, "step", lambda self, *args: [x := step(self, *args), overs.append(x.over)][0])
    played = shoal.evaluate(run, 20)  # at most 16 rows: 10 of 2 each
    ends = torch.stack(overs)
    assert ends.shape[1] == 10
    at = [[-1, *ends[:, i].nonzero().flatten().tolist()] for i in range(10)]
    assert any(len(x) > 3 for x in at)  # some were faster, and what they played on does not count
    assert played.lengths.reshape(2, 10).tolist() == [[x[k + 1] - x[k] for x in at] for k in range(2)]
    assert 4 <= played.lengths.min() < played.lengths.max() <= 12
