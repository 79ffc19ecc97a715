"""What is paid, worked out by hand: mpe2's rules, the original OpenAI ones, and settings that are refused."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from typing import Any

import pytest
import torch

from shoal.envs.mpe.geometry import fence
from shoal.envs.mpe.matching import matched, matchings
from shoal.envs.mpe.world import Scenario
from shoal.spec import UserError

from .reference import AGENTS, make, random_actions

torch.set_num_threads(1)
NEW = ["collect_treasure", "simple_formation", "simple_line"]  # OpenAI had none of these
SAME = ["simple", "simple_crypto", "simple_push", "simple_tag"]  # OpenAI paid the same


def results(name: str, places: list[tuple[float, float]], rules: str = "mpe2", **settings: Any) -> list[float]:
    """What the agents of one row are paid where everybody stands at `places`; settings in capitals belong to the state."""
    state = {k.lower(): torch.tensor([v]) for k, v in settings.items() if k.isupper()}
    world = make(name, 1, torch.float64, rules=rules, **{k: v for k, v in settings.items() if not k.isupper()})
    world.reset(torch.full((1, world.noise), 0.5))
    reward, _ = world.rewards({**world.state, "pos": torch.tensor([places], dtype=torch.float64), **state})
    return [round(x, 9) for x in reward[0].tolist()]


def test_spread() -> None:
    """Agents at 0, 0.2 and 2, landmarks at 0, 1 and 2: the distances are 0, 0.8 and 0; the first two touch."""
    places = [(0.0, 0.0), (0.2, 0.0), (2.0, 0.0), (0.0, 0.0), (1.0, 0.0), (2.0, 0.0)]
    assert results("simple_spread", places) == [-0.9, -0.9, -0.4]  # half of 0.8, half of 1 for touching
    assert results("simple_spread", places, local_ratio=1.0) == [-1, -1, 0]
    assert results("simple_spread", places, curriculum=True) == [-0.4, -0.4, -0.4]
    # each agent 0.8, two that touch one other and all three that touch themselves; every one is paid all of it
    assert results("simple_spread", places, "openai") == [-7.4] * 3


def test_spread_returns_convert() -> None:
    """With the OpenAI sum A of an episode, (A + 75) / 6 is mpe2's return, averaged over agents."""
    noise, gen = torch.rand(26, 8, 12, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    worlds = {rules: make("simple_spread", 8, torch.float64, rules=rules) for rules in ("mpe2", "openai")}
    returns = {rules: torch.zeros(8, 3, dtype=torch.float64) for rules in worlds}
    for world in worlds.values():
        world.reset(noise[0] * 0.3)  # close together
    touched = 0.0
    for t in range(25):
        actions = random_actions(worlds["mpe2"], gen)
        for rules, world in worlds.items():
            out = world.step(actions, noise[t + 1])
            returns[rules] += out.results["agents"].reward
            touched += float(out.stats["collisions"].sum())
    assert touched > 0
    assert returns["mpe2"].std(1).max() > 0  # own collisions differ
    torch.testing.assert_close((returns["openai"] + 75) / 6, returns["mpe2"].mean(1, keepdim=True).expand(-1, 3))


def test_adversary() -> None:
    """The goal is the second landmark, at 0; the adversary 2 away, the good 0.5 and 3."""
    places = [(0.0, 2.0), (0.5, 0.0), (3.0, 0.0), (9.0, 9.0), (0.0, 0.0)]
    assert results("simple_adversary", places, GOAL=[1]) == [-2, 1.5, 1.5]
    assert results("simple_adversary", places, "openai", GOAL=[1]) == [-4, 1.5, 1.5]


def test_reference() -> None:
    """Agent 0 knows that agent 1, at (1, 0), should be at (1, 2); agent 1 that agent 0, at 0, should be at (0, 3)."""
    places = [(0.0, 0.0), (1.0, 0.0), (1.0, 2.0), (0.0, 3.0), (7.0, 7.0)]
    assert results("simple_reference", places, GOAL=[0, 1]) == [-2.25, -2.75]  # own 2 and 3, mean 2.5
    assert results("simple_reference", places, local_ratio=1.0, GOAL=[0, 1]) == [-2, -3]
    assert results("simple_reference", places, "openai", GOAL=[0, 1]) == [-13, -13]


def test_speaker_listener() -> None:
    places = [(5.0, 5.0), (0.0, 0.0), (9.0, 9.0), (0.0, 3.0), (9.0, 9.0)]
    assert results("simple_speaker_listener", places, GOAL=[1]) == [-9, -9]
    assert results("simple_speaker_listener", places, "openai", GOAL=[1]) == [-18, -18]


def test_crypto() -> None:
    """The secret is word 0. Eve says word 1, which is off by 2; Bob says 0 and is right."""
    still = [(0.0, 0.0)] * 5
    said = [[0.0, 1, 0, 0], [1.0, 0, 0, 0], [0.0, 0, 1, 0]]
    assert results("simple_crypto", still, GOAL=[0, 1], COMM=said) == [-2, 2, 2]
    said[0] = [0.0] * 4  # Eve is silent
    assert results("simple_crypto", still, GOAL=[1, 1], COMM=said) == [0, -2, -2]


def test_push() -> None:
    places = [(0.0, 1.0), (3.0, 0.0), (9.0, 9.0), (0.0, 0.0)]
    assert results("simple_push", places, GOAL=[1]) == [2, -3]


def test_tag() -> None:
    """Two predators touch the first prey; the second is beyond the edge in x, and near it in y."""
    places = [(0.0, 0.0), (0.1, 0.0), (0.5, 0.5), (0.05, 0.0), (1.5, -0.95)]
    got = results("simple_tag", places, num_good=2, num_obstacles=0)
    assert got == [20, 20, 20, -20, round(-math.exp(1.0) - 0.5, 9)]


def test_world_comm() -> None:
    """The leader touches a prey that touches food; the other predator and the other prey are 0.9 and 0.4 from things."""
    places = [(0.0, 0.0), (0.0, 0.9), (0.1, 0.0), (0.1, 0.8), (0.1, 0.05), (0.5, 0.8)]
    settings = {"num_good": 2, "num_adversaries": 2, "num_obstacles": 0, "num_food": 2, "num_forests": 0}
    near = round(math.hypot(0.1, 0.1), 9)  # the second predator is this near to the second prey, and touches nothing
    assert results("simple_world_comm", places, **settings) == [
        4.99,  # 5 - 0.1 * 0.1
        round(5 - 0.1 * near, 9),
        round(-5 + 2 - 0.05 * 0.05, 9),
        round(-0.05 * 0.4, 9),
    ]
    got = results("simple_world_comm", places, "openai", **settings)
    assert got[2:] == [round(-5 + 2 + 0.05 * 0.05, 9), round(0.05 * 0.4, 9)]


def test_fence() -> None:
    x = torch.tensor([0.0, 0.9, 0.95, -1.0, 1.5, -9.0], dtype=torch.float64)
    cost = fence(torch.stack((x, torch.zeros(6)), -1))
    torch.testing.assert_close(cost, torch.tensor([0, 0, 0.5, 1, math.e, 10], dtype=torch.float64))


def test_matching_is_the_best_of_all() -> None:
    """Row 0: the greedy would give agent 0 its spot 0 and leave agent 1 with 9. Row 1: least in sum is not least at worst."""
    distance = torch.tensor([[[1.0, 2, 9], [1.5, 9, 9], [9, 9, 0.5]], [[0.0, 3, 9], [3, 4, 9], [9, 9, 1]]])
    assert matched(distance, torch.tensor(matchings(3))).tolist() == [[2.0, 1.5, 0.5], [0.0, 4.0, 1.0]]


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("simple_formation", [(-0.5, 0.0), (0.5, 0.0), (0.0, -0.5), (0.0, 0.5), (0.0, 0.0)]),
        ("simple_line", [(1.0, 0.0), (-0.25, 0.0), (0.5 / 3, 0.0), (1.75 / 3, 0.0), (-0.25, 0.0), (1.0, 0.0)]),
    ],
)
def test_in_place_in_any_order_is_success(name: str, places: list[tuple[float, float]]) -> None:
    world = make(name, 2, torch.float64, terminate_on_success=True)
    world.reset(torch.full((2, world.noise), 0.5))
    pos = torch.tensor([places, places], dtype=torch.float64)
    pos[1, 3, 1] += 0.06  # one is a little off
    world.set_state({**world.get_state(), "pos": pos})
    out = world.step({"agents": torch.zeros(2, 4, dtype=torch.long)}, torch.rand(2, world.noise))
    assert out.stats["success"].tolist() == [1, 0]
    assert out.over.tolist() == [True, False]
    assert out.results["agents"].terminated.tolist() == [[True] * 4, [False] * 4]
    assert abs(float(out.results["agents"].reward[0, 0])) < 1e-9
    assert float(out.results["agents"].reward[1, 0]) < -0.01


def test_treasures_are_taken_in_turn() -> None:
    """Each collector touches one treasure, of kinds 1 and 0; the first touches the deposit of kind 1 as well."""
    world = make("collect_treasure", 1, torch.float64, num_collectors=2, num_deposits=2, num_treasures=2)
    world.reset(torch.full((1, world.noise), 0.5))
    pos = [(0.0, 0.0), (0.3, 0.0), (9.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.3, 0.0)]
    state = {**world.get_state(), "pos": torch.tensor([pos], dtype=torch.float64), "kind": torch.tensor([[1, 0]])}
    still = {g.name: torch.zeros(1, g.n, dtype=torch.long) for g in world.spec.groups}
    world.set_state(state)
    out = world.step(still, torch.full((1, world.noise), 0.75))
    # each takes one; the first delivers at once. 15 for all; the second is 8.7 from the deposit it needs, which is 8.7 from it
    assert world.state["held"].tolist() == [[-1, 0]]
    assert world.state["here"].tolist() == [[False, False]]
    assert out.stats["picked"].tolist() == [2]
    assert out.stats["delivered"].tolist() == [1]
    assert [round(x, 9) for x in out.results["collector"].reward[0].tolist()] == [15, 15 - 0.87]
    # the deposit of kind 1 has nobody coming: 0.15 to the middle of the collectors
    assert [round(x, 9) for x in out.results["deposit"].reward[0].tolist()] == [15 - 0.87, 15 - 0.015]
    out = world.step(still, torch.full((1, world.noise), 0.25))  # both come back, where noise says, and cannot be taken yet
    assert world.state["here"].tolist() == [[True, True]]
    assert torch.allclose(world.state["pos"][0, 4:], torch.tensor(-0.475, dtype=torch.float64))
    assert world.state["kind"].tolist() == [[0, 0]]
    assert out.stats["picked"].tolist() == [0]


def test_who_takes_what_when_all_can() -> None:
    """Three collectors touch two treasures: the first in order takes the first, the second the second, the third none."""
    world = make("collect_treasure", 1, num_collectors=3, num_deposits=3, num_treasures=2)
    world.reset(torch.full((1, world.noise), 0.5))
    pos = [(0.0, 0.0)] * 3 + [(9.0, 0.0)] * 3 + [(0.0, 0.0)] * 2
    world.set_state({**world.get_state(), "pos": torch.tensor([pos]), "kind": torch.tensor([[2, 1]])})
    still = {g.name: torch.zeros(1, g.n, dtype=torch.long) for g in world.spec.groups}
    out = world.step(still, torch.full((1, world.noise), 0.5))
    assert world.state["held"].tolist() == [[2, 1, -1]]
    assert out.stats["collisions"].tolist() == [3]
    # in the same place or not, nobody sees itself: what the five others of each hold, added up
    obs = out.next["collector"].obs
    assert isinstance(obs, torch.Tensor)
    assert obs[0, :, 7:57].unflatten(1, (5, 10))[..., 7:].sum(1).tolist() == [[0, 1, 0], [0, 0, 1], [0, 1, 1]]


@pytest.mark.parametrize("name", sorted(set(AGENTS) - set(NEW)))
def test_rules_change_pay_alone(name: str) -> None:
    gen = torch.Generator().manual_seed(0)
    worlds = [make(name, 4, torch.float64, rules=rules) for rules in ("mpe2", "openai")]
    noise = torch.rand(6, 4, worlds[0].noise, generator=gen)
    for world in worlds:
        world.reset(noise[0])
    differ = False
    for t in range(1, 6):
        actions = random_actions(worlds[0], gen)
        a, b = (world.step(actions, noise[t]) for world in worlds)
        for g in a.results:
            assert torch.equal(a.next[g].obs, b.next[g].obs)  # type: ignore[arg-type]
            assert torch.equal(a.results[g].terminated, b.results[g].terminated)
            differ |= not torch.equal(a.results[g].reward, b.results[g].reward)
        assert all(torch.equal(a.stats[k], b.stats[k]) for k in a.stats)
    assert differ == (name not in SAME)


@pytest.mark.parametrize("name", NEW)
def test_worlds_that_openai_had_not_refuse_its_rules(name: str) -> None:
    with pytest.raises(UserError, match=f"no {name}: leave"):
        make(name, 1, rules="openai")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("simple", {"max_cycles": 0}),
        ("simple_spread", {"n": 0}),
        ("simple_spread", {"local_ratio": 1.5}),
        ("simple_spread", {"agent_neighbors": 0}),
        ("simple_adversary", {"n": 0}),
        ("simple_adversary", {"landmark_neighbors": 0}),
        ("simple_formation", {"n": 7}),
        ("simple_formation", {"n": 0}),
        ("simple_line", {"n": 7}),
        ("simple_line", {"n": 0}),
        ("simple_reference", {"local_ratio": -0.1}),
        ("simple_tag", {"num_good": 0}),
        ("simple_tag", {"num_adversaries": 0}),
        ("simple_tag", {"num_obstacles": -1}),
        ("simple_world_comm", {"num_food": 0}),
        ("simple_world_comm", {"num_forests": -1}),
        ("collect_treasure", {"num_deposits": 7}),
        ("collect_treasure", {"num_treasures": 0}),
    ],
)
def test_impossible_settings_are_refused(name: str, settings: dict[str, Any]) -> None:
    flag = next(iter(settings)).replace("_", "-")
    with pytest.raises(UserError, match=f"--env.{flag} is {settings[flag.replace('-', '_')]}: .*\\.$"):
        make(name, 1, **settings)


@pytest.mark.parametrize("name", AGENTS)
def test_every_setting_has_its_help(name: str) -> None:
    config = type(make(name, 1).config)
    text = "".join(inspect.getsource(c) for c in config.__mro__ if issubclass(c, Scenario.Config))
    for f in dataclasses.fields(config):
        assert re.search(rf"^\s+{f.name}: [^#\n]*  # \w", text, re.MULTILINE), f.name
