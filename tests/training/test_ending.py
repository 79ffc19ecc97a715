"""What a run says at its end: that it fell below its best."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import leaves, metrics

import shoal
from shoal.cli import main
from shoal.log.logger import read_metrics, read_remarks
from shoal.training.ending import mean_and_interval
from shoal.training.hooks import Hook
from shoal.training.loop import Loop
from shoal.training.run import Run

FIELDS = """
    @dataclass(frozen=True)
    class Config(BASE):
        length: int = 8
        at: int = 0  # the step of the fresh episodes at which it signals itself, or naps
        number: int = 0
        nap: float = 0.0
"""
NATIVE = '''
"""Pays the choice itself, 0 or 1, and some luck."""
import os, time
from dataclasses import dataclass
from shoal.envs.base import Move, World
from shoal.spec import Discrete, EnvSpec, Frame, Group, Result

class Choice(World):
    fixed_length = True
    noise_step = 1
FIELDS
    def setup(self):
        self.spec = EnvSpec((Group("agents", "agents", ("a_0",), (1,), Discrete(2)),), horizon=self.config.length)
        self.steps = 0

    def begin(self, noise):
        return {"x": noise.new_zeros(self.rows, 1)}

    def advance(self, state, actions, noise):
        self.steps += 1
        if self.rows == 100 and self.config.at and self.steps >= self.config.at:
            time.sleep(self.config.nap)
            if self.config.number:
                os.kill(os.getpid(), self.config.number)
        return Move(state, {"agents": Result(actions["agents"] + noise - 0.5, self.never(1))})

    def observe(self, state):
        return Frame({"agents": self.view(state["x"][..., None], state["clock"])})
'''.replace("FIELDS", FIELDS.replace("(BASE)", ""))
HOST = '''
"""Pays the choice itself, 0 or 1."""
from dataclasses import dataclass
from shoal.envs.rows import Row
from shoal.envs.vector import Host, HostConfig
from shoal.spec import Discrete, EnvSpec, Group

class ChoiceRow(Row):
    def __init__(self, config):
        self.spec = EnvSpec((Group("agents", "agents", ("a_0",), (1,), Discrete(2)),), horizon=config.length)
        self.length = config.length

    def reset(self, seed, out):
        self.clock = 0
        out.obs["agents"][:] = 0

    def step(self, actions, out):
        self.clock += 1
        out.obs["agents"][:] = 0
        out.reward["agents"][:] = int(actions["agents"][0])
        return self.clock >= self.length

class Choice(Host):
FIELDS
    @classmethod
    def row(cls, config, drawn=False):
        return ChoiceRow(config)
'''.replace("FIELDS", FIELDS.replace("BASE", "HostConfig"))
QUICK: dict[str, Any] = {
    "steps": 120,
    "envs": 2,
    "quiet": True,
    "compile": "off",
    "algo": {"rollout": 5, "epochs": 1, "minibatches": 1, "lr_schedule": "constant"},
    "net": {"hidden": (4,)},
    "eval": {"every": 40, "episodes": 5},
    "log": {"tensorboard": False, "every": 20},
    "save": {"every": 40, "keep": 0},
}
SAID = "The run ends far below its best"


class Plan(Hook):
    """What the policy does from each step on: 1, or 0."""

    def __init__(self, **choices: int):
        self.choices = {int(k.removeprefix("at")): x for k, x in choices.items()}

    def after_iteration(self, loop: Loop) -> None:
        choice = [x for step, x in self.choices.items() if loop.step >= step][-1]
        actor: Any = loop.learners[0].actor
        with torch.no_grad():
            actor.net.body.weights[1].zero_()
            actor.net.body.biases[1].copy_(torch.tensor([5.0, -5.0] if choice == 0 else [-5.0, 5.0]))


FALLS = {"at0": 1, "at90": 0}  # best at 80 (of equals the later one), fallen at 120


@pytest.fixture(params=["native"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A file of its own for each test: modules are loaded once."""
    path = tmp_path / "choice.py"
    path.write_text(HOST if request.param == "host" else NATIVE)
    return str(path)


def train(world: str, out: Path, plan: dict[str, int] | None = None, **more: Any) -> Run:
    sections = {k: {**QUICK[k], **more.pop(k)} for k in ("eval", "save", "log") if k in more}
    return shoal.train("ppo", world, out=out, hook=Plan(**(FALLS if plan is None else plan)), **{**QUICK, **more, **sections})


def lines(run: Run) -> list[str]:
    return [x for x in (run.path / "train.log").read_text().splitlines() if SAID in x]


def test_a_run_that_fell_says_how_far_and_since_when(world: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 steps of 1 or of 0, and 8 times luck of variance 1/12: an interval of 1.98 sqrt(8/12/100) = 0.16."""
    run = train(world, tmp_path / "run", quiet=False)
    (sentence,) = run.remarks
    found = re.fullmatch(
        r"The run ends far below its best: return/agents is (\S+) ± (\S+) at step 120 and was (\S+) ± (\S+) at step 80, each "
        r"over 100 fresh episodes \(95 % intervals\). Play the best by `shoal eval (\S+) --checkpoint best`; a falling "
        r"learning rate \(--algo.lr-schedule linear\) may keep it\.",
        sentence,
    )
    assert found is not None
    now, now_half, then, then_half = map(float, found.groups()[:4])
    assert abs(now) < 0.4
    assert then == pytest.approx(now + 8, abs=0.002)  # the same luck: the same episodes
    assert now_half == then_half == pytest.approx(0.16, abs=0.05)
    assert found[5] == str(run.path)
    out = capsys.readouterr().out
    assert out.count(sentence) == 1
    assert lines(run) == [sentence]
    assert main(["runs", str(tmp_path)]) == 0
    assert f"{run.path}: {sentence}" in capsys.readouterr().out
    (line,) = read_remarks(run.path)
    assert (line["step"], line["about"], line["kind"]) == (120, "ending", "remark")
    assert {x["kind"] for x in read_metrics(run.path)} == {"train", "eval"}  # what draws curves sees no other
    assert "sentence" not in (run.path / "metrics.csv").read_text()


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ({"at0": 1}, {}),  # the best is the last
        ({"at0": 0, "at120": 1}, {}),
        (FALLS, {"eval": {"recheck": False}}),
        (FALLS, {"eval": {"every": 0}}),
        (FALLS, {"save": {"best": "none"}}),
        (FALLS, {"until": 110}),  # it is not at its end
        (FALLS, {"save": {"best": "return_std/agents"}}),  # of all episodes together
    ],
)
def test_where_nothing_is_said(world: str, tmp_path: Path, plan: dict[str, int], more: dict[str, Any]) -> None:
    run = train(world, tmp_path / "run", plan, **more)
    assert (run.remarks, lines(run)) == ([], [])


def test_who_is_as_good_as_its_best_says_nothing(world: str, tmp_path: Path) -> None:
    """Evaluations have luck, here of five episodes; of the two on fresh episodes it is the same."""
    for seed in range(2):
        run = train(world, tmp_path / f"run{seed}", {"at0": 1}, seed=seed, eval={"sampled": True, "every": 5})
        assert (run.remarks, "not compared" in (run.path / "train.log").read_text()) == ([], False)


def test_the_advice_to_a_run_that_was_best_when_it_began(world: str, tmp_path: Path) -> None:
    before = train(world, tmp_path / "before", {"at0": 1})
    run = train(world, tmp_path / "run", {"at0": 0}, init=str(before.path), eval={"every": 1000})
    first, last = (e["return/agents"] for e in run.evaluations())
    assert first > last + 4
    assert "at step 0, each" in run.remarks[0]
    assert run.remarks[0].endswith("; it has learnt nothing yet, and wants more steps or other settings.")


@pytest.mark.parametrize("world", ["host"], indirect=True)
def test_worlds_of_python_play_as_many_episodes_as_an_evaluation(world: str, tmp_path: Path) -> None:
    run = train(world, tmp_path / "run", env={"workers": 0})
    assert "is 0 ± 0 at step 120 and was 8 ± 0 at step 80, each over 5 fresh episodes" in run.remarks[0]


def test_more_steps_replace_what_an_earlier_end_said(world: str, tmp_path: Path) -> None:
    """And the run is, number for number, one that never ended in between."""
    whole = train(world, tmp_path / "whole", {**FALLS, "at170": 1}, steps=240)
    run = train(world, tmp_path / "run")
    assert len(run.remarks) == len(lines(run)) == 1
    again = shoal.resume(run, hook=Plan(**FALLS), quiet=True)  # nothing is left to do: it says the same once more
    assert (again.remarks, lines(run)) == (run.remarks, run.remarks)
    shoal.resume(run, steps=240, hook=Plan(**FALLS, at170=1), quiet=True)
    assert (whole.remarks, run.remarks, lines(run)) == ([], [], [])
    a, b = leaves(whole.load("last")), leaves(run.load("last"))
    tensors = [k for k, x in a.items() if isinstance(x, torch.Tensor)]
    assert len(tensors) > 20
    assert [k for k in tensors if not torch.equal(a[k], b[k])] == []
    assert metrics(run.path)[-1] == metrics(whole.path)[-1]


@pytest.mark.parametrize(("number", "at"), [(signal.SIGTERM, 1), (signal.SIGINT, 11)])  # 8 steps of the last, 8 of the best
def test_a_signal_ends_it_and_a_resume_does_it(world: str, tmp_path: Path, number: int, at: int) -> None:
    plain = train(world, tmp_path / "plain")
    env = {"at": at, "number": int(number)}
    run = train(shutil.copy(world, tmp_path / "same.py"), tmp_path / "run", env=env)
    text = (run.path / "train.log").read_text()
    assert (run.remarks, lines(run), "not compared" in text) == ([], [], False)
    assert metrics(run.path) == metrics(plain.path)
    a, b = leaves(plain.load("last")), leaves(run.load("last"))
    assert all(torch.equal(x, b[k]) for k, x in a.items() if isinstance(x, torch.Tensor))
    loop = _resumed(run)
    assert loop.config.steps == 120
    (sentence,) = plain.remarks
    assert run.remarks == [sentence.replace(str(plain.path), str(run.path))]


def _resumed(run: Run) -> Loop:
    """In a world that does not signal any more."""
    config = run.path / "config.json"
    config.write_text(re.sub(r'"number": \d+', '"number": 0', config.read_text()))
    return shoal.api.go_on(Run(run.path), None, Plan(**FALLS), True, None)


def test_time_ends_it(world: str, tmp_path: Path) -> None:
    """A step of the fresh episodes takes longer than training may."""
    began = time.monotonic()
    run = train(world, tmp_path / "run", env={"at": 1, "nap": 2.1}, time="2s")
    assert time.monotonic() - began < 30
    log = (run.path / "train.log").read_text()
    assert (run.remarks, "The end was not compared with the best: --time 2s is up." in log) == ([], True)
    assert run.load("last")["step"] == 120


def test_a_process_that_is_killed_in_the_middle_leaves_a_whole_run(world: str, tmp_path: Path) -> None:
    plain = train(world, tmp_path / "plain")
    copy = shutil.copy(world, tmp_path / "same.py")
    if (child := os.fork()) == 0:
        try:
            train(copy, tmp_path / "run", env={"at": 11, "number": int(signal.SIGKILL)})
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    run = Run(tmp_path / "run")
    assert run.remarks == []
    assert metrics(run.path) == metrics(plain.path)
    _resumed(run)
    assert len(run.remarks) == 1


def test_several_seeds_say_it_each(world: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = train(world, tmp_path / "runs", seeds=2, quiet=False)
    out = capsys.readouterr().out.splitlines()
    for k, run in enumerate(runs):
        assert len(run.remarks) == 1
        assert f"seed {k}  {run.remarks[0]}" in out


def test_a_best_that_cannot_be_read_is_no_failure(world: str, tmp_path: Path) -> None:
    class Spoil(Plan):
        def after_iteration(self, loop: Loop) -> None:
            super().after_iteration(loop)
            if loop.step == 120:
                (loop.folder.checkpoints / "best.pt").write_bytes(b"nothing")

    run = shoal.train("ppo", world, out=tmp_path / "run", hook=Spoil(**FALLS), **QUICK)
    assert run.remarks == []
    assert "The end was not compared with the best: " in (run.path / "train.log").read_text()


def test_intervals_are_students() -> None:
    """Quantiles of the tables."""
    for n, quantile in ((4, 3.182), (11, 2.228), (31, 2.042), (101, 1.984), (10_001, 1.960)):
        x = torch.arange(n) % 2
        mean, half = mean_and_interval(x.double())
        assert mean == pytest.approx(float(x.double().mean()))
        assert half * math.sqrt(n) / float(x.double().std()) == pytest.approx(quantile, rel=0.005)
    assert mean_and_interval(torch.tensor([3.0])) == (3.0, math.inf)
