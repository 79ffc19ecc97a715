"""The command line: what people type, right and wrong. A mistake is one sentence, exit status 2, and nothing written."""

import json
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.cli import main, read
from shoal.training.run import Run

TINY = [
    "--steps",
    "400",
    "--envs",
    "4",
    "--algo.rollout",
    "10",
    "--eval.episodes",
    "2",
    "--log.tensorboard",
    "false",
    "--quiet",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "spread"
    assert main(["train", "mappo", "simple_spread", *TINY, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def tag(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "tag"
    assert main(["train", "ippo", "simple_tag", *TINY, "--out", str(path)]) == 0
    return path


def files(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(capsys, *argv):
    """The one sentence on stderr."""
    assert main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shoal: ")
    assert err.count("\n") == 1
    assert err.rstrip().endswith(".")
    return err


WRONG = [
    ("mapo simple_spread", ["'mapo'", "'mappo'"]),
    ("mappo simple_spred", ["'simple_spred'", "'simple_spread'"]),
    ("mappo", ["an algorithm and an environment"]),
    ("mappo simple_spread --stpes 5", ["--stpes", "'steps'"]),
    ("mappo simple_spread --algo.gama 0.9", ["--algo.gama", "'algo.gamma'"]),
    ("mappo simple_spread --steps 0", ["--steps is 0"]),
    ("mappo simple_spread --steps -5", ["--steps is -5"]),
    ("mappo simple_spread --steps many", ["--steps is 'many'", "whole number"]),
    ("mappo simple_spread --steps nan", ["whole number"]),
    ("mappo simple_spread --steps 1e400", ["whole number"]),
    ("mappo simple_spread --envs 0", ["--envs is 0"]),
    ("mappo simple_spread --envs 1.5", ["whole number"]),
    ("mappo simple_spread --algo.lr fast", ["--algo.lr is 'fast'"]),
    ("mappo simple_spread --algo.lr nan", ["--algo.lr is nan"]),
    ("mappo simple_spread --algo.gamma 1.5", ["--algo.gamma is 1.5"]),
    ("mappo simple_spread --env.actions discreet", ["'discreet'", "'discrete'"]),
    ("mappo simple_spread --env.n 0", ["--env.n is 0"]),
    ("mappo simple_line --env.rules openai", ["no simple_line"]),
    ("mappo simple_spread --net.hidden 64,0", ["--net.hidden"]),
    ("mappo simple_spread --algo.agnts.lr 1e-3", ["'agnts'", "'agents'"]),
    ("mappo simple_spread --algo.agents.lrr 1e-3", ["'lrr'", "'lr'"]),
    ("mappo simple_spread --team.agnts random", ["'agnts'", "'agents'"]),
    ("mappo simple_spread --team.agents nobody", ["'nobody'", "neither an algorithm nor a run"]),
    ("mappo simple_spread --time soon", ["--time is 'soon'"]),
    ("mappo simple_spread --save.best return/agent", ["'return/agent'", "'return/agents'"]),
    ("mappo simple_spread --eval.episodes 0", ["--eval.episodes is 0"]),
    ("mappo simple_spread --reward shared", ["'shared'", "team-mean"]),
    ("mappo simple_spread --device cuda", ["no CUDA device"]),
    ("mappo simple_spread --device tpu", ["'tpu'"]),
    ("mappo probe_copy --render", ["probe_copy"]),
    ("mappo simple_spread --config nowhere.json", ["nowhere.json"]),
    ("mappo simple_spread --init nowhere", ["'nowhere' is no run"]),
    ("./nowhere.py simple_spread", ["./nowhere.py"]),
    ("mappo simple_spread --threads 100000", ["--threads is 100000"]),
    ("mappo simple_spread --algo.clip nan", ["--algo.clip is nan"]),
    ("mappo simple_spread --algo.clip -1", ["--algo.clip is -1"]),
    ("mappo simple_spread --algo.grad-clip 0", ["--algo.grad-clip is 0"]),
    ("mappo simple_spread --algo.log-std 100", ["--algo.log-std is 100"]),
    ("mappo simple_spread --save.keep -7", ["--save.keep is -7"]),
    ("mappo simple_spread --stop-score nan", ["--stop-score is nan"]),
    ("mappo simple_spread --envs 1e12", ["not enough memory"]),
    ("mappo simple_spread --envs 1e18", ["--envs", "not enough memory"]),
    ("mappo simple_spread --envs 1e9", ["not enough memory"]),
    ("mappo simple_spread --net.hidden 9223372036854775807", ["--net.hidden", "not enough memory"]),
    ("mappo simple_spread --net.convolutions 9223372036854775807x3/1", ["--net.convolutions", "not enough memory"]),
    ("mappo simple_spread --env.n 1e18", ["--env.n", "at most"]),
    ("mappo simple_tag --env.num-good 9223372036854775807", ["--env.num-good", "at most"]),
    ("mappo probe_memory --env.n 1e12", ["--env.n", "1000"]),
    ("mappo simple_spread --algo.rollout 1e18", ["--algo.rollout", "at most"]),
    ("mappo simple_spread --algo.rollout 1e12", ["not enough memory"]),
    ("ppo gymnasium/CartPole-v1 --envs 1e6", ["1,000,000 rows"]),
    ("maddpg simple_spread --algo.critics 1e9", ["--algo.critics"]),
    ("mappo simple_spread --seeds 1e12", ["--seeds"]),
    ("mappo simple_spread --seed 1e30", ["--seed"]),
    ("mappo simple_spread --eval.episodes 1e30", ["--eval.episodes"]),
    ("mappo simple_spread --eval.episodes 1e18", ["--eval.episodes", "at most"]),
    ("mappo simple_spread --out", ["--out was given no value"]),
    ("mappo simple_spread --out --quiet", ["--out was given no value"]),
    ("mappo simple_spread --algo.agents.lr", ["--algo.agents.lr was given no value"]),
    ("mappo simple_spread --team.agents", ["--team.agents was given no value"]),
    ("mappo simple_spread --config", ["--config was given no value"]),
    (f"mappo simple_spread --out {'x' * 300}", ["cannot be made", "too long"]),
    (f"mappo simple_spread --init {'x' * 300}", ["is no run"]),
    (f"mappo simple_spread --config {'x' * 300}", ["there is no file"]),
    (f"mappo {'x' * 300}.py", ["there is no file"]),
    ("ddqn simple_spread --algo.dueling maybe", ["--algo.dueling is 'maybe'"]),
    ("mappo simple_spread --net.hidden 99999999999", ["not enough memory"]),
]


@pytest.mark.parametrize(("line", "words"), WRONG, ids=[w[0] for w in WRONG])
def test_a_mistake_is_one_sentence_and_no_folder(capsys, tmp_path, monkeypatch, line, words):
    if "cuda" in line and torch.cuda.is_available():
        line = line.replace("cuda", "cuda:99")
        words = ["cuda:99"]
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, "train", *line.split())
    for word in words:
        assert word in err
    assert list(tmp_path.iterdir()) == []


def test_verbs_refuse_what_they_cannot_take(capsys, run):
    for argv, word in [
        (["trian"], "'train'"),
        (["eval"], "takes a run's folder"),
        (["eval", "nowhere"], "is no run"),
        (["eval", run, "--episodes", "0"], "--episodes is 0"),
        (["eval", run, "--epsodes", "5"], "'episodes'"),
        (["eval", run, "--checkpoint", "77"], "has no checkpoint '77'"),
        (["eval", run, "--checkpoint", "²"], "has no checkpoint '²'"),
        (["eval", run, "--checkpoint", "x" * 300], "has no checkpoint"),
        (["eval", run, "--episodes", "1e30"], "--episodes"),
        (["eval", run, "--episodes", "1e18"], "--episodes"),
        (["eval", run, "--csv"], "--csv was given no value"),
        (["eval", run, "--team.agents"], "--team.agents was given no value"),
        (["eval", "x" * 300], "is no run"),
        (["watch", run, "--episodes", "1e30"], "--episodes"),
        (["watch", run, "--episodes", "1e18"], "--episodes"),
        (["plot", run, "--out", run], "is a folder"),
        (["plot", run, "--out", "x" * 300 + ".png"], "cannot be written"),
        (["eval", run, "--team.agents", "mappo"], "has learnt nothing"),
        (["watch", "nowhere"], "is no run"),
        (["plot"], "takes one run's folder or more"),
        (["plot", run, "--smooth", "0"], "--smooth is 0"),
        (["plot", run, "--at", "best"], "--kind scores"),
        (["plot", run, "--kind", "scores", "--x", "time"], "leave them out"),
        (["plot", run, "--kind", "improvement"], "share a task"),
        (["table"], "takes one run's folder or more"),
        (["table", "nowhere"], "is no run"),
        (["plot", "nowhere"], "is no run"),
        (["resume", "nowhere"], "is no run"),
        (["bench", "speed"], "env, train or update"),
        (["bench", "env", "nowhere"], "no environment 'nowhere'"),
        (["bench", "env", "simple", "--repeats", "0"], "--repeats is 0"),
    ]:
        assert word in refused(capsys, *argv)


def test_an_existing_run_is_left_alone(capsys, run):
    before = files(run)
    assert "shoal resume" in refused(capsys, "train", "mappo", "simple_spread", *TINY, "--out", run)
    assert files(run) == before


def test_a_folder_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "file").write_text("no folder")
    err = refused(capsys, "train", "mappo", "simple_spread", *TINY, "--out", tmp_path / "file" / "run")
    assert "cannot be made" in err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def copy(run, tmp_path):
    import shutil

    return shutil.copytree(run, tmp_path / "copy")


def test_a_truncated_checkpoint(capsys, run, tmp_path):
    broken = copy(run, tmp_path)
    for path in (broken / "checkpoints").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    before = files(broken)
    for verb in ("resume", "eval", "watch"):
        assert "damaged" in refused(capsys, verb, broken)
    assert {p: x for p, x in files(broken).items() if p.name != ".lock"} == {
        p: x for p, x in before.items() if p.name != ".lock"
    }


def test_a_checkpoint_of_another_environment(capsys, run, tag, tmp_path):
    mixed = copy(run, tmp_path)
    for name in ("last.pt", "best.pt"):
        (mixed / "checkpoints" / name).write_bytes((tag / "checkpoints" / name).read_bytes())
    before = files(mixed)
    assert "ippo on simple_tag" in refused(capsys, "resume", mixed)
    assert "has no group 'agents'" in refused(capsys, "eval", mixed)
    assert "has no group 'agents'" in refused(capsys, "train", "mappo", "simple_spread", "--init", tag, "--out", tmp_path / "x")
    assert files(mixed) == before
    assert not (tmp_path / "x").exists()


def test_init_names_what_does_not_fit(capsys, run, tmp_path):
    err = refused(capsys, "train", "mappo", "simple_spread", "--init", run, "--net.hidden", "32,64", "--out", tmp_path / "x")
    assert "actor.net.body" in err
    assert "[3, 64] there and [3, 32] here" in err
    assert not (tmp_path / "x").exists()


class Bomb:
    def __reduce__(self):
        return (open, ("boom.txt", "w"))


def test_a_pickle_with_code_in_it_is_not_run(capsys, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trap = copy(run, tmp_path)
    torch.save({"shoal": Bomb()}, trap / "checkpoints" / "best.pt")
    (trap / "checkpoints" / "last.pt").write_bytes(pickle.dumps({"shoal": Bomb()}))
    assert "was not run" in refused(capsys, "eval", trap)
    refused(capsys, "resume", trap)
    assert not (tmp_path / "boom.txt").exists()


PICKY = '''"""An algorithm that takes discrete actions alone."""
from shoal.algos.random import Random


class Picky(Random):
    takes = ("discrete",)
'''


def test_an_algorithm_that_cannot_take_the_actions(capsys, tmp_path):
    (tmp_path / "picky.py").write_text(PICKY)
    words = ["train", tmp_path / "picky.py", "simple_spread", *[t for t in TINY if "rollout" not in t and t != "10"]]
    err = refused(capsys, *words, "--env.actions", "continuous", "--out", tmp_path / "x")
    assert "takes discrete actions" in err
    assert "continuous" in err
    assert not (tmp_path / "x").exists()
    assert main([str(w) for w in words] + ["--out", str(tmp_path / "y")]) == 0
    (copy_of_it,) = (tmp_path / "y" / "code" / "algos").glob("*/picky.py")
    assert copy_of_it.read_text() == PICKY  # a user's file is copied into the run


def test_a_file_of_the_other_kind(capsys, tmp_path):
    (tmp_path / "picky.py").write_text(PICKY)
    assert "is no environment" in refused(capsys, "train", "mappo", tmp_path / "picky.py", "--out", tmp_path / "x")


def test_another_algorithm_over_a_config_takes_its_own_defaults(tag, tmp_path):
    assert main(["train", "mappo", "simple_tag", "--config", str(tag), "--out", str(tmp_path / "x")]) == 0
    players = json.loads((tmp_path / "x" / "config.json").read_text())["players"]
    assert {p["algo"]["critic"] for p in players.values()} == {"world"}


def test_unknown_keys_of_a_config_are_errors(capsys, run, tmp_path):
    values = json.loads((run / "config.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps({**values, "algoo": 1}))
    assert "'algoo'" in refused(capsys, "train", "--config", tmp_path / "a.json")
    values["sections"]["algo"] = {"gama": 0.9}
    (tmp_path / "b.json").write_text(json.dumps(values))
    assert "'gama'" in refused(capsys, "train", "--config", tmp_path / "b.json", "--out", tmp_path / "x")
    for key, value in (("algo", 1), ("sections", {"algo": 3}), ("run", []), ("groups", {"agents": {"algoo": {}}})):
        (tmp_path / "d.json").write_text(json.dumps({"algo": "mappo", "env": "simple_spread", key: value}))
        assert "'algoo'" in (err := refused(capsys, "train", "--config", tmp_path / "d.json")) or "not of the form" in err
    (tmp_path / "c.json").write_text("{")
    assert "is not JSON" in refused(capsys, "train", "--config", tmp_path / "c.json")


def test_a_config_starts_the_same_run_again(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(run)]) == 0  # in a folder of its own
    (again,) = (tmp_path / "runs" / "simple_spread" / "mappo").iterdir()
    drop = lambda line: {k: v for k, v in line.items() if k != "time"}  # noqa: E731
    assert [drop(x) for x in Run(again).metrics] == [drop(x) for x in Run(run).metrics]


def test_eval_prints_one_json_value(capsys, run, tmp_path):
    assert main(["eval", str(run), "--episodes", "10", "--json", "--csv", str(tmp_path / "e.csv")]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["episodes"] == 10
    row = value["metrics"]["return/agents"]
    lines = (tmp_path / "e.csv").read_text().splitlines()
    assert len(lines) == 11
    column = lines[0].split(",").index("return/agents")
    scores = [float(line.split(",")[column]) for line in lines[1:]]
    assert row["mean"] == pytest.approx(sum(scores) / 10)
    assert row["interval"] == pytest.approx(2.2622 * torch.tensor(scores).std().item() / 10**0.5, rel=1e-4)  # t of 9


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "seeds"
    assert main(["train", "mappo", "simple_spread", *TINY, "--seeds", "2", "--threads", "1", "--out", str(path)]) == 0
    return path


def test_eval_of_a_folder_of_seeds(capsys, seeds, tmp_path):
    """Each is as alone; two numbers m apart have an interval of 12.7062 m / 2 round their mean."""
    words = ["--episodes", "10", "--json"]
    assert main(["eval", str(seeds), *words, "--csv", str(tmp_path / "e.csv")]) == 0
    value = json.loads(capsys.readouterr().out)
    each = [s["metrics"] for s in value["seeds"]]
    for k, found in enumerate(each):
        assert main(["eval", str(seeds / f"seed{k}"), *words]) == 0
        assert json.loads(capsys.readouterr().out)["metrics"] == found
    one, two = (m["return/agents"]["mean"] for m in each)
    assert value["metrics"]["return/agents"]["mean"] == pytest.approx((one + two) / 2)
    assert value["metrics"]["return/agents"]["interval"] == pytest.approx(12.7062 * abs(one - two) / 2, rel=1e-4)
    lines = (tmp_path / "e.csv").read_text().splitlines()
    assert len(lines) == 21
    assert [line.split(",")[0] for line in lines[1::10]] == ["0", "1"]
    assert main(["eval", str(seeds), "--episodes", "10"]) == 0
    out = capsys.readouterr().out
    assert f"{one:.2f} ±" in out
    assert "2 seeds" in out


def test_watch_of_a_folder_of_seeds_is_of_the_best(capsys, seeds):
    scores = [max(e["return/agents"] for e in Run(seeds / f"seed{k}").evaluations()) for k in (0, 1)]
    best = scores.index(max(scores))
    assert main(["watch", str(seeds), "--episodes", "1"]) == 0
    out = capsys.readouterr().out
    assert f"seed {best}, the best of 2 by return/agents: {max(scores):.2f}" in out
    assert str(seeds / f"seed{best}" / "media" / "watch.gif") in out


def test_runs_that_are_no_seeds_of_each_other(capsys, tmp_path, run, tag):
    for name, path in (("a", run), ("b", tag)):
        (tmp_path / name).symlink_to(path)
    for verb in ("eval", "watch"):
        err = refused(capsys, verb, tmp_path)
        assert "differ by more than the seed" in err
        assert "mappo and ippo" in err


def test_eval_with_opponents(capsys, tag, tmp_path):
    scores = {}
    for who in (None, "random", tag):
        team = [] if who is None else ["--team.adversary", str(who)]
        assert main(["eval", str(tag), "--episodes", "20", "--json", *team]) == 0
        scores[who] = json.loads(capsys.readouterr().out)["metrics"]["return/agent"]["mean"]
    assert scores[None] == scores[tag]
    assert scores[None] != scores["random"]


def test_training_against_who_does_not_learn(tag, tmp_path):
    out = tmp_path / "x"
    assert main(["train", "ippo", "simple_tag", *TINY, "--team.adversary", str(tag), "--out", str(out)]) == 0
    learnt = Run(out).load("last")["algorithms"]
    theirs = Run(tag).load("best")["algorithms"]["adversary"]
    assert all(torch.equal(learnt["adversary"][k], x) for k, x in theirs.items())
    assert "agent/policy_loss" in Run(out).metrics[-2]
    assert "adversary/policy_loss" not in Run(out).metrics[-2]


def test_lists(capsys, run):
    for verb, name in (("envs", "simple_spread"), ("algos", "mappo")):
        assert main([verb, "--json"]) == 0
        assert name in [e["id"] for e in json.loads(capsys.readouterr().out)]
        assert main([verb]) == 0
        assert name in capsys.readouterr().out
    assert main(["runs", str(run.parent), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["algo"], row["env"], row["step"]) == ("mappo", "simple_spread", 400)
    assert row["best"] == max(e["return/agents"] for e in Run(run).evaluations())
    assert (row["seed"], row["state"], row["device"], row["steps"]) == (0, "finished", "cpu", 400)
    assert row["date"][:10] == json.loads((run / "versions.json").read_text())["date"][:10]


def test_runs_shows_what_learns(capsys, tmp_path):
    assert main(["train", "ippo", "simple_tag", *TINY, "--team.adversary", "random", "--out", str(tmp_path / "r")]) == 0
    assert main(["runs", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    last = Run(tmp_path / "r").evaluations()[-1]
    assert row["last"] == last["return/agent"]
    assert {k: s["last"] for k, s in row["scores"].items()} == {
        f"return/{g}": last[f"return/{g}"] for g in ("adversary", "agent")
    }
    best = max(Run(tmp_path / "r").evaluations(), key=lambda e: (e["return/agent"], e["step"]))
    assert row["scores"]["return/adversary"]["best"] == best["return/adversary"]  # of the same checkpoint
    assert main(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "run"
    assert lines[2] == f"ippo simple_tag, in {tmp_path}"
    assert "finished" in lines[3]
    assert f"agent {last['return/agent']:.2f} (" in lines[3]  # who learns is first
    assert lines[4].strip().startswith(f"adversary {last['return/adversary']:.2f} (")


def test_runs_of_a_folder_that_is_not_there(capsys):
    for name in ("nowhere", "x" * 300):
        assert main(["runs", name]) == 0
        assert "no runs under" in capsys.readouterr().out


def test_states_of_runs(capsys, tmp_path):
    """As far as the folder tells: locked, diverged, at its end, stopped, cut off, never begun."""
    for name, words in (
        ("cut", ["--until", "200"]),
        ("stopped", ["--stop-score", "-1e9"]),
        ("diverged", ["--algo.lr", "1e30"]),
    ):
        main(["train", "mappo", "simple_spread", *TINY, *words, "--out", str(tmp_path / name)])
    for name in ("running", "new"):
        copied = tmp_path / name
        copied.mkdir()
        (copied / "config.json").write_text((tmp_path / "cut" / "config.json").read_text())
    lock = Run(tmp_path / "running").lock()
    capsys.readouterr()
    assert main(["runs", str(tmp_path), "--json"]) == 0
    states = {Path(r["run"]).name: r["state"] for r in json.loads(capsys.readouterr().out)}
    lock.close()
    assert states == {
        "cut": "interrupted",
        "diverged": "diverged",
        "new": "not begun",
        "running": "running",
        "stopped": "stopped",
    }
    assert main(["resume", str(tmp_path / "cut"), "--quiet"]) == 0
    assert main(["runs", str(tmp_path / "cut"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "finished"


def test_a_config_works_from_anywhere(tag, tmp_path, monkeypatch):
    """With a file of one's own, another run as opponent, and another to start from."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picky.py").write_text(PICKY)
    flags = ["--steps", "400", "--envs", "4", "--eval.episodes", "2", "--log.tensorboard", "false", "--quiet"]
    (tmp_path / "opp").symlink_to(tag)
    assert main(["train", "ippo", "simple_tag", *flags, "--team.adversary", "opp", "--init", "opp", "--out", "a"]) == 0
    assert main(["train", "./picky.py", "simple_tag", *flags, "--out", "b"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in "ab":
        assert main(["train", "--config", f"../{name}", "--out", name]) == 0
        assert [x["step"] for x in Run(name).metrics] == [x["step"] for x in Run(f"../{name}").metrics]


def test_two_files_of_one_name(tmp_path):
    for side in ("one", "two"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "mine.py").write_text(PICKY.replace("Picky", side.capitalize()))
    one, two = tmp_path / "one" / "mine.py", tmp_path / "two" / "mine.py"
    flags = ["--steps", "400", "--envs", "4", "--eval.episodes", "2", "--log.tensorboard", "false", "--quiet"]
    assert main(["train", str(one), "simple_tag", *flags, "--team.agent", str(two), "--out", str(tmp_path / "r")]) == 0
    players = Run(tmp_path / "r").settings.players
    for group, name in (("adversary", "One"), ("agent", "Two")):
        assert f"class {name}" in Path(players[group]["id"]).read_text()
    assert main(["eval", str(tmp_path / "r"), "--episodes", "2", "--json"]) == 0


BARE = '''"""One net on a row of numbers, and no more: it knows no pictures and no memory."""

from dataclasses import dataclass

from shoal.algos.base import Acted, Algorithm, LearnerConfig, Rollout
from shoal.algos.optimiser import Optimiser
from shoal.nets.heads import Actor
from shoal.nets.parts import vector_width
from shoal.ops.distributions import noise_of
from shoal.ops.losses import masked_mean, masked_sum


class Mine(Algorithm):
    @dataclass(frozen=True)
    class Config(LearnerConfig):
        lr: float = 1e-3

    def __init__(self, seat):
        super().__init__(seat)
        self.feed, self.noise = Rollout(25), noise_of(self.space)
        width = vector_width(self.spec[self.groups[0]].obs)
        self.actor = Actor(width, self.space, self.n, self.net, seat.generator)
        self.place(seat.device)
        self.optimiser = Optimiser([self.actor], self.config.lr)

    def act(self, frame, memory, noise, explore):
        (g,) = self.groups
        pi = self.actor(frame[g].obs, frame[g].legal)
        return Acted({g: pi.mode() if noise is None else pi.sample(noise[g])}, memory, {g: {}})

    def update(self, samples):
        (g,) = self.groups
        mask = samples.active
        loss = -self.actor(samples.frame[g].obs, samples.legal).log_prob(samples.action) * samples.reward
        count = loss.numel() if mask is None else mask.sum()
        self.optimiser.descend(masked_sum(loss, mask), count)
        return {"loss": masked_mean(loss, mask).detach()}
'''


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(BARE)
    return tmp_path / "mine.py"


def test_what_an_algorithm_of_ones_own_cannot_take(capsys, mine, tmp_path):
    """It is said before anything is written, and what to do."""
    named = tmp_path / "named.py"
    named.write_text(mine.read_text().replace("self.n, self.net", "self.spec[self.groups[0]].agents, self.net"))
    for file, line, words in (
        (mine, "probe_copy --net.memory gru", ["--net.memory gru", "spec[group].agents"]),
        (named, "probe_copy --net.memory gru", ["--net.memory", "`memory`"]),
        (mine, "probe_image", ["pictures", "encoder"]),
        (mine, "probe_image --env.vector", ["pictures", "encoder"]),
        (mine, "probe_copy --net.share agent_0=a,agent_1=b", ["--net.share", "spec[group].agents"]),
    ):
        err = refused(capsys, "train", file, *line.split(), "--out", tmp_path / "r")
        assert all(w in err for w in words), err
        assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("words", ["my storage is full", "cannot allocate a name"])
def test_an_error_of_ones_own_algorithm_is_not_called_memory(mine, tmp_path, words):
    mine.write_text(
        mine.read_text().replace(
            "        (g,) = self.groups\n        mask", f"        raise RuntimeError({words!r})\n        mask"
        )
    )
    with pytest.raises(RuntimeError, match=words):
        main(["train", str(mine), "probe_copy", "--steps", "400", "--envs", "4", "--quiet", "--out", str(tmp_path / "r")])


@pytest.mark.parametrize(
    ("line", "words", "flags"),
    [
        ("--algo.dueling ddqn probe_copy", "ddqn probe_copy", {"algo.dueling": None}),
        ("--algo.lr 1e-3 --algo.dueling ddqn probe_copy", "ddqn probe_copy", {"algo.lr": "1e-3", "algo.dueling": None}),
        ("ddqn --algo.dueling probe_copy", "ddqn probe_copy", {"algo.dueling": None}),
        ("--algo.dueling false ddqn probe_copy", "ddqn probe_copy", {"algo.dueling": "false"}),
        ("--algo.dueling=no ddqn probe_copy", "ddqn probe_copy", {"algo.dueling": "no"}),
        ("--algo.agents.dueling ddqn probe_copy", "ddqn probe_copy", {"algo.agents.dueling": None}),
        ("ddqn --env.shaped probe_teams", "ddqn probe_teams", {"env.shaped": None}),
        ("--save.nets --quiet ddqn probe_copy", "ddqn probe_copy", {"save.nets": None, "quiet": None}),
        ("--net.layer-norm ddqn probe_copy", "ddqn probe_copy", {"net.layer-norm": None}),
        ("--algo.critic team mappo probe_copy", "mappo probe_copy", {"algo.critic": "team"}),
    ],
)
def test_switches_follow_from_the_types(line, words, flags):
    """Wherever the algorithm and the environment are named."""
    assert read("train", line.split()) == (words.split(), flags)


def test_a_switch_before_the_names(tmp_path):
    flags = [*(t for t in TINY if t not in ("--algo.rollout", "10")), "--compile", "off", "--out", str(tmp_path / "r")]
    assert main(["train", "--algo.dueling", "ddqn", "--env.n", "1", "probe_copy", *flags]) == 0
    assert Run(tmp_path / "r").settings.players["agents"]["algo"]["dueling"] is True
    assert read("check", ["--env.shaped", "probe_teams"]) == (["probe_teams"], {"env.shaped": None})


def test_configs_that_no_parser_takes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deep = "[" * 5000 + "]" * 5000
    less = "[" * 400 + "]" * 400
    for text in (
        deep,
        f'{{"algo": "mappo", "env": "simple_spread", "players": {{"a": {{"b": {less}}}}}}}',
        f'{{"algo": "mappo", "env": "simple_spread", "run": {{"steps": {"9" * 5000}}}}}',
        f'{{"algo": "mappo", "env": "simple_spread", "run": {{"steps": {"9" * 400}}}}}',
        f'{{"algo": "mappo", "env": "simple_spread", "sections": {{"algo": {{"lr": {"9" * 400}}}}}}}',
        '{"algo": "mappo", "env": "simple_spread", "run": {"init": "a\\u0000b"}}',
    ):
        (tmp_path / "config.json").write_text(text)
        assert len(refused(capsys, "train", "--config", tmp_path / "config.json")) < 500
        if text is deep or less in text:
            for verb in ("resume", "eval", "watch", "plot"):
                assert "config.json" in refused(capsys, verb, tmp_path)


def test_metrics_with_words_where_numbers_belong(capsys, run, tmp_path):
    broken = copy(run, tmp_path)
    lines = (broken / "metrics.jsonl").read_text().splitlines()
    for worse in (
        '{"step": "many", "kind": "eval", "return/agents": 1.0}',
        '{"step": 4, "kind": "eval", "return/agents": "high"}',
        '{"step": 4, "kind": ["eval"], "return/agents": 1}',
        f'{{"step": 4, "kind": "eval", "return/agents": {"9" * 400}}}',
        f'{{"step": 4, "kind": "eval", "return/agents": {"9" * 5000}}}',
        f'{{"step": {"9" * 400}, "kind": "eval", "return/agents": 1}}',
        '{"step": 4, "kind": "eval", "x": ' + "[" * 5000 + "]" * 5000 + "}",
    ):
        (broken / "metrics.jsonl").write_text("\n".join([*lines, worse]) + "\n")
        assert main(["runs", str(tmp_path), "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["last"] == Run(run).evaluations()[-1]["return/agents"]
        assert main(["runs", str(tmp_path)]) == 0
        assert main(["plot", str(broken), "--out", str(tmp_path / "c.png")]) == 0
        capsys.readouterr()


def test_help_lists_every_field(capsys):
    from shoal.algos.ppo import PPO
    from shoal.flags import flags_of

    assert main(["train", "mappo", "simple_spread", "--help"]) == 0
    out = capsys.readouterr().out
    for name, flag in flags_of(PPO.Config, "algo.").items():
        (line,) = [x for x in out.splitlines() if x.strip().startswith(f"--{name} ")]
        assert flag.help
        assert flag.help in line
    assert "world)" in next(x for x in out.splitlines() if x.strip().startswith("--algo.critic "))  # mappo's own default


def test_help_is_quick_and_loads_no_torch():
    code = (
        "import sys; from shoal.cli import main; main(['--help']); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert subprocess.run([sys.executable, "-m", "shoal.cli", "--help"], capture_output=True).returncode == 0
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # the processor's time, however busy the machine is
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 1  # 0.06 s was seen
