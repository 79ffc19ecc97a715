"""Recorded updates: the same bits as those that run operation by operation, whatever is done between plays."""

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
from shoal.ops import native
from shoal.spec import tree_leaves
from shoal.training import recording
from shoal.training.recording import Recorded, Recording, out_variant

LESSONS: list[dict[str, Any]] = [
    *(w for w in WORKS if "every" in w or "replay" in w),
    {"algo": "sac", "env": "probe_image", "rollout": 5, "delay": 2, **ACTS},
    {"algo": "maddpg", "net": {"attention": "both", "precision": "bf16", "layer_norm": True}, "rollout": 5, **ACTS},
    {"algo": "masac", "env": "probe_illegal", "net": {"share": "none"}, "rollout": 5, "normalise_reward": True, **ACTS},
    {"algo": "td3", "env": "simple_tag", "rollout": 5, "lr_schedule": "linear", "lr_critic_schedule": "cosine", "huber": 1.0}
    | {"target_every": 3, "target_tau": 1.0, "weight_decay": 0.01, "grad_clip": None, "noise_steps": 300, **ACTS},
    {"algo": "maddpg", "env": "simple_adversary", "team": {"adversary": "random"}, "rollout": 5, **ACTS},
]
torch.set_num_threads(1)


# --- a tape ---


def recorded(work: Any) -> Recording:
    with Recording() as made:
        work()
    return made


def test_what_is_played_is_done_to_the_same_tensors() -> None:
    x, total, kept = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(()), []

    def work() -> None:
        y = (x[1:] * 2).view(2, 1)  # a view, an operation, a view
        y += 1
        total.add_(y.sum())  # 5 + 7
        kept.append((y, *x.max(0), torch.zeros(2).index_fill_(0, torch.tensor([1]), 4.0) + y[:, 0]))

    made = recorded(work)
    assert total == 12
    (y, top, where, filled) = kept[0]
    x.copy_(torch.tensor([9.0, 0.0, 0.5]))
    made.play()
    assert total == 12 + 1 + 2
    assert y.flatten().tolist() == [1, 2]
    assert (top.item(), where.item()) == (9, 0)  # of two results neither has a tensor to be written into
    assert filled.tolist() == [1, 6]  # what is filled is zero again before
    assert len(kept) == 1


def test_gradients_are_among_what_is_played() -> None:
    """d/dw of (w x)^2 is 2 w x^2: of w = 3 and x = 1, 2 the sum 6 + 24; then of w = 1 and x = 2, 2: 16."""
    w, x, grad = torch.tensor(3.0, requires_grad=True), torch.tensor([1.0, 2.0]), torch.zeros(())
    made = recorded(lambda: grad.copy_(torch.autograd.grad((w * x).square().sum(), w)[0]))
    assert grad == 30
    w.data.fill_(1)
    x.fill_(2)
    made.play()
    assert grad == 16


def test_draws_go_on_in_the_generator() -> None:
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    kept: list[Tensor] = []
    made = recorded(lambda: kept.append(torch.rand(4, generator=one, dtype=torch.float64)))
    assert torch.equal(kept[0], torch.rand(4, generator=other, dtype=torch.float64))
    for _ in range(3):
        made.play()
        assert torch.equal(kept[0], torch.rand(4, generator=other, dtype=torch.float64))


@pytest.mark.parametrize(
    "variant",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.clone().unsqueeze_(0),
    ],
)
def test_who_looks_at_numbers_is_not_played(variant: Any) -> None:
    x = torch.tensor([1.0, 2.0])
    made = recorded(lambda: (x.mul_(2), variant(x), x.add_(1)))
    assert x.tolist() == [3, 5]  # it was done all the same
    assert made.broken is not None
    assert "reads a tensor out, or gives it another shape" in made.broken


def test_what_takes_too_much_memory_is_not_played(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(200)
    for most, fits in ((1000, False), (2000, True)):
        with Recording(most) as made:
            _ = x + 1, x + 2
        assert made.bytes == 1600
        assert (made.broken is None) == fits
    work: dict[str, Any] = {"algo": "ddqn", "env": "simple_tag", "rollout": 10, **PAST}  # two learners
    loop = make("graph", device="cpu", **work)
    for _ in range(6):
        loop.iterate()
    first, second = (t.bytes for t in played(loop))
    monkeypatch.setattr(recording, "MOST", first + second - 1)  # all tapes of a run together
    loop = make("graph", device="cpu", **work)
    for _ in range(6):
        loop.iterate()
    assert isinstance(loop.on_device_lessons[0], Recorded)
    assert loop.on_device_lessons[1] is loop.trainers[1]
    assert "they would keep more than" in loop.console.lines[0]  # type: ignore[attr-defined]


def test_operations_are_matched_with_those_that_write_into_a_tensor() -> None:
    aten = torch.ops.aten
    for func, variant in {
        aten.add.Tensor: aten.add.out,
        aten.sum.dim_IntList: aten.sum.IntList_out,
        aten.where.self: aten.where.self_out,
        aten.arange.default: aten.arange.out,
        aten.rand.generator: aten.rand.generator_out,
    }.items():
        assert out_variant(func)[1] is variant  # type: ignore[index]
    assert out_variant(aten.max.dim) is None


@pytest.mark.compiler
def test_kernels_are_played_in_as_many_threads_as_there_are() -> None:
    x = torch.randn(5000, 1, 6, generator=torch.Generator().manual_seed(0))
    weights, biases = [torch.ones(8, 6), torch.ones(2, 8)], [torch.zeros(8), torch.zeros(2)]
    kept: list[Tensor] = []
    made = recorded(lambda: kept.append(native.mlp(x, weights, biases)))
    first = kept[0].clone()
    for threads in (1, 2):
        native.share(threads)
        kept[0].fill_(torch.nan)
        made.play()
        assert torch.equal(kept[0], first)
    native.share(1)
    x.zero_()
    made.play()
    assert kept[0].abs().max() == 0


# --- lessons ---


def played(loop: Any) -> list[Recording]:
    """The tapes of a loop, each of which is whole."""
    assert all(isinstance(x, Recorded) for x in loop.on_device_lessons)
    assert loop.console.lines == []
    return [t for x in loop.on_device_lessons for t in x.tapes.values() if t is not None]


@pytest.mark.parametrize("work", LESSONS, ids=lambda w: "-".join(map(str, w)))
def test_recorded_updates_have_the_same_bits(work: dict[str, Any]) -> None:
    plain, taped = make("off", device="cpu", **work), make("graph", device="cpu", **work)
    for k in range(10):
        plain.iterate()
        taped.iterate()
        if k % 4 == 2:  # it takes longer than all the rest
            gc.collect()
        junk = [torch.full((n,), torch.nan) for n in (1, 3, 16, 48, 256, 4096)]  # whatever was let go is written over
        del junk
    assert_equal(plain, taped)
    tapes = played(taped)
    delay = work.get("delay", 2 if work["algo"] in ("td3", "matd3") else 1)
    assert len(tapes) == len(taped.trainers) * (2 if delay > 1 else 1)


@pytest.mark.compiler
@pytest.mark.parametrize("work", LESSONS, ids=lambda w: "-".join(map(str, w)))
def test_recorded_kernels_have_the_same_bits(work: dict[str, Any]) -> None:
    plain, taped = make("fused", device="cpu", **work), make("fused", device="cpu", **work)
    plain.on_device_lessons[:] = plain.trainers
    for _ in range(10):
        plain.iterate()
        native._planned.cache_clear()  # a tape holds what its kernels are told
        taped.iterate()
    assert_equal(plain, taped)
    assert played(taped)


def test_a_state_of_long_ago_is_gone_on_from() -> None:
    work: dict[str, Any] = {"algo": "td3", "env": "probe_copy", "world": {"actions": "continuous"}, "rollout": 5, **ACTS}
    plain, taped = make("off", device="cpu", **work), make("graph", device="cpu", **work)
    begun = state(plain)
    for again in range(2):
        put(plain, begun)
        put(taped, begun)
        for _ in range(8):
            plain.iterate()
            taped.iterate()
        assert_equal(plain, taped)
        assert again or played(taped)


def test_recorded_updates_beside_a_host_world() -> None:
    taped = make("graph", device="cpu", **HOST)
    assert_beside_a_host_world(make("off", device="cpu", **HOST), taped)
    assert played(taped)


def test_an_update_that_looks_goes_on_as_it_was_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, update = make("off", device="cpu", algo="ddqn", rollout=10, **PAST), DDQN.update
    taped = make("graph", device="cpu", algo="ddqn", rollout=10, **PAST)

    def looks(self: Any, samples: Any) -> dict[str, Tensor]:
        assert samples.batch.over.sum().item() >= 0
        return update(self, samples)

    monkeypatch.setattr(DDQN, "update", looks)
    for _ in range(7):
        plain.iterate()
        taped.iterate()
    (line,) = taped.console.lines  # type: ignore[attr-defined]
    assert line.startswith("Updates cannot be recorded, and run operation by operation: aten._local_scalar_dense")
    assert taped.on_device_lessons == taped.trainers
    assert_equal(plain, taped)


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
        ({"algo": "ddpg", "team": {"agent": "{}/mine.py"}, **TAG}, [True, False]),
        ({"algo": "maddpg", "team": {"agent": "{}/mine.py"}, **TAG}, [False, False]),  # who asks a user's
    ],
)
def test_what_users_bring_is_not_recorded(tmp_path: Path, work: dict[str, Any], recorded: list[bool]) -> None:
    """It may look at whatever it likes, in ways that are not noticed."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "mine.py").write_text(ALGO)

    def named(x: Any) -> Any:
        return {k: named(v) for k, v in x.items()} if isinstance(x, dict) else x.format(tmp_path) if isinstance(x, str) else x

    loop = make("graph", device="cpu", **named(work))
    assert [isinstance(x, Recorded) for x in loop.on_device_lessons] == recorded


@pytest.mark.compiler
def test_where_nobody_learns_from_a_replay_nothing_is_recorded_and_that_is_said() -> None:
    assert any(r.startswith("Nothing is captured: on the CPU") for r in make("graph", device="cpu").remarks)
    assert make("off", device="cpu").remarks == []


def test_beside_a_hook_nothing_is_recorded(tmp_path: Path) -> None:
    """It may change numbers of the host, which a tape would not notice."""

    class Looks(shoal.Hook):
        def before_iteration(self, loop: Any) -> None:
            assert loop.on_device_lessons == loop.trainers

    common: dict[str, Any] = {"steps": 200, "envs": 8, "quiet": True, "device": "cpu", "out": tmp_path / "run"}
    shoal.train("ddqn", "probe_copy", hook=Looks(), **common)


def test_an_actor_that_waited_moves_whoever_asks() -> None:
    """Who calls `update` without a look before has the actor move when it is due, and not otherwise."""
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
