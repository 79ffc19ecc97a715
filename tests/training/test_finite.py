"""A number of a world's that is not finite: it stops the run with a sentence about the world, and is in no checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import leaves

import shoal
from shoal.cli import main
from shoal.spec import NotFiniteError, StoppedError, UserError
from shoal.training.diverged import DivergedError
from shoal.training.loop import Loop
from shoal.training.run import Run
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_leaves

HOST = '''
"""Two agents; something is not finite in the fourth step of episodes whose seed is 1 mod 3."""
from dataclasses import dataclass
import numpy as np
from shoal.envs.rows import Row
from shoal.envs.vector import Host, HostConfig
from shoal.spec import Box, Discrete, EnvSpec, Group

class BadRow(Row):
    shapes = True

    def __init__(self, config):
        self.config, self.episodes = config, 0
        action = Box((-1.0,), (1.0,)) if config.box else Discrete(2)
        group = Group("agents", "agents", ("a_0", "a_1"), (3,), action, mortal=True)
        self.spec = EnvSpec((group,), state=2, horizon=6)

    def reset(self, seed, out):
        self.episodes, self.clock, self.mine = self.episodes + 1, 0, seed % 3 == 1 and self.episodes >= self.config.good
        self.see(out)
        out.start["agents"][:] = out.alive["agents"]

    def see(self, out):
        out.obs["agents"][:] = self.clock
        out.state[:] = self.clock
        out.alive["agents"][:] = out.active["agents"][:] = True, self.clock < 5 or self.config.bad != "dead"
        out.start["agents"][:] = False
        if self.config.bad == "dead":
            out.obs["agents"][1] = 0 if self.clock < 5 else np.nan
        if self.mine and self.clock == 4:
            value = getattr(np, self.config.value)
            if self.config.bad == "observation":
                out.obs["agents"][1, 2] = value
            elif self.config.bad == "state":
                out.state[1] = value

    def step(self, actions, out):
        assert np.isfinite(actions["agents"][out.alive["agents"]]).all()
        self.clock += 1
        self.see(out)
        if self.mine and self.clock == 4 and self.config.bad in ("reward", "shaping"):
            getattr(out, self.config.bad)["agents"][1] = getattr(np, self.config.value)
        return self.clock >= 6

class Bad(Host):
    @dataclass(frozen=True)
    class Config(HostConfig):
        bad: str = "reward"  # what
        value: str = "nan"
        good: int = 0  # episodes of a row that are all finite
        box: bool = False  # actions are numbers

    @classmethod
    def row(cls, config, drawn=False):
        return BadRow(config)
'''
NATIVE = '''
"""Two agents that see the clock; in row 2 something is not finite after some steps."""
from dataclasses import dataclass
import torch
from shoal.envs.base import Move, World
from shoal.spec import Discrete, EnvSpec, Frame, Group, Result

class Bad(World):
    fixed_length = True

    @dataclass(frozen=True)
    class Config:
        bad: str = "reward"  # what
        luck: float = 0.05  # less is bad

    def setup(self):
        group = Group("agents", "agents", ("a_0", "a_1"), (2,), Discrete(2))
        self.spec = EnvSpec((group,), horizon=6)
        self.noise_begin = 1
        self.nan = torch.zeros(self.rows, 2, device=self.device)
        if self.rows > 2:
            self.nan[2, 1] = torch.nan

    def begin(self, noise):
        return {"luck": noise}  # [B, 1]

    def advance(self, state, actions, noise):
        return Move(state, {"agents": Result(actions["agents"].float() + self.bad("reward", state), self.never(2))})

    def observe(self, state):
        obs = state["clock"][:, None, None].expand(-1, 2, 2).float() + self.bad("observation", state)[..., None]
        return Frame({"agents": self.view(obs, state["clock"])})

    def bad(self, what, state):
        """NaN in row 2, in the fourth step of an episode that begins with bad luck."""
        if what != self.config.bad:
            return torch.zeros_like(self.nan)
        return torch.where((state["luck"] < self.config.luck) & (state["clock"] == 3)[:, None], self.nan, 0)
'''
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
ON_POLICY = {"rollout": 5, "epochs": 1, "minibatches": 1}
REPLAY = {"capacity": 400, "learning_starts": 20, "batch": 4, "every": 4}
QUICK: dict[str, Any] = {
    "envs": 4,
    "quiet": True,
    "compile": "off",
    "eval": {"every": 0},
    "log": {"tensorboard": False, "every": 1_000_000},
    "save": {"every": 20, "keep": 0},
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("worlds")
    for name, text in (("host", HOST), ("native", NATIVE)):
        (folder / f"{name}.py").write_text(text)
    return {name: str(folder / f"{name}.py") for name in ("host", "native")}


def assert_good(run: Run) -> None:
    """Nothing in its checkpoints, the replay among them, is infinite or NaN; and they can be gone on with."""
    files = [p for p in run.checkpoints.rglob("*.pt") if p.name != "best.pt"]
    assert run.checkpoints / "last.pt" in files
    for path in files:
        state = torch.load(path, weights_only=True)
        state.pop("best", None)
        leaves = [x for x in tree_leaves(state) if isinstance(x, torch.Tensor)]
        assert leaves
        assert all(x.isfinite().all() for x in leaves if x.is_floating_point())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("bad", "value", "what"),
    [
        ("reward", "nan", "the reward of a_1 in row"),
        ("observation", "inf", "the observation of a_1 in row"),
        ("state", "nan", "the state in row"),
        ("shaping", "inf", "the shaping of a_1 in row"),
    ],
)
def test_a_host_world_says_where(worlds: dict[str, str], workers: int, bad: str, value: str, what: str) -> None:
    env = shoal.make(worlds["host"], rows=4, bad=bad, value=value, workers=workers)
    seeds = torch.tensor([[0.0, 3], [0.0, 6], [0.0, 1], [0.0, 9]]) / (1 << 15)
    env.reset(torch.tensor([[0.0, 0.0]] * 4))
    actions = {"agents": torch.zeros(4, 2, dtype=torch.long)}
    for _ in range(6):
        env.step(actions, seeds)  # the next episodes begin with 3, 6, 1 and 9
    for _ in range(3):
        env.step(actions, seeds)
    with pytest.raises(NotFiniteError) as e:
        env.step(actions, seeds)
    assert str(e.value) == f"{what} 2 is {value} at step 4 of the episode that began with seed 1"
    env.close()


def test_what_the_dead_see_may_be_anything(worlds: dict[str, str], tmp_path: Path) -> None:
    env = shoal.make(worlds["host"], rows=3, bad="dead", workers=0)
    env.reset(torch.zeros(3, 2))
    still = {"agents": torch.zeros(3, 2, dtype=torch.long)}
    seen = torch.stack([env.step(still, torch.zeros(3, 2)).next["agents"].obs for _ in range(14)])
    assert seen[:, :, 0].isfinite().all()
    assert seen[4, :, 1].isnan().all()
    env.close()
    quick = {**QUICK, "steps": 80, "eval": {"every": 40, "episodes": 4}}
    run = shoal.train("ippo", worlds["host"], env={"bad": "dead", "workers": 0}, algo=ON_POLICY, **quick, out=tmp_path / "r")
    assert run.load("last")["step"] == 80


@pytest.mark.parametrize(("algo", "settings", "workers"), [("ppo", ON_POLICY, 0), ("iql", REPLAY, 2)])
def test_training_on_a_host_world_stops_with_a_good_checkpoint(
    worlds: dict[str, str], tmp_path: Path, algo: str, settings: dict[str, Any], workers: int
) -> None:
    quick = {**QUICK, "save": {"every": 0, "keep": 0}}
    with pytest.raises(StoppedError) as e:
        shoal.train(
            algo, worlds["host"], env={"workers": workers, "good": 3}, algo=settings, **quick, steps=4000, out=tmp_path / "r"
        )
    words = (
        r"host gave a number that is not finite, and training stopped: the reward of a_1 in row \d is nan "
        r"at step 4 of the episode that began with seed \d+\. `shoal check .*host.py` looks a world over; the last good "
        r"checkpoint is .*last\.pt: start from its weights with --init .*/r once it is mended\."
    )
    assert re.fullmatch(words, str(e.value))
    assert "Stopped: host gave" in (tmp_path / "r" / "train.log").read_text()
    run = Run(tmp_path / "r")
    assert_good(run)
    done = run.load("last")["step"]
    assert done >= 20
    sound = {"env": {"workers": 0, "good": 999}, "algo": settings, **QUICK, "save": {"every": 0}}
    other = shoal.train(algo, worlds["host"], **sound, steps=4000, until=done, out=tmp_path / "other")
    mine, theirs = leaves(run.load("last")), leaves(other.load("last"))  # not one iteration was lost
    tensors = [k for k, x in theirs.items() if isinstance(x, torch.Tensor)]
    assert len(tensors) > 20
    scheduled = "/epsilon", ".rate"  # set before every iteration
    assert [k for k in tensors if not k.endswith(scheduled) and not torch.equal(mine[k], theirs[k])] == []
    assert mine["/step"] == theirs["/step"] == done


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("bad", ["reward", "observation"])
@pytest.mark.parametrize(("algo", "settings"), [("ppo", ON_POLICY), ("iql", REPLAY)])
def test_training_on_a_native_world_stops_with_a_good_checkpoint(
    worlds: dict[str, str], tmp_path: Path, algo: str, settings: dict[str, Any], bad: str, device: str
) -> None:
    quick = {**QUICK, "device": device, "compile": "graph", "steps": 4000}
    with pytest.raises(StoppedError) as e:
        shoal.train(algo, worlds["native"], env={"bad": bad}, algo=settings, **quick, out=tmp_path / "r")
    what = f"native gave a number that is not finite, and training stopped: the {bad} of a_1 in row 2 is "
    assert str(e.value).startswith(what)
    assert "learning rate" not in str(e.value)
    step = int(re.search(r"is not finite at step ([\d,]+)\.", str(e.value))[1].replace(",", ""))  # type: ignore[index]
    assert step % 24 == (12 if bad == "reward" else 8)  # 4 rows and 6 steps an episode: what the third one led to
    last = Run(tmp_path / "r").load("last")["step"]
    assert step - 20 < last <= step
    assert_good(Run(tmp_path / "r"))


def test_a_native_world_is_looked_at_once_a_log_line(worlds: dict[str, str], tmp_path: Path) -> None:
    often = {**QUICK, "log": {"tensorboard": False, "every": 40}, "save": {"every": 0, "keep": 0}}
    with pytest.raises(StoppedError, match="is not finite at step 12"):
        shoal.train("ppo", worlds["native"], env={"luck": 1.0}, algo=ON_POLICY, **often, steps=4000, out=tmp_path / "r")
    assert [x["step"] for x in Run(tmp_path / "r").metrics] == [40]


@pytest.mark.parametrize(("world", "env"), [("host", {"workers": 0}), ("native", {"luck": 1.0})])
def test_an_evaluation_that_meets_one_costs_nothing(
    worlds: dict[str, str], tmp_path: Path, world: str, env: dict[str, Any]
) -> None:
    """At the very beginning, before anything was trained on it."""
    quick = {**QUICK, "save": {"every": 0, "keep": 0}, "eval": {"every": 40, "episodes": 12}}
    with pytest.raises(StoppedError, match=r"gave a number that is not finite.*the reward of a_1 in row"):
        shoal.train("ppo", worlds[world], env=env, algo=ON_POLICY, **quick, steps=400, out=tmp_path / "r")
    run = Run(tmp_path / "r")
    assert run.evaluations() == []
    assert run.load("last")["evaluation_due"]
    assert_good(run)


def test_the_command_exits_with_1_and_evaluations_say_it_too(
    worlds: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--envs 4 --eval.every 0 --log.tensorboard false --quiet --compile off --env.workers 0".split()
    assert main(["train", "random", worlds["host"], *words, "--steps", "400", "--out", str(tmp_path / "r")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("shoal: host gave a number that is not finite")
    assert err.count("\n") == 1
    assert main(["eval", str(tmp_path / "r"), "--episodes", "12"]) == 2
    assert re.search(
        r"shoal: host gave .*: the reward of a_1 in row \d+ is nan at step 4 of the episode", capsys.readouterr().err
    )


def test_an_action_that_is_not_finite_is_not_the_worlds_fault(worlds: dict[str, str], tmp_path: Path) -> None:
    class Blow(shoal.Hook):
        def before_iteration(self, loop: Loop) -> None:
            if loop.step >= 40:
                for p in loop.learners[0].actor.parameters():
                    p.data.fill_(3e38)

    run = {**QUICK, "steps": 400, "hook": Blow(), "algo": ON_POLICY}
    for world, env in ((worlds["host"], {"box": True, "bad": "", "workers": 0}), ("pendulum", {})):
        with pytest.raises(DivergedError, match=r"learning rate, --algo\.lr below 0\.001"):
            shoal.train("ppo", world, env=env, **run, out=tmp_path / Path(world).stem)
        assert_good(Run(tmp_path / Path(world).stem))


def test_the_sentence_knows_whether_there_is_a_checkpoint(tmp_path: Path) -> None:
    class Blow(shoal.Hook):
        def on_evaluation(self, loop: Loop, episodes: Any) -> None:
            loop.learners[0].actor.net.body.weights[0].data[0, 0] = float("inf")

    quick = {**QUICK, "eval": {"episodes": 2}, "steps": 80, "algo": ON_POLICY}
    with pytest.raises(DivergedError) as e:
        shoal.train("ppo", "simple", **quick, hook=Blow(), out=tmp_path / "r")
    assert str(e.value) == (
        "a loss was not finite before step 0, and training stopped; there is no checkpoint yet: start anew with a smaller "
        "learning rate, --algo.lr below 0.001."
    )


def test_looking_changes_no_number(worlds: dict[str, str]) -> None:
    """On a device nothing is read until somebody looks: the same is found without the short cut of the CPU."""
    loop = Loop(resolve(Settings("ppo", worlds["native"], {"envs": 4, "quiet": True, "compile": "off"}, {})))
    batch = loop.collector.collect(4)
    batch.results["agents"].reward[2, 3, 0] = -torch.inf
    batch.results["agents"].reward[3, 1, 1] = torch.nan
    assert loop.not_finite is not None
    loop.not_finite.note(batch, torch.arange(100, 116, 4, device=loop.env.device))
    found = loop.not_finite.found()
    assert str(found) == "the reward of a_0 in row 3 is not finite at step 108"
    assert isinstance(found, UserError)


def test_a_shaper_that_gives_what_is_not_finite_is_in_no_checkpoint(tmp_path: Path) -> None:
    def shaper(reward: torch.Tensor, obs: Any, step: torch.Tensor, steps: int) -> torch.Tensor:
        return torch.where(step >= 60, torch.nan, reward)

    with pytest.raises(StoppedError, match="a shaper gave a reward that is not finite before step 8"):
        shoal.train("ddqn", "CartPole-v1", steps=400, shaper=shaper, out=tmp_path / "r", algo=REPLAY, **QUICK)
    kept = [torch.load(p, weights_only=True) for p in (tmp_path / "r" / "checkpoints").rglob("*.pt")]
    assert any("replay" in str(p) for p in (tmp_path / "r" / "checkpoints").rglob("*.pt"))
    tensors = [x for state in kept for x in tree_leaves(state) if isinstance(x, torch.Tensor)]
    assert tensors
    assert all(torch.isfinite(x).all() for x in tensors)


def test_what_begins_anew_after_a_resume_is_looked_at(worlds: dict[str, str]) -> None:
    world = shoal.make(worlds["host"], rows=2, workers=0)
    world.reset(torch.tensor([[0.0, 0.1], [0.0, 0.1]]))
    state = world.get_state()
    world.pool.runner.now[0].obs["agents"][:] = 0
    state["seen"] = [x + 1 if x.is_floating_point() else x for x in state["seen"]]  # it does not come out the same

    def see(bench: Any, rows: list[int]) -> None:
        bench.new[rows[0]].obs["agents"][:] = torch.nan

    world.pool.runner.reset = see.__get__(world.pool.runner)
    with pytest.raises(NotFiniteError, match="the observation of a_0 in row 0 is nan"):
        world.set_state(state)


def test_a_world_that_exits_when_it_is_closed_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "leaves.py"
    file.write_text(
        "import sys\nimport gymnasium as gym\nfrom gymnasium import spaces\n\n\nclass Leaves(gym.Env):\n"
        "    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)\n\n"
        "    def reset(self, seed=None, options=None):\n        return 0, {}\n\n"
        "    def step(self, action):\n        return 0, 0.0, False, True, {}\n\n    def close(self):\n        sys.exit(4)\n"
    )
    assert main(["train", "ppo", str(file), "--out", str(tmp_path / "r")]) == 2
    assert "the environment failed: SystemExit: 4 (leaves.py, line 16)" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
