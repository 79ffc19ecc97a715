"""Gymnasium's environments: trained on, stepped beside Gymnasium's own, and small ones of which every number is known."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.envs import vector
from shoal.envs.vector import BITS
from shoal.ids import find
from shoal.spec import Box, Discrete, MultiDiscrete, UserError

gymnasium = pytest.importorskip("gymnasium")
from gymnasium import spaces  # noqa: E402

QUICK = {"envs": 2, "quiet": True, "eval": {"every": 0}, "log": {"tensorboard": False}, "save": {"every": 0, "keep": 0}}
SHORT = {"rollout": 25, "epochs": 1, "minibatches": 1}
RACE = {"grey": True, "resize": 16, "stack": 2, "skip": 2}
TAXI = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"
TASKS = [("CartPole-v1", 2), ("MountainCar-v0", 0), ("Acrobot-v1", 0), ("Pendulum-v1", 0), ("MountainCarContinuous-v0", 0)]
BOX2D = [("CarRacing-v3", 0), ("BipedalWalker-v3", 2), ("BipedalWalkerHardcore-v3", 0), ("LunarLander-v3", 0)]
SPACES = [("FrozenLake-v1", 0), ("Blackjack-v1", 0), (TAXI, 0), ("Shoal/Tiny-v0", 0)]
TINY = {"args": "seen=both,does=binary"}


def sown(*seeds: int) -> torch.Tensor:
    """Noise of which a world makes these seeds."""
    return torch.tensor([[s >> BITS, s % (1 << BITS)] for s in seeds], dtype=torch.float64) / (1 << BITS)


def log_of(run: Any) -> list[str]:
    return (run.path / "train.log").read_text().splitlines()


def image(t: int) -> np.ndarray:
    return np.full((8, 6, 3), t, np.uint8)


EYE = spaces.Box(0, 255, (8, 6, 3), np.uint8)
SEEN: dict[str, tuple[Any, Any]] = {  # the space, and what is seen after t frames
    "vector": (spaces.Box(-99, 99, (2,)), lambda t: np.array([t, -t], np.float32)),
    "dict": (spaces.Dict({"a": spaces.Box(-99, 99, (1,)), "b": spaces.Discrete(9)}), lambda t: {"a": [0.5 * t], "b": t}),
    "tuple": (spaces.Tuple((spaces.Discrete(9, start=-1), spaces.MultiBinary(2))), lambda t: (t - 1, [1, t > 0])),
    "discrete": (spaces.Discrete(9, start=3), lambda t: 3 + t),
    "both": (spaces.Dict({"eye": EYE, "speed": spaces.Box(-9, 9, (1,))}), lambda t: {"eye": image(t), "speed": [t]}),
}
DOES: dict[str, Any] = {
    "choice": spaces.Discrete(3),
    "late": spaces.Discrete(3, start=5),
    "binary": spaces.MultiBinary(3),
    "dice": spaces.MultiDiscrete([2, 3]),
    "dict": spaces.Dict({"a": spaces.Discrete(2, start=-1), "b": spaces.MultiDiscrete([3, 4])}),
    "box": spaces.Box(np.array([-1, 0], np.float32), np.array([3, 2], np.float32)),
}
MASKS: dict[str, Any] = {
    "none": None,
    "flat": np.array([1, 0, 1, 1, 0], np.int8),
    "tuple": (np.array([1, 0], np.int8), np.array([1, 1, 0], np.int8)),  # as MultiDiscrete.sample takes it
    "empty": np.array([0, 0, 1, 1, 0], np.int8),
}


class Tiny(gymnasium.Env):
    """Its n-th frame pays n, and it is over after `ends` of them, terminated or truncated."""

    got: list[Any] = []

    def __init__(self, seen="vector", does="choice", ends=5, how="terminated", mask="none", render_mode=None):
        (self.observation_space, self.look), self.action_space = SEEN[seen], DOES[does]
        self.ends, self.how = ends, how
        self.info = {} if mask == "none" else {"action_mask": MASKS[mask]}

    def reset(self, seed=None, options=None):
        self.t = 0
        return self.look(0), self.info

    def step(self, action):
        assert self.action_space.contains(action), action
        Tiny.got.append(action)
        self.t += 1
        over = self.t >= self.ends
        return self.look(self.t), float(self.t), over and "term" in self.how, over and "trunc" in self.how, self.info


class Plain(Tiny):
    """Knows nothing of drawing."""

    def __init__(self):
        super().__init__()


class Pair(gymnasium.Env):
    """Two agents in tuples, paid n and -10 n for the n-th frame; over after three, when the first has not terminated."""

    n_agents = 2

    def __init__(self, alike=False, pictures=False, render_mode=None):
        one = EYE if pictures else spaces.Box(-99, 99, (1,))
        self.action_space = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3 if alike else 2, start=1)))
        self.observation_space, self.pictures = spaces.Tuple((one, one)), pictures

    def look(self):
        return (image(self.t), image(self.t + 50)) if self.pictures else ([self.t], [-self.t])

    def reset(self, seed=None, options=None):
        self.t = 0
        return self.look(), {}

    def step(self, actions):
        Tiny.got.append(actions)
        self.t += 1
        return self.look(), [self.t, -10.0 * self.t], [False, self.t > 1], self.t >= 3, {}


for cls in (Tiny, Plain, Pair):
    gymnasium.register(id=f"Shoal/{cls.__name__}-v0", entry_point=cls)


def tiny(kind: str = "Tiny", **config: Any) -> tuple[Any, Any]:
    env = shoal.make(f"gymnasium/Shoal/{kind}-v0", rows=1, workers=0, **config)
    Tiny.got.clear()
    return env, env.reset(sown(0))


# --- trained on ---


def train(id: str, path: Any, workers: int | None = None, steps: int = 100, **settings: Any) -> Any:
    env = {**(RACE if "CarRacing" in id else TINY if "Tiny" in id else {}), **({} if workers is None else {"workers": workers})}
    return shoal.train("ppo", id, steps=steps, out=path / "run", env=env, **{"algo": SHORT, **QUICK, **settings})


@pytest.mark.parametrize(("id", "workers"), [*TASKS, *BOX2D, ("LunarLanderContinuous-v3", 2), *SPACES])
def test_a_hundred_steps_by_adapter(tmp_path, id, workers):
    run = train(f"gymnasium/{id}", tmp_path, workers)
    assert run.load("last")["step"] == 100
    assert run.metrics[-1]["worker_restarts"] == 0


@pytest.mark.parametrize("id", [id for id, _ in TASKS])
def test_a_hundred_steps_of_the_native_ones(tmp_path, id):
    assert find("envs", id).module.startswith("shoal.envs.classic.")
    run = train(id, tmp_path)
    assert run.load("last")["step"] == 100
    assert "worker_restarts" not in run.metrics[-1]


@pytest.mark.parametrize("prefix", ["", "gymnasium/"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Pendulum-v0", "Pendulum-v1"),
        ("LunarLander-v2", "LunarLander-v3"),
        ("LunarLanderContinuous-v2", "LunarLanderContinuous-v3"),
        ("BipedalWalker-v2", "BipedalWalker-v3"),
        ("BipedalWalkerHardcore-v2", "BipedalWalkerHardcore-v3"),
        ("CarRacing-v0", "CarRacing-v3"),
    ],
)
def test_old_names_run_the_new_version_and_say_so(tmp_path, prefix, old, new):
    once = {"rollout": 1, "epochs": 1, "minibatches": 1}
    native = not prefix and old == "Pendulum-v0"
    run = train(prefix + old, tmp_path, None if native else 0, steps=1, envs=1, **{"algo": once, "eval": {"every": 0}})
    assert log_of(run).count(f"{old} is called {new} now, and that is what runs.") == 1
    assert native or run.settings.sections["env"]["id"] == new


@pytest.mark.parametrize("id", ["CartPole-v0", "gymnasium/CartPole-v0"])
def test_the_old_cart_pole_is_itself(id):
    assert find("envs", id).note == ""
    assert shoal.make(id).spec.horizon == 200


# --- the same as Gymnasium's own ---


@pytest.mark.parametrize(
    ("id", "choices", "steps"), [("CartPole-v1", 2, 60), ("LunarLander-v3", 4, 150), (TAXI, 6, 210), ("Blackjack-v1", 2, 9)]
)
def test_it_steps_as_gymnasium_does(id, choices, steps):
    hand, rng, ends = gymnasium.make(id), np.random.default_rng(0), []
    env = shoal.make(f"gymnasium/{id}", rows=1, workers=0)
    flat = (lambda x: spaces.flatten(hand.observation_space, x).astype(np.float32).tolist()) if id != TAXI else None
    obs, info = hand.reset(seed=70_000)
    frame = env.reset(sown(70_000))
    for t in range(steps):
        if id == TAXI:
            assert frame["agents"].obs[0, 0].nonzero().tolist() == [[obs]]
            assert frame["agents"].legal[0, 0].tolist() == [bool(x) for x in info["action_mask"]]
        else:
            assert frame["agents"].obs[0, 0].tolist() == flat(obs)
        action = int(rng.integers(choices))
        out = env.step({"agents": torch.tensor([[action]])}, sown(90_000 + t))
        obs, reward, terminated, truncated, info = hand.step(action)
        assert out.results["agents"].reward.item() == np.float32(reward)
        assert (out.results["agents"].terminated.item(), out.over.item()) == (terminated, terminated or truncated)
        if terminated or truncated:
            ends.append((t, terminated))
            last = out.next["agents"].obs[0, 0]  # the true one
            assert last.nonzero().tolist() == [[obs]] if id == TAXI else last.tolist() == flat(obs)
            obs, info = hand.reset(seed=90_000 + t)
        assert out.frame["agents"].start.item() == (terminated or truncated)
        frame = out.frame
    assert ends
    assert ends[0] == (199, False) if id == TAXI else ends[0][1]


@pytest.mark.parametrize(
    ("id", "obs", "n", "steps"),
    [("lbforaging/Foraging-8x8-2p-3f-v3", 15, 6, 55), ("rware/rware-tiny-2ag-v2", 71, 5, 30)],
)
def test_teams_in_tuples_are_groups(tmp_path, id, obs, n, steps):
    pytest.importorskip(id.partition("/")[0])
    env, hand, rng = shoal.make(id, rows=1, workers=0), gymnasium.make(id.partition("/")[2]), np.random.default_rng(6)
    (group,) = env.spec.groups
    assert (group.agents, group.obs, group.action) == (("agent_0", "agent_1"), (obs,), Discrete(n))
    seen, frame, learner_reward = hand.reset(seed=6)[0], env.reset(sown(6)), np.zeros(2)
    for t in range(steps):
        assert frame["agents"].obs[0].tolist() == np.stack(seen).tolist()
        action = rng.integers(0, n, 2)
        out = env.step({"agents": torch.tensor(action[None])}, sown(6 + t))
        seen, rewards, terminated, truncated, _ = hand.step(tuple(action))
        assert out.results["agents"].reward[0].tolist() == np.float32(rewards).tolist()
        assert out.over.item() == (terminated or truncated)
        learner_reward += rewards
        seen, frame = hand.reset(seed=6 + t)[0] if out.over.item() else seen, out.frame
    if "Foraging" in id:
        assert learner_reward.round(3).tolist() == [0.111, 0.222]  # each its own
    assert train(id, tmp_path, 0).load("last")["step"] == 100


# --- small ones ---


@pytest.mark.parametrize(
    ("seen", "first", "second"),
    [
        ("dict", [0, 1, 0, 0, 0, 0, 0, 0, 0, 0], [0.5, 0, 1, 0, 0, 0, 0, 0, 0, 0]),
        ("tuple", [1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]),
        ("discrete", [1, 0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_what_is_seen(seen, first, second):
    env, frame = tiny(args=f"seen={seen}")
    assert frame["agents"].obs[0, 0].tolist() == first
    assert env.step({"agents": torch.tensor([[0]])}, sown(0)).frame["agents"].obs[0, 0].tolist() == second


def test_a_picture_beside_a_vector():
    env, frame = tiny(args="seen=both", grey=True, stack=2)
    assert env.spec["agents"].obs == {"vector": (1,), "eye": (2, 8, 6)}
    frame = env.step({"agents": torch.tensor([[0]])}, sown(0)).frame
    assert frame["agents"].obs["vector"].tolist() == [[[1.0]]]
    assert frame["agents"].obs["eye"].dtype == torch.uint8
    assert frame["agents"].obs["eye"][0, 0, :, 3, 3].tolist() == [0, 1]
    for _ in range(4):
        out = env.step({"agents": torch.tensor([[0]])}, sown(0))
    assert out.next["agents"].obs["eye"][0, 0, :, 3, 3].tolist() == [4, 5]
    assert out.frame["agents"].obs["eye"][0, 0, :, 3, 3].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("does", "ours", "action", "theirs"),
    [
        ("late", Discrete(3), 2, "7"),
        ("binary", MultiDiscrete((2, 2, 2)), [1, 0, 1], "[1, 0, 1]"),
        ("dict", MultiDiscrete((2, 3, 4)), [1, 2, 3], "{'a': 0, 'b': [2, 3]}"),
        ("box", Box((-1, 0), (3, 2)), [2.5, 0.5], "[2.5, 0.5]"),
    ],
)
def test_what_is_done(does, ours, action, theirs):
    env, _ = tiny(args=f"does={does}")
    assert env.spec["agents"].action == ours
    env.step({"agents": torch.tensor([[action]])}, sown(0))
    (got,) = Tiny.got
    plain = {k: getattr(v, "tolist", lambda v=v: v)() for k, v in got.items()} if isinstance(got, dict) else got.tolist()
    assert str(plain) == theirs


@pytest.mark.parametrize(
    ("mask", "legal"),
    [
        ("flat", [True, False, True, True, False]),
        ("tuple", [True, False, True, True, False]),
        ("empty", [True, True, True, True, False]),
    ],
)
def test_a_mask_of_several_choices(mask, legal):
    _, frame = tiny(args=f"does=dice,mask={mask}")
    assert frame["agents"].legal.tolist() == [[legal]]


def test_one_that_knows_nothing_of_drawing():
    assert tiny("Plain")[1]["agents"].obs.tolist() == [[[0, 0]]]


@pytest.mark.parametrize(
    ("config", "rewards", "horizon", "terminated"),
    [
        ({}, [1, 2, 3, 4, 5], None, True),
        ({"skip": 2}, [3, 7, 5], None, True),  # the last one stops at the end
        ({"skip": 8}, [15], None, True),
        ({"args": "how=truncated,ends=3"}, [1, 2, 3], None, False),
        ({"args": "how=term-trunc,ends=2"}, [1, 2], None, True),
        ({"horizon": 3}, [1, 2, 3], 3, False),
        ({"horizon": 3, "skip": 2}, [3, 3], 2, False),
        ({"horizon": 5, "skip": 2}, [3, 7, 5], 3, True),
    ],
)
def test_how_it_ends(config, rewards, horizon, terminated):
    env, _ = tiny(**config)
    outcomes = [env.step({"agents": torch.tensor([[0]])}, sown(0)) for _ in rewards]
    assert [x.results["agents"].reward.item() for x in outcomes] == rewards
    assert [x.over.item() for x in outcomes] == [False] * (len(rewards) - 1) + [True]
    assert [x.results["agents"].terminated.item() for x in outcomes] == [False] * (len(rewards) - 1) + [terminated]
    assert env.spec.horizon == horizon
    assert outcomes[-1].next["agents"].obs[0, 0, 0].item() == {3: 3, 15: 5}.get(rewards[-1], rewards[-1])
    assert outcomes[-1].frame["agents"].obs.tolist() == [[[0, 0]]]


def test_agents_that_differ_are_groups_of_one_team():
    env, _ = tiny("Pair")
    assert [(g.name, g.team, g.agents) for g in env.spec.groups] == [
        ("agents_0", "agents", ("agent_0",)),
        ("agents_1", "agents", ("agent_1",)),
    ]
    assert not env.spec.common
    for t in (1, 2, 3):
        out = env.step({"agents_0": torch.tensor([[2]]), "agents_1": torch.tensor([[0]])}, sown(0))
        assert [out.results[g].reward.item() for g in ("agents_0", "agents_1")] == [t, -10 * t]
        assert [out.next[g].obs.item() for g in ("agents_0", "agents_1")] == [t, -t]
        assert out.over.item() == (t == 3)
        assert [out.results[g].terminated.item() for g in ("agents_0", "agents_1")] == [False, t == 3]
    assert [tuple(map(int, a)) for a in Tiny.got] == [(2, 1)] * 3


def test_agents_in_tuples_hold_their_actions():
    env, _ = tiny("Pair", args="alike=true", skip=2, horizon=3)
    outcomes = [env.step({"agents": torch.tensor([[0, 0]])}, sown(0)) for _ in range(env.spec.horizon)]
    assert [x.results["agents"].reward.tolist() for x in outcomes] == [[[3, -30]], [[3, -30]]]
    assert [x.over.item() for x in outcomes] == [False, True]


def test_stacks_of_agents_in_tuples_begin_anew():
    env, frame = tiny("Pair", args="alike=true,pictures=true", grey=True, stack=2)
    for _ in range(3):
        frame = env.step({"agents": torch.tensor([[0, 0]])}, sown(0)).frame
    assert frame["agents"].obs[0, :, :, 0, 0].tolist() == [[0, 0], [50, 50]]


def test_an_episode_too_long_to_be_played_again_begins_anew(monkeypatch):
    monkeypatch.setattr(vector, "LONGEST", 10)
    env = shoal.make("gymnasium/Pendulum-v1", rows=1, workers=0)
    env.reset(sown(0))
    for _ in range(64):  # it looks every so many
        env.step({"agents": torch.zeros(1, 1, 1)}, sown(0))
    assert env.set_state(env.get_state())["agents"].start.item()
    assert "1 of 1 rows did not come out the same" in env.news[0]


# --- sentences ---


@pytest.mark.parametrize(
    ("id", "config", "sentence"),
    [
        (
            "gymnasium/CartPol-v1",
            {},
            "gymnasium has no environment 'CartPol-v1' (did you mean 'CartPole-v1' or 'CartPole-v0'?)",
        ),
        ("gymnasium/CartPole-v7", {}, "gymnasium has no environment 'CartPole-v7' (did you mean 'CartPole-v1' or 'CartPole-v0"),
        ("gymnasium/Nowhere/X-v0", {}, "gymnasium has no environment 'Nowhere/X-v0': Namespace Nowhere not found"),
        (
            "gymnasium/CartPole-v1",
            {"args": "nope=1"},
            "CartPole-v1 could not be made of --env.args 'nope=1': TypeError: CartPoleEnv.__init__()",
        ),
        ("gymnasium/CartPole-v1", {"args": "nope"}, "--env.args is 'nope': it takes name=value,name=value."),
        ("gymnasium/CartPole-v1", {"skip": 0}, "--env.skip is 0: it must be at least 1."),
        ("gymnasium/CartPole-v1", {"horizon": 0}, "--env.horizon is 0: it must be at least 1."),
        pytest.param("gymnasium/FrozenLake-v1", {"args": "map_name=foo"}, "FrozenLake-v1"),  # KeyError
        pytest.param("gymnasium/LunarLander-v3", {"args": "gravity=5"}, "LunarLander-v3"),  # AssertionError
        pytest.param("gymnasium/nowhere:X-v0", {}, "gymnasium has no environment"),  # ModuleNotFoundError
        pytest.param("gymnasium/not an id", {}, "gymnasium has no environment"),  # gymnasium.error.Error
    ],
)
def test_what_cannot_be_made(id, config, sentence):
    with pytest.raises(UserError) as e:
        shoal.make(id, workers=0, **config)
    assert str(e.value).startswith(sentence)


def test_what_is_not_installed(monkeypatch):
    def make(*_: Any, **__: Any) -> None:
        raise gymnasium.error.DependencyNotInstalled("Box2D is not installed, run `pip install it`.")

    with monkeypatch.context() as m:
        m.setattr(gymnasium, "make", make)
        with pytest.raises(UserError) as e:
            shoal.make("gymnasium/LunarLander-v3")
    assert str(e.value) == "LunarLander-v3 needs what is not installed: Box2D is not installed, run `pip install it`."
    monkeypatch.setitem(sys.modules, "rware", None)
    with pytest.raises(UserError, match=r"^rware is not installed \(.*\): pip install rware\.$"):
        shoal.make("rware/rware-tiny-2ag-v2")


def test_foraging_follows_from_the_seed_whatever_was_played_before():
    """Players that stand about would be in the way of where they begin."""
    used, fresh = (shoal.make("lbforaging/Foraging-5x5-4p-1f-v3", rows=40, workers=0) for _ in range(2))
    used.reset(sown(*range(100, 140)))
    for _ in range(7):
        used.step({"agents": torch.ones(40, 4, dtype=torch.long)}, sown(*range(40)))
    assert torch.equal(used.reset(sown(*range(40)))["agents"].obs, fresh.reset(sown(*range(40)))["agents"].obs)


def test_limits_of_time_that_libraries_call_ends_are_truncations():
    for id in ("lbforaging/Foraging-8x8-2p-3f-v3", "rware/rware-tiny-2ag-v2"):
        env = shoal.make(id, rows=1, workers=0)
        env.reset(sown(0))
        for _ in range(env.spec.horizon):
            out = env.step({"agents": torch.zeros(1, 2, dtype=torch.long)}, sown(1))
        assert out.over.tolist() == [True]
        assert out.results["agents"].terminated.tolist() == [[False, False]]
