"""What every native world of the catalogue owes: the contract, pure functions of state, actions and noise, exact restoring,
rows that do not meet, nothing that waits for the device."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import native_worlds

from shoal.api import make
from shoal.envs.base import World
from shoal.ids import catalog
from shoal.spec import Box, Frame, Outcome, UserError
from shoal.tools.contract import check_contract
from shoal.tree import tree_leaves

SETTINGS: dict[str, list[dict[str, Any]]] = {  # beside a world's defaults
    **{name: [{"terminate_on_success": True, "n": 1}] for name in ("simple_formation", "simple_line", "simple_spread")},
    "simple_tag": [{"terminate_on_success": True, "curriculum": True}],
    "probe_truncated": [{"stagger": True, "n": 2}],
    "probe_image": [{"vector": True, "n": 2}],
}
ROWS, STEPS = 3, 30


def kinds_of_actions(id: str) -> list[dict[str, Any]]:
    """Settings for every kind of actions that a world has, but the default."""
    config, settings = catalog("envs")[id].load().Config, []
    for kind in get_args(get_type_hints(config).get("actions")):
        with suppress(UserError):  # a kind that this world refuses
            settings += [{"actions": kind}] if config(actions=kind) != config() else []
    return settings


WORLDS = [(id, settings) for id in native_worlds() for settings in ({}, *kinds_of_actions(id), *SETTINGS.get(id, ()))]
every_world = pytest.mark.parametrize(("id", "settings"), WORLDS, ids=str)


def world_of(id: str, settings: dict[str, Any]) -> World:
    world = make(id, ROWS, **settings)
    assert isinstance(world, World)
    return world


def noises(world: World, steps: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(steps, world.rows, world.noise, generator=torch.Generator().manual_seed(seed))


def random_actions(world: World, frame: Frame, gen: torch.Generator) -> dict[str, torch.Tensor]:
    """Uniform among what is legal."""
    actions = {}
    for g in world.spec.groups:
        shape, legal = (world.rows, g.n), frame[g.name].legal
        if isinstance(g.action, Box):
            low, high = torch.tensor(g.action.low), torch.tensor(g.action.high)
            actions[g.name] = low + torch.rand(*shape, len(g.action.low), generator=gen) * (high - low)
            continue
        rank = torch.rand(*shape, sum(g.action.sizes), generator=gen)
        rank = rank if legal is None else rank.masked_fill(~legal, -1.0)
        chosen = torch.stack([x.argmax(-1) for x in rank.split(list(g.action.sizes), -1)], -1)
        actions[g.name] = chosen if g.action.kind == "multi-discrete" else chosen[..., 0]
    return actions


def same(a: Any, b: Any) -> bool:
    x, y = tree_leaves(a), tree_leaves(b)
    return len(x) == len(y) and all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


def play(world: World, steps: int, seed: int = 0, frame: Frame | None = None) -> list[Outcome]:
    """From a reset, or from `frame` on."""
    noise, gen = noises(world, steps + 1, seed), torch.Generator().manual_seed(seed + 1)
    frame, outcomes = world.reset(noise[0]) if frame is None else frame, []
    for t in range(steps):
        outcomes.append(world.step(random_actions(world, frame, gen), noise[t + 1]))
        frame = outcomes[-1].frame
    return outcomes


def test_there_are_worlds_to_test() -> None:
    assert {"simple_spread", "probe_copy", "cartpole"} <= set(native_worlds())
    assert set(SETTINGS) <= set(native_worlds())


@every_world
def test_contract(id: str, settings: dict[str, Any]) -> None:
    check_contract(world_of(id, settings), steps=70)


@every_world
def test_same_noise_and_actions_same_outcome(id: str, settings: dict[str, Any]) -> None:
    world = world_of(id, settings)
    assert same(play(world, STEPS), play(world_of(id, settings), STEPS))
    if world.noise:
        assert not same(play(world, STEPS), play(world, STEPS, seed=5))


@every_world
def test_state_goes_out_and_in_bit_for_bit(id: str, settings: dict[str, Any]) -> None:
    world, other = world_of(id, settings), world_of(id, settings)
    frame = play(world, 11)[-1].frame
    if hasattr(world, "stage"):  # of a curriculum
        world.stage.fill_(1)
    saved = world.get_state()
    play(other, 4, seed=7)
    restored = other.set_state(saved)
    assert same(restored, frame)
    kept = {k: v.clone() for k, v in saved.items()}
    assert same(play(world, STEPS, 9, frame), play(other, STEPS, 9, restored))
    assert same(saved, kept)  # what was taken out is a copy
    assert all(v.data_ptr() != world.get_state()[k].data_ptr() for k, v in world.state.items() if v.numel())


@every_world
def test_rows_do_not_meet(id: str, settings: dict[str, Any]) -> None:
    """Other actions and other noise in row 1 change row 1 and nothing else."""
    a, b = world_of(id, settings), world_of(id, settings)
    noise, gen = noises(a, STEPS + 1), torch.Generator().manual_seed(1)
    frames = [a.reset(noise[0]), b.reset(noise[0])]
    for t in range(1, STEPS + 1):
        actions, others = random_actions(a, frames[0], gen), random_actions(b, frames[1], gen)
        mixed = {k: v.clone() for k, v in actions.items()}
        for k in mixed:
            mixed[k][1] = others[k][1]
        stirred = noise[t].clone()
        stirred[1] = 1 - stirred[1]
        outcomes = [a.step(actions, noise[t]), b.step(mixed, stirred)]
        for p, q in zip(*map(tree_leaves, outcomes), strict=True):
            assert torch.equal(p[::2], q[::2])
        frames = [o.frame for o in outcomes]


class NoWaiting(TorchDispatchMode):
    """Refuses what reads a tensor on the host, or has a shape that depends on data."""

    refused = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.refused, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@every_world
def test_nothing_waits_for_the_device(id: str, settings: dict[str, Any]) -> None:
    world = world_of(id, settings)
    noise, gen = noises(world, 4), torch.Generator().manual_seed(0)
    with NoWaiting():
        frame = world.reset(noise[0])
    for t in range(1, 4):
        actions = random_actions(world, frame, gen)
        with NoWaiting():
            frame = world.step(actions, noise[t]).frame


@every_world
def test_everything_is_on_the_worlds_device(id: str, settings: dict[str, Any]) -> None:
    """On torch's device without data, mixing in a tensor from the CPU is an error and looking at one impossible."""
    cpu = world_of(id, settings)
    actions = random_actions(cpu, cpu.reset(noises(cpu, 1)[0]), torch.Generator())
    world = type(cpu)(cpu.config, ROWS, device="meta")
    noise = torch.empty(ROWS, world.noise, device="meta")
    frame = world.reset(noise)
    out = world.step({k: v.to("meta") for k, v in actions.items()}, noise)
    assert all(x.device.type == "meta" for x in tree_leaves((frame, out, world.state)))
