"""Recorded updates: the same bits as those that run operation by operation, whatever is done between replays."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from test_graph import ACTS, HOST, PAST, WORKS, assert_beside_a_host_world, assert_equal, make, put, state
from torch import Tensor

import shoal
from shoal.algos.ddqn import DDQN
from shoal.kernels import native, recording
from shoal.kernels.recording import Recording
from shoal.training.speedup import Recorded
from shoal.tree import tree_leaves

UPDATES: list[dict[str, Any]] = [
    *(w for w in WORKS if "every" in w or "replay" in w),
    {"algo": "sac", "env": "probe_image", "rollout": 5, "delay": 2, **ACTS},
    {"algo": "maddpg", "net": {"attention": "both", "precision": "bf16", "layer_norm": True}, "rollout": 5, **ACTS},
    {"algo": "masac", "env": "probe_illegal", "net": {"share": "none"}, "rollout": 5, "normalise_reward": True, **ACTS},
    {"algo": "td3", "env": "simple_tag", "rollout": 5, "lr_schedule": "linear", "lr_critic_schedule": "cosine", "huber": 1.0}
    | {"target_every": 3, "target_tau": 1.0, "weight_decay": 0.01, "grad_clip": None, "noise_steps": 300, **ACTS},
    {"algo": "maddpg", "env": "simple_adversary", "team": {"adversary": "random"}, "rollout": 5, **ACTS},
]
torch.set_num_threads(1)


def recordings_of(loop: Any) -> list[Recording]:
    """The recordings of a loop, in which every trainer is recorded."""
    assert all(isinstance(x, Recorded) for x in loop.on_device_updates)
    assert loop.console.lines == []
    return [r for x in loop.on_device_updates for r in x.recordings.values() if r is not None]


def test_the_recordings_of_a_run_share_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    work: dict[str, Any] = {"algo": "ddqn", "env": "simple_tag", "rollout": 10, **PAST}  # two learners
    loop = make("graph", device="cpu", **work)
    for _ in range(6):
        loop.iterate()
    first, second = (r.bytes for r in recordings_of(loop))
    monkeypatch.setattr(recording, "MOST", first + second - 1)  # of all recordings together
    loop = make("graph", device="cpu", **work)
    for _ in range(6):
        loop.iterate()
    assert isinstance(loop.on_device_updates[0], Recorded)
    assert loop.on_device_updates[1] is loop.trainers[1]
    assert "they would keep more than" in loop.console.lines[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("work", UPDATES, ids=lambda w: "-".join(map(str, w)))
def test_recorded_updates_have_the_same_bits(work: dict[str, Any]) -> None:
    plain, replayed = make("off", device="cpu", **work), make("graph", device="cpu", **work)
    for k in range(10):
        plain.iterate()
        replayed.iterate()
        if k % 4 == 2:  # it takes longer than all the rest
            gc.collect()
        junk = [torch.full((n,), torch.nan) for n in (1, 3, 16, 48, 256, 4096)]  # whatever was let go is written over
        del junk
    assert_equal(plain, replayed)
    recordings = recordings_of(replayed)
    delay = work.get("delay", 2 if work["algo"] in ("td3", "matd3") else 1)
    assert len(recordings) == len(replayed.trainers) * (2 if delay > 1 else 1)


@pytest.mark.compiler
@pytest.mark.parametrize("work", UPDATES, ids=lambda w: "-".join(map(str, w)))
def test_recorded_kernels_have_the_same_bits(work: dict[str, Any]) -> None:
    plain, replayed = make("fused", device="cpu", **work), make("fused", device="cpu", **work)
    plain.on_device_updates[:] = plain.trainers
    for _ in range(10):
        plain.iterate()
        native._planned.cache_clear()  # a recording holds the arguments of its kernels
        replayed.iterate()
    assert_equal(plain, replayed)
    assert recordings_of(replayed)


def test_a_restored_state_is_replayed_from() -> None:
    work: dict[str, Any] = {"algo": "td3", "env": "probe_copy", "world": {"actions": "continuous"}, "rollout": 5, **ACTS}
    plain, replayed = make("off", device="cpu", **work), make("graph", device="cpu", **work)
    begun = state(plain)
    for again in range(2):
        put(plain, begun)
        put(replayed, begun)
        for _ in range(8):
            plain.iterate()
            replayed.iterate()
        assert_equal(plain, replayed)
        assert again or recordings_of(replayed)


def test_recorded_updates_with_a_host_world() -> None:
    replayed = make("graph", device="cpu", **HOST)
    assert_beside_a_host_world(make("off", device="cpu", **HOST), replayed)
    assert recordings_of(replayed)


def test_an_update_that_reads_numbers_out_runs_plainly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, update = make("off", device="cpu", algo="ddqn", rollout=10, **PAST), DDQN.update
    replayed = make("graph", device="cpu", algo="ddqn", rollout=10, **PAST)

    def reads(self: Any, samples: Any) -> dict[str, Tensor]:
        assert samples.batch.over.sum().item() >= 0
        return update(self, samples)

    monkeypatch.setattr(DDQN, "update", reads)
    for _ in range(7):
        plain.iterate()
        replayed.iterate()
    (line,) = replayed.console.lines  # type: ignore[attr-defined]
    assert line.startswith("Updates cannot be recorded, and run operation by operation: aten._local_scalar_dense")
    assert replayed.on_device_updates == replayed.trainers
    assert_equal(plain, replayed)


OWN = """
from torch import nn
from shoal.nets.norm import Running
class Own(nn.Sequential):
    def __init__(self, width_in, width_out, agents):
        super().__init__(nn.Linear(width_in, width_out))
class Norm(Running): pass
"""
ALGO = "from shoal.algos.ddpg import DDPG\nclass Mine(DDPG): pass\n"
TAG: dict[str, Any] = {"env": "simple_tag", **ACTS}


@pytest.mark.parametrize(
    ("work", "recorded"),
    [
        ({"algo": "ddpg", **TAG}, [True, True]),
        ({"algo": "ddpg", "net": {"module": "{}/own.py:Own"}, **TAG}, [False, False]),
        ({"algo": "ddpg", "normaliser": "{}/own.py:Norm", **TAG}, [False, False]),
        ({"algo": "maddpg", "state_normaliser": "{}/own.py:Norm", **TAG}, [False, False]),
        ({"algo": "ddpg", "team": {"agent": "{}/mine.py"}, **TAG}, [True, False]),
        ({"algo": "maddpg", "team": {"agent": "{}/mine.py"}, **TAG}, [False, False]),  # who asks a user's
    ],
)
def test_what_users_bring_is_not_recorded(tmp_path: Path, work: dict[str, Any], recorded: list[bool]) -> None:
    """It may read numbers out of tensors, in ways that are not noticed."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "mine.py").write_text(ALGO)

    def named(x: Any) -> Any:
        return {k: named(v) for k, v in x.items()} if isinstance(x, dict) else x.format(tmp_path) if isinstance(x, str) else x

    loop = make("graph", device="cpu", **named(work))
    assert [isinstance(x, Recorded) for x in loop.on_device_updates] == recorded


@pytest.mark.compiler
def test_where_nobody_learns_from_a_replay_nothing_is_recorded_and_that_is_said() -> None:
    assert any(r.startswith("Nothing is captured: on the CPU") for r in make("graph", device="cpu").remarks)
    assert make("off", device="cpu").remarks == []


def test_with_a_hook_nothing_is_recorded(tmp_path: Path) -> None:
    """It may change numbers of the host, which a recording would not notice."""

    class Watch(shoal.Hook):
        def before_iteration(self, loop: Any) -> None:
            assert loop.on_device_updates == loop.trainers

    common: dict[str, Any] = {"steps": 200, "envs": 8, "quiet": True, "device": "cpu", "out": tmp_path / "run"}
    shoal.train("ddqn", "probe_copy", hook=Watch(), **common)


def test_an_actor_that_waited_moves_whoever_asks() -> None:
    """Who calls `update` without asking for the variant before has the actor move when it is due, and not otherwise."""
    loop = make("off", device="cpu", algo="td3", env="probe_copy", world={"actions": "continuous"}, rollout=5, **ACTS)
    for _ in range(8):
        loop.iterate()
    learner, moved = loop.learners[0], []
    learner.variant()
    for _ in range(6):
        before = learner.actor_optimiser.vector.clone()
        loop.trainers[0].update_once()
        moved.append(not torch.equal(before, learner.actor_optimiser.vector))
    assert moved in ([True, False] * 3, [False, True] * 3)


@pytest.mark.parametrize("algo", ["td3", "iql"])
def test_resume_of_recorded_runs_is_exact(tmp_path: Path, algo: str) -> None:
    """Stopped in the middle, where everything is recorded, and gone on from by who has recorded nothing yet."""
    common: dict[str, Any] = {"steps": 1600, "envs": 8, "device": "cpu", "quiet": True, "log": {"tensorboard": False}}
    common["algo"] = {"rollout": 5, "prioritised": True, **(PAST if algo == "iql" else {**ACTS, "delay": 3})}
    whole = shoal.train(algo, "simple_spread", out=tmp_path / "whole", **common)
    half = shoal.resume(shoal.train(algo, "simple_spread", out=tmp_path / "half", until=800, **common))
    a, b = (tree_leaves(r.load("last")["algorithms"]) for r in (whole, half))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
