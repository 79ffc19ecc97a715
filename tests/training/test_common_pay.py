"""`--reward auto`: the team's mean where an algorithm needs common pay and the world pays each agent its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.cli import main
from shoal.training.loop import Loop
from shoal.training.run import Run
from shoal.training.settings import Settings, resolve
from shoal.training.start import begin

QUICK: dict[str, Any] = {"steps": 16, "envs": 2, "quiet": True, "compile": "off", "eval": {"episodes": 2}}
PLAIN = {"log": {"tensorboard": False, "csv": False}, "net": {"hidden": (8,)}}
SAID = "needs agents that are paid alike: all learn from their team's"


def train(out: Path, algo: str, world: str, **more: Any) -> Run:
    algo_settings = {"rollout": 4, **({} if algo == "coma" else {"capacity": 1000})}
    return shoal.train(algo, world, out=out, **{**QUICK, **PLAIN, "algo": algo_settings, **more})


def said(run: Run) -> list[str]:
    return [x for x in (run.path / "train.log").read_text().splitlines() if SAID in x]


@pytest.mark.parametrize(
    ("algo", "env", "asked", "kept"),
    [
        ("qmix", "simple_spread", "auto", "team-mean"),
        ("coma", "simple_spread", "auto", "team-mean"),
        ("vdn", "simple_world_comm", "auto", "team-mean"),
        ("vdn", "simple_spread", "team-sum", "team-sum"),
        ("vdn", "probe_matrix", "auto", "own"),  # it pays its agents alike
        ("iql", "simple_spread", "auto", "own"),
        ("iql", "simple_spread", "team-mean", "team-mean"),
    ],
)
def test_what_auto_means_is_kept_and_said(tmp_path: Path, algo: str, env: str, asked: str, kept: str) -> None:
    run = train(tmp_path / "r", algo, env, reward=asked)
    assert json.loads((run.path / "config.json").read_text())["run"]["reward"] == kept
    needs = algo != "iql" and kept != "own"
    sum_or_mean = kept.removeprefix("team-")
    sentence = f"{algo.upper()} {SAID} {sum_or_mean} (--reward {kept})."
    assert said(run) == ([sentence] if needs else [])
    assert f'"reward": "{kept}"' in (run.path / "train.log").read_text()
    run = shoal.resume(run, steps=32, quiet=True)
    assert run.settings.run["reward"] == kept
    assert len(said(run)) == needs  # not once more


def test_a_team_that_another_algorithm_plays_is_paid_its_mean_too() -> None:
    """The mean is each team's own."""
    loop = Loop(
        resolve(
            Settings(
                "ippo",
                "simple_tag",
                {"envs": 16, "compile": "off"},
                {"env": {"num_good": 2}, "net": {"hidden": (8,)}},
                {},
                {"adversary": "vdn"},
            )
        )
    )
    assert loop.config.reward == loop.resolved.settings.run["reward"] == "team-mean"
    told = 0
    for _ in range(5):
        batch = loop.collector.collect(4)
        loop.shaping(batch)
        for g in ("adversary", "agent"):
            mean = batch.results[g].reward.mean(-1, keepdim=True).expand_as(batch.learner_reward[g])
            torch.testing.assert_close(batch.learner_reward[g], mean)
            told += int((batch.results[g].reward != mean).any())
    assert told > 0


def test_every_seed_is_paid_as_the_first(tmp_path: Path) -> None:
    """Those that begin in a process of their own, from their config.json, say it as well."""
    runs = train(tmp_path / "r", "vdn", "simple_spread", seeds=2, hook=shoal.Hook())
    assert [(r.settings.run["reward"], len(said(r))) for r in runs] == [("team-mean", 1)] * 2
    assert any(SAID in x for x in begin(runs[1], runs[1].resolve()).remarks)


def test_own_pay_is_refused_where_it_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "qmix", "simple_spread", "--reward", "own", "--out", str(tmp_path / "r")]) == 2
    assert "QMIX needs agents that are paid alike: ask for --reward team-mean" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
