"""Over all probes and their settings: the answers are what playing the world gives."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import probes

from shoal.envs.probe.base import Probe, Valued
from shoal.ids import catalog
from shoal.spec import Box, Frame, Group, Shape, View
from shoal.tree import tree_leaves

torch.set_num_threads(1)

SETTINGS: dict[str, list[dict[str, Any]]] = {  # of a probe that is not named here: its defaults
    "probe_constant": [{}, {"n": 3, "actions": "multi"}],
    "probe_copy": [{}, {"n": 1}, {"actions": "multi"}, {"actions": "continuous"}],
    "probe_deaths": [{}, {"copy": False, "ghost": 0.0}],
    "probe_delay": [{}, {"n": 2, "actions": "continuous"}],
    "probe_illegal": [{}, {"actions": "multi", "n": 3}],
    "probe_image": [{}, {"n": 3}, {"vector": True}, {"n": 2, "vector": True}],
    "probe_leave": [{}, {"common": True}],
    "probe_matrix": [{}, {"payoff": "penalty"}, {"payoff": "penalty", "k": -10.0}],
    "probe_memory": [{}, {"n": 2, "blank": 1}],
    "probe_observation": [{}, {"n": 2}],
    "probe_teams": [
        {},
        {"pair": "multi", "lone": "continuous", "pay": "opposed"},
        {"pair": "continuous", "lone": "multi", "shaped": True},
        {"shaped": True, "pay": "opposed"},
    ],
    "probe_terminated": [{}, {"stagger": True, "n": 2}, {"length": 3}],
    "probe_truncated": [{}, {"stagger": True}, {"n": 2}],
    "probe_turns": [{}, {"copy": False}],
}
CASES = [
    pytest.param(s, c, id=f"{s}-{'-'.join(map(str, c.values())) or 'plain'}") for s in probes() for c in SETTINGS.get(s, [{}])
]


def probe(stem: str) -> type[Probe]:
    return catalog("envs")[stem].load()  # type: ignore[no-any-return]


def make(stem: str, settings: dict[str, Any], rows: int) -> Probe:
    cls = probe(stem)
    return cls(cls.Config(**settings), rows, dtype=torch.float64)


def parts(group: Group, view: View) -> list[tuple[Shape, Tensor]]:
    """What should be seen, and what is: one tensor, or several that have names."""
    if not isinstance(group.obs, dict):
        return [(group.obs, view.obs)]
    assert view.obs.keys() == group.obs.keys()
    return [(shape, view.obs[name]) for name, shape in group.obs.items()]


def draw(world: Probe, g: torch.Generator) -> Tensor:
    return torch.rand(world.rows, world.noise, generator=g, dtype=torch.float64)


def guess(world: Probe, frame: Frame, g: torch.Generator) -> dict[str, Tensor]:
    """Uniform among what is legal."""
    actions = {}
    for group in world.spec.groups:
        space, shape = group.action, (world.rows, group.n)
        if isinstance(space, Box):
            low, high = torch.tensor(space.low), torch.tensor(space.high)
            actions[group.name] = low + torch.rand(*shape, len(space.low), generator=g, dtype=torch.float64) * (high - low)
            continue
        legal = frame[group.name].legal
        rank = torch.rand(*shape, sum(space.sizes), generator=g)
        rank = rank if legal is None else rank.masked_fill(~legal, -1.0)
        chosen = torch.stack([x.argmax(-1) for x in rank.split(list(space.sizes), -1)], -1)
        actions[group.name] = chosen if space.kind == "multi-discrete" else chosen[..., 0]
    return actions


def mean_return(world: Probe, how: str) -> dict[str, float]:
    """The first episode of every row; mean over rows and agents."""
    g = torch.Generator().manual_seed(1)
    frame = world.reset(draw(world, g))
    live = torch.ones(world.rows, 1, dtype=torch.float64)
    total = {x.name: torch.zeros(world.rows, x.n, dtype=torch.float64) for x in world.spec.groups}
    for _ in range(world.spec.horizon or 0):
        actions = world.solution(world.state) if how == "best" else guess(world, frame, g)
        out = world.step(actions, draw(world, g))
        for x in total:
            total[x] += out.results[x].reward * live
        live = live * ~out.over[:, None]
        frame = out.frame
    assert not live.any()
    return {x: float(r.mean()) for x, r in total.items()}


def test_every_probe_is_here() -> None:
    assert set(SETTINGS) <= set(probes())
    assert len(probes()) >= 14


@pytest.mark.parametrize("stem", probes())
def test_says_what_it_is(stem: str) -> None:
    cls = probe(stem)
    assert stem.startswith("probe_")
    assert len(inspect.getmodule(cls).__doc__ or "") > 60
    source = "".join(inspect.getsource(vars(c)["Config"]) for c in cls.__mro__ if "Config" in vars(c))
    own = [
        line for line in source.splitlines() if " = " in line and ": " in line and not line.strip().startswith(("if", "raise"))
    ]
    assert all("  # " in line for line in own)  # help on the same line


@pytest.mark.parametrize(("stem", "settings"), CASES)
@pytest.mark.parametrize("how", ["best", "random"])
def test_answer_is_what_the_world_pays(stem: str, settings: dict[str, Any], how: str) -> None:
    world = make(stem, settings, 20_000)
    claimed, learner_reward = getattr(world.answer, how), mean_return(world, how)
    wide = 0.7 if "penalty" in settings.values() else 0.15 if "climbing" in world.config.__dict__.values() else 0.06
    exact = how == "best" and not settings.get("stagger") and stem not in ("probe_observation", "probe_delay", "probe_teams")
    assert learner_reward == pytest.approx(claimed, abs=1e-9 if exact else wide)
    assert set(claimed) == {g.name for g in world.spec.groups} == set(world.answer.floor)
    assert all(world.answer.floor[g] <= world.answer.best[g] for g in claimed)


@pytest.mark.parametrize(("stem", "settings"), [c for c in CASES if issubclass(probe(str(c.values[0])), Valued)])
@pytest.mark.parametrize("gamma", [0.9, 0.5])
def test_values_are_what_playing_on_from_each_state_gives(stem: str, settings: dict[str, Any], gamma: float) -> None:
    frames = make(stem, settings, 1).frames()
    rows = frames["agents"].obs.shape[0]
    world = make(stem, settings, rows)
    assert isinstance(world, Valued)
    seen = torch.cat([frames["agents"].obs.flatten(1), frames["agents"].active], 1)
    assert len(seen.unique(dim=0)) == rows or stem in ("probe_deaths",)  # the dead hide their symbol
    g = torch.Generator().manual_seed(2)
    frame = world.set_state(world.states())
    first = frame["agents"].active
    worth, weight, live = torch.zeros_like(first, dtype=torch.float64), torch.ones_like(first, dtype=torch.float64), first
    for t in range(300):
        view = frame["agents"]
        weight = torch.where(view.active & (t > 0), weight * gamma, weight)  # gamma counts an agent's own turns
        actions = guess(world, frame, g) if world.idle else world.solution(world.state)
        out = world.step(actions, draw(world, g))
        worth = worth + out.results["agents"].reward * weight * live
        live = live & ~out.results["agents"].terminated  # a cut is no end: play on
        frame = out.frame
    values = world.values(gamma)["agents"]
    assert values.shape == first.shape
    torch.testing.assert_close(values * first, worth, atol=1e-9, rtol=0)
    assert (values[~first] == 0).all()


@pytest.mark.parametrize(("stem", "settings"), CASES)
def test_contract(stem: str, settings: dict[str, Any]) -> None:
    world, g = make(stem, settings, 64), torch.Generator().manual_seed(3)
    frame = world.reset(draw(world, g))
    horizon = world.spec.horizon or 0
    for _ in range(3 * horizon):
        out = world.step(guess(world, frame, g), draw(world, g))
        assert set(out.stats) == set(world.spec.stats)
        assert all(s.shape == (64,) for s in out.stats.values())
        for group in world.spec.groups:
            before, after, fresh, pay = frame[group.name], out.next[group.name], out.frame[group.name], out.results[group.name]
            for view in (after, fresh):
                for shape, seen in parts(group, view):
                    assert seen.shape == (64, group.n, *shape)
                    assert seen.dtype == (torch.uint8 if len(shape) == 3 else torch.float64)  # pictures are bytes
                assert view.alive.shape == view.active.shape == view.start.shape == (64, group.n)
                assert not (view.active & ~view.alive).any()
                assert not (view.start & ~view.alive).any()
                assert (view.legal is not None) == group.masked
                assert group.mortal or bool(view.active.all())
                if view.legal is not None:
                    assert all(x.any(-1).all() for x in view.legal.split(list(group.action.sizes), -1))
            assert not (pay.terminated & ~before.alive).any()
            assert not (pay.reward * ~before.alive).any()
            assert pay.reward.shape == pay.terminated.shape == (64, group.n)
            for seen, again in zip(tree_leaves(after.obs), tree_leaves(fresh.obs), strict=True):
                assert torch.equal(seen[~out.over], again[~out.over])
            assert (fresh.start[out.over] == fresh.alive[out.over]).all()
            wage = pay.reward.gather(1, before.alive.long().argmax(-1, keepdim=True))  # of somebody who is there
            assert not world.spec.common or bool((pay.reward == wage)[before.alive].all())
        frame = out.frame


@pytest.mark.parametrize(("stem", "settings"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_noise_same_outcome_and_state_round_trip(stem: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    cls, g = probe(stem), torch.Generator().manual_seed(4)
    one, two, late = (cls(cls.Config(**settings), 16, dtype=dtype) for _ in range(3))
    noise = draw(one, g)
    frame, other = one.reset(noise), two.reset(noise)
    cut = (one.spec.horizon or 0) // 2
    for t in range(2 * (one.spec.horizon or 0)):
        assert all(torch.equal(a, b) for a, b in zip(tree_leaves(frame), tree_leaves(other), strict=True))
        if t == cut:
            resumed = late.set_state(one.get_state())
            assert all(torch.equal(a, b) for a, b in zip(tree_leaves(frame), tree_leaves(resumed), strict=True))
        actions, noise = guess(one, frame, g), draw(one, g)
        a, b = one.step(actions, noise), two.step(actions, noise)
        c = late.step(actions, noise) if t >= cut else a
        assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(*map(tree_leaves, (a, b, c)), strict=True))
        seen = [parts(group, f[group.name]) for f in (a.frame, a.next) for group in one.spec.groups]
        pictures = {id(x) for each in seen for shape, x in each if len(shape) == 3}
        for x in tree_leaves(a):
            assert x.dtype in ((torch.uint8,) if id(x) in pictures else (dtype, torch.bool, torch.long))
        frame, other = a.frame, b.frame


class NoWaiting(TorchDispatchMode):
    """What would make the host wait for a device, or copy to it, in the middle of a step."""

    banned = ("_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "masked_select", "unique", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        assert name not in self.banned, name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("stem", "settings"), CASES)
def test_a_step_never_waits(stem: str, settings: dict[str, Any]) -> None:
    world, g = make(stem, settings, 4), torch.Generator().manual_seed(5)
    frame = world.reset(draw(world, g))
    for _ in range(2 * (world.spec.horizon or 0)):
        actions, noise = guess(world, frame, g), draw(world, g)
        with NoWaiting():
            frame = world.step(actions, noise).frame
