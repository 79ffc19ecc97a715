"""Other groups of the same agents: what they see, do and are paid is what it was."""

from typing import Any

import pytest
import torch

import shoal
from shoal.envs.pettingzoo import PettingZoo
from shoal.envs.regroup import Regrouping, _RegroupedWorld, behind, respecified
from shoal.spec import EnvSpec, Outcome, UserError
from shoal.tree import tree_leaves, tree_map

TAG = "back=adversary_2,adversary_0 prey=agent_0 front=adversary_1"
PLACES = {"back": ("adversary", [2, 0]), "prey": ("agent", [0]), "front": ("adversary", [1])}


def actions_for(spec: EnvSpec, rows: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    return {g.name: torch.randint(g.action.n, (rows, g.n), generator=draw) for g in spec.groups}  # type: ignore[union-attr]


def test_who_is_where_and_the_team_that_they_came_from() -> None:
    spec = shoal.make("simple_tag", regroup=TAG).spec
    found = [(g.name, g.team, g.agents) for g in spec.groups]
    assert found == [
        ("back", "adversary", ("adversary_2", "adversary_0")),
        ("prey", "agent", ("agent_0",)),
        ("front", "adversary", ("adversary_1",)),
    ]


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.compiler)])
def test_a_native_world_is_what_it_was(fused: bool) -> None:
    """States, observations and rewards of 60 steps, over ends of episodes, agent by agent."""
    rows, draw = 5, torch.Generator().manual_seed(0)
    one, other = shoal.make("simple_tag", rows), shoal.make("simple_tag", rows, regroup=TAG)
    assert isinstance(other, _RegroupedWorld)
    if fused:
        assert one.fuse() is None  # type: ignore[attr-defined]
        assert other.fuse() is None
    noise = torch.rand(rows, one.noise, generator=draw)
    frames: Any = (one.reset(noise), other.reset(noise))
    compared, alive = 0, []
    for _ in range(60):
        for g, (old, places) in PLACES.items():
            torch.testing.assert_close(frames[1][g].obs, frames[0][old].obs[:, places], rtol=0, atol=1e-6 if fused else 0)
            compared += 1
        assert torch.equal(frames[1]["prey"].start, frames[0]["agent"].start)
        theirs = actions_for(one.spec, rows, draw)
        mine = {g: theirs[old][:, places] for g, (old, places) in PLACES.items()}
        noise = torch.rand(rows, one.noise, generator=draw)
        a, b = one.step(theirs, noise), other.step(mine, noise)
        for g, (old, places) in PLACES.items():
            torch.testing.assert_close(b.results[g].reward, a.results[old].reward[:, places], rtol=1e-6, atol=1e-6)
            assert not b.results[g].terminated.any()
        assert torch.equal(a.over, b.over)
        frames = (a.frame, b.frame)
        alive.append(b.frame["back"].alive)
    assert compared == 180
    assert len({id(x) for x in alive}) <= 2  # still known for a constant, of steps in the middle and of the last


def test_a_state_taken_over_goes_on_the_same() -> None:
    world: Any = shoal.make("simple_spread", 3, regroup="b=agent_2 a=agent_0,agent_1")
    draw = torch.Generator().manual_seed(1)
    world.reset(torch.rand(3, world.noise, generator=draw))
    actions, noise = actions_for(world.spec, 3, draw), torch.rand(3, world.noise, generator=draw)
    state = world.get_state()
    first = world.step(actions, noise)
    world.set_state(state)
    again: Outcome = world.step(actions, noise)
    assert all(map(torch.equal, tree_leaves(first), tree_leaves(again)))
    assert world.draw(0) is not None


ZOO = PettingZoo.Config(id="classic.connect_four_v3", workers=0)


def test_a_world_of_another_library_behind_a_front() -> None:
    """Connect four, whose seats have masks and turns: moves by seat lead to what moves by the one group lead to."""
    pytest.importorskip("pettingzoo.classic.connect_four_v3")
    rows = 3
    one, other = PettingZoo(ZOO, rows=rows), behind(PettingZoo(ZOO, rows=rows), "second=player_1 first=player_0")
    noise = torch.full((rows, 2), 0.3)
    a, b = one.reset(noise), other.reset(noise)
    draw = torch.Generator().manual_seed(0)
    for _ in range(12):
        for i, seat in enumerate(("first", "second")):
            mine, theirs = b[seat], tree_map(lambda x, i=i: x[:, i : i + 1], a["agents"])
            assert all(map(torch.equal, tree_leaves(mine), tree_leaves(theirs)))
        action = torch.multinomial(a["agents"].legal.flatten(0, 1).float(), 1, generator=draw).reshape(rows, 2)  # type: ignore[union-attr]
        x = one.step({"agents": action}, noise)
        y = other.step({"first": action[:, :1], "second": action[:, 1:]}, noise)
        assert torch.equal(x.results["agents"].reward, torch.cat([y.results["first"].reward, y.results["second"].reward], 1))
        a, b = x.frame, y.frame
    mark, state = other.mark(), other.get_state()  # type: ignore[attr-defined]
    other.rewind(mark)  # type: ignore[attr-defined]
    again = other.set_state(state)
    assert torch.equal(again["first"].obs, b["first"].obs)  # type: ignore[arg-type]
    assert other.restarts == 0
    assert not other.begun_anew.any()  # type: ignore[union-attr]
    other.close()
    one.close()


def test_a_library_that_forms_groups_itself_forms_these() -> None:
    pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    world = shoal.make("pettingzoo/classic.tictactoe_v3", regroup="x=player_1 o=player_2", workers=0)
    assert [(g.name, g.team, g.agents) for g in world.spec.groups] == [("x", "x", ("player_1",)), ("o", "o", ("player_2",))]
    assert isinstance(world, PettingZoo)


def test_agents_of_two_teams_are_no_group() -> None:
    spec = shoal.make("simple_tag").spec
    groups = tuple(
        shoal.spec.Group(g.name, g.team, g.agents, (4,), g.action)  # spaces that are equal
        for g in spec.groups
    )
    with pytest.raises(UserError, match="a group wins together, and they are of the teams adversary and agent"):
        respecified(EnvSpec(groups), "a=adversary_0,agent_0 b=adversary_1,adversary_2")


def test_there_and_back() -> None:
    old = shoal.make("simple_tag").spec
    there = Regrouping(old, respecified(old, TAG))
    x = {"adversary": torch.arange(3).expand(2, 3), "agent": torch.full((2, 1), 9)}
    new = {g: torch.cat([x[name][:, a:b] for name, a, b in pieces], 1) for g, pieces in there.pieces.items()}
    assert new["back"].tolist() == [[2, 0]] * 2
    assert all(torch.equal(there.actions(new)[g], x[g]) for g in x)
