"""What every scenario owes: shapes, pure functions of state, actions and noise, exact restoring, rows that do not meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.envs.mpe.world import Scenario
from shoal.spec import Frame, Outcome, tree_leaves

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


@every_world
def test_same_noise_and_actions_same_outcome(name: str, settings: dict[str, Any]) -> None:
    assert same(play(make(name, ROWS, **settings), 30), play(make(name, ROWS, **settings), 30))
    assert not same(play(make(name, ROWS, **settings), 30), play(make(name, ROWS, **settings), 30, seed=5))


@every_world
def test_state_goes_out_and_in_bit_for_bit(name: str, settings: dict[str, Any]) -> None:
    world, other = make(name, ROWS, **settings), make(name, ROWS, **settings)
    play(world, 11)
    world.stage.fill_(1)
    saved = world.get_state()
    play(other, 4, seed=7)
    frame = other.set_state(saved)
    assert same(frame, world.observe(world.state))
    kept = {k: v.clone() for k, v in saved.items()}
    assert same(play(world, 30, seed=9, begin=False), play(other, 30, seed=9, begin=False))
    assert same(saved, kept)  # what was taken out is a copy
    assert all(v.data_ptr() != world.get_state()[k].data_ptr() for k, v in world.state.items())


@every_world
def test_rows_do_not_meet(name: str, settings: dict[str, Any]) -> None:
    """Other actions and other noise in row 1 change row 1 and nothing else."""
    a, b = make(name, ROWS, **settings), make(name, ROWS, **settings)
    noise, gen = noises(a, 31), torch.Generator().manual_seed(1)
    a.reset(noise[0])
    b.reset(noise[0])
    for t in range(1, 31):
        actions, others = random_actions(a, gen), random_actions(a, gen)
        mixed = {k: v.clone() for k, v in actions.items()}
        for k in mixed:
            mixed[k][1] = others[k][1]
        stirred = noise[t].clone()
        stirred[1] = 1 - stirred[1]
        x, y = tree_leaves(a.step(actions, noise[t])), tree_leaves(b.step(mixed, stirred))
        for p, q in zip(x, y, strict=True):
            assert torch.equal(p[::2], q[::2])
    assert any(not torch.equal(p[1], q[1]) for p, q in zip(x, y, strict=True))


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


class NoWaiting(TorchDispatchMode):
    """Refuses what reads a tensor on the host or has a shape that depends on data."""

    refused = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.refused, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("actions", ["discrete", "multi", "continuous"])
@every_world
def test_nothing_waits_for_the_device(name: str, settings: dict[str, Any], actions: str) -> None:
    world = make(name, ROWS, actions=actions, **settings)
    noise, gen = noises(world, 4), torch.Generator().manual_seed(0)
    chosen = random_actions(world, gen)
    with NoWaiting():
        world.reset(noise[0])
        for t in range(1, 4):
            world.step(chosen, noise[t])


@pytest.mark.parametrize("actions", ["discrete", "continuous"])
@every_world
def test_everything_is_on_the_worlds_device(name: str, settings: dict[str, Any], actions: str) -> None:
    """On torch's device without data, mixing in a tensor from the CPU is an error and looking at one impossible."""
    cpu = make(name, ROWS, actions=actions, **settings)
    world = type(cpu)(cpu.config, ROWS, device="meta")
    noise = torch.empty(ROWS, world.noise, device="meta")
    frame = world.reset(noise)
    out = world.step({k: v.to("meta") for k, v in random_actions(cpu, torch.Generator()).items()}, noise)
    assert all(x.device.type == "meta" for x in tree_leaves((frame, out, world.state)))


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
