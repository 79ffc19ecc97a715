"""A policy in the environment's own loop, against `shoal eval`: the same seeds, and every episode's return is the same. Then in
a process that has neither Gymnasium nor PettingZoo nor mpe2, on what was seen: the same actions."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.envs.conversions import describe, restored
from shoal.envs.rows import RowRunner
from shoal.envs.spaces import Moves, Observer
from shoal.spec import UserError

QUICK = {"envs": 4, "steps": 160, "quiet": True, "eval": {"episodes": 1}, "log": {"tensorboard": False}, "compile": "off"}
EPISODES = 6

WORLDS = '''
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Small(gym.Env):
    """Ten steps; pays by what is done and by what is seen, so that a wrong number shows."""

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), self.info()

    def step(self, action):
        reward, self.t = self.reward(action), self.t + 1
        return self.look(), float(reward), False, self.t == 10, self.info()

    def info(self):
        return {}


class Shifted(Small):
    """Choices 1 to 3, and seen numbers from 5 on."""

    observation_space, action_space = spaces.Discrete(3, start=5), spaces.Discrete(3, start=1)

    def look(self):
        self.symbol = int(self.np_random.integers(3))
        return self.symbol + 5

    def reward(self, action):
        assert self.action_space.contains(action), action
        return action == self.symbol + 1


class Column(Small):
    """Numbers in a column, in float64."""

    observation_space = spaces.Box(-1, 1, (2, 2), np.float64)
    action_space = spaces.Box(np.array([[-3.0], [0.0]]), np.array([[1.0], [2.0]]), (2, 1), np.float64)

    def look(self):
        self.seen = self.np_random.uniform(-1, 1, (2, 2))
        return self.seen

    def reward(self, action):
        assert self.action_space.contains(action), action
        return (action[:, 0] * self.seen[0]).sum()


class Camera(Small):
    """A picture, height by width by channels, and numbers; several choices, nested."""

    observation_space = spaces.Dict(camera=spaces.Box(0, 255, (12, 10, 3), np.uint8), imu=spaces.Box(-1, 1, (3,)))
    action_space = spaces.Dict(steer=spaces.Discrete(3, start=-1), pedals=spaces.MultiDiscrete([2, 4]))

    def look(self):
        camera = self.np_random.integers(0, 256, (12, 10, 3)).astype(np.uint8)
        camera[:, : self.t, 2] = 255
        self.imu = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return {"camera": camera, "imu": self.imu}

    def reward(self, action):
        assert self.action_space.contains(action), action
        return action["steer"] * self.imu[0] + action["pedals"] @ self.imu[1:]


class Masked(Small):
    """Legal choices are in the info."""

    observation_space, action_space = spaces.Box(-1, 1, (4,)), spaces.Discrete(4, start=2)

    def look(self):
        self.seen = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        self.legal = self.np_random.integers(0, 2, 4).astype(np.int8)
        self.legal[self.np_random.integers(4)] = 1
        return self.seen

    def info(self):
        return {"action_mask": self.legal}

    def reward(self, action):
        assert self.legal[action - 2], (self.legal, action)
        return action * self.seen[action - 2]


class Shown(Masked):
    """Legal choices are in the observation."""

    observation_space = spaces.Dict(observation=spaces.Box(-1, 1, (4,)), action_mask=spaces.MultiBinary(4))

    def look(self):
        return {"observation": super().look(), "action_mask": self.legal}

    def info(self):
        return {}


class Lives(ParallelEnv):
    """Agents die, by what they see, and others come; masks are in the observation; the agents' names are numbers."""

    metadata = {"name": "lives"}
    possible_agents = [0, 1, 2, 3]

    def observation_space(self, agent):
        return spaces.Dict(observation=spaces.Box(-1, 1, (3,)), action_mask=spaces.MultiBinary(3))

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.draw, self.t, self.agents = np.random.default_rng(seed), 0, [0, 1]
        return self.look(), {a: {} for a in self.agents}

    def look(self):
        self.seen = {a: self.draw.uniform(-1, 1, 3).astype(np.float32) for a in self.possible_agents}
        self.masks = {a: np.roll([1, 1, 0], self.t + a).astype(np.int8) for a in self.possible_agents}
        return {a: {"observation": self.seen[a], "action_mask": self.masks[a]} for a in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        assert all(self.masks[a][x] for a, x in actions.items())
        rewards = {a: float(x * self.seen[a][0]) for a, x in actions.items()}
        self.t += 1
        dead = {a: bool(self.seen[a][1] > 0.6) for a in self.agents}
        late = {a: self.t == 12 for a in self.agents}
        here = [a for a in self.agents if not dead[a]]
        come = [a for a in (2, 3) if self.t == a and a not in here]  # and who has died does not come back
        gone, self.agents = self.agents, here + come
        seen = self.look()
        seen.update({a: {"observation": self.seen[a], "action_mask": self.masks[a]} for a in gone})
        if self.t == 12:
            self.agents = []
        return seen, rewards, dead, late, {a: {} for a in seen}
'''


@dataclass
class Played:
    """What a raw loop held: (observations, infos, whether an episode begins, actions) of each call; and returns by agent."""

    calls: list[Any] = field(default_factory=list)
    returns: list[dict[str, float]] = field(default_factory=list)


def gym_loop(make, policy, seeds):
    played, env = Played(), make()
    for seed in seeds:
        (obs, info), memory, total, over = env.reset(seed=seed), None, 0.0, False
        while not over:
            action, after = policy.act(obs, memory, info)
            played.calls.append((obs, info, memory is None, action))
            obs, reward, terminated, truncated, info = env.step(action)
            memory, total, over = after, total + reward, terminated or truncated
        played.returns.append({"agent_0": total})
    return played


def parallel_loop(make, policy, seeds):
    played, env = Played(), make()
    for seed in seeds:
        (obs, infos), memory, total = env.reset(seed=seed), None, dict.fromkeys(map(str, env.possible_agents), 0.0)
        while env.agents:
            living = {a: obs[a] for a in env.agents}
            actions, after = policy.act(living, memory, infos)
            played.calls.append((living, infos, memory is None, actions))
            obs, rewards, _, _, infos = env.step(actions)
            memory = after
            for a, r in rewards.items():
                total[str(a)] += r
        played.returns.append(total)
    return played


def turns_loop(make, policy, seeds):
    played, env = Played(), make()
    for seed in seeds:
        env.reset(seed=seed)
        memory, total = None, dict.fromkeys(env.possible_agents, 0.0)
        for agent in env.agent_iter():
            obs, reward, terminated, truncated, info = env.last()
            total[agent] += reward
            if terminated or truncated:
                env.step(None)
                continue
            actions, after = policy.act({agent: obs}, memory, {agent: info})
            played.calls.append(({agent: obs}, {agent: info}, memory is None, actions))
            memory = after
            env.step(actions[agent])
        played.returns.append(total)
    return played


def tuple_loop(make, policy, seeds):
    played, env = Played(), make()
    for seed in seeds:
        for player in env.unwrapped.players:
            player.position = None  # or seeds do not repeat
        (obs, _), memory, over = env.reset(seed=seed), None, False
        total = np.zeros(len(obs))
        while not over:
            actions, after = policy.act(obs, memory)
            played.calls.append((obs, None, memory is None, actions))
            obs, rewards, terminated, truncated, _ = env.step(actions)
            memory, total, over = after, total + rewards, terminated or truncated
        played.returns.append({f"agent_{i}": float(x) for i, x in enumerate(total)})
    return played


def gym_make(id, **kwargs):
    return lambda: importlib.import_module("gymnasium").make(id, **kwargs)


def foraging():
    importlib.import_module("lbforaging")
    return gym_make("Foraging-5x5-2p-1f-v3")()


def of_package(module, name, **kwargs):
    return lambda: getattr(importlib.import_module(module), name)(**kwargs)


@dataclass(frozen=True)
class Case:
    algo: str
    env: str  # a bare name: one of WORLDS
    loop: Any
    make: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    net: dict[str, Any] = field(default_factory=dict)


GRU = {"memory": "gru", "memory_width": 8}
FOUR = "classic.connect_four_v3"
CASES = {
    "cartpole": Case("dqn", "gymnasium/CartPole-v1", gym_loop, gym_make("CartPole-v1")),
    "start": Case("ppo", "Shifted", gym_loop, net=GRU),
    "column": Case("sac", "Column", gym_loop),
    "camera": Case("ppo", "Camera", gym_loop),
    "stacked": Case("ppo", "Camera", gym_loop, config={"grey": True, "resize": 8, "stack": 3}),
    "info masks": Case("ddqn", "Masked", gym_loop),
    "shown masks": Case("ppo", "Shown", gym_loop),
    "lives": Case("ippo", "Lives", parallel_loop, net=GRU),
    "spread": Case("mappo", "mpe2/simple_spread_v3", parallel_loop, of_package("mpe2.simple_spread_v3", "parallel_env")),
    "connect four": Case("ippo", f"pettingzoo/{FOUR}", turns_loop, of_package(f"pettingzoo.{FOUR}", "env"), net=GRU),
    "foraging": Case("iql", "lbforaging/Foraging-5x5-2p-1f-v3", tuple_loop, foraging),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "worlds.py"
    path.write_text(WORLDS)
    return path


def env_of(case, own):
    """The id for Shoal, and how the raw environment is made."""
    if case.make is not None:
        return case.env, case.make
    spec = importlib.util.spec_from_file_location("raw_worlds", own)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return f"{own}:{case.env}", getattr(module, case.env)


@dataclass
class Done:
    run: Any
    policy: Any
    episodes: Any
    played: Played


@pytest.fixture(scope="module")
def done(own, tmp_path_factory):
    """Of each case a run, its evaluation, and the raw loop of the same seeds."""
    return {name: play(case, own, tmp_path_factory.mktemp("runs") / "r") for name, case in CASES.items()}


def play(case, own, folder):
    id, make = env_of(case, own)
    past = {"capacity": 4000, "learning_starts": 80} if case.algo in ("dqn", "ddqn", "iql", "sac") else {}
    net = {"hidden": (16,), "gain_actor": 5.0, **case.net}
    env = {"workers": 0, **case.config}
    run = shoal.train(case.algo, id, algo={"rollout": 20, **past}, net=net, env=env, out=folder, **QUICK)
    seeds: dict[int, int] = {}
    begin = RowRunner._begin

    def recorded(runner, i):
        begin(runner, i)
        seeds.setdefault(i, runner.begun[i])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowRunner, "_begin", recorded)
        episodes = shoal.evaluate(run, EPISODES)
    policy = shoal.load(run)
    return Done(run, policy, episodes, case.loop(make, policy, [seeds[i] for i in range(EPISODES)]))


@pytest.mark.parametrize("name", CASES)
def test_a_raw_loop_earns_what_an_evaluation_did(done, name):
    policy, episodes, played = done[name].policy, done[name].episodes, done[name].played
    assert len(played.returns) == EPISODES
    for g in policy.spec.groups:
        for i, a in enumerate(g.agents):
            raw = torch.tensor([r[a] for r in played.returns], dtype=torch.float64)
            assert torch.allclose(episodes.returns[g.name][:, i], raw, atol=1e-4), a
    earned = {x for r in played.returns for x in r.values()}
    assert len(earned) > 1 or name in ("foraging", "start")  # what is always the same shows nothing


def test_a_policy_says_what_it_takes(done):
    for name, one in done.items():
        words = repr(one.policy)
        assert one.policy.name in words
        for g in one.policy.spec.groups:
            assert f"{g.name} ({', '.join(g.agents)}): sees " in words
            assert ("action_mask" in words) == g.masked, name
    assert "sees Discrete(5 to 7), does Discrete(1 to 3)" in repr(done["start"].policy)
    assert "sees Dict(camera: Box(12, 10, 3) of uint8, imu: Box(3))" in repr(done["camera"].policy)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("lives", "connect four")])
def test_a_batch_is_its_worlds_one_by_one(done, name):
    """As Gymnasium's vector environments have it: every array has one dimension more."""
    policy, calls = done[name].policy, [c for c in done[name].played.calls if c[2]]  # the first steps of episodes
    many, infos = stacked([c[0] for c in calls]), stacked([c[1] for c in calls]) if name == "info masks" else None
    actions, memory = policy.act(many, None, infos)
    for b, call in enumerate(calls):
        assert same(row(actions, b), call[3])
    again, _ = policy.act(many, memory, infos, start=np.ones(len(calls), bool))
    assert same(again, actions)


def stacked(xs):
    if isinstance(xs[0], dict):
        return {k: stacked([x[k] for x in xs]) for k in xs[0]}
    return tuple(map(stacked, map(list, zip(*xs, strict=True)))) if isinstance(xs[0], tuple) else np.stack(xs)


def row(x, b):
    if isinstance(x, dict):
        return {k: row(v, b) for k, v in x.items()}
    return tuple(row(v, b) for v in x) if isinstance(x, tuple) else x[b]


def same(x, y):
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[k], y[k]) for k in x)
    if isinstance(x, tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return np.shape(x) == np.shape(y) and np.allclose(x, y, atol=1e-6)


def test_agents_that_are_gone_from_some_worlds_are_said(done):
    """Memory and all, a batch of worlds in which agents die and come goes as each of them does."""
    policy, calls = done["lives"].policy, done["lives"].played.calls
    first = [k for k, c in enumerate(calls) if c[2]]
    episodes = [calls[a:b] for a, b in zip(first, [*first[1:], None], strict=True)]
    blank = {"observation": np.zeros(3, np.float32), "action_mask": np.ones(3, np.int8)}
    memory, acted = None, 0
    for t in range(max(map(len, episodes))):
        now = [e[t] if t < len(e) else ({}, {}, False, {}) for e in episodes]  # nobody is left where it is over
        many = {a: stacked([c[0].get(a, blank) for c in now]) for a in range(4)}
        alive = {a: [a in c[0] for c in now] for a in range(4)}
        actions, memory = policy.act(many, memory, alive=alive)
        for b, c in enumerate(now):
            assert {a: actions[a][b] for a in c[0]} == c[3]
            acted += len(c[3])
    assert acted == sum(len(c[3]) for c in calls)


ELSEWHERE = """
import pickle, sys

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gymnasium", "gym", "pettingzoo", "mpe2", "lbforaging"):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, Gone())
import numpy as np
import shoal

def same(x, y):
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[k], y[k]) for k in x)
    if isinstance(x, tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return type(x) is type(y) and np.shape(x) == np.shape(y) and np.allclose(x, y, atol=1e-6)

checked = 0
for name, (run, calls) in pickle.load(open(sys.argv[1], "rb")).items():
    policy = shoal.load(run)
    for obs, infos, begins, action in calls:
        mine, memory = policy.act(obs, None if begins else memory, infos)
        assert same(mine, action), (name, mine, action)
        checked += 1
print(checked, *sorted(m for m in ("gymnasium", "pettingzoo", "mpe2") if m in sys.modules))
"""


def test_no_environment_package_is_needed_to_act(done, tmp_path):
    kept = {name: (str(one.run.path), one.played.calls) for name, one in done.items()}
    (tmp_path / "calls").write_bytes(pickle.dumps(kept))
    child = subprocess.run([sys.executable, "-c", ELSEWHERE, tmp_path / "calls"], capture_output=True, text=True, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == [str(sum(len(calls) for _, calls in kept.values()))]


# --- spaces as data ---


def test_a_space_comes_back_from_json_as_it_was():
    spaces = importlib.import_module("gymnasium").spaces
    nested = spaces.Dict(
        camera=spaces.Box(0, 255, (12, 10, 3), np.uint8),
        pair=spaces.Tuple((spaces.Discrete(3, start=-2), spaces.MultiDiscrete([2, 4], start=[1, 0]))),
        flags=spaces.MultiBinary(3),
        wide=spaces.Box(np.array([-1.5, -np.inf], np.float32), np.array([np.inf, 2.5], np.float32)),
    )
    again = restored(json.loads(json.dumps(describe(nested), allow_nan=False)))
    before, after = Observer(nested), Observer(again)
    assert before.shape == after.shape
    nested.seed(3)
    seen = nested.sample()
    outs = [{k: np.zeros(s) for k, s in o.shape.items()} for o in (before, after)]
    for o, out in zip((before, after), outs, strict=True):
        o.write(seen, out)
    assert all((outs[0][k] == outs[1][k]).all() for k in outs[0])
    boxes = spaces.Tuple((nested["wide"], spaces.Box(-2, 2, (2, 1))))
    one, other = Moves(boxes), Moves(restored(json.loads(json.dumps(describe(boxes), allow_nan=False))))
    assert one.space == other.space
    action = np.array([0.25, -0.5, 2.0, -2.0], np.float32)
    assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(one.read(action), other.read(action), strict=True))


# --- what an environment's loop may hand over ---


def test_who_has_waited_through_an_episodes_end_begins_anew(tmp_path):
    """`start` is said once, with whoever moves first."""
    policy = shoal.load(shoal.train("mappo", "probe_turns", net=GRU, algo={"rollout": 10}, out=tmp_path / "r", **QUICK))
    one, other = policy.spec["agents"].agents[:2]
    seen = np.full(policy.spec["agents"].obs, 0.7, np.float32)
    _, memory = policy.act({other: seen}, policy.act({one: seen})[1])
    _, fresh = policy.act({other: seen}, policy.act({one: seen})[1])
    _, again = policy.act({other: seen}, policy.act({one: seen}, memory, start=True)[1])
    hidden = [m.state["agents"]["actor"]["hidden"][0, 1] for m in (memory, fresh, again)]
    assert torch.equal(hidden[1], hidden[2])


def test_infos_may_say_more_than_of_agents(done):
    policy, (living, infos, _, action) = done["lives"].policy, done["lives"].played.calls[0]
    assert policy.act(living, None, {**infos, "__common__": {}})[0] == action
    policy, (seen, _, _, action) = done["foraging"].policy, done["foraging"].played.calls[0]
    assert policy.act(seen, None, {"episode": 3})[0] == action


def test_masks_of_several_choices_are_one_each(tmp_path):
    policy = shoal.load(
        shoal.train("ppo", "probe_illegal", env={"actions": "multi"}, out=tmp_path / "r", algo={"rollout": 5}, **QUICK)
    )
    (g,) = policy.spec.groups
    seen = {a: np.zeros(g.obs, np.float32) for a in g.agents}
    for choice in np.ndindex(*g.action.sizes):
        masks = {a: tuple(np.arange(n) == c for n, c in zip(g.action.sizes, choice, strict=True)) for a in g.agents}
        assert all(tuple(x) == choice for x in policy.act(seen, masks=masks)[0].values())
    many = {a: np.zeros((3, *g.obs), np.float32) for a in g.agents}
    with pytest.raises(UserError, match="is not one for each of 3 worlds"):
        policy.act(many, masks={a: np.ones((2, sum(g.action.sizes))) for a in g.agents})


def test_tensors_in_and_tensors_out(done):
    policy = done["foraging"].policy
    actions, _ = policy.act(torch.zeros(2, *policy.spec["agents"].obs))
    assert isinstance(actions, torch.Tensor)
    assert actions.shape == (2,)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("start", (5.5,), r"is 5.5: this policy takes Discrete\(5 to 7\)"),
        ("start", (8,), r"is 8: this policy takes Discrete\(5 to 7\)"),
        ("start", (5, {"hidden": 3}), "memory is a dict: it takes what `act` gave back"),
        ("cartpole", ([0.0, np.nan, 0.0, 0.0],), "the observation of 'agent_0' holds a number that is not finite"),
    ],
)
def test_what_no_environment_gives_is_a_sentence(done, name, given, words):
    with pytest.raises(UserError, match=words):
        done[name].policy.act(*given)


def test_whole_numbers_are_choices_whatever_their_type(done):
    policy = done["start"].policy
    assert policy.act(5.0)[0] == policy.act(torch.tensor(5))[0] == policy.act(5)[0]


# --- drawing ---


def test_draws_go_on_from_call_to_call(tmp_path):
    run = shoal.train("ippo", "simple_tag", team={"agent": "random"}, out=tmp_path / "r", algo={"rollout": 5}, **QUICK)
    policy = shoal.load(run)
    seen = {a: [0.1] * g.obs[0] for g in policy.spec.groups for a in g.agents}
    actions = [policy.act(seen)[0] for _ in range(60)]
    assert len({a["agent_0"] for a in actions}) == 5  # a uniform choice of 5 leaves one out once in 650,000 times
    assert len({tuple(a.values())[:3] for a in actions}) == 1  # the others are greedy
    assert len({tuple(policy.act(seen, sampled=True)[0].values())[:3] for _ in range(60)}) > 1
    assert [policy.act(seen)[0] for policy in (shoal.load(run), shoal.load(run))] == actions[:1] * 2
    assert [shoal.load(run, seed=k).act(seen)[0]["agent_0"] for k in range(20)] != [actions[0]["agent_0"]] * 20


# --- worlds in tensors, in the loops of the libraries that they are like ---


def interval(x):
    return 1.96 * x.std() / len(x) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "team", "net", "loop", "make"),
    [
        ("simple_spread", {}, {}, parallel_loop, of_package("mpe2.simple_spread_v3", "parallel_env")),
        ("simple_spread", {}, GRU, parallel_loop, of_package("mpe2.simple_spread_v3", "parallel_env")),
        ("simple_tag", {"agent": "random"}, {}, parallel_loop, of_package("mpe2.simple_tag_v3", "parallel_env")),
        ("CartPole-v1", {}, {}, gym_loop, gym_make("CartPole-v1")),
    ],
    ids=["spread", "spread with memory", "tag against random", "cartpole"],
)
def test_a_native_world_is_played_as_its_library_has_it(tmp_path, env, team, net, loop, make):
    """Over 500 episodes of other starts: the means differ by no more than both intervals, widened by a half."""
    options = {**QUICK, "envs": 32, "steps": 40_000, "compile": "auto"}
    algo = "ppo" if env == "CartPole-v1" else "mappo"
    run = shoal.train(algo, env, team=team, net=net, out=tmp_path / "r", **options)
    episodes, played = shoal.evaluate(run, 512), loop(make, shoal.load(run), range(500))
    for g in shoal.load(run).spec.groups:
        there = episodes.returns[g.name].mean(-1).numpy()
        here = np.array([np.mean([r[a] for a in g.agents]) for r in played.returns])
        assert abs(there.mean() - here.mean()) < 1.5 * (interval(there) + interval(here)), g.name


@pytest.mark.parametrize("actions", ["continuous", "discrete"])
def test_vmas_takes_a_list_of_tensors_and_gives_one(tmp_path, actions):
    pytest.importorskip("vmas")
    quick = {**QUICK, "steps": 20, "eval": {"every": 0}}
    run = shoal.train("ippo", "vmas/balance", env={"actions": actions}, out=tmp_path / "r", algo={"rollout": 5}, **quick)
    policy = shoal.load(run)
    inner = importlib.import_module("vmas").make_env("balance", num_envs=3, continuous_actions=actions == "continuous", seed=0)
    seen, memory = inner.reset(), None
    for _ in range(3):
        taken, memory = policy.act(seen, memory)
        assert type(taken) is list
        assert [tuple(x.shape) for x in taken] == [(3, 2 if actions == "continuous" else 1)] * len(seen)
        frame = {f"agent_{i}": x for i, x in enumerate(seen)}
        assert all(torch.equal(x, policy.act(frame)[0][a]) for x, a in zip(taken, frame, strict=True))
        seen, *_ = inner.step(taken)


# --- mistakes are sentences ---


def test_one_agent_is_told_apart_from_names(tmp_path):
    policy = shoal.load(shoal.train("ppo", "CartPole-v1", out=tmp_path / "r", algo={"rollout": 5}, **QUICK))
    bare, _ = policy.act([0.0] * 4)
    named, _ = policy.act({"agent_0": [0.0] * 4})
    batch, _ = policy.act(np.zeros((3, 4)))
    assert type(bare) is int
    assert named == {"agent_0": bare}
    assert batch.tolist() == [bare] * 3
    for wrong, words in (
        ([0.0] * 5, r"has shape \(5,\); this policy takes \(4,\)"),
        (np.zeros((2, 3, 4)), r"has shape \(2, 3, 4\); this policy takes \(4,\)"),
        ({"pole": [0.0] * 4}, "is not made of numbers"),
    ):
        with pytest.raises(UserError, match=words):
            policy.act(wrong)
    _, memory = policy.act(np.zeros((3, 4)))
    with pytest.raises(UserError, match="the memory is of 3 worlds, and the observations are of 1"):
        policy.act([0.0] * 4, memory)


def test_a_record_that_cannot_be_read_is_a_sentence(tmp_path):
    run = shoal.train("ppo", "CartPole-v1", out=tmp_path / "r", algo={"rollout": 5}, **QUICK)
    file = Path(run.path) / "config.json"
    whole = json.loads(file.read_text())
    spec, box = whole["world"]["spec"], {"type": "Box", "shape": [4], "dtype": "float32"}
    odd = ({}, {"agent_0": 3}, {"agent_0": {"observation": box, "action": {"type": "Disk"}}}, {"agent_1": {}})
    for wrong in ({"spec": {}}, *({"spec": spec, "conversions": c} for c in odd)):
        file.write_text(json.dumps({**whole, "world": wrong}))
        with pytest.raises(UserError, match=r"has a `world` that cannot be read"):
            shoal.load(run.path)
    file.write_text(json.dumps({k: x for k, x in whole.items() if k != "world"}))
    assert shoal.load(run.path).act([0.0] * 4)[0] in (0, 1)  # an older run: its environment is asked
