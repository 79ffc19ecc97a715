"""EnvPool behind the contract: ends within the step, seeds, spaces, and new episodes where a state cannot be put back."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shoal
from shoal.algos.random import Random
from shoal.envs.envpool import EnvPool, claims
from shoal.ids import find
from shoal.nets.config import NetConfig
from shoal.spec import Box, Discrete, Outcome, UserError
from shoal.training.collect import Collector, Players
from shoal.tree import tree_leaves, tree_map

here = importlib.util.find_spec("envpool") is not None
needs = pytest.mark.skipif(not here, reason="envpool is not installed (924 MB): pip install envpool")
torch.set_num_threads(1)

QUICK = {"envs": 8, "steps": 200, "quiet": True, "eval": {"episodes": 2}, "log": {"tensorboard": False}, "compile": "off"}


def make(id: str = "CartPole-v1", rows: int = 4, **settings: Any) -> EnvPool:
    return EnvPool(EnvPool.Config(id=id, **settings), rows)


def begun(seed: int = 0, **settings: Any) -> tuple[EnvPool, Tensor, torch.Generator]:
    world, generator = make(**settings), torch.Generator().manual_seed(seed)
    obs = world.reset(torch.rand(world.rows, world.noise, generator=generator))["agents"].obs
    assert isinstance(obs, Tensor)
    return world, obs, generator


def actions(world: EnvPool, generator: torch.Generator) -> dict[str, Tensor]:
    space = world.spec["agents"].action
    if isinstance(space, Box):
        low, high = torch.tensor(space.low), torch.tensor(space.high)
        return {"agents": low + (high - low) * torch.rand(world.rows, 1, len(low), generator=generator)}
    return {"agents": torch.randint(space.sizes[0], (world.rows, 1), generator=generator)}


def play(world: EnvPool, steps: int, generator: torch.Generator) -> list[Outcome]:
    return [world.step(actions(world, generator), torch.zeros(world.rows, 2)) for _ in range(steps)]


def same(a: Any, b: Any) -> bool:
    x, y = tree_leaves(a), tree_leaves(b)
    return len(x) == len(y) and all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


# --- ends ------------------------------------------------------------------------------------------------------------


@needs
def test_every_step_is_a_transition_and_ends_are_seen() -> None:
    """CartPole moves by x' = x + 0.02 v: that holds from the frame acted on to `next` in every step, so that none is a reset.
    It is over beyond 2.4, or 12 degrees, and begins within 0.05 of the middle."""
    world, obs, generator = begun(rows=6, threads=2)
    ended = 0
    for _ in range(150):
        out = world.step(actions(world, generator), torch.zeros(6, 2))
        view, new, pay = out.next["agents"], out.frame["agents"], out.results["agents"]
        assert isinstance(view.obs, Tensor)
        assert isinstance(new.obs, Tensor)
        assert torch.allclose(view.obs[..., [0, 2]], obs[..., [0, 2]] + 0.02 * obs[..., [1, 3]], atol=1e-5)
        fallen = (view.obs[..., 0].abs() > 2.4) | (view.obs[..., 2].abs() > 12 * np.pi / 180)
        assert torch.equal(pay.terminated, fallen)
        assert torch.equal(out.over, fallen[:, 0])
        assert pay.reward.tolist() == [[1.0]] * 6
        assert torch.equal(new.start, fallen)
        assert not view.start.any()
        assert torch.equal(new.obs[~out.over], view.obs[~out.over])
        assert (new.obs[out.over].abs() <= 0.05).all()
        ended, obs = ended + int(out.over.sum()), new.obs
    assert ended > 20  # an episode at random is of about 22 steps


@needs
def test_time_is_cut_off_after_500_steps() -> None:
    world, obs, _ = begun(rows=3)
    assert world.spec.horizon == 500
    for t in range(1, 502):
        push = (obs @ torch.tensor([0.1, 0.3, 3.0, 1.0]) > 0).long()  # [B, 1]
        out = world.step({"agents": push}, torch.zeros(3, 2))
        assert out.over.tolist() == [t == 500] * 3, t
        assert not out.results["agents"].terminated.any()
        following = out.next["agents"].obs
        assert isinstance(following, Tensor)
        assert torch.allclose(following[..., 0], obs[..., 0] + 0.02 * obs[..., 1], atol=1e-5)
        assert torch.equal(out.frame["agents"].start, out.over[:, None])
        obs = out.frame["agents"].obs


@needs
def test_what_was_handed_out_stays() -> None:
    world, _, generator = begun()
    outcomes = play(world, 3, generator)
    kept = tree_map(torch.clone, outcomes)
    play(world, 60, generator)
    assert same(kept, outcomes)


# --- seeds -----------------------------------------------------------------------------------------------------------


@needs
@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
def test_same_noise_same_numbers_whatever_the_threads(id: str) -> None:
    (one, first, g), (two, again, h) = begun(id=id, rows=8, threads=1), begun(id=id, rows=8, threads=3)
    assert torch.equal(first, again)
    assert same(play(one, 80, g), play(two, 80, h))
    assert not torch.equal(begun(seed=1, id=id, rows=8)[1], first)
    assert len({tuple(x) for x in first[:, 0].tolist()}) == 8


@needs
def test_a_row_follows_from_its_own_noise() -> None:
    """Later episodes too: rows 0 and 2 of three are those of a world of two, and reset makes all of it again."""
    noise, push = torch.rand(3, 2, generator=torch.Generator().manual_seed(0)), torch.ones(3, 1, dtype=torch.long)
    three, two, at = make(rows=3), make(rows=2), [0, 2]
    for _ in range(2):
        assert same(tree_map(lambda x: x[at], three.reset(noise)), two.reset(noise[at]))
        for _ in range(40):
            a, b = (w.step({"agents": push[: w.rows]}, torch.zeros(w.rows, 2)) for w in (three, two))
            assert same(tree_map(lambda x: x[at], a), b)


# --- spaces ----------------------------------------------------------------------------------------------------------


@needs
def test_actions_in_its_own_dtype_and_bounds() -> None:
    world, _, _ = begun(rows=2)
    assert world.spec["agents"].action == Discrete(2)
    taken = world._taken(np.array([[1], [0]]))
    assert (taken.dtype, taken.tolist()) == (np.int32, [1, 0])
    world, _, _ = begun(id="Pendulum-v1", rows=2)
    assert world.spec["agents"].action == Box((-2.0,), (2.0,))
    taken = world._taken(np.array([[[2.5]], [[-0.25]]], np.float32))
    assert (taken.dtype, taken.tolist()) == (np.float32, [[2.0], [-0.25]])


@needs
def test_pictures_and_one_hots() -> None:
    world, obs, generator = begun(id="Pong-v5", rows=2)
    assert (world.spec["agents"].obs, obs.shape, obs.dtype) == ((4, 84, 84), (2, 1, 4, 84, 84), torch.uint8)
    (out,) = play(world, 1, generator)
    following = out.next["agents"].obs
    assert isinstance(following, Tensor)
    assert torch.equal(following[:, :, :3], obs[:, :, 1:])  # the last four pictures, one further on
    _, obs, _ = begun(id="FrozenLake-v1", rows=2)
    assert (obs.shape, obs.dtype, obs.sum().tolist()) == ((2, 1, 16), torch.float32, 2.0)


@needs
def test_named_parts_are_one_vector() -> None:
    world, obs, generator = begun(id="CartpoleBalance-v1", rows=3)  # position, 3 numbers, and velocity, 2, in float64
    assert (world.spec["agents"].obs, obs.shape, obs.dtype) == ((5,), (3, 1, 5), torch.float32)
    assert play(world, 2, generator)[1].results["agents"].reward.dtype == torch.float32


# --- states ----------------------------------------------------------------------------------------------------------


@needs
def test_a_state_is_taken_up_with_new_episodes() -> None:
    world, first, generator = begun()
    play(world, 30, generator)
    state = world.get_state()
    one, two = make(), make()
    assert not one.begun_anew.any()
    frame = one.set_state(state)
    assert len(one.news) == 1
    assert "new episodes began in all rows" in one.news[0]
    assert one.begun_anew.all()
    assert frame["agents"].start.all()
    assert not torch.equal(tree_leaves(frame["agents"].obs)[0], first)
    assert same(two.set_state(state), frame)
    assert same(*(play(w, 50, torch.Generator().manual_seed(1)) for w in (one, two)))
    assert not same(one.set_state({**state, "steps": 31}), frame)  # another checkpoint goes on with other episodes
    with pytest.raises(UserError, match="4 rows and the world 3"):
        make(rows=3).set_state(state)


@needs
def test_a_collector_goes_on_from_the_new_episodes() -> None:
    def collector() -> Collector:
        world = make()
        player = Random(world.spec, ("agents",), None, NetConfig(), torch.Generator().manual_seed(0))
        return Collector(world, Players(world.spec, [player]), torch.Generator().manual_seed(0))

    one, two = collector(), collector()
    one.episode_stats.count(one.collect(7))
    two.load_state_dict(one.state_dict())
    assert two.frame["agents"].start.all()
    assert not two.episode_stats.carry["length"].any()
    assert same(two.frame, make().set_state(one.state_dict()["env"]))
    batch, x = two.collect(1), 0
    before, after = (tree_leaves(f["agents"].obs)[0] for f in (batch.frame, batch.next))
    assert torch.allclose(after[..., x], before[..., x] + 0.02 * before[..., 1], atol=1e-5)


# --- training --------------------------------------------------------------------------------------------------------


@needs
def test_ppo_trains_and_the_seed_decides(tmp_path: Path) -> None:
    runs = [
        shoal.train("ppo", "envpool/CartPole-v1", seed=seed, algo={"rollout": 25}, out=tmp_path / str(i), **QUICK)  # type: ignore[arg-type]
        for i, seed in enumerate((3, 3, 4))
    ]
    one, again, other = (tree_leaves(run.load("last")["algorithms"]) for run in runs)
    tensors = [i for i, x in enumerate(one) if isinstance(x, Tensor)]
    assert len(tensors) > 5
    assert all(torch.equal(one[i], again[i]) for i in tensors)
    assert not all(torch.equal(one[i], other[i]) for i in tensors)
    more = shoal.resume(runs[0], steps=400, quiet=True)
    assert more.load("last")["step"] == 400
    assert "EnvPool cannot be put back" in (tmp_path / "0" / "train.log").read_text()


# --- ids and mistakes ------------------------------------------------------------------------------------------------


def test_ids() -> None:
    assert not claims("CartPole-v1")
    entry = find("envs", "envpool/CartPole-v1")
    assert (entry.cls, entry.settings) == ("EnvPool", {"id": "CartPole-v1"})
    with pytest.raises(UserError, match=r"envpool/ID"):
        find("envs", "envpool")


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(UserError, match=r"envpool is not installed .*: pip install envpool\."):
        make()


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_are_some(threads: int) -> None:
    with pytest.raises(UserError, match=r"--env\.threads"):
        EnvPool.Config(threads=threads)


@needs
@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("CartPol-v1", r"no task 'CartPol-v1' \(did you mean 'CartPole-v1'"),
        ("xyzzy", r"no task 'xyzzy'"),
        ("TicTacToe-v1", r"TicTacToe-v1 is for 2 players"),
        ("BinPack-v2", r"BinPack-v2 has actions that are Box.*int32"),
        ("Basic-v1", r"Basic-v1 has actions that are Box.*bounded numbers"),
    ],
)
def test_what_is_refused(id: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(id)


@needs
@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
def test_a_policy_acts_in_envpools_own_loop(tmp_path: Path, id: str) -> None:
    policy = shoal.load(shoal.train("ppo", f"envpool/{id}", out=tmp_path / "r", **QUICK))
    inner = importlib.import_module("envpool").make_gymnasium(id, num_envs=3, seed=1)
    (seen, _), memory = inner.reset(), None
    for _ in range(3):
        actions, memory = policy.act(seen, memory)
        assert len(actions) == 3
        seen, *_ = inner.step(actions)
