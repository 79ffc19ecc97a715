"""Environments of a user's own, of Gymnasium's or PettingZoo's kind: how they are named, and that a run keeps them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import shoal
from shoal.cli import main
from shoal.ids import find, id_of
from shoal.spec import UserError
from shoal.training.run import Run

pytest.importorskip("gymnasium")
pytest.importorskip("pettingzoo")

GYM = '''
"""Pays PAY times its action of two, for `length` steps."""
import gymnasium
import numpy as np
from gymnasium import spaces

PAY = 1.0

class Helper:
    pass

class Mine(gymnasium.Env):
    observation_space = spaces.Box(-99, 99, (2,))
    action_space = spaces.Discrete(2)
    render_mode = None

    def __init__(self, length=4, pay=None):
        self.length, self.pay = length, PAY if pay is None else pay

    def look(self):
        return np.array([self.t, self.pay], np.float32)

    def reset(self, seed=None, options=None):
        self.t = 0
        return self.look(), {}

    def step(self, action):
        self.t += 1
        return self.look(), self.pay * (1 + action), self.t >= self.length, False, {}

def make_short(length=2):
    return Mine(length, pay=7.0)

NUMBER = 3

def make_number():
    return NUMBER
'''
PARALLEL = """
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

class Mine(ParallelEnv):
    metadata = {"name": "mine"}
    possible_agents = ["a_0", "a_1", "b_0"]

    def __init__(self, length=4, render_mode=None):
        self.length, self.render_mode = length, render_mode

    def observation_space(self, agent):
        return spaces.Box(-99, 99, (2,))

    def action_space(self, agent):
        return spaces.Discrete(2)

    def look(self):
        return {a: np.array([self.t, 0], np.float32) for a in self.possible_agents}

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, self.possible_agents[:]
        return self.look(), {a: {} for a in self.agents}

    def step(self, actions):
        self.t += 1
        here, over = self.agents, self.t >= self.length
        self.agents = [] if over else here
        return (self.look(), {a: 1.0 for a in here}, {a: over for a in here}, {a: False for a in here}, {a: {} for a in here})
"""
AEC = (
    PARALLEL.replace("class Mine", "class _Both")
    + """
from pettingzoo import AECEnv
from pettingzoo.utils import parallel_to_aec, BaseWrapper

class Mine(BaseWrapper):
    def __init__(self, length=4):
        super().__init__(parallel_to_aec(_Both(length)))
"""
)
KINDS = {"gym": (GYM, ["agents"]), "parallel": (PARALLEL, ["a", "b"]), "aec": (AEC, ["a", "b"])}
FLAGS = (
    "--steps 48 --envs 2 --algo.rollout 6 --algo.epochs 1 --algo.minibatches 1 --eval.every 24 --eval.episodes 2 "
    "--save.every 0 --save.keep 0 --log.tensorboard false --compile off --quiet"
).split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder that one is in."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget()


def forget():
    """As a new process would: files are read again."""
    for name in [n for n in sys.modules if n.startswith(("shoal_user_", "bench_of_mine"))]:
        del sys.modules[name]


def write(text, name="mine.py"):
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def lengths(id, steps=9, **config):
    """How long the first episodes are, by playing zeros."""
    env = shoal.make(id, rows=1, workers=0, **config)
    env.reset(torch.zeros(1, 2))
    zeros = {g.name: torch.zeros(1, g.n, dtype=torch.long) for g in env.spec.groups}
    outcomes = [env.step(zeros, torch.zeros(1, 2)) for _ in range(steps)]
    return [t + 1 for t, x in enumerate(outcomes) if x.over[0]], [
        x.results[env.spec.groups[0].name].reward[0, 0].item() for x in outcomes
    ]


# --- by any name ---


@pytest.mark.parametrize("name", ["mine.py", "./mine.py", "mine.py:Mine", "bench_of_mine.worlds:Mine"])
@pytest.mark.parametrize("kind", KINDS)
def test_by_file_and_by_import(here, kind, name):
    text, groups = KINDS[kind]
    write(text)
    write(text, "bench_of_mine/worlds.py")
    assert find("envs", name).cls == "Own"
    env = shoal.make(name, workers=0)
    assert [g.name for g in env.spec.groups] == groups
    assert env.spec.turns == (kind == "aec")
    each = 3 if kind == "aec" else 1  # steps that all agents together need
    assert lengths(name, 9 * each)[0] == [4 * each, 8 * each]
    assert lengths(name, 9 * each, args="length=3")[0] == [3 * each, 6 * each, 9 * each]
    assert main(["train", "ppo", name, *FLAGS, "--env.workers", "2", "--env.args", "length=3", "--out", "r"]) == 0
    assert Run("r").load("last")["step"] == 48
    assert {x["episode_length"] for x in Run("r").evaluations()} == {3 * each}


def test_by_a_function_that_makes_one(here):
    write(GYM)
    assert lengths("mine.py:make_short", 4) == ([2, 4], [7.0] * 4)
    assert lengths("mine.py:make_short", 4, args="length=4") == ([4], [7.0] * 4)


def test_a_world_of_shoals_kind_still_is_that(here):
    head = "import gymnasium\nfrom shoal.envs.probe.probe_constant import ProbeConstant\n"
    path = write(head + "class World(ProbeConstant):\n    pass\nclass Beside(gymnasium.Env):\n    pass\n")
    assert type(shoal.make(str(path))).__name__ == "World"


@pytest.mark.parametrize(
    ("kind", "horizon"),
    [
        ("gym", 3),
        ("parallel", 3),
        ("aec", 9),
    ],
)
def test_a_horizon_cuts_it_off(here, kind, horizon):
    write(KINDS[kind][0])
    assert lengths("mine.py", 9, horizon=horizon, args="length=7")[0] == list(range(horizon, 10, horizon))
    assert shoal.make("mine.py", workers=0, horizon=horizon).spec.horizon == horizon


def test_spawned_workers_know_the_file(here):
    write(GYM)
    env = shoal.make("mine.py", rows=3, workers=2, start="spawn", args="pay=2.5")
    assert env.reset(torch.zeros(3, 2))["agents"].obs[:, 0].tolist() == [[0, 2.5]] * 3
    env.close()


# --- kept with the run ---


@pytest.mark.parametrize(
    ("name", "fate", "workers"),
    [
        ("mine.py", "edited", 0),
        ("mine.py", "deleted", 2),
        ("mine.py:Mine", "edited", 2),
        ("mine.py:Mine", "deleted", 0),
        ("mine.py:make_short", "edited", 0),
    ],
)
def test_whatever_becomes_of_the_file_the_run_goes_on_as_it_was(here, monkeypatch, name, fate, workers):
    def train(out, *flags):
        assert main(["train", "ppo", name, *FLAGS, "--env.workers", str(workers), "--out", out, *flags]) == 0
        forget()

    path = write(GYM)
    train("whole")
    train("half", "--until", "24")
    assert all(copy.read_text() == GYM for copy in (here / "half" / "code").rglob("*.py"))
    assert f"{here}/mine.py" in json.loads((here / "half" / "config.json").read_text())["env"]
    before = shoal.evaluate("half", 2)
    active = shoal.load("half").act({"agent_0": [0.0, 1.0]})[0]
    forget()
    path.write_text(GYM.replace("PAY = 1.0", "PAY = 50.0").replace("7.0", "50.0")) if fate == "edited" else path.unlink()
    monkeypatch.chdir("/")
    after = shoal.evaluate(here / "half", 2)
    assert torch.equal(after.returns["agents"], before.returns["agents"])
    assert float(after.returns["agents"].max()) < 50
    assert shoal.load(here / "half").act({"agent_0": [0.0, 1.0]})[0] == active
    assert main(["resume", str(here / "half"), "--quiet"]) == 0
    lines = [[{k: v for k, v in x.items() if k != "time"} for x in Run(here / r).metrics] for r in ("whole", "half")]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("fate", ["edited", "deleted"])
def test_a_worker_that_is_replaced_plays_what_the_others_play(here, fate):
    class Trouble(shoal.Hook):
        def after_iteration(self, loop):
            if loop.step == 12:
                path.write_text(GYM.replace("PAY = 1.0", "PAY = 50.0")) if fate == "edited" else path.unlink()
                os.kill(loop.env.pool.workers[0].process.pid, signal.SIGKILL)

    path, quick = write(GYM), {"algo": {"rollout": 6}, "eval": {"every": 0}, "log": {"tensorboard": False, "every": 1}}
    run = shoal.train("ppo", "mine.py", steps=48, envs=2, out="r", quiet=True, env={"workers": 2}, hook=Trouble(), **quick)
    assert run.metrics[-1]["worker_restarts"] == 1
    assert max(x["reward_total/agents"][0] for x in run.metrics) <= 12


# --- sentences ---


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        (
            GYM,
            "mine.py:Mien",
            "the environment is '{here}/mine.py:Mien', and {here}/mine.py has no 'Mien' (did you mean 'Mine'?).",
        ),
        (GYM, "mine.py:NUMBER", "{here}/mine.py:NUMBER is 3: it must be a class or a function that makes an environment."),
        (
            GYM,
            "mine.py:make_number",
            "{here}/mine.py:make_number made a int, which is no environment of Gymnasium's or PettingZoo",
        ),
        (
            GYM,
            "mine.py:Helper",
            "{here}/mine.py:Helper made a Helper, which is no environment of Gymnasium's or PettingZoo's kind",
        ),
        ("1 / 0", "mine.py", "{here}/mine.py could not be loaded: ZeroDivisionError: division by zero."),
        (
            "1 / 0",
            "mine.py:Mine",
            "the environment is '{here}/mine.py:Mine', and {here}/mine.py could not be loaded: ZeroDivision",
        ),
        ("def f():\n    pass\n", "mine.py", "'{here}/mine.py' defines no environment: it needs one class that derives"),
        (
            GYM.replace("self.length, ", "self.missing, self.length, "),
            "mine.py",
            "{here}/mine.py:Mine could not be made: ValueError",
        ),
        (GYM, "nowhere.py", "there is no file '{here}/nowhere.py'."),
        (GYM, "nowhere.py:Mine", "there is no file {here}/nowhere.py."),
        (
            GYM,
            "bench_of_nobody.worlds:Mine",
            "the environment is 'bench_of_nobody.worlds:Mine', and bench_of_nobody.worlds could not",
        ),
    ],
)
def test_what_cannot_be_made(here, text, name, sentence):
    write(text)
    with pytest.raises(UserError) as e:
        shoal.make(f"{here}/{name}" if ".py" in name else name, workers=0)
    assert str(e.value).startswith(sentence.format(here=here))


def test_settings_that_it_does_not_take(here):
    write(GYM)
    with pytest.raises(UserError, match=r"mine.py:Mine could not be made: TypeError: .*unexpected keyword argument 'nope'\.$"):
        shoal.make("mine.py", workers=0, args="nope=1")


def test_what_lies_beside_a_file_can_be_imported(here):
    write(GYM.replace("PAY = 1.0", "from beside_mine import PAY"))
    Path("beside_mine.py").write_text("PAY = 4.0\n")
    env = shoal.make("mine.py", workers=0)
    env.reset(torch.rand(1, 2))
    out = env.step({"agents": torch.zeros(1, 1, dtype=torch.long)}, torch.rand(1, 2))
    assert out.results["agents"].reward.item() == 4.0


# --- from Python: a class, or a function that makes one ---

TRAIN = {
    "steps": 24,
    "envs": 2,
    "quiet": True,
    "compile": "off",
    "algo": {"rollout": 6},
    "eval": {"episodes": 2, "every": 0},
    "log": {"tensorboard": False},
}
SCRIPT = """
import shoal
from mine import Mine

class Here(Mine):
    pass

def main():
    run = shoal.train("ppo", Here, **TRAIN)
    shoal.resume(run, steps=48, quiet=True)
    print(run.recorded.env, run.load("last")["step"])

main()
"""


@pytest.fixture
def mine(here, monkeypatch):
    """Modules as a user's script imports them."""
    monkeypatch.syspath_prepend(here)
    write(GYM, "a_module_of_mine.py")
    write(GYM, "bench_of_mine/worlds.py")
    yield __import__("a_module_of_mine"), __import__("bench_of_mine.worlds").worlds
    del sys.modules["a_module_of_mine"]


def test_a_class_or_a_function_is_trained_on(here, mine):
    alone, packed = mine
    for thing, id in (
        (packed.Mine, "bench_of_mine.worlds:Mine"),
        (alone.Mine, f"{here}/a_module_of_mine.py:Mine"),
        (alone.make_short, f"{here}/a_module_of_mine.py:make_short"),
    ):
        run = shoal.train("ppo", thing, **TRAIN, env={"workers": 2})
        assert run.recorded.env == id
        assert [g.name for g in shoal.make(thing, workers=0).spec.groups] == ["agents"]
        forget()
        assert shoal.resume(run, steps=48, quiet=True).load("last")["step"] == 48
    assert not shoal.check(alone.Mine, steps=8).of("problem")


def test_classes_of_shoals_own_kind(here):
    from shoal.algos.ppo import PPO
    from shoal.envs.probe.probe_constant import ProbeConstant

    assert shoal.train(PPO, ProbeConstant, **TRAIN).recorded.env == "probe_constant"
    path = write("from shoal.envs.probe.probe_constant import ProbeConstant\nclass World(ProbeConstant):\n    pass\n")
    world = find("envs", str(path)).load()
    assert type(shoal.make(world)) is world


def test_what_no_import_finds_is_a_sentence(here, mine):
    class Inside(mine[0].Mine):
        pass

    for thing, sentence in (
        (Inside, "top level of a file"),
        (lambda: mine[0].Mine(), "top level of a file"),
        (mine[0].Mine(), "made already: give its class"),
        (3, "give its class, a function"),
        (None, "give its class, a function"),
    ):
        for call in (lambda x: shoal.train("ppo", x), shoal.make, shoal.check):
            with pytest.raises(UserError, match=sentence) as e:
                call(thing)
            assert str(e.value).endswith(".")
    assert not (here / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False])
def test_a_class_of_the_script_itself(here, guarded):
    write(GYM)
    text = SCRIPT.replace("**TRAIN", f"**{TRAIN}")
    script = write(text.replace("\nmain()\n", '\nif __name__ == "__main__":\n    main()\n') if guarded else text, "script.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    if guarded:
        assert done.stdout.strip() == f"{here}/script.py:Here 48", done.stderr
    else:
        assert 'under `if __name__ == "__main__":`' in done.stderr
        assert not (here / "runs").exists()


def test_a_class_of_a_script_is_named_by_its_file(here, mine, monkeypatch):
    class Here(mine[0].Mine):
        pass

    Here.__module__, Here.__qualname__ = "__main__", "Here"
    main = ModuleType("__main__")
    main.Here = Here
    monkeypatch.setitem(sys.modules, "__main__", main)
    for file in (
        None,
        "<stdin>",
        str(here / "gone.py"),
        str(write(GYM, "script")),
    ):  # of a notebook, python -c, python < script
        main.__file__ = file
        with pytest.raises(UserError, match="put it at the top level of a file"):
            id_of("envs", Here)
    main.__file__ = str(write(GYM, "script.py"))
    assert id_of("envs", Here) == f"{here}/script.py:Here"
    main.__spec__ = ModuleSpec("bench_of_mine.script", None)  # of python -m
    assert id_of("envs", Here) == "bench_of_mine.script:Here"


# --- what lists and pictures call it ---


def test_seeds_are_one_curve_and_runs_are_named_by_the_users_file(here, capsys):
    from shoal.tools.scores import seeds_of

    def train(seed, out):
        assert main(["train", "ppo", "mine.py", *FLAGS, "--env.workers", "0", "--seed", seed, "--out", out]) == 0

    path = write(GYM)
    for k in "012":
        train(k, k)
    (seeds,) = seeds_of([Run(k) for k in "012"])
    assert (seeds.algo, seeds.env, len(seeds.runs)) == ("ppo", "mine", 3)
    assert main(["runs", ".", "--json"]) == 0
    assert {r["env"] for r in json.loads(capsys.readouterr().out)} == {f"{here}/mine.py"}
    assert main(["runs", "."]) == 0
    assert "ppo mine.py, in ." in capsys.readouterr().out
    forget()
    path.write_text(GYM.replace("PAY = 1.0", "PAY = 2.0"))
    train("3", "edited")
    assert len(seeds_of([Run(k) for k in ("0", "1", "2", "edited")])) == 2  # another world by now
