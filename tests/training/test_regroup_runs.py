"""Runs with groups as the user says: each has settings, nets and metrics of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.cli import main

ALONE = "a=agent_0 b=agent_1 c=agent_2"
SHORT: dict[str, Any] = {"steps": 1600, "envs": 8, "quiet": True, "eval": {"episodes": 8}}


def test_every_setting_is_one_agents(tmp_path: Path) -> None:
    """An algorithm, a rate, nets and metrics for each; and a run that stopped half way ends as one that did not."""

    def train(name: str, **how: Any) -> Any:
        groups = {"fast": {"algo": {"lr": 5e-4}, "net": {"hidden": (8,)}}}
        return shoal.train(
            "ppo",
            "simple_spread",
            **SHORT | how,
            algo={"rollout": 25},
            regroup="fast=agent_1 slow=agent_0,agent_2",
            groups=groups,
            team={"slow": "maddpg"},
            out=str(tmp_path / name),
            save={"nets": True},
        )

    whole = train("a")
    line = next(x for x in reversed(whole.metrics) if x["kind"] == "train")
    assert {"fast/learning_rate", "slow/loss_critic"} <= set(line)
    assert {"return/fast", "return/slow", "return/slow/1"} <= set(whole.evaluations()[-1])
    assert {p.name.partition(".")[0] for p in (whole.checkpoints / "nets" / "last").glob("*.pt")} == {"fast", "slow"}
    half = train("b", until=800)
    shoal.resume(half, quiet=True)
    a, b = whole.load()["algorithms"], half.load()["algorithms"]
    assert set(a) == {"fast", "slow"} == set(b)
    assert all(torch.equal(x, b[g][k]) for g in a for k, x in a[g].items())


def test_parts_of_a_group_play_as_the_whole_did(tmp_path: Path) -> None:
    """A run that learnt three agents as one, played in other groups: greedily the very same episodes."""
    run = shoal.train("ippo", "simple_spread", **SHORT, out=str(tmp_path / "a"), net={"memory": "gru", "share": "none"})
    as_one = shoal.evaluate(run, 20, seed=1).returns["agents"]
    parted = shoal.evaluate(run, 20, seed=1, regroup="z=agent_2 x=agent_0,agent_1").returns
    assert torch.equal(torch.cat([parted["x"], parted["z"]], -1), as_one)
    turned = shoal.evaluate(run, 20, seed=1, regroup="agents=agent_2,agent_1,agent_0").returns["agents"]
    assert torch.equal(turned.flip(-1), as_one)
    other = shoal.evaluate(run, 20, seed=1, regroup="x=agent_0,agent_1 z=agent_2", team={"z": "random"}, sampled=True)
    assert not torch.equal(other.returns["x"], as_one[:, :2])


def test_two_seats_of_a_game_are_played_by_different_policies(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    how = {**SHORT, "steps": 400, "env": {"workers": 0}, "out": str(tmp_path / "a")}
    run = shoal.train("ppo", "pettingzoo/classic.tictactoe_v3", **how)
    seats = "first=player_1 second=player_2"
    one = shoal.evaluate(run, 40, seed=2, sampled=True, regroup=seats, team={"second": "random"}).returns
    turned = {"first": "random", "second": str(run.path)}
    two = shoal.evaluate(run, 40, seed=2, sampled=True, regroup=seats, team=turned).returns
    for played in (one, two):
        assert torch.equal(played["first"], -played["second"])
    assert not torch.equal(one["first"], two["first"])


def test_what_was_learnt_apart_is_not_joined(tmp_path: Path) -> None:
    run = shoal.train("ippo", "simple_spread", **SHORT, regroup=ALONE, out=str(tmp_path / "a"))
    with pytest.raises(shoal.UserError, match=r"learnt the agents of 'x' in the groups a and b: --regroup may part them, not"):
        shoal.evaluate(run, 4, regroup="x=agent_0,agent_1 c=agent_2")
    assert json.loads((run.path / "config.json").read_text())["run"]["regroup"] == ALONE


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--regroup", "a=agent_0", "b=agent_1"], "--regroup leaves out agent_2"),
        (["--regroup", "a=agent_0,agent_1", "b=agent_1,agent_2"], "has 'agent_1' twice"),
        (["--regroup", "a=nobody"], "has 'nobody': the agents are agent_0, agent_1, agent_2"),
        (["--regroup", "a=agent_0", "b=agent_1,agent_2", "--algo.c.lr", "1"], "there is no group 'c' here"),
        (["--env.groups", "a=agent_0"], "--env.groups is --regroup now"),
        (["--regroup"], "--regroup was given no value"),
    ],
)
def test_a_wrong_word_is_a_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "mappo", "simple_spread", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_words_after_the_flag_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--steps", "200", "--envs", "4", "--quiet", "--out", "r", "--eval.episodes", "2"]
    assert main(["train", "--regroup", "b=agent_2", "a=agent_0,agent_1", "ippo", "simple_spread", *words]) == 0
    assert shoal.load("r") is not None
    recorded = json.loads(Path("r/config.json").read_text())
    assert [g["name"] for g in recorded["world"]["spec"]["groups"]] == ["b", "a"]
