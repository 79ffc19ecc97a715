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
        (["--regroup", "train=agent_0", "rest=agent_1,agent_2"], "a group 'train', which PyTorch's modules call something of"),
        (["--regroup", "agents=agent_0", "b=agent_1,agent_2"], "a group 'agents', and so is a team of other agents called"),
        (["--regroup", "a" * 65 + "=agent_0", "b=agent_1,agent_2"], "it takes GROUP=AGENT,AGENT GROUP=AGENT"),
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
    assert main(["train", "--regroup", "b=agent_2", "ippo", "simple_spread", "--regroup=a=agent_0, agent_1", *words]) == 0
    assert shoal.load("r") is not None
    recorded = json.loads(Path("r/config.json").read_text())
    assert [g["name"] for g in recorded["world"]["spec"]["groups"]] == ["b", "a"]


@pytest.mark.parametrize(("algorithm", "env"), [("maddpg", "simple_tag"), ("qmix", "simple_tag")])
def test_a_group_that_stays_beside_one_that_is_parted(algorithm: str, env: str, tmp_path: Path) -> None:
    """A central critic's inputs, and a learner of several groups, are those of then."""
    run = shoal.train(algorithm, env, **SHORT, out=str(tmp_path / "a"), algo={"learning_starts": 400})
    before = shoal.evaluate(run, 20, seed=1).returns
    words = "lead=adversary_0 rest=adversary_1,adversary_2 agent=agent_0"
    after = shoal.evaluate(run, 20, seed=1, regroup=words).returns
    assert torch.equal(torch.cat([after["lead"], after["rest"]], -1), before["adversary"])
    assert torch.equal(after["agent"], before["agent"])
    by_dict = {"lead": "adversary_0", "rest": ["adversary_1", "adversary_2"], "agent": ["agent_0"]}
    assert torch.equal(shoal.evaluate(run, 20, seed=1, regroup=by_dict).returns["rest"], after["rest"])


def test_one_learner_of_two_groups_is_parted(tmp_path: Path) -> None:
    run = shoal.train("vdn", "simple_spread", **SHORT, regroup="a=agent_0 b=agent_1,agent_2", out=str(tmp_path / "a"))
    before = shoal.evaluate(run, 20, seed=1).returns
    after = shoal.evaluate(run, 20, seed=1, regroup="a=agent_0 c=agent_1 d=agent_2").returns
    assert torch.equal(torch.cat([after["c"], after["d"]], -1), before["b"])
    assert torch.equal(after["a"], before["a"])


def test_teams_follow_their_agents_in_an_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("vmas")
    how = {**SHORT, "steps": 400, "env": {"teams": "red=a+b"}, "out": str(tmp_path / "a")}
    run = shoal.train("ippo", "vmas/balance", **how, regroup="a=agent_0 b=agent_1,agent_2")
    returns = shoal.evaluate(run, 2, regroup="x=agent_0 y=agent_1 z=agent_2").returns
    assert set(returns) == {"x", "y", "z"}


def test_a_setting_of_a_worlds_own_that_is_called_groups(tmp_path: Path) -> None:
    own = tmp_path / "herds.py"
    own.write_text(
        "from dataclasses import dataclass\n\nfrom shoal.envs.mpe.simple_spread import SimpleSpread\n\n\n"
        "class Herds(SimpleSpread):\n    @dataclass(frozen=True)\n    class Config(SimpleSpread.Config):\n"
        "        groups: int = 2  # how many herds\n"
    )
    world = shoal.make(str(own), regroup={"a": ["agent_0"], "b": ["agent_1", "agent_2"]})
    assert [g.name for g in world.spec.groups] == ["a", "b"]
    assert world.inner.config.groups == 2  # type: ignore[attr-defined]


def test_what_is_no_grouping_is_refused_from_python() -> None:
    with pytest.raises(shoal.UserError, match="regroup is 3: it takes a text as --regroup does, or a dict"):
        shoal.make("simple_spread", regroup=3)
