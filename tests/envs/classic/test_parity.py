"""Our classic-control worlds against Gymnasium's: the same states and actions give the same steps, and starts are alike.

Gymnasium computes in float64 and shows float32, so in float64 states and pay have to agree to 1e-11 and observations to
half a unit of float32's last place. MountainCarContinuous keeps its state in float32 as well: there the state is compared
as the observation is. In float32 a close decision may fall the other way, within `CLOSE` of the threshold, and only there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from scipy import stats

from shoal.envs.base import World
from shoal.envs.drawing import Sketch
from shoal.ids import find
from shoal.spec import Box, Outcome, UserError
from shoal.tree import tree_leaves

torch.set_num_threads(1)
Array = np.ndarray[Any, np.dtype[Any]]
PI, TILT = math.pi, 12 * 2 * math.pi / 360
HALF_ULP = 2.0**-24 * 1.001  # of float32, relative
CLOSE = 1e-5


@dataclass(frozen=True)
class Task:
    id: str
    state: dict[str, int]  # the parts of our state in Gymnasium's order -> numbers in each
    edges: tuple[tuple[float, ...], ...]  # for each number of the state: all combinations are tried
    low: tuple[float, ...]  # and random states between these
    actions: tuple[float, ...]  # every one is tried in every state
    starts: tuple[tuple[float, float], ...]  # bounds
    margin: Callable[[Array], Array]  # how far from the end's threshold a state is
    drive: Callable[[Array, int], Array]  # a policy that gets somewhere
    horizon: int
    loose: float = 1e-5  # tolerance of a float32 step, relative to the numbers' size
    drift: float = 1e-9  # of a float64 episode

    @property
    def discrete(self) -> bool:
        return "Continuous" not in self.id and self.id != "Pendulum-v1"

    @property
    def narrow(self) -> bool:
        return self.id == "MountainCarContinuous-v0"


def car_margin(goal: float) -> Callable[[Array], Array]:
    return lambda s: np.minimum(abs(s[:, 0] - goal), np.where(s[:, 0] > goal - CLOSE, abs(s[:, 1]), 1.0))


CARS = (-1.2, -1.19, -1.14, -0.5, 0.0, 0.39, 0.44, 0.4499, 0.4501, 0.49, 0.4999, 0.5001, 0.59, 0.6)
SPEEDS = (-0.07, -0.0699, -0.01, 0.0, 0.0005, 0.002, 0.01, 0.0699, 0.07)
LINKS = (-PI, -3.1, -PI / 2, 0.0, 1.0, 2.0, PI)
TASKS = [
    Task(
        "CartPole-v1",
        {"x": 1, "v": 1, "angle": 1, "spin": 1},
        (
            *((-2.4, -2.399, 0.0, 2.4, math.nextafter(2.4, 3)), (-3.0, 0.0, 3.0)),
            *((-TILT, -0.209, 0.0, TILT, math.nextafter(TILT, 1)), (-3.0, 0.0, 3.0)),
        ),
        (-2.5, -3.0, -0.22, -3.0),
        (0, 1),
        ((-0.05, 0.05),) * 4,
        lambda s: np.minimum(abs(abs(s[:, 0]) - 2.4), abs(abs(s[:, 2]) - TILT)),
        lambda s, t: s[:, 2] + 0.3 * s[:, 3] + 0.03 * s[:, 1] + 0.01 * s[:, 0] > 0,
        500,
    ),
    Task(
        "MountainCar-v0",
        {"place": 1, "speed": 1},
        (CARS, SPEEDS),
        (-1.2, -0.07),
        (0, 1, 2),
        ((-0.6, -0.4), (0.0, 0.0)),
        car_margin(0.5),
        lambda s, t: np.where(s[:, 1] >= 0, 2, 0),
        200,
    ),
    Task(
        "MountainCarContinuous-v0",
        {"place": 1, "speed": 1},
        (CARS, SPEEDS),
        (-1.2, -0.07),
        (-3.0, -1.0, -0.3, 0.0, 0.7, 1.0, 2.5),
        ((-0.6, -0.4), (0.0, 0.0)),
        car_margin(0.45),
        lambda s, t: np.where(s[:, 1] >= 0, 1.0, -1.0),
        999,
        drift=1e-5,  # float32's roundings of a thousand steps
    ),
    Task(
        "Acrobot-v1",
        {"angles": 2, "spins": 2},
        (LINKS, LINKS, (-4 * PI, 0.5, 4 * PI), (-9 * PI, -1.0, 9 * PI)),
        (-PI, -PI, -4 * PI, -9 * PI),
        (0, 1, 2),
        ((-0.1, 0.1),) * 4,
        lambda s: abs(-np.cos(s[:, 0]) - np.cos(s[:, 0] + s[:, 1]) - 1),
        lambda s, t: np.where(s[:, 2] > 0, 0, 2),
        500,
        loose=1e-3,  # at full speed it accelerates by hundreds a second
        drift=1e-6,  # it is chaotic
    ),
    Task(
        "Pendulum-v1",
        {"angle": 1, "spin": 1},
        ((-9.0, -PI, -3.14, -1.0, 0.0, 1e-3, 3.14, PI, 3 * PI, 20.0, 80.0), (-8.0, -7.9, -1.0, 0.0, 7.9, 8.0)),
        (-10.0, -8.0),
        (-3.0, -2.0, -0.5, 0.0, 1.0, 2.0, 7.0),
        ((-PI, PI), (-1.0, 1.0)),
        lambda s: np.ones(len(s)),
        lambda s, t: np.where(s[:, 1] >= 0, 2.0, -2.0),
        200,
    ),
]
SETTINGS = [("CartPole-v1", {"sutton_barto_reward": True}), ("MountainCar-v0", {"goal_velocity": 0.03})]
SETTINGS += [("MountainCarContinuous-v0", {"goal_velocity": 0.03}), ("Pendulum-v1", {"g": 3.7})]


def of(task: Task, rows: int, dtype: torch.dtype = torch.float64, **settings: Any) -> World:
    entry = find("envs", task.id)
    cls = entry.load()
    world: World = cls(cls.Config(**{**entry.settings, **settings}), rows, "cpu", dtype)
    return world


def put(task: Task, world: World, states: Array, clock: torch.Tensor | int = 0) -> None:
    parts = torch.from_numpy(states).split(list(task.state.values()), -1)
    state = {k: x if x.shape[1] > 1 else x[:, 0] for k, x in zip(task.state, parts, strict=True)}
    world.set_state({**state, "clock": torch.as_tensor(clock).expand(world.rows)})


def read(task: Task, state: dict[str, torch.Tensor]) -> Array:
    joined: Array = torch.cat([state[k].reshape(-1, n) for k, n in task.state.items()], -1).double().numpy()
    return joined  # [B, S]


def chosen(task: Task, actions: Array) -> dict[str, torch.Tensor]:
    x = torch.as_tensor(actions)
    return {"agents": x.long()[:, None] if task.discrete else x.double()[:, None, None]}


def step(task: Task, world: World, actions: Array) -> tuple[Outcome, Array]:
    """The outcome, and the state before any row begins again."""
    before = {k: v.clone() for k, v in world.state.items()}
    noise = torch.rand(world.rows, world.noise, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moved = world.advance(before, chosen(task, actions), noise[:, world.noise_begin :]).state
    return world.step(chosen(task, actions), noise), read(task, moved)


def seen(outcome: Outcome) -> tuple[Array, Array, Array]:
    pay, view = outcome.results["agents"], outcome.next["agents"]
    assert isinstance(view.obs, torch.Tensor)
    return view.obs[:, 0].double().numpy(), pay.reward[:, 0].double().numpy(), pay.terminated[:, 0].numpy()


def their_step(task: Task, env: Any, state: Array | None, action: float) -> tuple[Array, float, bool, bool, Array]:
    inner = env.unwrapped
    if state is not None:
        inner.state, inner.steps_beyond_terminated = np.array(state), None
    obs, reward, terminated, truncated, _ = env.step(int(action) if task.discrete else np.array([action]))
    assert obs.dtype == np.float32
    return obs, float(reward), terminated, truncated, np.array(inner.state, dtype=float)


def apart(task: Task, a: Array, b: Array) -> Array:
    """The difference of two states; angles that are wrapped may be so at either end."""
    d = a - b
    if "angles" in task.state:
        d[:, :2] = (d[:, :2] + PI) % (2 * PI) - PI
    return d


def trials(task: Task) -> tuple[Array, Array]:
    """Every state with every action."""
    rng = np.random.default_rng(0)
    low = np.array(task.low)
    high = np.where(low == -1.2, 0.6, -low)
    states = np.concatenate((np.array(list(product(*task.edges))), rng.uniform(low, high, (300, len(low)))))
    n = len(task.actions)
    return states.repeat(n, 0), np.tile(np.array(task.actions, dtype=float), len(states))


def compare(task: Task, dtype: torch.dtype, **settings: Any) -> tuple[int, int, int]:
    """Every trial stepped by both: how many were compared, how many ended, and how many ends fell the other way."""
    states, actions = trials(task)
    if dtype == torch.float32:
        states, actions = states.astype(np.float32).astype(float), actions.astype(np.float32).astype(float)
    world = of(task, len(states), dtype, **settings)
    put(task, world, states)
    outcome, state = step(task, world, actions)
    obs, reward, terminated = seen(outcome)
    assert obs.shape == (len(states), world.spec.groups[0].obs[0])  # type: ignore[index]
    env = gymnasium.make(task.id, disable_env_checker=True, **settings)
    env.reset(seed=0)
    theirs = [their_step(task, env, s, a) for s, a in zip(states, actions, strict=True)]
    obs_, reward_, state_ = np.stack([x[0] for x in theirs]), np.array([x[1] for x in theirs]), np.stack([x[4] for x in theirs])
    terminated_ = np.array([x[2] for x in theirs])
    other = terminated != terminated_
    assert "angles" not in task.state or abs(state[:, :2]).max() < PI + 1e-6
    torch.testing.assert_close(outcome.over.numpy(), terminated)  # the clock is at 1, the horizon far
    if dtype == torch.float64:
        assert not other.any()
        np.testing.assert_allclose(obs, obs_, rtol=HALF_ULP, atol=1e-11)
        np.testing.assert_allclose(reward, reward_, rtol=0, atol=1e-11)
        wide = HALF_ULP * abs(state_) if task.narrow else 0
        assert (abs(apart(task, state, state_)) <= 1e-11 + wide).all()
    else:
        assert (task.margin(state_)[other] < CLOSE).all()
        np.testing.assert_allclose(obs, obs_, rtol=task.loose, atol=task.loose)
        np.testing.assert_allclose(reward[~other], reward_[~other], rtol=task.loose, atol=task.loose)
    return len(theirs), int(terminated_.sum()), int(other.sum())


COUNTS = {  # trials, how many of them end, and how many ends fall the other way in float32: states put on the edge itself
    "CartPole-v1": (1050, 342, 114),
    "MountainCar-v0": (1278, 129, 0),
    "MountainCarContinuous-v0": (2982, 388, 0),
    "Acrobot-v1": (2223, 340, 0),
    "Pendulum-v1": (2562, 0, 0),
}


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.id)
def test_a_step_is_gymnasiums(task: Task) -> None:
    trials, ends, ties = COUNTS[task.id]
    assert compare(task, torch.float64) == (trials, ends, 0)
    compared, _, others = compare(task, torch.float32)
    assert (compared, others) == (trials, ties)


@pytest.mark.parametrize(("id", "settings"), SETTINGS, ids=lambda x: x if isinstance(x, str) else next(iter(x)))
def test_a_step_is_gymnasiums_with_its_arguments(id: str, settings: dict[str, Any]) -> None:
    task = next(t for t in TASKS if t.id == id)
    speed = settings.get("goal_velocity", math.inf)
    fast = replace(task, margin=lambda s: np.minimum(task.margin(s), abs(s[:, 1] - speed)))
    for dtype in (torch.float64, torch.float32):
        assert compare(fast, dtype, **settings)[0] == COUNTS[id][0]


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.id)
def test_a_fused_step_is_the_step(task: Task, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every row far from the horizon, every row at it, and every third."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    states, actions = trials(task)
    plain, fused = (of(task, len(states), dtype) for _ in range(2))
    assert fused.fuse() is None
    tolerance, last = (1e-11 if dtype == torch.float64 else task.loose), task.horizon - 1
    for clock in (torch.zeros(len(states)), torch.full((len(states),), last), torch.arange(len(states)) % 3 // 2 * last):
        for world in (plain, fused):
            put(task, world, states, clock.long())
        (a, state), (b, _) = step(task, plain, actions), step(task, fused, actions)
        far = torch.from_numpy(task.margin(state)) > CLOSE
        assert float(far.double().mean()) > 0.7
        assert a.over[clock == last].all()
        for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
            torch.testing.assert_close(y[far], x[far], rtol=tolerance, atol=tolerance if x.is_floating_point() else 0)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.id)
def test_episodes_are_gymnasiums(task: Task) -> None:
    """Whole episodes, ours and theirs side by side, two rows driven and two at random, from our starts."""
    rows, rng = 4, np.random.default_rng(3)
    world = of(task, rows)
    noise = torch.Generator().manual_seed(0)
    world.reset(torch.rand(rows, world.noise, generator=noise, dtype=torch.float64))
    envs = [gymnasium.make(task.id, disable_env_checker=True) for _ in range(rows)]

    def begin(i: int) -> None:
        envs[i].reset(seed=i)
        start = read(task, world.state)[i]
        envs[i].unwrapped.state = start.astype(np.float32) if task.narrow else start  # type: ignore[attr-defined]

    for i in range(rows):
        begin(i)
    compared, ends, worst = 0, {"terminated": 0, "truncated": 0}, 0.0
    for t in range(2 * task.horizon):
        random = rng.choice(task.actions, rows)
        actions = np.where(np.arange(rows) < 2, task.drive(read(task, world.state), t), random)
        outcome = world.step(chosen(task, actions), torch.rand(rows, world.noise, generator=noise, dtype=torch.float64))
        obs, reward, terminated = seen(outcome)
        for i, env in enumerate(envs):
            obs_, reward_, terminated_, truncated_, _ = their_step(task, env, None, actions[i])
            worst = max(worst, float(abs(obs[i] - obs_).max() / (1 + abs(obs_).max())) - HALF_ULP, abs(reward[i] - reward_))
            assert terminated[i] == terminated_
            assert bool(outcome.over[i]) == (terminated_ or truncated_)
            ends["terminated"] += terminated_
            ends["truncated"] += truncated_
            compared += 1
            if outcome.over[i]:
                begin(i)
    assert worst < task.drift
    assert compared == rows * 2 * task.horizon
    assert ends["truncated"] >= 2
    assert (ends["terminated"] >= 2) == (task.id != "Pendulum-v1")


def test_an_end_at_the_horizon_is_an_end() -> None:
    """One row falls in its last step, the other is cut off: both are over, the first alone terminated, as in Gymnasium."""
    task = TASKS[0]
    world = of(task, 2, horizon=3)
    states = np.array([[2.39, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    put(task, world, states, clock=2)
    outcome, _ = step(task, world, np.array([1, 1]))
    assert outcome.over.tolist() == [True, True]
    assert outcome.results["agents"].terminated.tolist() == [[True], [False]]
    assert outcome.results["agents"].reward.tolist() == [[1.0], [1.0]]
    env = gymnasium.make(task.id, max_episode_steps=1)
    for state, terminated in zip(states, (True, False), strict=True):
        env.reset(seed=0)
        assert their_step(task, env, state, 1)[2:4] == (terminated, True)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.id)
def test_starts_are_gymnasiums(task: Task) -> None:
    n = 3000
    world = of(task, n, torch.float32)
    world.reset(torch.rand(n, world.noise, generator=torch.Generator().manual_seed(1)))
    ours = read(task, world.state)
    env: Any = gymnasium.make(task.id).unwrapped
    env.reset(seed=2)
    theirs = np.stack([(env.reset(), np.array(env.state, dtype=float))[1] for _ in range(n)])
    for k, (low, high) in enumerate(task.starts):
        for x in (ours[:, k], theirs[:, k]):
            assert low - 1e-6 <= x.min() <= low + 0.01 * (high - low) + 1e-6
            assert high - 0.01 * (high - low) - 1e-6 <= x.max() <= high + 1e-6
        if high > low:
            assert stats.ks_2samp(ours[:, k], theirs[:, k]).pvalue > 1e-3
    sample = ours[:, [high > low for low, high in task.starts]]
    assert (abs(np.corrcoef(sample.T) - np.eye(sample.shape[1])) < 0.1).all()  # each number has a draw of its own


def test_ids_and_spaces() -> None:
    horizons = {**{t.id: t.horizon for t in TASKS}, "CartPole-v0": 200}
    for id, horizon in horizons.items():
        entry, theirs = find("envs", id), gymnasium.spec(id)
        world = entry.load()(entry.load().Config(**entry.settings))
        assert entry.family == "classic"
        assert world.fixed_length == (id == "Pendulum-v1")
        assert world.spec.horizon == horizon == theirs.max_episode_steps
        env, (group,) = gymnasium.make(id), world.spec.groups
        assert (group.name, group.team, group.agents, world.spec.common) == ("agents", "agents", ("agent_0",), True)
        assert env.observation_space.shape == group.obs
        if isinstance(group.action, Box):
            space: Any = env.action_space
            assert (space.low.tolist(), space.high.tolist()) == (list(group.action.low), list(group.action.high))
        else:
            assert env.action_space.n == group.action.sizes[0]  # type: ignore[attr-defined]
        view = world.reset(torch.rand(1, world.noise, generator=torch.Generator().manual_seed(0)))["agents"]
        assert (view.obs.shape, view.obs.dtype) == ((1, 1, *group.obs), torch.float32)
    with pytest.raises(UserError, match="horizon is 0: an episode needs"):
        find("envs", "cartpole").load().Config(horizon=0)


def tip(sketch: Sketch) -> tuple[float, float]:
    """Where the last segment ends."""
    return sketch.segments[-1].x1, sketch.segments[-1].y1


def test_pictures_show_the_state() -> None:
    worlds = {t.id: of(t, 2) for t in TASKS}
    states = [[1.0, 0.0, 0.1, 0.0], [0.5, 0.0], [0.45, 0.0], [PI / 2, PI / 2, 0.0, 0.0], [PI / 2, 0.0]]
    for task, state in zip(TASKS, states, strict=True):
        put(task, worlds[task.id], np.array([[0.0] * len(state), state]))
    sample = {id: world.draw(1) for id, world in worlds.items()}
    sketch = {id: x for id, x in sample.items() if x is not None}
    assert tip(sketch["CartPole-v1"]) == pytest.approx((1.0 + math.sin(0.1), math.cos(0.1)))
    for id, goal in (("MountainCar-v0", 0.5), ("MountainCarContinuous-v0", 0.45)):
        *_, pole, car = sketch[id].segments
        assert (car.x0 + car.x1) / 2 == pytest.approx(pole.x0) == pytest.approx(goal + 0.3)  # the car is at the flag
    assert tip(sketch["Acrobot-v1"]) == pytest.approx((1.0, 1.0))  # the first link to the right, the second up from there
    assert tip(sketch["Pendulum-v1"]) == pytest.approx((-1.0, 0.0))
    assert all(worlds[id].draw(0) != x for id, x in sketch.items())
