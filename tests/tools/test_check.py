"""The doctor: healthy environments are found healthy, and each way of being broken is named by its sentence."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import processes, wait_for

import shoal
import shoal.envs.own  # loaded here, it is not loaded in each process that looks
from shoal.cli import main
from shoal.ids import catalog
from shoal.spec import UserError
from shoal.tools import doctor as tool
from shoal.tools.check import CheckOptions, Report, check

GYM = """
    import os, signal, time
    import gymnasium, numpy as np
    from gymnasium.spaces import Box, Dict, Discrete

    class Good(gymnasium.Env):
        metadata = {"render_modes": ["rgb_array"]}
        observation_space, action_space = Box(-1, 1, (3,), np.float32), Discrete(2)

        def __init__(self, render_mode=None):
            self.render_mode = render_mode

        def see(self):
            return self.x.astype(np.float32)

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            self.t, self.x = 0, self.np_random.uniform(-1, 1, 3)
            return self.see(), {}

        def step(self, action):
            self.t += 1
            self.x = np.clip(self.x + self.np_random.uniform(-0.1, 0.1, 3), -1, 1)
            return self.see(), float(action), False, self.t >= 10, {}
"""

ZOO = """
    import numpy as np
    from gymnasium.spaces import Box, Dict, Discrete
    from pettingzoo import AECEnv, ParallelEnv

    class Good(ParallelEnv):
        metadata = {"render_modes": ["rgb_array"], "name": "good"}
        possible_agents = ["a_0", "a_1"]
        seen, done = Box(-1, 1, (3,), np.float32), Discrete(2)

        def observation_space(self, agent):
            return self.seen

        def action_space(self, agent):
            return self.done

        def see(self):
            return {a: self.random.uniform(-1, 1, 3).astype(np.float32) for a in self.agents}

        def reset(self, seed=None, options=None):
            self.random, self.t, self.agents = np.random.default_rng(seed), 0, list(self.possible_agents)
            return self.see(), {a: {} for a in self.agents}

        def step(self, actions):
            self.t += 1
            there, seen = self.agents, self.see()
            ended = {a: a == "a_1" and self.t >= 5 for a in there}  # a_1 dies in step 5, a_0 is cut off in step 10
            cut = {a: self.t >= 10 for a in there}
            self.agents = [a for a in there if not ended[a] and not cut[a]]
            return seen, {a: float(actions[a]) for a in there}, ended, cut, {a: {} for a in there}
"""

NATIVE = """
    import torch
    from shoal.envs.base import Move, World
    from shoal.spec import Discrete, EnvSpec, Frame, Group, Result

    class Good(World):
        noise_begin = noise_step = 2

        def setup(self):
            self.spec = EnvSpec((Group("agents", "agents", ("a", "b"), (1,), Discrete(2)),), horizon=8)

        def begin(self, noise):
            return {"x": noise}

        def advance(self, state, actions, noise):
            return Move({"x": noise}, {"agents": Result(actions["agents"].float(), self.never(2))})

        def observe(self, state):
            return Frame({"agents": self.view(state["x"][..., None], state["clock"])})
"""

# what is put into the class Mine(Good) -> level, and the sentence's beginning
GYM_BROKEN = {
    "def step(self, action):\n    if self.t == 4: raise ValueError('no such thing')\n    return super().step(action)": (
        "problem",
        "step raised ValueError: no such thing (mine.py, line ",
    ),
    "def step(self, action):\n    raise SystemExit(3)": ("problem", "step raised SystemExit: 3 (mine.py, line "),
    "def __init__(self, render_mode=None):\n    raise KeyError('colour')": ("problem", "could not be made: KeyError: 'colour'"),
    "def reset(self, seed=None, options=None):\n    return super().reset(seed=seed)[0]": (
        "problem",
        "reset returned a ndarray: it must return two things, observation and info.",
    ),
    "def reset(self):\n    return super().reset()": ("problem", "unexpected keyword argument 'seed'"),
    "def step(self, action):\n    o, r, e, c, i = super().step(action)\n    return o, r, e or c, i": (
        "problem",
        "step returned a tuple of 4: it must return five things",
    ),
    "def see(self):\n    return self.x": (
        "note",
        "the observation of agent_0 is float64 where its space says float32: Shoal converts it; make them alike.",
    ),
    "def see(self):\n    return np.sign(self.x).astype(int)": (
        "note",
        "is int64 where its space says float32: Shoal converts it",
    ),
    "observation_space = Box(-1, 1, (3,), np.int8)": ("problem", "float32 where its space says int8: numbers are lost"),
    "observation_space = Box(-0.01, 0.01, (3,), np.float32)": ("problem", "in it where its space says -0.01 to 0.01"),
    "observation_space = Box(-1, 1, (4,), np.float32)": ("problem", "has shape (3,) and its space (4,): make them alike."),
    "observation_space = Dict(a=Box(-1, 1, (3,)), b=Discrete(2))": ("problem", "where its space has a, b: make them alike."),
    "observation_space = Discrete(2)\ndef see(self):\n    return self.t": (
        "problem",
        "has 2 in it where its space says 0 to 1",
    ),
    "def see(self):\n    return super().see() / (0 if self.t == 3 else 1)": ("problem", "in it: observations must be finite."),
    "def see(self):\n    return 'left'": ("problem", "the observation of agent_0 is a str, which is not made of numbers"),
    "def step(self, action):\n    return (*super().step(action)[:1], None, False, self.t > 9, {})": (
        "problem",
        "the reward of agent_0 is None (NoneType): it must be a number.",
    ),
    "def step(self, action):\n    return (*super().step(action)[:1], '1.0', False, self.t > 9, {})": (
        "problem",
        "the reward of agent_0 is '1.0' (str): it must be a number.",
    ),
    "def step(self, action):\n    return (*super().step(action)[:1], float('nan'), False, self.t > 9, {})": (
        "problem",
        "a reward of agent_0 is nan: rewards must be finite.",
    ),
    "def step(self, action):\n    return (*super().step(action)[:3], False, {})": (
        "problem",
        "no episode ended in 40 steps: it never truncates; give it a limit of time",
    ),
    "def step(self, action):\n    return (*super().step(action)[:2], self.t > 9, self.t > 9, {})": (
        "note",
        "terminated and truncated were both true for agent_0: Shoal takes it for terminated.",
    ),
    "def step(self, action):\n    return (*super().step(action)[:2], int(self.t > 9), False, {})": (
        "note",
        "Gymnasium's own checker says: Expects `terminated` signal to be a boolean, actual type: <class 'int'>",
    ),
    "def reset(self, seed=None, options=None):\n    return super().reset()": (
        "problem",
        "the same seed gives another first observation each time: draw from a generator that reset seeds",
    ),
    "def reset(self, seed=None, options=None):\n    return super().reset(seed=1)": (
        "note",
        "five seeds gave one and the same first observation: it always begins alike.",
    ),
    "def step(self, action):\n    self.x = self.x * np.random.rand()\n    return super().step(action)": (
        "problem",
        "the same seed and actions led elsewhere at step 1: draw from a generator that reset seeds",
    ),
    "def see(self):\n    if not hasattr(self, 'y'): self.y = np.zeros(3, np.float32)\n"
    "    self.y[:] = self.x\n    return self.y": (
        "note",
        "an observation that was handed out is written over by the next step (that of agent_0)",
    ),
    "def see(self):\n    return np.ones(3, np.float32)": (
        "note",
        "in what 'agents' sees, nothing ever changed: all are constant.",
    ),
    "def reset(self, seed=None):\n    return super().reset(seed=seed)": (
        "note",
        "Gymnasium's own checker says: The `reset` method does not provide an `options`",
    ),
    "metadata = {}": ("note", "it has no render mode rgb_array: shoal watch cannot film it."),
    "def reset(self, seed=None, options=None):\n"
    "    return super().reset(seed=seed)[0], {'action_mask': np.zeros(2, np.int8)}": (
        "problem",
        "the action mask of agent_0 forbids everything: allow at least one choice.",
    ),
    "def reset(self, seed=None, options=None):\n    return super().reset(seed=seed)[0], {'action_mask': np.ones(3, np.int8)}": (
        "problem",
        "the action mask of agent_0 has 3 entries and the agent 2 choices",
    ),
    "action_space = Dict(a=Discrete(2), b=Box(-1, 1, (2,)))": ("problem", "choices and numbers at once"),
}

ZOO_BROKEN = {
    "def action_space(self, agent):\n    return Discrete(2)": (
        "note",
        "PettingZoo's own checker says: action_space should return the exact same space object",
    ),
    "def step(self, actions):\n    s, r, e, c, i = super().step(actions)\n    return s, r, {a: int(e[a]) for a in e}, c, i": (
        "note",
        "terminated is 0 (int) for a_0: make it True or False.",
    ),
    "def step(self, actions):\n    s, r, e, c, i = super().step(actions)\n"
    "    return s, {a: r[a] for a in self.agents}, e, c, i": (
        "problem",
        "the reward of a_1 is missing in a step that it began alive: pay everyone who was there before the step",
    ),
    "def step(self, actions):\n    s, r, e, c, i = super().step(actions)\n"
    "    return s, r, {k: e[k] for k in self.agents}, c, i": (
        "problem",
        "terminated does not mention a_1, who was there before the step: say true or false.",
    ),
    "def step(self, actions):\n    s, *rest = super().step(actions)\n    return {a: s[a] for a in self.agents}, *rest": (
        "problem",
        "a_0 was truncated without a last observation: give it one, its value is reckoned from there.",
    ),
    "def step(self, actions):\n    out = super().step(actions)\n"
    "    if self.t == 7: self.agents = ['a_0', 'a_1']\n    return out": (
        "problem",
        "a_1 came back from the dead: who terminated or was truncated stays out.",
    ),
    "def step(self, actions):\n    out = super().step(actions)\n    if self.t == 2: self.agents = ['a_0']\n    return out": (
        "problem",
        "a_1 left without having terminated or been truncated: set one of the two.",
    ),
    "def step(self, actions):\n    s, *rest = super().step(actions)\n"
    "    s['a_1'] = self.see()['a_0'] if self.agents else s['a_0']\n"
    "    return s, *rest": ("note", "observations of 'agents' who are not there change: nobody learns from them."),
    "def reset(self, seed=None, options=None):\n    out = super().reset(seed)\n    self.agents.append('b_7')\n    return out": (
        "problem",
        "'b_7' is not among the possible_agents: name everyone who may come.",
    ),
    "def reset(self, seed=None, options=None):\n    return list(super().reset(seed)[0].values()), {}": (
        "problem",
        "the observations that reset returned are a list of 2: they must be a dict by agent.",
    ),
}

NATIVE_BROKEN = {
    "def observe(self, state):\n    f = super().observe(state)\n    f['agents'].obs = f['agents'].obs[..., 0]\n    return f": (
        "problem",
        "the observation of 'agents' in the first frame has shape [2, 2]: it must be [2, 2, 1].",
    ),
    "def observe(self, state):\n    f = super().observe(state)\n    f['agents'].alive = self.never(2)\n    return f": (
        "problem",
        "`active` of 'agents' in the first frame holds for some who are not alive: it is a part of `alive`.",
    ),
    "def observe(self, state):\n    f = super().observe(state)\n    f['agents'].start = self.always(2)\n    return f": (
        "problem",
        "`start` of 'agents' is not what it should be: true in an agent's first frame, and in no other.",
    ),
    "def observe(self, state):\n    f = super().observe(state)\n"
    "    f['agents'].legal = torch.zeros(2, 2, 2) > 0\n    return f\n"
    "def setup(self):\n    super().setup()\n    import dataclasses as d\n"
    "    g = d.replace(self.spec.groups[0], masked=True)\n    self.spec = d.replace(self.spec, groups=(g,))": (
        "problem",
        "`legal` of 'agents' in the first frame forbids everything to somebody: allow at least one choice.",
    ),
    "def advance(self, state, actions, noise):\n    m = super().advance(state, actions, noise)\n"
    "    m.results['agents'].reward = m.results['agents'].reward / 0\n    return m": (
        "problem",
        "a reward of 'agents' is not finite",
    ),
    "def advance(self, state, actions, noise):\n    return super().advance(state, actions, torch.rand_like(noise))": (
        "problem",
        "the same noise and actions led elsewhere: make all of it follow from the noise",
    ),
    "def begin(self, noise):\n    return {'x': torch.rand_like(noise)}": (
        "problem",
        "the same noise gives another first frame",
    ),
    "def begin(self, noise):\n    return {'x': noise * 0}": ("note", "other noise gives the same first frame"),
    "def observe(self, state):\n    f = super().observe(state)\n"
    "    self.y = getattr(self, 'y', f['agents'].obs.clone())\n    self.y.copy_(f['agents'].obs)\n"
    "    f['agents'].obs = self.y\n    return f": ("problem", "a frame that was handed out is written over by the next step"),
    "def get_state(self):\n    return {**super().get_state(), 'x': self.state['x'] * 0}": (
        "problem",
        "what follows set_state(get_state()) is not what followed then",
    ),
    "def setup(self):\n    super().setup()\n    self.spec = EnvSpec(self.spec.groups, common=True, horizon=8)": (
        "problem",
        "agents of a team are paid unlike, and the spec says common=True",
    ),
    "def advance(self, state, actions, noise):\n    m = super().advance(state, actions, noise)\n"
    "    m.results['agents'].terminated = self.always(2)\n    return m": (
        "problem",
        "some of 'agents' terminated and are still alive in `next`: who ended is gone.",
    ),
    "def step(self, actions, noise):\n    import dataclasses as d\n    self.n = getattr(self, 'n', 0) + 1\n"
    "    out = super().step(actions, noise)\n    return d.replace(out, over=torch.zeros(2) > 0)": (
        "problem",
        "an episode is longer than the 8 steps that the spec names as its horizon",
    ),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    catalog("envs")  # read here, it is not read in each process that looks
    monkeypatch.setattr(tool, "SPEED", 0.005)  # what is forked has it too
    monkeypatch.chdir(tmp_path)


def written(base: str, body: str = "pass") -> str:
    """The file, and in it the class Mine with this body."""
    code = textwrap.dedent(base) + f"\n\nclass Mine(Good):\n{textwrap.indent(body, '    ')}\n"
    Path("mine.py").write_text(code)
    return "mine.py"


def looked(env: str, **options: Any) -> Report:
    return check(env, CheckOptions(**{"steps": 40, "rows": 2, "timeout": 10.0, **options}))


def complaints(report: Report) -> list[tuple[str, str]]:
    return [(f.level, f.sentence) for f in report.findings if f.level != "ok"]


def named(report: Report, level: str, words: str) -> bool:
    return any(found == level and words in sentence for found, sentence in complaints(report))


@pytest.mark.parametrize(
    "env",
    [
        "simple_spread",
        "probe_deaths",
        "probe_turns",
        "probe_illegal",
        "gymnasium/CartPole-v1",
        "pettingzoo.classic.tictactoe_v3:env",  # in turn, masked
    ],
)
def test_healthy_worlds(env: str) -> None:
    report = looked(env)
    assert report.of("problem") == []
    good = {f.about for f in report.of("ok")}
    assert good >= {"frames", "start flags", "ends", "tensors", "next", "seeding", "repeatable", "exact resume"}
    assert report.seen["episodes"] > 0
    assert report.seen["rates"]["in one process"] > 0
    assert report.algorithms["mappo"] == ""


def test_what_is_seen_is_counted_right() -> None:
    """Eight steps: two of three die before the end and one comes late; by hand."""
    seen = looked("probe_deaths", steps=80, rows=3).seen
    assert {k: seen[k] for k in ("episodes", "terminated", "truncated", "deaths", "arrivals")} == {
        "episodes": 30,
        "terminated": 30,
        "truncated": 0,
        "deaths": 60,
        "arrivals": 30,
    }
    assert (seen["shortest"], seen["longest"]) == (8, 8)


def test_long_episodes_are_no_problem() -> None:
    report = looked("gymnasium/Pendulum-v1")
    assert named(report, "note", "no episode ended in 40 steps, and one may have 200: look on with --steps.")
    assert report.of("problem") == []


@pytest.mark.parametrize(("base", "groups"), [(GYM, ["agents"]), (ZOO, ["agents"]), (NATIVE, ["agents"])])
def test_healthy_ones_of_ones_own(base: str, groups: list[str]) -> None:
    report = looked(written(base))
    assert complaints(report) == []
    assert list(report.groups) == groups
    if base != NATIVE:
        assert set(report.seen["rates"]) == {"in one process", "with workers"}


@pytest.mark.parametrize("body", GYM_BROKEN)
def test_broken_of_gymnasiums_kind(body: str) -> None:
    report = looked(written(GYM, body))
    assert named(report, *GYM_BROKEN[body]), complaints(report)


@pytest.mark.parametrize("body", ZOO_BROKEN)
def test_broken_of_pettingzoos_kind(body: str) -> None:
    report = looked(written(ZOO, body))
    assert named(report, *ZOO_BROKEN[body]), complaints(report)


@pytest.mark.parametrize("body", NATIVE_BROKEN)
def test_broken_native_worlds(body: str) -> None:
    report = looked(written(NATIVE, body))
    assert named(report, *NATIVE_BROKEN[body]), complaints(report)


def test_what_was_not_looked_at_is_not_called_well() -> None:
    few = {f.about for f in looked("simple_spread", steps=20).of("ok")}
    assert "repeatable" in few
    assert "exact resume" not in few  # that is tried from step 32 on
    unseeded = "def reset(self, seed=None, options=None):\n    return super().reset()"
    astray = "def step(self, action):\n    self.x = self.x * np.random.rand()\n    return super().step(action)"
    for body in (unseeded, astray):
        assert not {"repeatable", "exact resume"} & {f.about for f in looked(written(GYM, body)).of("ok")}


HANGS = {
    "def step(self, action):\n    while True: pass": "step took longer than 1 s (mine.py, line ",
    "def step(self, action):\n    while True:\n        try: time.sleep(9)\n        except Exception: pass": (
        "step took longer than 1 s (mine.py, line "
    ),
    "def step(self, action):\n    while True:\n        try: time.sleep(9)\n        except BaseException: pass": (
        "step took longer than 1 s and could not be interrupted"
    ),
    "def reset(self, seed=None, options=None):\n    time.sleep(60)": "making it took longer than 1 s (mine.py, line ",
}
CRASHES = {
    "def step(self, action):\n    os._exit(7)": "the process left with exit status 7 while step",
    "def step(self, action):\n    os.kill(os.getpid(), signal.SIGSEGV)": "the process was killed by SIGSEGV while step",
}


SLEEP = f"7000.{os.getpid()}"  # what the environment starts besides, so that it is known from others


def ours() -> dict[int, str]:
    """Processes that are our children, or that the environment started."""
    return {pid: line for pid, (parent, line) in processes().items() if parent == os.getpid() or SLEEP in line}


@pytest.mark.parametrize("body", [*HANGS, *CRASHES])
def test_hangs_and_crashes_are_findings_and_nothing_is_left(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tools.check.GRACE", 0.5)
    before = ours()  # what other tests have started, such as wandb's own, is not ours to judge
    started = f"\n    import subprocess\n    subprocess.Popen(['sleep', '{SLEEP}'])\n    Mine.begun = True"
    head, _, rest = body.partition("\n")
    mine = f"begun = False\n{head}\n    if not Mine.begun:{textwrap.indent(started, '    ')}\n{rest}"
    report = looked(written(GYM, mine), timeout=1.0)
    assert named(report, "problem", {**HANGS, **CRASHES}[body]), complaints(report)
    assert wait_for(lambda: ours().keys() <= before.keys()), ours()  # what was killed goes when it gets its turn


def test_algorithms_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.algos.ppo import PPO

    monkeypatch.setattr(PPO, "takes", ("continuous",))
    report = looked("probe_copy")
    assert report.algorithms["mappo"] == "PPO takes continuous actions; those of 'agents' are discrete."
    assert report.algorithms["maa2c"] == ""


def test_statuses_and_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--steps 80 --rows 2".split()
    assert main(["check", "simple_spread", "--env.n", "2", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simple_spread: ")
    assert "agent_0 ... agent_1 (2)" in out
    assert out.rstrip().endswith("no problems.")
    assert main(["check", written(GYM, "def step(self, action):\n    return 1"), *words]) == 1
    *_, problem, _, last = capsys.readouterr().out.rstrip().splitlines()
    assert re.match(" ?problem +form +step returned a int: it must return five things", problem)
    assert last == "1 problem."


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("simple_spred", "did you mean 'simple_spread'"),
        ("simple_spread --env.m 3", "no setting 'm'"),
        ("simple_spread --env.n 0", "--env.n is 0"),
        ("simple_spread --stepps 3", "no flag --stepps"),
        ("simple_spread --steps 0", "--steps is 0: it must be more than zero."),
        ("gymnasium/NoSuch-v0", "has no environment 'NoSuch-v0'"),
        ("no_such_file.py", "there is no file 'no_such_file.py'."),
        ("", "check takes an environment"),
    ],
)
def test_wrong_words(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shoal: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_json_is_one_value_whatever_the_environment_prints(capfd: pytest.CaptureFixture[str]) -> None:
    body = "def step(self, action):\n    print('hello')\n    os.write(1, b'there')\n    return super().step(action)"
    assert main(["check", written(GYM, body), "--steps", "80", "--json"]) == 0
    value = json.loads(capfd.readouterr().out)
    assert value["env"] == "mine.py"
    assert value["groups"]["agents"]["range"][""] == pytest.approx([-1, 1], abs=0.2)
    assert value["groups"]["agents"]["reward_range"] == [0, 1]
    assert value["seen"]["truncated"] == 32  # 80 steps of 4 rows, 10 an episode
    assert value["algorithms"]["mappo"] is None
    assert {f["level"] for f in value["findings"]} == {"ok"}


def test_json_has_no_word_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    body = "def see(self):\n    return super().see() / (0 if self.t == 3 else 1)"
    assert main(["check", written(GYM, body), "--steps", "40", "--json"]) == 1
    value = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert value["groups"]["agents"]["range"][""] == [None, None]


def test_from_python() -> None:
    report = shoal.check("simple_spread", steps=30, n=2)
    assert report.spec is not None
    assert report.spec.groups[0].n == 2
    with pytest.raises(UserError, match="no setting 'm'"):
        shoal.check("simple_spread", m=2)


def test_the_global_generators_stay_as_they_are() -> None:
    before, folder = torch.random.get_rng_state(), os.getcwd()
    looked("probe_copy")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert os.getcwd() == folder


def test_what_was_played_before_must_not_matter() -> None:
    """Whoever stands somewhere is in the way of the next episode's beginning, once in a while."""
    mine = """
    stands = 0
    def reset(self, seed=None, options=None):
        seen, info = super().reset(seed=seed)
        at = int(np.random.default_rng(seed).integers(12))
        self.stands = at + 1 if (at + self.stands) % 7 == 5 else at
        return np.full(3, self.stands / 20, np.float32), info
    """
    report = looked(written(GYM, textwrap.dedent(mine)))
    assert named(report, "problem", "what was played before changes how seed"), complaints(report)
