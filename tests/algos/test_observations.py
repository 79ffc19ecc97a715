"""What nets see: scopes of critics, who is blotted out, and observations in a row."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shoal.algos.base import Algorithm, LearnerConfig
from shoal.algos.observations import Observations, scope_groups, scope_width
from shoal.nets.config import NetConfig
from shoal.nets.norm import Running
from shoal.nets.parts import flat, vector_width
from shoal.spec import Discrete, EnvSpec, Frame, Group, View

torch.set_num_threads(1)


def group(name: str, n: int, obs: tuple[int, ...], **more: Any) -> Group:
    return Group(name, more.pop("team", name), tuple(f"{name}_{i}" for i in range(n)), obs, Discrete(3), **more)


SPEC = EnvSpec(
    (group("a", 2, (2,), team="red", mortal=True), group("b", 1, (3,), team="blue"), group("c", 1, (1, 2), team="red"))
)


def observations(name: str, scope: Any, critic_input: Any = "state", spec: EnvSpec = SPEC, norm: bool = False) -> Observations:
    """Of one group, by a learner of which no more is known than what it sees by."""

    class Owner:
        returns_after_death, groups, net = False, (name,), NetConfig()
        config = LearnerConfig(normalise_obs=norm)

    owner = Owner()
    owner.spec = spec  # type: ignore[attr-defined]
    return Observations(cast(Algorithm, owner), scope, critic_input)


def frame(lead: tuple[int, ...] = (1,), state: Tensor | None = None) -> Frame:
    """a sees 1 2 and 3 4, of whom the second is dead; b sees 5 6 7; c sees 8 9."""

    def view(obs: Any, alive: list[bool]) -> View:
        x, live = torch.tensor(obs), torch.tensor(alive)
        live = live.expand(*lead, *live.shape)
        return View(x.expand(*lead, *x.shape), live, live, live)

    return Frame(
        {"a": view([[1.0, 2], [3, 4]], [True, False]), "b": view([[5.0, 6, 7]], [True]), "c": view([[[8, 9]]], [True])}, state
    )


@pytest.mark.parametrize("lead", [(1,), (4, 1), (6, 4)])
def test_scopes(lead: tuple[int, ...]) -> None:
    f = frame(lead)
    cases: list[tuple[str, str, list[float]]] = [
        ("a", "team", [1, 2, 0, 0, 8, 9]),  # the dead are zeros; its own team alone, in the world's order
        ("c", "team", [1, 2, 0, 0, 8, 9]),
        ("b", "team", [5, 6, 7]),
        ("a", "world", [1, 2, 0, 0, 5, 6, 7, 8, 9]),
        ("b", "world", [1, 2, 0, 0, 5, 6, 7, 8, 9]),
    ]
    for name, scope, expected in cases:
        out = observations(name, scope).critic_input(f)
        assert out.shape == (*lead, len(expected))
        assert out.dtype == torch.float32
        assert torch.equal(out, torch.tensor(expected).float().expand_as(out))
        assert scope_width(SPEC, (name,), scope) == len(expected)  # type: ignore[arg-type]
    assert [scope_width(SPEC, (g,), "own") for g in "abc"] == [2, 3, 2]


def test_the_worlds_own_state() -> None:
    spec = EnvSpec(SPEC.groups, state=5)
    state = torch.arange(5).expand(3, 5)
    assert scope_width(spec, ("a",), "world") == 5
    out = observations("a", "world", spec=spec).critic_input(frame((3,), state))
    assert torch.equal(out, state.float())
    assert out.dtype == torch.float32
    assert observations("a", "team", spec=spec).critic_input(frame((3,), state)).shape == (3, 6)  # a team's view is its own
    assert scope_width(spec, ("a",), "team") == 6


def test_what_the_dead_see_reaches_no_critic() -> None:
    f = frame()
    f["a"].obs = torch.tensor([[[1.0, 2.0], [math.nan, math.inf]]])
    assert observations("a", "team").critic_input(f).tolist() == [[1, 2, 0, 0, 8, 9]]


def test_the_dead_are_zeros_after_what_is_done_to_observations() -> None:
    """Normalising would move a zero: the dead are blotted out after it, each group by its own."""
    seen = observations("a", "team", norm=True)
    for name, shift in (("a", 10.0), ("c", 20.0)):
        norm = cast(Running, seen.norms[name])
        norm.normalise = lambda x, clip, shift=shift: x + shift  # type: ignore[method-assign, misc, assignment]
    assert seen.critic_input(frame()).tolist() == [[11, 12, 0, 0, 28, 29]]


def test_flat() -> None:
    x = torch.arange(24).reshape(2, 3, 4)
    assert torch.equal(flat(x, (4,)), x.float())
    assert flat(x[..., None].expand(2, 3, 4, 5), (4, 5)).shape == (2, 3, 20)
    assert flat(x[..., 0], ()).shape == (2, 3, 1)
    assert flat(x, (4,)).dtype == torch.float32
    assert [vector_width(o) for o in ((), (4,), (4, 5))] == [1, 4, 20]


def test_named_parts_and_images_have_widths_apart() -> None:
    assert vector_width((3, 8, 8)) == 0
    assert vector_width({"picture": (1, 8, 8), "asks": (2,), "grid": (4, 5), "one": ()}) == 23


def test_groups_around() -> None:
    def names(scope: str, *groups: str) -> list[str]:
        return [g.name for g in scope_groups(SPEC, groups, scope)]  # type: ignore[arg-type]

    assert names("own", "c", "a") == ["c", "a"]  # as they were bound
    assert names("team", "c") == names("team", "a") == ["a", "c"]
    assert names("team", "b") == ["b"]
    assert names("world", "b") == ["a", "b", "c"]


def test_what_is_given_of_a_world_that_has_a_state() -> None:
    """critic_input agent: what agent b sees, 5 6 7, stands beside the rest."""
    spec, f = EnvSpec(SPEC.groups, state=5), frame((3,), torch.arange(5).expand(3, 5))
    side_by_side = [1.0, 2, 0, 0, 5, 6, 7, 8, 9]

    def seen(spec: EnvSpec, f: Frame, given: str) -> Any:
        out = observations("b", "world", given, spec).critic_input(f)
        if given == "agent":
            assert out[..., -3:].tolist() == [[[5, 6, 7]]] * 3
            out = out[:, 0, :-3]
        return out.tolist()

    for given, expected in (("state", [0.0, 1, 2, 3, 4]), ("joined", side_by_side), ("agent", [0.0, 1, 2, 3, 4])):
        assert seen(spec, f, given) == [expected] * 3
        assert scope_width(spec, ("b",), "world", given) == len(expected)  # type: ignore[arg-type]
        assert seen(SPEC, frame((3,)), given) == [side_by_side] * 3
        assert scope_width(SPEC, ("b",), "world", given) == len(side_by_side)  # type: ignore[arg-type]
        assert scope_width(spec, ("b",), "team", given) == 3  # type: ignore[arg-type]
