"""What nets see: scopes of critics, who is blotted out, and observations in a row."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import shoal
from shoal.algos.base import Algorithm
from shoal.algos.observations import Observations, scope_groups, scope_width
from shoal.algos.ppo import PPO
from shoal.nets.config import NetConfig
from shoal.nets.norm import Running
from shoal.nets.parts import flat, vector_width
from shoal.spec import Discrete, EnvSpec, Frame, Group, UserError, View

torch.set_num_threads(1)


def group(name: str, n: int, obs: tuple[int, ...], **more: Any) -> Group:
    return Group(name, more.pop("team", name), tuple(f"{name}_{i}" for i in range(n)), obs, Discrete(3), **more)


SPEC = EnvSpec(
    (group("a", 2, (2,), team="red", mortal=True), group("b", 1, (3,), team="blue"), group("c", 1, (1, 2), team="red"))
)


def observations(
    name: str, scope: Any, critic_input: Any = "state", spec: EnvSpec = SPEC, normalise_obs: bool = False, **settings: Any
) -> Observations:
    """Of one group, by a learner of which no more is known than what it sees by."""

    class Owner:
        returns_after_death, groups, net = False, (name,), NetConfig()
        config = PPO.Config(normalise_obs=normalise_obs, **settings)

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
    seen = observations("a", "team", normalise_obs=True)
    for name, shift in (("a", 10.0), ("c", 20.0)):
        norm = cast(Running, seen.norms[name])
        norm.normalise = lambda x, clip, shift=shift: x + shift  # type: ignore[method-assign, misc, assignment]
    assert seen.critic_input(frame()).tolist() == [[11, 12, 0, 0, 28, 29]]


# --- the state apart ---

SETTINGS: list[dict[str, Any]] = [
    {"normalise_obs": True},
    {"normalise_obs": True, "normalise_state": True, "state_normaliser": None},
    {"normalise_obs": True, "normalise_state": False},
    {"normalise_obs": False, "normalise_state": True},
    {"normalise_obs": True, "state_normaliser": "test_observations:Times:by=3"},
    {"normalise_obs": True, "normaliser": "test_observations:Times", "state_normaliser": "test_observations:Times"},
]


class Times(torch.nn.Module):
    """A normaliser that multiplies."""

    def __init__(self, width: int = 1, by: float = 2.0):
        super().__init__()
        self.by, self.seen = by, 0.0

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        self.seen += float(x.sum() if mask is None else x[mask].sum())

    def normalise(self, x: Tensor, clip: float | None = None) -> Tensor:
        return x * self.by

    def denormalise(self, x: Tensor) -> Tensor:
        return x / self.by


# what b sees, 5 6 7, has a mean of 4 and a deviation of 2: 0.5 1 1.5. In the state it stands behind a's 1 2 (of mean 0 and
# deviation 0.5: 2 4) and the zeros of the dead, and before c's 8 9 (of mean 8, deviation 1: 0 1)
SEEN = {
    "raw": ([5.0, 6, 7], [1.0, 2, 0, 0, 5, 6, 7, 8, 9]),
    "normalised": ([0.5, 1, 1.5], [2.0, 4, 0, 0, 0.5, 1, 1.5, 0, 1]),
}
STATISTICS = {"a": (0.0, 0.5), "b": (4.0, 2.0), "c": (8.0, 1.0)}


def seen_with(spec: EnvSpec = SPEC, scope: Any = "world", critic_input: Any = "state", **settings: Any) -> Observations:
    """What b and its critic see, with these statistics."""
    out = observations("b", scope, critic_input, spec, **settings)
    for norms in (out.norms, out.joined_norms or {}):
        for g, norm in norms.items():
            if isinstance(norm, Running):
                norm.shift.fill_(STATISTICS[g][0])
                norm.scale.fill_(STATISTICS[g][1])
    return out


@pytest.mark.parametrize(
    ("settings", "actor", "critic"),
    list(zip(SETTINGS, ("normalised", "normalised", "normalised", "raw", "normalised"), "nnrn3", strict=False)),
)
def test_observations_that_are_joined_to_a_state_are_normalised_as_it_is(settings: Any, actor: str, critic: str) -> None:
    seen, f = seen_with(**settings), frame()
    state = {"n": SEEN["normalised"][1], "r": SEEN["raw"][1], "3": [3.0 * x for x in SEEN["raw"][1]]}[critic]
    own = SEEN[actor][0]
    assert seen.actor_input(f)[0, 0].tolist() == own
    assert seen.critic_input(f)[0].tolist() == state
    cache: dict[str, Any] = {}  # of one frame, for both
    assert (seen.actor_input(f, cache)[0, 0].tolist(), seen.critic_input(f, cache)[0].tolist()) == (own, state)
    beside = seen_with(critic_input="agent", **settings)
    assert beside.critic_input(f)[0, 0].tolist() == [*state, *own]


def test_settings_that_say_the_same_of_both_keep_one_normaliser_for_both() -> None:
    """Its names are those that checkpoints have always had."""
    for settings in (SETTINGS[0], SETTINGS[1], SETTINGS[5]):
        assert seen_with(**settings).joined_norms is None
    assert set(seen_with(**SETTINGS[0]).norms) == {"a", "b", "c"}
    assert set(seen_with(**SETTINGS[2]).norms) == {"b"}
    assert "norms.b.shift" in seen_with(**SETTINGS[1]).state_dict()
    assert "joined_norms.b.shift" in seen_with(**SETTINGS[3]).state_dict()


def test_the_worlds_own_state_is_normalised_or_not() -> None:
    spec, f = EnvSpec(SPEC.groups, state=5), frame((3,), torch.arange(5).expand(3, 5))
    for k, (state, own) in {0: ("n", "n"), 2: ("r", "n"), 3: ("n", "r"), 4: ("3", "n")}.items():
        seen = seen_with(spec, **SETTINGS[k])
        assert seen.joined_norms is None
        assert set(seen.norms) == ({"b"} if own == "n" else set())
        if isinstance(seen.state_norm, Running):
            seen.state_norm.shift.fill_(1.0)
        expected = {"n": [-1.0, 0, 1, 2, 3], "r": [0.0, 1, 2, 3, 4], "3": [0.0, 3, 6, 9, 12]}[state]
        assert seen.critic_input(f).tolist() == [expected] * 3


def test_statistics_of_the_state_move_by_the_living() -> None:
    seen = seen_with(**{**SETTINGS[4], "normalise_obs": False, "normalise_state": True})
    seen.update(frame((4,)))
    assert seen.joined_norms is not None
    assert [cast(Times, seen.joined_norms[g]).seen for g in "abc"] == [4 * 3.0, 4 * 18.0, 4 * 17.0]
    both = seen_with(**SETTINGS[4])
    both.update(frame((4,)))
    assert cast(Running, both.norms["b"]).mean.tolist() == [5, 6, 7]


def test_who_sees_no_state_takes_no_settings_of_it(tmp_path: Any) -> None:
    for algo, settings in (("ippo", {"normalise_state": True}), ("ddpg", {"state_normaliser": "test_observations:Times"})):
        with pytest.raises(
            UserError, match=r"^--algo.(normalise-state|state-normaliser) is for critics that see more than their"
        ):
            shoal.train(algo, "simple_spread", algo=settings, out=tmp_path / "r", quiet=True)
    with pytest.raises(UserError, match="has no setting 'normalise_state'"):
        shoal.train("ddqn", "simple_spread", algo={"normalise_state": False}, out=tmp_path / "r", quiet=True)
    assert not (tmp_path / "r").exists()


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
