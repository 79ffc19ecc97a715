"""Exact resume: a run that was stopped, or killed, and went on equals one that never stopped, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import wait_for

import shoal as shoal_api
from shoal.training import checkpoint
from shoal.training.diverged import DivergedError
from shoal.training.run import Run

FLAGS = (
    "--steps 12800 --envs 16 --algo.rollout 20 --algo.normalise-obs true --algo.lr-schedule linear --algo.weight-decay 1e-3 "
    "--eval.every 3000 --eval.episodes 8 --save.every 1600 --log.every 700 --log.tensorboard false --quiet --seed 3"
).split()


def shoal(*args, **kwargs):
    return subprocess.run([sys.executable, "-m", "shoal.cli", *map(str, args)], capture_output=True, text=True, **kwargs)


def leaves(tree, path=""):
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, x in items for k, v in leaves(x, f"{path}/{key}").items()}
    return {path: tree}


def metrics(folder):
    return [{k: v for k, v in line.items() if k != "time"} for line in Run(folder).metrics]


def assert_same(a, b):
    """Every tensor of the last checkpoints, and every metric but time."""
    mine, theirs = leaves(Run(a).load("last")), leaves(Run(b).load("last"))
    assert mine.keys() == theirs.keys()
    tensors = [k for k, x in mine.items() if isinstance(x, torch.Tensor)]
    assert len(tensors) > 30
    assert [k for k in tensors if not torch.equal(mine[k], theirs[k])] == []
    assert mine["/step"] == theirs["/step"] == 12800
    assert metrics(a) == metrics(b)
    assert {line["kind"] for line in metrics(a)} == {"train", "eval"}
    steps = [line.split(",")[0] for line in (a / "train.log").read_text().splitlines() if line.startswith("Step:")]
    assert steps == [line.split(",")[0] for line in (b / "train.log").read_text().splitlines() if line.startswith("Step:")]


@pytest.mark.parametrize(
    ("algo", "env", "extra"),
    [
        ("ppo", "simple", ["--env.actions", "continuous"]),
        ("ippo", "simple_tag", ["--net.share", "none", "--algo.agent.lr", "1e-3"]),
        ("mappo", "simple_spread", []),
        ("mappo", "probe_deaths", []),
    ],
)
def test_until_and_resume_equal_one_run(tmp_path, algo, env, extra):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert shoal("train", algo, env, *FLAGS, *extra, "--out", whole).returncode == 0
    assert shoal("train", algo, env, *FLAGS, *extra, "--out", halves, "--until", 6400).returncode == 0
    assert Run(halves).load("last")["step"] == 6400
    assert shoal("resume", halves).returncode == 0
    assert_same(whole, halves)


def test_a_remark_is_in_the_log_once(tmp_path):
    run = shoal_api.train("ddqn", "simple", steps=400, until=200, out=tmp_path / "r", **{**QUICK, "algo": {"capacity": 400}})
    shoal_api.resume(run, quiet=True)
    log = (run.path / "train.log").read_text()
    assert log.count("\nThe replay holds 400 steps in ") == 1


def test_kill_9_in_the_middle(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert shoal("train", "mappo", "simple_spread", *FLAGS, "--out", whole).returncode == 0
    command = [sys.executable, "-m", "shoal.cli", "train", "mappo", "simple_spread", *FLAGS, "--out", str(killed)]
    process = subprocess.Popen(command)
    assert wait_for((killed / "checkpoints" / "step-000000003200.pt").exists)
    time.sleep(0.05)  # somewhere past a checkpoint
    process.kill()
    assert process.wait() == -signal.SIGKILL
    at = Run(killed).load("last")["step"]
    assert 3200 <= at < 12800
    assert shoal("resume", killed).returncode == 0
    assert_same(whole, killed)


def test_same_seed_same_metrics_and_other_seed_others(tmp_path):
    short = ["--steps", "1600", "--envs", "16", "--algo.rollout", "20", "--eval.episodes", "4", "--quiet"]
    short += ["--log.tensorboard", "false"]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert shoal("train", "ippo", "simple_spread", *short, "--seed", seed, "--out", tmp_path / name).returncode == 0
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_leave(tmp_path, number, status):
    run = tmp_path / "run"
    flags = ["--steps", "50M", "--envs", "16", "--log.tensorboard", "false", "--log.every", "1", "--save.every", "0"]
    command = [sys.executable, "-m", "shoal.cli", "train", "mappo", "simple_spread", *flags, "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_for(lambda: (run / "metrics.jsonl").exists() and '"train"' in (run / "metrics.jsonl").read_text())
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == status
    assert err == ""
    assert f"shoal resume {run}" in out
    state = Run(run).load("last")
    assert state["step"] > 0
    assert json.loads((run / "config.json").read_text())["run"]["steps"] == 50_000_000
    assert not list(run.rglob("*.part"))


def test_resume_with_a_new_total(tmp_path):
    run = tmp_path / "run"
    assert shoal("train", "mappo", "simple_spread", *FLAGS, "--out", run).returncode == 0
    assert shoal("resume", run, "--steps", 16000, "--quiet").returncode == 0
    assert Run(run).load("last")["step"] == 16000
    assert metrics(run)[-1]["step"] == 16000
    refused = shoal("resume", run, "--steps", 100)
    assert refused.returncode == 2
    assert "has done 16000 already" in refused.stderr


# --- odd places ---

QUICK = {"envs": 8, "quiet": True, "algo": {"rollout": 10}, "eval": {"episodes": 4}, "log": {"tensorboard": False}}


class Crash(shoal_api.Hook):
    def before_iteration(self, loop):
        raise KeyboardInterrupt


def test_from_the_checkpoint_of_step_0(tmp_path):
    """The first evaluation is in that checkpoint, and is not done twice."""
    whole = shoal_api.train("ippo", "simple", steps=1600, out=tmp_path / "a", **QUICK)
    with pytest.raises(KeyboardInterrupt):
        shoal_api.train("ippo", "simple", steps=1600, out=tmp_path / "b", hook=Crash(), **QUICK)
    broken = shoal_api.resume(tmp_path / "b", quiet=True)
    assert metrics(whole.path) == metrics(broken.path)
    a, b = whole.load("last"), broken.load("last")
    assert a["evaluations"] == b["evaluations"]
    assert torch.equal(a["evaluation_sum"], b["evaluation_sum"])


def test_from_before_the_first_checkpoint(tmp_path):
    whole = shoal_api.train("ippo", "simple", steps=800, out=tmp_path / "a", **QUICK)
    other = shoal_api.train("ippo", "simple", steps=800, out=tmp_path / "b", **QUICK)
    best = other.load("best")  # that of step 0 is written before the first checkpoint
    for path in (*other.checkpoints.iterdir(), other.path / "train.log"):
        path.unlink()
    lines = (other.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other.path / "metrics.jsonl").write_text(lines[0] + lines[1][:20])
    checkpoint.write(other.checkpoints / "best.pt", {**best, "step": 0})
    shoal_api.resume(other, quiet=True)
    assert metrics(whole.path) == metrics(other.path)
    lines = [len((run.path / "train.log").read_text().splitlines()) for run in (whole, other)]
    assert lines[0] == lines[1]  # with the header


def test_groups_played_by_several_algorithms(tmp_path):
    """Each keeps settings of its own, whatever the defaults of the run's main algorithm are."""
    team = {"adversary": "mappo"}
    runs = [tmp_path / "a", tmp_path / "b"]
    for path, until in zip(runs, (None, 800), strict=True):
        shoal_api.train("ippo", "simple_tag", steps=1600, until=until, out=path, team=team, **QUICK)
    config = json.loads((runs[1] / "config.json").read_text())["players"]
    assert (config["adversary"]["algo"]["critic"], config["agent"]["algo"]["critic"]) == ("world", "own")
    shoal_api.resume(runs[1], quiet=True)
    assert metrics(runs[0]) == metrics(runs[1])
    shoal_api.evaluate(runs[1], 4)


def test_an_opponent_is_kept_in_the_run(tmp_path):
    shoal_api.train("ippo", "simple_tag", steps=800, out=tmp_path / "opp", **QUICK)
    run = shoal_api.train(
        "ippo", "simple_tag", steps=1600, until=800, out=tmp_path / "r", team={"adversary": str(tmp_path / "opp")}, **QUICK
    )
    before = shoal_api.evaluate(run, 8).returns["adversary"]
    shutil.rmtree(tmp_path / "opp")
    assert torch.equal(shoal_api.evaluate(run, 8).returns["adversary"], before)
    kept = run.load("last")["algorithms"]["adversary"]
    shoal_api.resume(run, quiet=True)
    assert all(torch.equal(x, kept[k]) for k, x in run.load("last")["algorithms"]["adversary"].items())


MINE = '''"""Moves right."""
import torch
from shoal.algos.base import Acted
from shoal.algos.random import Random


class Mine(Random):
    def act(self, frame, memory, noise, explore):
        actions = {g: torch.full(frame[g].active.shape, SIDE) for g in self.groups}
        return Acted(actions, memory, {g: {} for g in self.groups})
'''


def test_a_users_own_file_is_kept_in_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE.replace("SIDE", "2"))
    run = shoal_api.train("./mine.py", "simple", steps=800, until=400, out=tmp_path / "r", **{**QUICK, "algo": {}})
    before = shoal_api.evaluate(run, 4).returns["agents"]
    (tmp_path / "mine.py").write_text(MINE.replace("SIDE", "1"))
    monkeypatch.chdir("/")
    assert torch.equal(shoal_api.evaluate(run.path, 4).returns["agents"], before)
    shoal_api.resume(run.path, quiet=True)
    assert run.load("last")["step"] == 800


def test_a_new_total_outlives_an_interruption(tmp_path):
    class Stop(shoal_api.Hook):
        def after_iteration(self, loop):
            if loop.step >= 1200:
                loop.stop("enough")

    run = shoal_api.train("ippo", "simple", steps=800, out=tmp_path / "r", **QUICK)
    shoal_api.resume(run, steps=2400, hook=Stop(), quiet=True)
    assert run.load("last")["step"] == 1200
    shoal_api.resume(run, quiet=True)
    assert run.load("last")["step"] == 2400


def test_init_takes_weights_for_those_who_learn_alone(tmp_path):
    one = shoal_api.train("ippo", "simple_tag", steps=800, out=tmp_path / "one", **QUICK)
    two = shoal_api.train("ippo", "simple_tag", steps=800, seed=7, out=tmp_path / "two", **QUICK)
    for who in (str(two.path), "random"):
        run = shoal_api.train(
            "ippo",
            "simple_tag",
            steps=1,
            until=1,
            init=str(one.path),
            team={"adversary": who},
            out=tmp_path / Path(who).name / "x",
            **QUICK,
        )
        first = run.load("best")["algorithms"]
        assert float(first["agent"]["actor_optimiser.steps"]) in (0, 16)
        if who != "random":
            theirs = two.load("best")["algorithms"]["adversary"]
            assert torch.equal(first["adversary"]["actor.net.body.weights.0"], theirs["actor.net.body.weights.0"])


def test_a_run_of_another_device_is_played_here(tmp_path):
    run = shoal_api.train("ippo", "simple", steps=400, out=tmp_path / "r", **QUICK)
    path = run.path / "config.json"
    path.write_text(path.read_text().replace('"device": "auto"', '"device": "cuda:7"'))
    shoal_api.evaluate(run.path, 4, device="cpu")
    shoal_api.load(run.path)
    shoal_api.resume(run.path, steps=800, quiet=True, device="cpu")


def test_a_reader_that_goes_away_does_not_stop_training(tmp_path):
    flags = ["--steps", "4000", "--envs", "8", "--eval.every", "400", "--eval.episodes", "4", "--log.tensorboard", "false"]
    command = [sys.executable, "-m", "shoal.cli", "train", "ippo", "simple", *flags, "--out", str(tmp_path / "r")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert process.stderr.read() == b""
    assert Run(tmp_path / "r").load("last")["step"] == 4000


def test_no_weight_that_is_not_finite_is_ever_saved(tmp_path):
    """A step may end where the next gradient would show it: it is looked at before anything is written."""

    class Poison(shoal_api.Hook):
        def after_iteration(self, loop):
            if loop.step == 480:
                loop.learners[0].actor.net.body.weights[0].data[0, 0] = float("inf")

    with pytest.raises(DivergedError):
        shoal_api.train("ippo", "simple", steps=1600, hook=Poison(), out=tmp_path / "r", **QUICK)
    for name in ("last", "best"):
        state = Run(tmp_path / "r").load(name)
        assert state["step"] < 480
        assert all(x.isfinite().all() for x in state["algorithms"]["agents"].values())
