"""Captured iterations: the same bits as eager ones, whatever is done between replays; and what each mode means."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.algos.ddqn import DDQN
from shoal.algos.ppo import PPO
from shoal.kernels.compiler import compiler
from shoal.training.loop import Loop
from shoal.training.settings import Settings, most_compiled, resolve
from shoal.training.speedup import Captured
from shoal.training.state import load_replay_state, replay_state
from shoal.tree import tree_leaves, tree_map

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
torch.set_num_threads(1)


class Told:
    """Stands in for the console and the log."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, sentence: str) -> None:
        self.lines.append(sentence)

    def say(self, sentence: str) -> None:
        return None


def make(
    compile: str,
    algo: str = "mappo",
    env: str = "simple_spread",
    rollout: int = 25,
    device: str = "cuda",
    net: dict[str, Any] | None = None,
    reward: str = "own",
    world: dict[str, Any] | None = None,
    team: dict[str, str] | None = None,
    groups: dict[str, Any] | None = None,
    regroup: str = "",
    log: dict[str, Any] | None = None,
    **more: Any,
) -> Loop:
    run = {"envs": 8, "device": device, "quiet": True, "compile": compile, "steps": 20_000, "matmul": "float32"}
    run |= {"reward": reward, "regroup": regroup}
    sections = {"algo": {"rollout": rollout, **more}, "net": net or {}, "env": world or {}, "log": log or {}}
    loop = Loop(resolve(Settings(algo, env, run, sections, groups or {}, team or {})))
    loop.console = loop.logger = Told()  # type: ignore[assignment]
    return loop


def everything(loop: Loop) -> dict[str, Tensor]:
    parts: dict[str, Any] = {
        "algorithms": [dict(a.state_dict()) for a in loop.players.algorithms],
        "collector": loop.collector.state_dict(),
        "noise": loop.update_noise.get_state(),
        "means": loop.means.sums,
        "replay": replay_state(loop),
        "contents": contents(loop),
    }
    return {f"{k} {i}": x.clone() for k, tree in parts.items() for i, x in enumerate(tree_leaves(tree))}


def contents(loop: Loop) -> list[Tensor]:
    return (
        []
        if loop.replay is None
        else [x for r in (loop.replay.transitions, loop.replay.initial_memory) for x in r.store.values()]
    )


def state(loop: Loop) -> Any:
    learnt = [tree_map(torch.clone, dict(a.state_dict())) for a in loop.players.algorithms]
    remembered = tree_map(torch.clone, contents(loop)), replay_state(loop)
    means = loop.means.state_dict()
    return learnt, loop.collector.state_dict(), loop.update_noise.get_state(), means, loop.step, remembered


def put(loop: Loop, saved: Any) -> None:
    for a, x in zip(loop.players.algorithms, saved[0], strict=True):
        a.load_state_dict(x)
    loop.collector.load_state_dict(saved[1])
    loop.update_noise.set_state(saved[2])
    loop.means.load_state_dict(saved[3], loop.env.device)
    loop.step = saved[4]
    for mine, theirs in zip(contents(loop), saved[5][0], strict=True):
        mine.copy_(theirs)
    load_replay_state(loop, saved[5][1])


def assert_equal(one: Loop, two: Loop) -> None:
    a, b = everything(one), everything(two)
    assert a.keys() == b.keys()
    different = [k for k in a if not torch.equal(a[k], b[k])]
    assert not different


PAST = {"every": 24, "batch": 16, "capacity": 800, "learning_starts": 300, "epsilon_steps": 1000}
ACTS = {"every": 12, "batch": 16, "capacity": 800, "learning_starts": 150, "random_steps": 200}
KINDS = {"pair": "continuous", "lone": "multi"}
ACTOR_CRITICS: list[dict[str, Any]] = [
    {"algo": "maddpg", "env": "probe_teams", "world": KINDS, "rollout": 5, "others": "policy", **ACTS},
    {"algo": "matd3", "env": "probe_deaths", "rollout": 6, "n_step": 2, **ACTS},  # two critics, an actor once in two updates
    {"algo": "masac", "reward": "team-mean", "rollout": 5, "delay": 2, **ACTS},
    {"algo": "masac", "env": "probe_leave", "reward": "team-mean", "rollout": 5, **ACTS},
    {"algo": "masac", "env": "probe_teams", "world": KINDS, "net": {"memory": "gru"}, "rollout": 5, "chunk": 4, **ACTS},
    {
        "algo": "ddpg",
        "env": "probe_copy",
        "world": {"actions": "continuous"},
        "net": {"memory": "gru"},
        "prioritised": True,
        "noise_keep": 0.5,
        "rollout": 5,
        "chunk": 4,
        **ACTS,
    },
    {"algo": "sac", "env": "probe_copy", "world": {"actions": "continuous"}, "rollout": 5, "noise_keep": 0.5, **ACTS},
    {"algo": "td3", "env": "probe_turns", "rollout": 5, "delay": 3, **ACTS},
    {
        "algo": "maddpg",
        "env": "simple_tag",
        "team": {"agent": "ippo"},  # who is taught in the iteration, and asked in lessons
        "groups": {"agent": {"net": {"memory": "gru"}}},
        "rollout": 5,
        **ACTS,
    },
]
WORKS = [
    {},
    {"rollout": 16, "lr_schedule": "linear"},  # rollouts begin anywhere in an episode; the rate changes between replays
    {"algo": "ippo", "env": "simple_tag"},  # two that learn
    {"algo": "ippo", "env": "probe_deaths"},  # masks
    {"algo": "ppo", "env": "probe_turns", "rollout": 10},
    {"env": "probe_deaths", "net": {"memory": "lstm"}, "rollout": 16, "chunk": 4},
    {"algo": "maa2c", "net": {"memory": "gru", "attention": "both", "precision": "bf16", "layer_norm": True}},
    {"env": "probe_image", "net": {"share": "none"}, "rollout": 16},
    {"lr_schedule": "kl", "kl_stop": 1e-3, "entropy_schedule": "linear", "clip_schedule": "cosine", "learning_starts": 600},
    {"target_tau": 0.1, "critic_slices": 10, "advantage_every": "epoch", "normalise_reward": True, "random_steps": 400},
    {"algo": "ippo", "net": {"trunk": "shared", "share": "agent_0=a,agent_1=b,agent_2=a"}, "advantage_every": "minibatch"},
    {"net": {"trunk": "shared", "memory": "gru"}, "critic_input": "agent", "target_tau": 0.1},
    {"algo": "ddqn", "env": "simple_tag", "rollout": 10, **PAST},  # two that learn; 80 steps and 3 or 4 updates an iteration
    {"algo": "iql", "env": "probe_deaths", "net": {"memory": "gru"}, "rollout": 6, "prioritised": True, "chunk": 4, **PAST},
    {"algo": "ddqn", "env": "probe_turns", "rollout": 7, "noisy": True, "dueling": True, "prioritised": True, **PAST},
    {"algo": "qmix", "reward": "team-mean", "n_step": 3, "target_every": 1, "target_tau": 0.1, **PAST},
    {"algo": "vdn", "env": "simple_speaker_listener", "net": {"share": "none"}, "normalise_reward": True, **PAST},
    {"algo": "coma", "env": "simple_speaker_listener", "net": {"memory": "gru"}, "critic_slices": 5},
    {"algo": "coma", "reward": "team-mean", "replay": 20, "batch": 4},
    {"minibatch_episodes": 3, "episodes": 1, "critic_slices": 5, "advantage_every": "minibatch"},
    {
        "env": "probe_terminated",
        "world": {"n": 2, "length": 5, "stagger": True},  # episodes of 1 to 5 steps
        "net": {"memory": "gru"},
        "episodes": 2,
        "minibatch_episodes": 3,
        "critic_slices": 2,
        "advantage_every": "minibatch",
        "normalise_reward": True,
    },
    {"algo": "coma", "env": "probe_terminated", "world": {"n": 2, "length": 5, "stagger": True}, "episodes": 3},
    {"algo": "ippo", "env": "probe_deaths", "reward": "team-mean", "net": {"memory": "gru"}, "rollout": 16, "critic_slices": 4},
    {"algo": "iql", "env": "probe_deaths", "reward": "team-mean", "net": {"memory": "gru"}, "rollout": 6, "chunk": 4, **PAST},
    {"algo": "coma", "env": "probe_deaths", "reward": "team-mean", "replay": 60, "batch": 4, "critic_slices": 2},
    {"algo": "vdn", "reward": "team-mean", "net": {"memory": "lstm"}, "rollout": 6, "epsilon_keep": 0.7, "chunk": 4, **PAST},
    {"algo": "qmix", "env": "simple_speaker_listener", "net": {"memory": "gru"}, "rollout": 6, "chunk": 4, **PAST},
    {"regroup": "fast=agent_1 slow=agent_2,agent_0", "groups": {"fast": {"algo": {"lr": 1e-3}, "net": {"hidden": (8,)}}}},
    {"algo": "vdn", "reward": "team-mean", "regroup": "fast=agent_1 slow=agent_2,agent_0", **PAST},
    {"env": "probe_deaths", "log": {"agents": True}, "normalise_state": False},
    {"algo": "qmix", "reward": "team-mean", "log": {"agents": True}, "normalise_obs": False, "normalise_state": True, **PAST},
    {"optimiser": "rmsprop", "momentum": 0.5, "lr_schedule": "StepLR:step_size=2,gamma=0.5"},
    {"algo": "ddqn", "env": "simple_tag", "rollout": 10, "optimiser": "sgd", "momentum": 0.9, **PAST},
    {"algo": "maa2c", "optimiser": "adam", "beta1": 0.5, "weight_decay": 1e-3},
    *ACTOR_CRITICS,
]


@cuda
@pytest.mark.parametrize("work", WORKS, ids=lambda w: "-".join(map(str, w)) or "plain")
def test_single_iterations_from_many_states_have_the_same_bits(work: dict[str, Any]) -> None:
    eager, captured = make("off", **work), make("graph", **work)
    for _ in range(int(os.environ.get("SHOAL_PARITY_STATES", "10"))):
        put(captured, state(eager))
        eager.iterate()
        captured.iterate()
        assert_equal(eager, captured)
    assert captured.console.lines == []  # type: ignore[attr-defined]
    for one in (captured.on_device, *captured.on_device_updates):
        assert isinstance(one, Captured)
        assert len(one.graphs) == 1


@pytest.mark.parametrize("work", ACTOR_CRITICS, ids=lambda w: "-".join(map(str, w)))
def test_all_that_an_actor_critic_goes_by_is_put_back(work: dict[str, Any]) -> None:
    """What the test above rests on, of eager iterations: those who were elsewhere go on alike."""
    one, other = make("off", device="cpu", **work), make("off", device="cpu", **work)
    for _ in range(6):
        one.iterate()
    assert one.trainers[0].updates_due(one.step) % 2 == 1  # an actor that is delayed waits
    put(other, state(one))
    for _ in range(2):
        one.iterate()
        other.iterate()
    assert_equal(one, other)
    learnt = [x for x in everything(make("off", device="cpu", **work)).items() if x[0].startswith("algorithms")]
    assert sum(not torch.equal(x, everything(one)[k]) for k, x in learnt) > len(learnt) // 2


HOST: dict[str, Any] = {"algo": "sac", "env": "gymnasium/Pendulum-v1", "world": {"workers": 0}, "rollout": 5, **ACTS}


def assert_beside_a_host_world(one: Loop, other: Loop) -> None:
    for _ in range(8):
        one.iterate()
        other.iterate()
    for loop in (one, other):
        assert loop.on_device == loop.collect_and_update
        assert loop.trainers[0].updates_due(loop.step) >= 10
        loop.env.close()
        loop.eval_env.close()
    a, b = ([*dict(x.learners[0].state_dict()).values(), *contents(x), x.update_noise.get_state()] for x in (one, other))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@cuda
def test_lessons_are_captured_beside_a_host_world() -> None:
    eager, captured = make("off", **HOST), make("graph", **HOST)
    assert_beside_a_host_world(eager, captured)
    (trainer,) = captured.on_device_updates
    assert isinstance(trainer, Captured)
    assert len(trainer.graphs) == 1
    assert captured.console.lines == []  # type: ignore[attr-defined]


def test_eager_lessons_beside_a_host_world_repeat() -> None:
    assert_beside_a_host_world(make("off", device="cpu", **HOST), make("off", device="cpu", **HOST))


@cuda
def test_replay_after_replay_and_a_state_of_long_ago() -> None:
    eager, captured = make("off"), make("graph")
    begun = state(eager)
    for _ in range(2):
        put(eager, begun)
        put(captured, begun)
        for _ in range(4):
            eager.iterate()
            captured.iterate()
        assert_equal(eager, captured)


@cuda
def test_a_graph_that_nobody_holds_does_not_break_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a loop before this one is garbage that Python collects in the middle."""
    plain, captured, left = PPO.update, make("graph"), make("graph")
    left.iterate()
    left.itself = left  # type: ignore[attr-defined]

    def collects(self: Any, batch: Any) -> dict[str, Tensor]:
        if gc.isenabled() and torch.cuda.is_current_stream_capturing():  # as Python may wherever it is
            gc.collect()
        return plain(self, batch)

    monkeypatch.setattr(PPO, "update", collects)
    gc.collect()
    del left
    captured.iterate()
    assert captured.console.lines == []  # type: ignore[attr-defined]
    assert isinstance(captured.on_device, Captured)


@cuda
def test_fused_is_near() -> None:
    eager, fused = make("off"), make("fused")
    for _ in range(10):
        put(fused, state(eager))
        eager.iterate()
        fused.iterate()
        a, b = everything(eager), everything(fused)
        for k in (k for k in a if k.startswith("algorithms") and a[k].is_floating_point()):
            torch.testing.assert_close(a[k], b[k], rtol=2e-2, atol=2e-2, msg=k)


@cuda
@pytest.mark.parametrize("cls", [PPO, DDQN])
def test_what_cannot_be_captured_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch, cls: Any) -> None:
    """It is said once; of an update from a replay the iteration stays captured, and the draws go on as they would have."""
    plain, work = cls.update, {"rollout": 10, "algo": "ddqn", **PAST} if cls is DDQN else {}
    eager, captured = make("off", **work), make("graph", **work)

    def looks(self: Any, samples: Any) -> dict[str, Tensor]:
        assert samples.batch.over.sum().item() >= 0
        return plain(self, samples)

    monkeypatch.setattr(cls, "update", looks)
    for _ in range(7):
        eager.iterate()
        captured.iterate()
    (line,) = captured.console.lines  # type: ignore[attr-defined]
    assert line.startswith("Iterations cannot be captured as a CUDA graph, and run eagerly: ")
    assert captured.on_device_updates == captured.trainers
    assert (captured.on_device == captured.collect_and_update) == (cls is PPO)
    assert_equal(eager, captured)


@cuda
@pytest.mark.parametrize("algo", ["mappo", "iql", "matd3", "masac"])
def test_resume_of_captured_runs_is_exact(tmp_path: Path, algo: str) -> None:
    common: dict[str, Any] = {"steps": 2000, "envs": 8, "device": "cuda", "quiet": True, "log": {"tensorboard": False}}
    for mode in ("graph", "fused"):
        past = {} if algo == "mappo" else PAST if algo == "iql" else {**ACTS, "delay": 4}  # stopped after 70 updates
        common["algo"] = {"rollout": 5, "prioritised": True, **past} if past else {}
        whole = shoal.train(algo, "simple_spread", out=tmp_path / f"{mode}-whole", compile=mode, **common)
        half = shoal.train(algo, "simple_spread", out=tmp_path / f"{mode}-half", compile=mode, until=1000, **common)
        half = shoal.resume(half)
        a, b = (tree_leaves(r.load("last")["algorithms"]) for r in (whole, half))
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


DRAWS = """
from torch import nn
class Draws(nn.Sequential):
    def __init__(self, width_in, width_out, agents):
        super().__init__(nn.Linear(width_in, 8), nn.Dropout(0.5), nn.Linear(8, width_out))
"""


@cuda
def test_what_a_captured_module_draws_follows_from_the_seed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DRAWS)
    common: dict[str, Any] = {"steps": 2000, "envs": 8, "device": "cuda", "quiet": True, "log": {"tensorboard": False}}
    common.update(compile="graph", net={"module": f"{tmp_path / 'mine.py'}:Draws"}, reward="team-mean")
    whole = shoal.train("mappo", "simple_spread", out=tmp_path / "whole", **common)
    torch.rand(3, device="cuda")  # wherever the global generator is
    half = shoal.resume(shoal.train("mappo", "simple_spread", out=tmp_path / "half", until=1000, **common))
    assert not [line for line in (whole.path / "train.log").read_text().splitlines() if line.startswith("Iterations cannot")]
    a, b = (tree_leaves(r.load("last")["algorithms"]) for r in (whole, half))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- modes ---


def test_auto_is_written_down(tmp_path: Path) -> None:
    run = shoal.train("mappo", "simple_spread", steps=200, envs=2, out=tmp_path / "run", quiet=True)
    mode = json.loads((run.path / "config.json").read_text())["run"]["compile"]
    assert mode == most_compiled(torch.device("cuda" if torch.cuda.is_available() else "cpu")) != "auto"


def test_without_a_compiler_auto_is_graph_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compiler.cache_clear()
    assert most_compiled(torch.device("cpu")) == "graph"
    (remark,) = make("auto", device="cpu").remarks
    assert remark.startswith("Nothing is compiled: there is no C compiler")
    compiler.cache_clear()


def test_fused_without_a_compiler_goes_on_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As when a run is resumed on a machine that has none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compiler.cache_clear()
    loop = make("fused", device="cpu")
    compiler.cache_clear()
    assert any("there is no C compiler" in remark for remark in loop.remarks)
    loop.iterate()


@pytest.mark.compiler
def test_fused_on_the_cpu_is_near_and_repeats() -> None:
    plain, fused, again = make("off", device="cpu"), make("fused", device="cpu"), make("fused", device="cpu")
    assert fused.remarks == []
    assert fused.env._do != fused.env._transition
    for loop in (plain, fused, again):
        loop.iterate()
    assert_equal(fused, again)
    a, b = everything(plain), everything(fused)
    for k in (k for k in a if k.startswith("algorithms") and a[k].is_floating_point()):
        torch.testing.assert_close(a[k], b[k], rtol=1e-2, atol=1e-2, msg=k)
