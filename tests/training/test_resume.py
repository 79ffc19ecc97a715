"""Exact resume: a run that was stopped, or killed, and went on equals one that never stopped, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

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


def test_kill_9_in_the_middle(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert shoal("train", "mappo", "simple_spread", *FLAGS, "--out", whole).returncode == 0
    command = [sys.executable, "-m", "shoal.cli", "train", "mappo", "simple_spread", *FLAGS, "--out", str(killed)]
    process = subprocess.Popen(command)
    last, deadline = killed / "checkpoints" / "step-000000003200.pt", time.time() + 60
    while not last.exists() and time.time() < deadline:
        time.sleep(0.01)
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
    flags = ["--steps", "50M", "--envs", "16", "--log.tensorboard", "false", "--save.every", "0"]
    command = [sys.executable, "-m", "shoal.cli", "train", "mappo", "simple_spread", *flags, "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 60
    while not (run / "checkpoints" / "last.pt").exists() and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=30)
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
