"""The files that CONTRIBUTING.md prints, exactly as printed: they pass the probes the first time, and every check."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.api import make
from shoal.cli import main
from shoal.envs.probe.base import Valued
from shoal.ids import find, load_module
from shoal.tools.contract import check_contract
from shoal.training.evaluate import evaluate
from shoal.training.loop import Loop
from shoal.training.run import Run
from shoal.training.settings import Settings, resolve

ROOT = Path(__file__).parent.parent
BLOCKS = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.+?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL))
GAMMA = 0.9
LONG = {"rollout": 16, "lr": 1e-2, "lr_schedule": "linear", "gamma": GAMMA, "entropy": 0.005}
REPLAY = {"every": 32, "batch": 128, "capacity": 20_000, "learning_starts": 1_000, "epsilon_steps": 30_000, "target_every": 50}
REPLAY |= {"target_tau": 1.0, "huber": 1.0, "n_step": 1, "epsilon_keep": 0.0}
PROBES = [  # world, its settings, settings of the nets
    ("probe_deaths", {}, {}),
    ("probe_turns", {}, {}),
    ("probe_illegal", {}, {}),
    ("probe_image", {}, {}),
    ("probe_truncated", {"stagger": True, "n": 2}, {}),
    ("probe_memory", {}, {"memory": "gru", "memory_width": 32}),
    ("probe_deaths", {}, {"memory": "gru", "memory_width": 32}),
]


@pytest.fixture
def mine(tmp_path):
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_there_are_three_files():
    assert set(BLOCKS) == {"plain.py", "hysteretic.py", "line.py"}
    assert (ROOT / "CONTRIBUTING.md").read_text().count("```python") == len(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_they_are_formatted(mine, name):
    config = ["--config", str(ROOT / "pyproject.toml"), str(mine / name)]
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_they_are_typed(mine):
    words = ["mypy", "--config-file", str(ROOT / "pyproject.toml"), *(str(mine / name) for name in BLOCKS)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def solved(loop):
    world = make(loop.resolved.settings.env, 256, **loop.resolved.settings.section("env"))
    seen = evaluate(world, loop.players, 1, seed=7)
    short = {g: float(x.mean()) for g, x in seen.returns.items() if float(x.mean()) < world.answer.floor[g] - 1e-6}
    wrong = {}
    if isinstance(world, Valued) and not loop.learners[0].recurrent:
        frames, truth = world.frames(), world.values(GAMMA)
        batch = dataclasses.replace(frames, views={g: _timed(v) for g, v in frames.views.items()})
        for a in loop.learners:
            (g,) = a.groups
            with torch.no_grad():
                error = (a.values(batch)[0] - truth[g])[frames[g].active].abs().max()
            if error >= 0.12 * max(1.0, float(truth[g].abs().max())):
                wrong[g] = float(error)
    return not short and not wrong, (short, wrong)


def _timed(view):
    return type(view)(*(None if x is None else x[None] for x in vars(view).values()))


@pytest.mark.parametrize(
    ("env", "config", "net"), PROBES, ids=["-".join((e, *map(str, (c | n).values()))) for e, c, n in PROBES]
)
@pytest.mark.parametrize("name", ["plain.py", "hysteretic.py"])
def test_probes(mine, name, env, config, net):
    algo = LONG if name == "plain.py" else {**LONG, **REPLAY, "lr": 3e-3}
    algo = {k: v for k, v in algo.items() if name == "plain.py" or k != "entropy"}
    if name == "hysteretic.py" and net:
        algo |= {"chunk": 8, "burn_in": 1, "batch": 64}
    rounds = 200
    sections = {"algo": algo, "net": {"hidden": (32,), "activation": "tanh", **net}, "env": config}
    run = {"envs": 32, "steps": rounds * 16 * 32, "quiet": True}
    loop = Loop(resolve(Settings(str(mine / name), env, run, sections)))
    for k in range(1, rounds + 1):
        loop.iterate()
        if k % 10 == 0 and solved(loop)[0]:
            return
    assert solved(loop)[0], solved(loop)[1]


def test_hysteresis_is_in_the_loss(mine):
    """Errors of 2 and -2, halves of their squares, the second weighed by 0.4."""
    cls = find("algos", str(mine / "hysteretic.py")).load()
    a = object.__new__(cls)
    torch.nn.Module.__init__(a)
    a.config = cls.Config(huber=None)
    assert a.td_loss(torch.tensor([0.0, 2.0]), torch.tensor([2.0, 0.0])).tolist() == pytest.approx([2.0, 0.8])


def test_from_the_command_line(mine, tmp_path):
    flags = ["--steps", "3200", "--envs", "16", "--eval.episodes", "4", "--log.tensorboard", "false", "--quiet"]
    words = ["train", str(mine / "plain.py"), str(mine / "line.py"), *flags, "--out", str(tmp_path / "r")]
    assert main(words) == 0
    assert "agents/policy_loss" in Run(tmp_path / "r").metrics[-2]
    assert main(["resume", str(tmp_path / "r"), "--steps", "4000", "--quiet"]) == 0
    assert main(["check", str(mine / "line.py"), "--steps", "200"]) in (0, None)


def test_the_world_keeps_the_contract_and_is_learnt(mine):
    world = load_module(find("envs", str(mine / "line.py"))).Line
    check_contract(world(rows=4))
    run = {"envs": 64, "steps": 64 * 25 * 40, "quiet": True}
    loop = Loop(resolve(Settings("ppo", str(mine / "line.py"), run, {"algo": {"lr": 3e-3}, "env": {"slip": 0.0}})))
    for _ in range(40):
        loop.iterate()
    assert float(evaluate(loop.eval_env, loop.players, 2, seed=3).returns["agents"].mean()) > 0.95
