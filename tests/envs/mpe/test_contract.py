"""What every scenario owes beyond `envs/test_contract.py`: its teams, its blocks of observations, the end of its episodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.envs.mpe.world import Scenario
from shoal.ids import catalog
from shoal.spec import Frame, Outcome
from shoal.tree import tree_leaves

from .reference import AGENTS, make, random_actions

torch.set_num_threads(1)
TEAMS = {  # group -> team
    "collect_treasure": {"collector": "team", "deposit": "team"},
    "simple_adversary": {"adversary": "adversary", "agent": "agent"},
    "simple_crypto": {"eve": "eve", "bob": "good", "alice": "good"},
    "simple_push": {"adversary": "adversary", "agent": "agent"},
    "simple_speaker_listener": {"speaker": "team", "listener": "team"},
    "simple_tag": {"adversary": "adversary", "agent": "agent"},
    "simple_world_comm": {"leadadversary": "adversary", "adversary": "adversary", "agent": "agent"},
}
EARLY = ["simple_formation", "simple_line", "simple_spread", "simple_tag"]  # may end on success
WORLDS = [(name, {}) for name in AGENTS] + [(name, {"terminate_on_success": True, "n": 1}) for name in EARLY[:3]]
WORLDS += [("simple_tag", {"terminate_on_success": True, "curriculum": True})]
every_world = pytest.mark.parametrize(("name", "settings"), WORLDS, ids=str)
ROWS = 3


def noises(world: Scenario, steps: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(steps, world.rows, world.noise, generator=torch.Generator().manual_seed(seed))


def same(a: Any, b: Any) -> bool:
    x, y = tree_leaves(a), tree_leaves(b)
    return len(x) == len(y) and all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


def play(world: Scenario, steps: int, seed: int = 0, begin: bool = True) -> list[Outcome]:
    noise, gen = noises(world, steps + 1, seed), torch.Generator().manual_seed(seed + 1)
    if begin:
        world.reset(noise[0])
    return [world.step(random_actions(world, gen), noise[t + 1]) for t in range(steps)]


def test_every_scenario_is_here() -> None:
    assert set(AGENTS) == {id for id, e in catalog("envs").items() if e.native and issubclass(e.load(), Scenario)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("actions", ["discrete", "multi", "continuous"])
@every_world
def test_shapes(name: str, settings: dict[str, Any], actions: str, dtype: torch.dtype) -> None:
    world = make(name, ROWS, dtype, actions=actions, **settings)
    spec = world.spec
    assert {g.name: g.team for g in spec.groups} == TEAMS.get(name, {"agents": "agents"})
    assert [a for g in spec.groups for a in g.agents] == [b.name for b in world.agents]
    assert spec.horizon == 25

    def check(frame: Frame) -> None:
        for g in spec.groups:
            view = frame[g.name]
            assert isinstance(view.obs, torch.Tensor)
            assert (view.obs.shape, view.obs.dtype) == ((ROWS, g.n, *g.obs), dtype)
            assert view.obs.isfinite().all()
            assert view.alive.shape == view.active.shape == view.start.shape == (ROWS, g.n)
            assert view.alive.all()
            assert sum(s.count * s.width for s in g.layout) == g.obs[0]

    frame = world.reset(noises(world, 1)[0])
    check(frame)
    assert all(v.start.all() for v in frame.views.values())
    for out in play(world, 3):
        check(out.next)
        check(out.frame)
        for g in spec.groups:
            assert (out.results[g.name].reward.shape, out.results[g.name].reward.dtype) == ((ROWS, g.n), dtype)
            assert (out.results[g.name].terminated.shape, out.results[g.name].terminated.dtype) == ((ROWS, g.n), torch.bool)
        assert {k: (v.shape, v.dtype) for k, v in out.stats.items()} == dict.fromkeys(spec.stats, ((ROWS,), dtype))
        assert set(spec.stats.values()) <= {"sum", "mean", "last"}
    assert all(v.shape[0] == ROWS for v in world.get_state().values())
    world.draw(ROWS - 1)


@pytest.mark.parametrize("name", AGENTS)
def test_the_end_of_an_episode(name: str) -> None:
    world = make(name, ROWS, max_cycles=4)
    noise = noises(world, 5)
    for t, out in enumerate(play(world, 4), 1):
        assert out.over.tolist() == [t == 4] * ROWS
        assert not any(p.terminated.any() for p in out.results.values())
        assert not any(v.start.any() for v in out.next.views.values())
        assert all(bool(v.start.all()) == (t == 4) for v in out.frame.views.values())
    fresh = make(name, ROWS, max_cycles=4)
    assert same(out.frame, fresh.reset(noise[4]))
    assert not same(out.next, out.frame)  # the true next one is another
    assert world.state["clock"].tolist() == [0] * ROWS


@pytest.mark.parametrize("name", AGENTS)
def test_rows_in_step_need_no_masks_and_get_the_same(name: str) -> None:
    quick, general = make(name, ROWS, max_cycles=4), make(name, ROWS, max_cycles=4)
    general.hold(3)  # rollouts of three steps begin anywhere in an episode
    assert same(play(quick, 10), play(general, 10))
    assert quick.phase == 2  # ten steps on, in episodes of four
    assert general.phase == -1
    quick.hold(8)
    assert quick.phase == 2


@pytest.mark.parametrize("name", ["simple_reference", "simple_world_comm"])
def test_move_and_word_apart_are_the_same_as_together(name: str) -> None:
    joint, split = make(name, ROWS), make(name, ROWS, actions="multi")
    noise, gen = noises(joint, 6), torch.Generator().manual_seed(0)
    joint.reset(noise[0])
    split.reset(noise[0])
    for t in range(1, 6):
        two = random_actions(split, gen)
        one = {k: v[..., 0] + 5 * v[..., 1] if v.dim() == 3 else v for k, v in two.items()}
        assert same(joint.step(one, noise[t]), split.step(two, noise[t]))


def test_a_row_keeps_the_pace_it_began_with() -> None:
    """Stage 0 slows the prey to half; a stage set in the middle counts from each row's next start."""
    world = make("simple_tag", 2, torch.float64, curriculum=True, max_cycles=3, num_obstacles=0)
    world.reset(noises(world, 1)[0])
    state = world.get_state()
    state["pos"] = torch.tensor([[[-1.0, -1], [-1, 1], [1, -1], [0.5, 0.5]]] * 2)  # nobody near anybody
    state["clock"] = torch.tensor([0, 1])
    world.set_state(state)
    world.stage.fill_(2)
    right = {"adversary": torch.zeros(2, 3, dtype=torch.long), "agent": torch.full((2, 1), 2)}
    noise = noises(world, 3, 3)
    world.step(right, noise[0])
    assert world.state["vel"][:, 3, 0].tolist() == pytest.approx([0.2, 0.2])  # 4 * 0.5 * 0.1
    world.step(right, noise[1])
    assert world.state["pace"].tolist() == [0.5, 1.0]  # row 1 has begun again
    world.step(right, noise[2])
    assert world.state["vel"][1, 3, 0].item() == pytest.approx(0.4)
    fast = world.get_state()
    fast["vel"][:, 3, 0] = 5.0
    world.set_state(fast)
    world.step(right, noise[0])
    assert world.state["vel"][:, 3, 0].abs().max() <= 1.3 + 1e-9
