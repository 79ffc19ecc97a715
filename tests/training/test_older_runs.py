"""Runs that an older version made resume, evaluate and load: `data/older_runs` has one of each kind, stopped at half of its
steps, and the weights that the older version came to at the end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import shoal
from shoal.training import checkpoint

RUNS = Path(__file__).parents[1] / "data" / "older_runs"


@pytest.fixture(params=["mappo", "qmix", "matd3"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUNS / request.param, tmp_path / request.param))


def test_an_older_run_goes_on_as_it_would_have(run: Path) -> None:
    expected = torch.load(run / "expected.pt", weights_only=True)
    shoal.resume(run, quiet=True)
    state = checkpoint.read(run / "checkpoints" / "last.pt")
    assert state["step"] == expected["step"] == 400
    compared = 0
    for group, weights in expected["algorithms"].items():
        mine = state["algorithms"][group]
        for name, x in checkpoint.renamed(weights, mine).items():
            torch.testing.assert_close(mine[name], x, rtol=1e-4, atol=1e-5)
            compared += 1
    assert compared >= 9


def test_an_older_run_is_evaluated_and_loaded(run: Path) -> None:
    episodes = shoal.evaluate(run, episodes=4, checkpoint="last")
    assert episodes.returns["agents"].shape == (4, 3)
    policy = shoal.load(run, checkpoint="last")
    assert "agent_0" in repr(policy)


def test_weights_of_an_older_run_begin_a_new_one(run: Path, tmp_path: Path) -> None:
    env = {"actions": "continuous"} if run.name == "matd3" else {}
    reward = "team-mean" if run.name == "qmix" else "own"
    algo = {"mixer_width": 4, "hyper_width": 8} if run.name == "qmix" else {}
    begun = shoal.train(
        run.name, "simple_spread", init=run, env=env, reward=reward, algo=algo, net={"hidden": (8,)}, envs=4, steps=4,
        quiet=True, out=tmp_path / "new",
    )  # fmt: skip
    old, new = (checkpoint.read(r / "checkpoints" / "last.pt") for r in (run, begun.path))
    (theirs,) = old["algorithms"].values()
    (mine,) = new["algorithms"].values()
    known = {k for k in mine if not k.startswith("reward_norm.")}  # QMIX had no statistics of rewards: they begin anew
    assert set(checkpoint.renamed(theirs, mine)) == known


def test_a_name_that_an_algorithm_has_now_is_no_old_one() -> None:
    """A user's own algorithm may call a buffer `whole`."""
    theirs = {"whole": 1, "wild": 2, "sight.mean": 3}
    assert checkpoint.renamed(theirs, ["whole", "warmup", "observations.mean"]) == {
        "whole": 1,
        "warmup": 2,
        "observations.mean": 3,
    }


def test_a_world_of_before_imports_results_by_their_old_name() -> None:
    assert shoal.spec.Pay is shoal.spec.Result
