"""Nets in files of their own, beside every checkpoint where they are asked for."""

import pytest
import torch
from torch import nn

import shoal
from shoal.cli import main
from shoal.training.run import Run

FLAGS = (
    "--steps 120 --envs 4 --algo.rollout 6 --net.hidden 8 --eval.episodes 2 --eval.every 24 --save.every 24 "
    "--log.tensorboard false --env.max-cycles 5 --compile off --quiet"
).split()


def train(out, *flags, algo="ippo", world="simple_spread"):
    assert main(["train", algo, world, *FLAGS, *map(str, flags), "--out", str(out)]) == 0
    return Run(out)


def apart(run):
    """Checkpoint -> the names of its nets' files."""
    folder = run.checkpoints / "nets"
    return {p.name: {f.name for f in p.iterdir()} for p in folder.iterdir()} if folder.exists() else None


def load(run, file, name="last"):
    return torch.load(run.checkpoints / "nets" / name / f"{file}.pt", weights_only=True)


def steps(*numbers):
    return {f"step-{n:012d}" for n in numbers}


def assert_equal_the_checkpoints(run, prefixes):
    """Every file holds what the checkpoint of its name holds, and all of it."""
    for name, files in apart(run).items():
        state = run.load(name)["algorithms"]
        assert files == {f"{g}.{net}.pt" for g in state for net in prefixes}
        for g, weights in state.items():
            for net, prefix in prefixes.items():
                mine = load(run, f"{g}.{net}", name)["net"]
                theirs = {k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)}
                assert mine.keys() == theirs.keys()
                assert mine
                assert all(torch.equal(x, theirs[k]) for k, x in mine.items())


def test_every_checkpoint_has_them(tmp_path):
    run = train(tmp_path / "r", "--save.nets", "true", world="simple_tag")
    assert apart(run).keys() == {"last", "best"} | steps(96, 120)
    assert_equal_the_checkpoints(run, {"actor": "actor.", "critic": "critic."})
    one, other = (load(run, "agent.actor", k)["net"] for k in steps(96, 120))
    assert any(not torch.equal(one[k], other[k]) for k in one)
    assert not list(run.path.rglob("*.part"))


@pytest.mark.parametrize(
    ("flags", "prefixes"),
    [
        (["--algo.target-tau", 0.1], {"actor": "actor.", "critic": "critic.", "target_critic": "target."}),
        (["--net.trunk", "shared"], {"actor": "actor."}),
        (["--net.trunk", "shared", "--algo.target-tau", 0.1], {"actor": "actor.", "target_critic": "target."}),
        (["--net.memory", "lstm", "--net.attention", "actor"], {"actor": "actor.", "critic": "critic."}),
    ],
)
def test_each_net_there_is(tmp_path, flags, prefixes):
    run = train(tmp_path / "r", "--save.nets", "true", "--save.keep", 0, *flags)
    assert apart(run).keys() == {"last", "best"}
    assert_equal_the_checkpoints(run, prefixes)


class Counts(nn.Module):
    """A module with something besides weights."""

    def __init__(self, width_in, width_out, agents):
        super().__init__()
        self.layer = nn.Linear(width_in, width_out)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return self.layer(x)


def test_what_a_module_counts_is_in_them(tmp_path):
    run = train(tmp_path / "r", "--save.nets", "true", "--net.module", "test_nets_apart:Counts")
    assert_equal_the_checkpoints(run, {"actor": "actor.", "critic": "critic."})
    assert load(run, "agents.actor")["net"]["net.body.count"] > 0


def test_they_fit_the_nets_they_are_of(tmp_path):
    run = train(tmp_path / "r", "--save.nets", "true", algo="mappo")
    learnt = shoal.load(run, "last").players.algorithms[0]
    for net in ("actor", "critic"):
        file = run.checkpoints / "nets" / "last" / f"agents.{net}.pt"
        getattr(learnt, net).load_state_dict(load(run, f"agents.{net}")["net"])
        size = sum(p.numel() for p in getattr(learnt, net).parameters()) * 4
        assert size < file.stat().st_size < size + 10_000  # itself, and not all that it shares memory with


def test_they_are_not_there_unless_asked_for(tmp_path):
    assert apart(train(tmp_path / "r")) is None
    assert apart(train(tmp_path / "s", "--save.nets", "false")) is None


@pytest.mark.parametrize(("keep", "kept"), [(0, ()), (1, (120,)), (3, (72, 96, 120)), (-1, tuple(range(24, 121, 24)))], ids=str)
def test_they_go_with_the_numbered_checkpoint_they_are_of(tmp_path, keep, kept):
    run = train(tmp_path / "r", "--save.nets", "true", "--save.keep", keep, "--save.best", "none")
    assert apart(run).keys() == {"last"} | steps(*kept)
    assert {p.stem for p in run.checkpoints.glob("*.pt")} == apart(run).keys()


def test_who_does_not_learn_has_none(tmp_path):
    run = train(tmp_path / "r", "--save.nets", "true", "--team.adversary", "random", world="simple_tag")
    assert apart(run)["last"] == {"agent.actor.pt", "agent.critic.pt"}


def test_resume_goes_on_with_them(tmp_path):
    run = train(tmp_path / "r", "--save.nets", "true", "--until", 72)
    assert apart(run).keys() == {"last", "best"} | steps(48, 72)
    assert main(["resume", str(run.path), "--quiet"]) == 0
    assert apart(run).keys() == {"last", "best"} | steps(96, 120)
    assert_equal_the_checkpoints(run, {"actor": "actor.", "critic": "critic."})


def test_python_asks_for_them_as_well(tmp_path):
    how = {"steps": 48, "envs": 4, "quiet": True, "eval": {"episodes": 2}, "log": {"tensorboard": False}}
    run = shoal.train("maa2c", "simple_spread", out=tmp_path / "r", save={"nets": True}, **how)
    assert apart(run)["last"] == {"agents.actor.pt", "agents.critic.pt"}


OWN = '''"""An algorithm of one's own."""
from dataclasses import dataclass
import torch
from torch import nn
from shoal.algos.base import LearnerConfig, Rollout
from shoal.algos.random import Random


class Mine(Random):
    learns = True

    @dataclass(frozen=True)
    class Config(LearnerConfig):
        pass

    def __init__(self, seat):
        super().__init__(seat)
        self.feed, self.table = Rollout(6), nn.Linear(2, 3)

    def update(self, samples):
        return {"loss": torch.zeros(())}
'''


def test_an_algorithm_of_ones_own_has_its_children(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    flags = [f for k, f in enumerate(FLAGS) if "algo." not in f and "algo." not in FLAGS[k - 1]]
    words = ["train", str(tmp_path / "mine.py"), "simple_spread", *flags, "--save.nets", "true"]
    assert main([*words, "--out", str(tmp_path / "r")]) == 0
    assert apart(Run(tmp_path / "r"))["last"] == {"agents.table.pt"}
