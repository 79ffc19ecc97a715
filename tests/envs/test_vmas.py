"""VMAS behind the contract: shapes, ends, seeds, and states that are taken up again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from shoal.envs.drawing import Circle, Line
from shoal.ids import find
from shoal.spec import Box, Discrete, MultiDiscrete, Outcome, UserError
from shoal.tree import tree_leaves

pytest.importorskip("vmas")
from shoal.envs.vmas import VMAS, claims, scenarios

torch.set_num_threads(1)


def make(id: str = "balance", rows: int = 3, **settings: Any) -> VMAS:
    return VMAS(VMAS.Config(id=id, **settings), rows)


def actions(world: VMAS, generator: torch.Generator) -> dict[str, torch.Tensor]:
    out = {}
    for g in world.spec.groups:
        if isinstance(g.action, Box):
            low, high = torch.tensor(g.action.low), torch.tensor(g.action.high)
            out[g.name] = low + (high - low) * torch.rand(world.rows, g.n, len(low), generator=generator)
        else:
            each = [torch.randint(n, (world.rows, g.n), generator=generator) for n in g.action.sizes]
            out[g.name] = torch.stack(each, -1) if isinstance(g.action, MultiDiscrete) else each[0]
    return out


def noise(world: VMAS, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(world.rows, world.noise, generator=generator)


def play(world: VMAS, steps: int, generator: torch.Generator) -> list[Outcome]:
    return [world.step(actions(world, generator), noise(world, generator)) for _ in range(steps)]


def begun(seed: int = 0, **settings: Any) -> tuple[VMAS, torch.Generator]:
    world, generator = make(**settings), torch.Generator().manual_seed(seed)
    world.reset(noise(world, generator))
    return world, generator


def same(a: Any, b: Any) -> bool:
    x, y = tree_leaves(a), tree_leaves(b)
    return len(x) == len(y) and all(torch.equal(p.nan_to_num(), q.nan_to_num()) for p, q in zip(x, y, strict=True))


@pytest.mark.parametrize(
    ("kind", "space"),
    [("continuous", Box((-1.0, -1.0), (1.0, 1.0))), ("discrete", Discrete(9)), ("multi", MultiDiscrete((3, 3)))],
)
def test_shapes(kind: str, space: Any) -> None:
    world, generator = begun(actions=kind, args="n_agents=4", max_steps=7)
    (group,) = world.spec.groups
    assert (group.name, group.team, group.n, group.obs) == ("agents", "agents", 4, (16,))
    assert group.agents == ("agent_0", "agent_1", "agent_2", "agent_3")
    assert group.action == space
    assert world.spec.horizon == 7
    (out,) = play(world, 1, generator)
    for view in (out.next["agents"], out.frame["agents"]):
        assert isinstance(view.obs, torch.Tensor)
        assert view.obs.shape == (3, 4, 16)
        assert view.alive.all()
        assert view.active.all()
    pay = out.results["agents"]
    assert pay.reward.shape == pay.terminated.shape == (3, 4)


def test_forces_move_what_they_push() -> None:
    """simple_spread's agents begin at rest and have 0.1 s a step: pushed right, they go right."""
    world, _ = begun(id="simple_spread")
    push = torch.zeros(3, 3, 2)
    push[:, 1, 0] = 1.0
    world.step({"agents": push}, torch.zeros(3, 4))
    moved = torch.stack([a.state.vel for a in world.inner.agents], 1)
    assert (moved[:, 1, 0] > 0).all()
    assert moved[:, [0, 2]].abs().max() < 1e-3
    world, _ = begun(id="simple_spread", actions="discrete")
    world.step({"agents": torch.zeros(3, 3, dtype=torch.long)}, torch.zeros(3, 4))  # the first choice is to do nothing
    assert torch.stack([a.action.u for a in world.inner.agents]).abs().max() == 0


def test_groups_and_teams() -> None:
    world = make("simple_tag")
    assert [(g.name, g.team, g.n) for g in world.spec.groups] == [("adversary", "adversary", 3), ("agent", "agent", 1)]
    world = make("simple_tag", teams="all", groups="b=adversary_1,a=adversary_2+adversary_0,c=agent_0")
    assert [(g.name, g.team, g.agents) for g in world.spec.groups] == [
        ("b", "team", ("adversary_1",)),
        ("a", "team", ("adversary_2", "adversary_0")),
        ("c", "team", ("agent_0",)),
    ]
    taken: list[Any] = []
    world.reset(torch.zeros(3, 4))
    world.inner.step, step = lambda a: taken.extend(a) or step(a), world.inner.step
    zeros = {g: torch.zeros(3, len(at), 2) for g, at in world.members.items()}
    zeros["a"][:, 0, 0] = 0.5
    world.step(zeros, torch.zeros(3, 4))
    assert [float(x[0, 0]) for x in taken] == [0, 0, 0.5, 0]


def test_time_is_cut_off_row_by_row() -> None:
    world, generator = begun(id="simple_spread", max_steps=5)
    world.clock = torch.tensor([0, 2, 4])
    first, second = play(world, 2, generator)
    assert first.over.tolist() == [False, False, True]
    assert not first.results["agents"].terminated.any()
    assert first.frame["agents"].start[:, 0].tolist() == [False, False, True]
    assert not first.next["agents"].start.any()
    last, new = first.next["agents"].obs, first.frame["agents"].obs
    assert isinstance(last, torch.Tensor)
    assert isinstance(new, torch.Tensor)
    assert torch.equal(last[:2], new[:2])
    assert not torch.equal(last[2], new[2])
    assert last[2, :, 2:4].abs().sum() > 0
    assert new[2, :, 2:4].abs().sum() == 0  # begun again at rest
    assert second.over.tolist() == [False, False, False]
    assert world.clock.tolist() == [2, 4, 1]


def test_rows_that_begin_together_do_not_begin_alike() -> None:
    world, generator = begun(id="simple_spread", max_steps=5)
    world.clock = torch.tensor([4, 0, 4])
    (out,) = play(world, 1, generator)
    new = out.frame["agents"].obs
    assert isinstance(new, torch.Tensor)
    assert out.over.tolist() == [True, False, True]
    assert not torch.equal(new[0], new[2])


def test_what_is_drawn_in_a_step_follows_from_its_noise() -> None:
    seen = []
    for draw in (0.25, 0.25, 0.75):
        world, _ = begun(id="simple_spread")
        for agent in world.inner.agents:
            agent.action._u_noise = agent._u_noise = 0.5
        out = world.step({"agents": torch.zeros(3, 3, 2)}, torch.full((3, 4), draw))
        seen.append(out.next["agents"].obs)
    assert same(seen[0], seen[1])
    assert not same(seen[0], seen[2])


def test_what_the_scenario_calls_done_is_terminated() -> None:
    world, generator = begun(max_steps=50)
    world.inner.scenario.done = lambda: torch.tensor([False, True, False])
    (out,) = play(world, 1, generator)
    assert out.over.tolist() == [False, True, False]
    assert out.results["agents"].terminated.tolist() == [[False] * 3, [True] * 3, [False] * 3]
    assert world.clock.tolist() == [1, 0, 1]


def test_noise_is_the_seed_and_nobody_else_notices() -> None:
    runs = []
    for seed in (0, 0, 1):
        torch.rand(seed + 1)  # whatever others draw
        before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        world, generator = begun(seed, max_steps=3, id="simple_spread")
        runs.append(play(world, 7, generator))
        after = torch.random.get_rng_state(), np.random.get_state()[1], random.getstate()
        assert torch.equal(before[0], after[0])
        assert (before[1] == after[1]).all()
        assert before[2] == after[2]
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


def test_each_step_has_tensors_of_its_own() -> None:
    world, generator = begun()
    first = play(world, 1, generator)[0]
    kept = [x.clone() for x in tree_leaves(first)]
    play(world, 3, generator)
    assert same(kept, tree_leaves(first))


@pytest.mark.parametrize(
    ("id", "args"),
    [("balance", ""), ("simple_adversary", ""), ("sampling", "grid_spacing=0.5"), ("dropout", ""), ("simple_reference", "")],
)
def test_a_state_is_taken_up_exactly(id: str, args: str) -> None:
    """Rows out of step, across the ends of episodes; simple_adversary points at another landmark each time, sampling
    keeps distributions, dropout the same tensor twice."""
    world, generator = begun(id=id, args=args, max_steps=6)
    world.clock = torch.tensor([0, 2, 4])
    play(world, 3, generator)
    state, at = world.get_state(), generator.get_state()
    kept = [x.clone() for x in tree_leaves(state["values"]) if isinstance(x, torch.Tensor)]
    expected = play(world, 8, generator)
    again = make(id, args=args, max_steps=6)
    frame = again.set_state(state)
    assert again.news == []
    assert frame["agents" if len(world.spec.groups) == 1 else "agent"].obs.shape[0] == 3  # type: ignore[union-attr]
    generator.set_state(at)
    assert same(play(again, 8, generator), expected)
    assert any(o.over.any() for o in expected)
    assert all(map(torch.equal, kept, [x for x in tree_leaves(state["values"]) if isinstance(x, torch.Tensor)]))


def test_what_points_at_a_body_points_at_it_again() -> None:
    world, again = begun(id="simple_spread")[0], make("simple_spread")
    for w, k in ((world, 1), (again, 0)):
        w.inner.scenario.target = w.inner.world.landmarks[k]
    again.set_state(world.get_state())
    first, second = again.inner.world.landmarks[:2]
    assert first is not second
    assert again.inner.scenario.target is second


def test_a_state_that_does_not_fit() -> None:
    world, generator = begun()
    play(world, 2, generator)
    state = world.get_state()
    with pytest.raises(UserError, match="3 rows and the world 2"):
        make(rows=2).set_state(state)
    state["values"]["/0/nothing/here"] = 1
    frame = world.set_state(state)
    assert frame["agents"].start.all()
    assert len(world.news) == 1
    assert "could not be put back into its state" in world.news[0]


def test_a_drawing() -> None:
    world, _ = begun()
    sketch = world.draw(1)
    x, y = world.inner.agents[0].state.pos[1].tolist()
    assert Circle(x, y, 0.03, tuple(world.inner.agents[0].color), "agent_0", True) in sketch.circles
    (line,) = [e for e in world.inner.world.landmarks if e.name == "line"]
    segments = [s for s in sketch.segments if s.color == tuple(line.color[:3])]
    assert len(segments) >= 1
    ends = segments[0]
    assert isinstance(ends, Line)
    assert ((ends.x0 - ends.x1) ** 2 + (ends.y0 - ends.y1) ** 2) ** 0.5 == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"id": "ballance"}, r"no scenario 'ballance' \(did you mean 'balance'"),
        ({"id": ""}, "no scenario ''; it has "),
        ({"args": "n_agent=4"}, "a setting that the scenario balance does not know: n_agent"),
        ({"args": "n_agents=1"}, "balance could not be made: AssertionError"),
        ({"max_steps": 0}, "--env.max-steps is 0"),
    ],
)
def test_what_cannot_be_made(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make(**settings)


def test_scenarios_by_name() -> None:
    assert {"balance", "simple_tag", "waterfall"} <= set(scenarios())
    assert claims("balance")
    assert not claims("ballance")
    assert find("envs", "vmas/balance").settings == {"id": "balance"}
