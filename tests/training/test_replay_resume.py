"""Exact resume of those who learn from a replay: its contents and all that is known of them, with every option of theirs; and
the files that it is kept in."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from test_host import TOY
from test_options_resume import MINE, STATED, differing, leaves

import shoal
from shoal.algos.coma import COMA
from shoal.algos.ddpg import DDPG
from shoal.algos.ddqn import DDQN
from shoal.algos.iql import IQL
from shoal.algos.qmix import QMIX
from shoal.algos.sac import SAC
from shoal.algos.td3 import TD3
from shoal.algos.vdn import VDN
from shoal.cli import main
from shoal.training import checkpoint
from shoal.training.run import Run
from shoal.training.segments import Segments

ROWS, LAPS, STOPS = 4, 6, (2, 5)
CARTPOLE = "gymnasium/CartPole-v1"
SHORT = {"max_cycles": 5}  # out of step with rollouts: stops fall into episodes
WORLDS: dict[str, Any] = {
    **dict.fromkeys(("simple_spread", "simple_tag", "simple_speaker_listener", "simple_world_comm", "simple_reference"), SHORT),
    "probe_copy": {"actions": "continuous"},
    "probe_terminated": {"n": 2, "length": 5, "stagger": True},  # episodes of 1 to 5 steps
}
NET = {"hidden": (8,), "memory_width": 4, "attention_width": 8, "heads": 2}
SMALL = {  # ten steps of each row, of eighteen: some are written over at the second stop, and more at the end
    "algo.rollout": 3,
    "algo.every": 5,  # an update is owed in part when an iteration ends
    "algo.batch": 4,
    "algo.capacity": 40,
    "algo.learning_starts": 24,
    "algo.epsilon_steps": 60,
    "algo.target_every": 3,
}
FRESH = {"algo.rollout": 4, "algo.epsilon_steps": 60, "algo.target_every": 3, "run.reward": "team-mean"}
PAST = {**FRESH, "algo.replay": 12, "algo.batch": 2, "algo.every": 9}  # fifteen steps of each row, of twenty-four
MEMORY = {"net.memory": "gru", "algo.chunk": 3, "algo.burn_in": 2}
DRAWN = {k: v for k, v in SMALL.items() if "epsilon" not in k and "target" not in k}
DRAWN |= {"algo.random_steps": 12, "algo.lr": 1e-2}
ACTING = {**DRAWN, "algo.noise_steps": 60}
BASE = {
    **dict.fromkeys(("ddqn", "dqn", "iql", "vdn", "qmix"), SMALL),
    **dict.fromkeys(("ddpg", "maddpg", "td3", "matd3"), ACTING),
    **dict.fromkeys(("sac", "masac"), DRAWN),
    "coma": FRESH,
    "ippo": {},
}


@dataclass(frozen=True)
class Case:
    """An option and its value; `beside` is what it needs to matter."""

    option: str  # algo.NAME, net.NAME, env.NAME or run.NAME
    value: Any
    env: str = "simple_spread"
    algorithm: str = "ddqn"
    beside: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        near = {k: v for k, v in self.beside.items() if FRESH.get(k) != v}
        return " ".join([self.algorithm, self.env, self.option, str(self.value), *map(str, near.values())])

    @property
    def plain(self):
        beside = {k: v for k, v in self.beside.items() if (k, v) != (self.option, self.value)}
        return {"algorithm": self.algorithm, "env": self.env, "options": beside}

    @property
    def whole(self):
        return {**self.plain, "options": {**self.beside, self.option: self.value}}


def each(option, values, env="simple_spread", algorithm="ddqn", beside=None):
    return [Case(option, v, env, algorithm, beside or {}) for v in values]


def optimisers(env="simple_spread", algorithm="ddqn"):
    return [
        *each("algo.optimiser", ["rmsprop", "sgd"], env, algorithm),
        *each("algo.optimiser", ["adam"], env, algorithm, {"algo.weight_decay": 0.1}),
        *each("algo.beta1", [0.5], env, algorithm),
        *each("algo.beta2", [0.5], env, algorithm),
        *each("algo.eps", [0.1], env, algorithm),
        *each("algo.momentum", [0.9], env, algorithm, {"algo.optimiser": "sgd"}),
    ]


RANKED = {"algo.prioritised": True}
CASES = [
    *each("algo.rollout", [5]),
    *each("algo.rollout", [1], beside={"algo.learning_starts": 0}),
    *each("algo.every", [0.8, 17]),
    *each("algo.batch", [9]),
    *each("algo.capacity", [12, 30, 1000]),  # no more than a rollout; with a remainder; never full
    *each("algo.learning_starts", [0, 30, 60]),  # stops are at 24 and 60
    *each("algo.chunk", [4]),
    *each("algo.chunk", [5], "probe_deaths", beside=MEMORY),
    *each("algo.burn_in", [0], beside=MEMORY),
    *each("algo.n_step", [8]),  # as long as the ring allows
    *each("algo.n_step", [3], "probe_deaths", beside={**MEMORY, **RANKED}),
    *each("algo.gamma", [0.5]),
    *each("algo.time_limit", [False]),
    *each("algo.after_death", ["own"], "probe_deaths", beside={"run.reward": "team-mean"}),
    *each(
        "algo.after_death", ["team"], "probe_deaths", beside={"run.reward": "team-mean", "algo.after_death": "own", **MEMORY}
    ),
    *each("algo.double", [False]),
    *each("algo.dueling", [True]),
    *each("algo.noisy", [True], beside={"algo.epsilon": 0.0}),
    *each("algo.noisy", [True], beside={"algo.dueling": True, "net.memory": "lstm", "algo.chunk": 3, **RANKED}),
    *each("algo.prioritised", [True]),
    *each("algo.prioritised", [True], "probe_deaths", beside=MEMORY),
    *each("algo.priority", [1.0], beside=RANKED),
    *each("algo.priority_weight", [0.9], beside=RANKED),
    *each("algo.epsilon", [0.3]),
    *each("algo.epsilon_last", [0.5]),
    *each("algo.epsilon_steps", [50]),
    *each("algo.epsilon_schedule", ["constant", "{mine}/mine.py:Halving"]),
    *each("algo.epsilon_keep", [0.8]),  # what was random is remembered
    *each("algo.epsilon_keep", [0.8], "probe_illegal", beside={**MEMORY, "algo.epsilon": 0.5}),
    *each("algo.epsilon_keep", [0.8], "simple_reference", "vdn", {"run.reward": "team-mean"}),
    *each("algo.target_every", [2]),
    *each("algo.target_tau", [0.1]),
    *each("algo.huber", [0.1]),
    *each("algo.lr", [3e-3]),
    *each("algo.lr_schedule", ["cosine", "exponential:0.9/update"]),
    *each("algo.lr_last", [0.5], beside={"algo.lr_schedule": "linear"}),
    *each("algo.weight_decay", [0.1]),
    *each("algo.grad_clip", [0.01]),
    *optimisers(),
    *each("algo.normalise_obs", [False]),
    *each("algo.normalise_reward", [True]),
    *each("algo.normaliser", ["{mine}/mine.py:Bound"]),
    *each("algo.reward_scale", [0.1]),
    *each("algo.shaper", ["{mine}/mine.py:fading"]),
    *each("algo.normalise_state", [False], "simple_speaker_listener", "qmix"),
    *each("algo.state_normaliser", ["{mine}/mine.py:Bound:bound=0.5"], "simple_speaker_listener", "qmix"),
    *each("algo.mixer_width", [4], "simple_speaker_listener", "qmix"),
    *each("algo.hyper_width", [8], "simple_speaker_listener", "qmix"),
    *each("net.memory", ["gru", "lstm"], beside={"algo.chunk": 3}),
    *each("net.memory", ["lstm"], "simple_speaker_listener", "qmix", {"algo.chunk": 3, **RANKED}),
    *each("net.memory", ["gru"], "probe_turns", beside={"algo.chunk": 3}),
    *each("net.share", ["agent_0=a,agent_1=b,agent_2=a"]),
    *each("net.attention", ["actor"]),
    *each("net.precision", ["bf16"], beside=MEMORY),
    *each("net.module", ["{mine}/mine.py:Mine"]),  # counts when it learns
    *each("run.reward", ["team-mean", "team-sum"]),
    *each("algo.prioritised", [True], "simple_tag"),  # several learners, a place of their own in the ring each
    *each("algo.prioritised", [True], "probe_turns"),
    *each("algo.prioritised", [True], "probe_illegal"),
    *each("algo.prioritised", [True], "probe_image"),
    *each("algo.prioritised", [True], "simple_speaker_listener", "qmix"),
    *each("algo.normalise_reward", [False], "probe_deaths", "qmix", {"run.reward": "team-mean", **MEMORY}),
    *each("algo.dueling", [True], "simple_reference", "iql"),  # several choices at once
    *each("algo.double", [True], "simple_spread", "dqn"),
]
COUNTERFACTUAL = [
    *each("algo.rollout", [5]),
    *each("algo.episodes", [2]),
    *each("algo.episodes", [2], "probe_terminated", beside={"net.memory": "gru", "algo.normalise_reward": True}),
    *each("algo.replay", [12, 400], beside=PAST),
    *each("algo.replay", [20], "probe_deaths", beside=PAST),
    *each("algo.replay", [12], "simple_speaker_listener", beside={**PAST, "net.memory": "gru"}),
    *each("algo.batch", [3], beside=PAST),
    *each("algo.every", [None, 5], beside=PAST),
    *each("algo.gamma", [0.5]),
    *each("algo.lam", [0.2]),
    *each("algo.time_limit", [False]),
    *each("algo.after_death", ["own"], "probe_deaths", beside=PAST),
    *each("algo.after_death", ["team"], "probe_deaths", beside={"algo.after_death": "own"}),
    *each("algo.epsilon", [0.1]),
    *each("algo.epsilon_last", [0.4]),
    *each("algo.epsilon_steps", [100]),
    *each("algo.epsilon_schedule", ["constant", "exponential:0.9/update"]),
    *each("algo.entropy", [0.5]),
    *each("algo.entropy_schedule", ["linear", "exponential:0.9/update"], beside={"algo.entropy": 0.5}),
    *each("algo.entropy_last", [0.5], beside={"algo.entropy_schedule": "linear"}),
    *each("algo.last_action", [False]),
    *each("algo.advantage_scope", ["none", "agent"]),
    *each("algo.dueling", [False]),
    *each("algo.critic_slices", [0, 2]),
    *each("algo.critic_slices", [2], "probe_deaths", beside={**PAST, "algo.replay": 20, "net.memory": "lstm"}),
    *each("algo.target_every", [1]),
    *each("algo.target_tau", [0.1]),
    *each("algo.huber", [0.1]),
    *each("algo.lr", [3e-3]),
    *each("algo.lr_critic", [3e-3]),
    *each("algo.lr_schedule", ["constant", "{mine}/mine.py:Halving"]),
    *each("algo.lr_last", [0.5], beside={"algo.lr_schedule": "linear"}),
    *each("algo.weight_decay", [0.1]),
    *optimisers(),
    *each("algo.grad_clip", [None], beside={"algo.grad_clip": 0.01}),
    *each("algo.normalise_obs", [False], beside=PAST),
    *each("algo.normalise_value", [False]),
    *each("algo.normalise_reward", [True]),
    *each("algo.normaliser", ["{mine}/mine.py:Bound"]),
    *each("algo.normalise_state", [False]),
    *each("algo.state_normaliser", ["{mine}/mine.py:Bound:bound=0.5"], beside=PAST),
    *each("algo.reward_scale", [0.1], beside={"algo.normalise_value": False}),
    *each("algo.shaper", ["{mine}/mine.py:fading"], beside=PAST),
    *each("net.memory", ["gru", "lstm"], "probe_deaths"),
    *each("net.share", ["id"], beside=PAST),
]
CASES += [Case(c.option, c.value, c.env, "coma", c.beside) for c in COUNTERFACTUAL]
COPY, TALK, TAG, COMM, DEATHS = "probe_copy", "simple_speaker_listener", "simple_tag", "simple_world_comm", "probe_deaths"
MULTI, SMOOTH, ALIKE = {"env.actions": "multi"}, {"env.actions": "continuous"}, {"run.reward": "team-mean"}
CASES += [
    *each("algo.rollout", [5], COPY, "ddpg"),
    *each("algo.every", [3], COPY, "ddpg", MULTI),
    *each("algo.batch", [9], TALK, "maddpg", SMOOTH),
    *each("algo.capacity", [30], DEATHS, "ddpg"),
    *each("algo.learning_starts", [60], COPY, "ddpg"),  # where it is stopped
    *each("algo.chunk", [5], DEATHS, "ddpg", MEMORY),
    *each("algo.burn_in", [0], COPY, "ddpg", {**MEMORY, **MULTI}),
    *each("algo.n_step", [3], DEATHS, "maddpg"),
    *each("algo.gamma", [0.5], TAG, "maddpg"),
    *each("algo.time_limit", [False], TAG, "ddpg", SMOOTH),
    *each("algo.after_death", ["own"], DEATHS, "maddpg", ALIKE),
    *each("algo.after_death", ["team"], DEATHS, "ddpg", {**ALIKE, "algo.after_death": "own"}),
    *each("algo.prioritised", [True], TAG, "maddpg"),
    *each("algo.prioritised", [True], DEATHS, "maddpg", {**MEMORY, "algo.n_step": 2}),
    *each("algo.priority", [1.0], COPY, "ddpg", RANKED),
    *each("algo.priority_weight", [0.9], "probe_illegal", "ddpg", RANKED),
    *each("algo.critic", ["team", "world"], TALK, "ddpg", SMOOTH),
    *each("algo.critic_input", ["joined", "agent"], "{mine}/stated.py", "maddpg"),
    *each("algo.others", ["policy"], TALK, "maddpg"),
    *each("algo.others", ["policy"], TAG, "maddpg", {**MEMORY, **ALIKE, **SMOOTH}),  # one critic a team, and peers who remember
    *each("algo.critics", [3], "probe_turns", "maddpg"),
    *each("algo.delay", [2], COPY, "ddpg"),  # of seven updates, at the second stop, three moved the actor
    *each("algo.delay", [2], TAG, "maddpg", {"algo.target_every": 2, "algo.target_tau": 1.0}),
    *each("algo.random_steps", [0, 30], COPY, "ddpg"),  # stops are at 24 and 60
    *each("algo.random_steps", [66], "probe_illegal", "ddpg", MULTI),
    *each("algo.target_every", [3], COPY, "ddpg"),
    *each("algo.target_tau", [1.0], TALK, "maddpg"),
    *each("algo.huber", [0.1], COPY, "ddpg"),
    *each("algo.lr", [3e-3], "probe_illegal", "ddpg"),
    *each("algo.lr_critic", [3e-3], COPY, "ddpg"),
    *each("algo.lr_schedule", ["exponential:0.9/update"], COPY, "ddpg"),
    *each("algo.lr_last", [0.5], COPY, "ddpg", {"algo.lr_schedule": "linear"}),
    *each("algo.lr_critic_schedule", ["{mine}/mine.py:Halving"], COPY, "ddpg"),
    *each("algo.weight_decay", [0.1], COPY, "ddpg"),
    *optimisers(COPY, "ddpg"),
    *each("algo.grad_clip", [0.01], COPY, "ddpg"),
    *each("algo.normalise_obs", [False], DEATHS, "maddpg"),
    *each("algo.normalise_reward", [True], DEATHS, "ddpg"),
    *each("algo.normaliser", ["{mine}/mine.py:Bound"], COPY, "ddpg"),
    *each("algo.normalise_state", [False], TALK, "maddpg", SMOOTH),
    *each("algo.state_normaliser", ["{mine}/mine.py:Bound:bound=0.5"], DEATHS, "maddpg"),
    *each("algo.reward_scale", [0.1], COPY, "ddpg"),
    *each("algo.shaper", ["{mine}/mine.py:fading"], COPY, "ddpg"),
    *each("algo.noise", [0.9], COPY, "ddpg", MULTI),
    *each("algo.noise_last", [0.5], COPY, "ddpg"),
    *each("algo.noise_steps", [30], COPY, "ddpg"),
    *each("algo.noise_schedule", ["{mine}/mine.py:Halving"], COPY, "ddpg"),
    *each("algo.noise_keep", [0.85], COPY, "ddpg"),  # what was drawn is remembered
    *each("algo.noise_keep", [0.85], COPY, "ddpg", MEMORY),
    *each("algo.gumbel", [0.3], "probe_illegal", "maddpg", ALIKE),
    *each("algo.regularise", [0.5], COPY, "ddpg"),
    *each("net.memory", ["gru"], "probe_turns", "maddpg", {"algo.chunk": 3}),
    *each("net.memory", ["lstm"], TALK, "maddpg", {"algo.chunk": 3, **SMOOTH, **RANKED}),
    *each("algo.critics", [3], COPY, "td3"),
    *each("algo.critics", [1], DEATHS, "matd3", MEMORY),
    *each("algo.delay", [1], COPY, "td3"),
    *each("algo.delay", [3], DEATHS, "matd3"),
    *each("algo.smooth", [0.9], COPY, "td3"),
    *each("algo.smooth_limit", [0.05], TALK, "matd3", SMOOTH),
    *each("net.memory", ["gru"], TAG, "matd3", {"algo.chunk": 3, **SMOOTH}),
    *each("algo.critics", [1], COPY, "sac"),
    *each("algo.critics", [1], COPY, "sac", MULTI),
    *each("algo.delay", [2], "probe_illegal", "sac"),
    *each("algo.alpha", [0.9], COPY, "sac"),
    *each("algo.alpha", [0.9], DEATHS, "masac", MEMORY),
    *each("algo.alpha_auto", [False], COPY, "sac"),
    *each("algo.alpha_auto", [False], TALK, "masac", SMOOTH),  # one critic, and the entropies of both in it
    *each("algo.target_entropy", [0.5], COPY, "sac"),
    *each("algo.target_entropy", [0.7], "probe_illegal", "masac"),
    *each("algo.lr_alpha", [0.1], "probe_turns", "masac"),
    *each("algo.noise_keep", [0.85], TALK, "masac", {**SMOOTH, "algo.random_steps": 66}),  # not yet over at the stops
    *each("algo.prioritised", [True], TAG, "masac", {"net.memory": "gru", "algo.chunk": 3}),
]
NOWHERE: dict[str, str] = {}  # options that have no case, and why


FAMILY = {"ddpg": ("ddpg", "maddpg"), "td3": ("td3", "matd3"), "sac": ("sac", "masac")}  # names of one


@pytest.mark.parametrize(("algorithm", "cls"), [("ddqn", DDQN), ("coma", COMA), ("ddpg", DDPG)])
def test_every_option_has_a_case_and_every_word_of_it(algorithm, cls):
    hints = get_type_hints(cls.Config)
    mine = [c for c in CASES if c.algorithm in FAMILY.get(algorithm, (algorithm,))]
    options = {f"algo.{f.name}" for f in fields(cls.Config)}
    assert {c.option for c in mine if c.option.startswith("algo.")} == options - NOWHERE.keys()
    assert not {c.option for c in mine} & NOWHERE.keys()
    for f in fields(cls.Config):
        tried = {c.value for c in mine if c.option == f"algo.{f.name}"}
        assert tried - {f.default}, f.name
        parts = get_args(hints[f.name]) if get_origin(hints[f.name]) is not Literal else (hints[f.name],)
        words = {w for p in parts if get_origin(p) is Literal for w in get_args(p)}
        assert words - {f.default} <= tried, f.name


def test_what_others_add_has_a_case_too():
    known = {f.name for f in fields(DDQN.Config)}
    for name, cls in {"iql": IQL, "vdn": VDN, "qmix": QMIX}.items():
        more = {f"algo.{f.name}" for f in fields(cls.Config) if f.name not in known}
        assert more <= {c.option for c in CASES if c.algorithm == name}
    defaults = {f.name: f.default for f in fields(DDPG.Config)}
    for name, cls in {"td3": TD3, "sac": SAC}.items():
        changed = {f"algo.{f.name}": f.default for f in fields(cls.Config) if defaults.get(f.name, ...) != f.default}
        assert len(changed) >= 4
        tried = {(c.option, c.value) for c in CASES if c.algorithm in FAMILY[name]}
        assert changed.keys() <= {option for option, value in tried if changed.get(option) != value}


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    (folder / "toy.py").write_text(TOY)
    (folder / "stated.py").write_text(STATED)
    return folder


class Witness(shoal.Hook):
    """Keeps the loop, and stops it after so many steps."""

    def __init__(self, until=None):
        self.until = until

    def after_iteration(self, loop):
        self.loop = loop
        if self.until is not None and loop.step >= self.until:
            loop.stop("for now")


def plan(mine, algorithm, env, options, env_config=None, compile="off", **more):
    """What `shoal.train` is asked for, and the environment steps of an iteration."""
    sections: dict[str, dict[str, Any]] = {"algo": {}, "net": dict(NET), "run": {}, "env": {}}
    for name, value in {**BASE[algorithm], **options}.items():
        section, _, key = name.partition(".")
        sections[section][key] = value.replace("{mine}", str(mine)) if isinstance(value, str) else value
    world = {**WORLDS.get(env, {}), **sections.pop("env"), **(env_config or {})}
    if "episodes" in sections["algo"]:
        del sections["algo"]["rollout"]
        lap = ROWS * sections["algo"]["episodes"] * world.get("max_cycles", world.get("length"))
    else:
        lap = ROWS * sections["algo"]["rollout"]
    asked = {
        "algorithm": algorithm,
        "environment": env.replace("{mine}", str(mine)),
        "envs": ROWS,
        "steps": LAPS * lap,
        "seed": 3,
        "quiet": True,
        "compile": compile,
        "env": world,
        "log": {"tensorboard": False, "csv": False, "every": 4 * lap},  # metrics are under way when it stops
        "eval": {"episodes": 2, "every": LAPS * lap},
        "save": {"every": 0, "keep": 0, "best": "none"},
        **sections.pop("run"),
        **sections,
        **more,
    }
    return asked, lap


def train(out, asked, **more):
    asked = {**asked, **more}
    return shoal.train(asked.pop("algorithm"), asked.pop("environment"), out=out, **asked)


def play(out, mine, stops=(), **how):
    """All laps; with `stops` stopped after so many of them, and resumed. What there is in the end."""
    asked, lap = plan(mine, **how)
    hook = Witness()
    run = train(out, asked, until=stops[0] * lap if stops else None, hook=hook)
    for k, at in enumerate(stops):
        assert run.load("last")["step"] == at * lap
        hook = Witness(stops[k + 1] * lap if k + 1 < len(stops) else None)
        run = shoal.resume(out, quiet=True, hook=hook)
    return told(run, hook.loop)


def told(run, loop=None):
    """Every metric but times, all of the last checkpoint but how the replay is cut into files, the ring as the files have it,
    and as it was."""
    lines = [{k: v for k, v in line.items() if k != "time"} for line in run.metrics]
    assert [x["kind"] for x in lines] == ["eval", "train", "train", "eval"]
    last = run.load("last")
    out = {**leaves(lines, "/metrics"), **saved_ring(run, last)}
    if "replay" in last:
        del last["replay"]["spans"]
    passing = ("/seconds", "/logs/metrics.jsonl", "/logs/train.log")
    out |= {k: x for k, x in leaves(last).items() if k not in passing}
    assert sum(isinstance(x, torch.Tensor) for x in out.values()) > 30
    if loop is not None and loop.replay is not None:
        out |= {f"/ring/{d}": x for d, x in loop.replay.transitions.store.items()}
        out |= {f"/before/{d}": x for d, x in loop.replay.initial_memory.store.items()}
        assert last["replay"]["count"] == int(loop.replay.count) == last["step"] // ROWS
    return out


def saved_ring(run, last):
    """What a checkpoint's files hold, step by step, of the newest steps that all rows have in the ring."""
    if "replay" not in last:
        return {}
    capacity = max(p["algo"].get("capacity") or 0 for p in run.settings.players.values())
    spans = last["replay"]["spans"]
    assert [a for a, _ in spans[1:]] == [b for _, b in spans[:-1]]  # end to end
    parts = [torch.load(run.checkpoints / "replay" / f"{a:012d}-{b:012d}.pt", weights_only=True) for a, b in spans]
    files = {p.name for p in (run.checkpoints / "replay").iterdir()}
    assert files == {f"{a:012d}-{b:012d}.pt" for a, b in spans}  # and no others
    count = last["replay"]["count"]
    assert spans[-1][1] == count
    oldest = max(0, count - capacity // ROWS) if capacity else spans[0][0]
    assert spans[0][0] <= oldest < spans[0][1]
    out = {}
    for kind in ("moments", "firsts"):
        for dtype in parts[0][kind]:
            joined = torch.cat([p[kind][dtype] for p in parts])
            if capacity:
                out[f"/files/{kind}/{dtype}"] = joined[oldest - spans[0][0] :]
    return out


def assert_exact(tmp_path, mine, **how):
    whole = play(tmp_path / "whole", mine, **how)
    assert differing(whole, play(tmp_path / "thirds", mine, stops=STOPS, **how)) == []
    return whole


@pytest.fixture(scope="module")
def plain(tmp_path_factory, mine):
    """Runs without the option, each made once."""
    made: dict[str, Any] = {}

    def make(how):
        key = str(how)
        if key not in made:
            made[key] = play(tmp_path_factory.mktemp("plain") / "r", mine, **how)
        return made[key]

    return make


def learnt(state):
    return {k: x for k, x in state.items() if k.startswith("/algorithms")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_resume_is_exact_with(case, tmp_path, mine, plain):
    whole = assert_exact(tmp_path, mine, **case.whole)
    assert differing(learnt(whole), learnt(plain(case.plain))) != []  # the option does something
    updates = [int(x) for k, x in whole.items() if k.endswith("target.updates")]
    assert updates
    assert min(updates) > 0


# --- worlds and players ---

TWO = {"adversary": "ippo"}
OTHERS: dict[str, dict[str, Any]] = {
    "several learners": {"algorithm": "ddqn", "env": "simple_tag", "options": {}},
    "unlike groups, vdn": {"algorithm": "vdn", "env": "simple_speaker_listener", "options": {**MEMORY, **RANKED}},
    "unlike groups, qmix": {"algorithm": "qmix", "env": "simple_speaker_listener", "options": {"algo.n_step": 2}},
    "unlike groups of two teams": {
        "algorithm": "qmix",
        "env": "simple_world_comm",
        "options": {"run.reward": "team-mean", **RANKED},
    },
    "a task of Gymnasium's, here": {"algorithm": "ddqn", "env": CARTPOLE, "options": RANKED, "env_config": {"workers": 0}},
    "a task of Gymnasium's, two workers": {
        "algorithm": "ddqn",
        "env": CARTPOLE,
        "options": {**MEMORY, **RANKED},
        "env_config": {"workers": 2},
    },
    "deaths, vdn": {"algorithm": "vdn", "env": "probe_deaths", "options": {"run.reward": "team-mean", "algo.n_step": 3}},
    "turns": {"algorithm": "ddqn", "env": "probe_turns", "options": {}},
    "fresh and past": {"algorithm": "ddqn", "env": "simple_tag", "options": {**MEMORY, **RANKED}, "team": TWO},
    "fresh and past, both recurrent": {
        "algorithm": "coma",
        "env": "simple_tag",
        "options": {"net.memory": "gru"},
        "team": {"agent": "ddqn"},
        "groups": {"agent": {"algo": {"capacity": 100, "learning_starts": 10, "chunk": 3, "every": 7, "batch": 3}}},
    },
    "episodes beside moments": {
        "algorithm": "coma",
        "env": "simple_tag",
        "options": PAST,
        "team": {"agent": "ddqn"},
        "groups": {"agent": {"algo": {"capacity": 60, "learning_starts": 10}}},
    },
    "kernels": {"algorithm": "ddqn", "env": "simple_spread", "options": RANKED, "compile": "auto"},
    "kernels, qmix": {"algorithm": "qmix", "env": "simple_speaker_listener", "options": MEMORY, "compile": "auto"},
    "a task of Gymnasium's, two critics": {
        "algorithm": "sac",
        "env": "gymnasium/Pendulum-v1",
        "options": {**RANKED, "algo.noise_keep": 0.5},
        "env_config": {"workers": 2},
    },
    "unlike groups, matd3": {"algorithm": "matd3", "env": COMM, "options": {**MEMORY, **RANKED, **MULTI}},
    "fresh and past, who asks": {
        "algorithm": "maddpg",
        "env": TAG,
        "options": {**MEMORY, **RANKED},
        "team": TWO,
    },
    "kernels, maddpg": {"algorithm": "maddpg", "env": TAG, "options": {"algo.delay": 2}, "compile": "auto"},
    "kernels, masac": {"algorithm": "masac", "env": TALK, "options": {**MEMORY, **SMOOTH}, "compile": "auto"},
    "kernels, coma": {"algorithm": "coma", "env": "simple_speaker_listener", "options": PAST, "compile": "auto"},
}


@pytest.mark.parametrize("how", OTHERS.values(), ids=OTHERS)
def test_resume_is_exact_of(how, tmp_path, mine):
    whole = assert_exact(tmp_path, mine, **how)
    players = Run(tmp_path / "whole").settings.players
    still = {k.split("/")[2] for k, x in whole.items() if k.endswith("optimiser.steps") and x == 0}
    moved = {k.split("/")[2] for k, x in whole.items() if k.endswith("optimiser.steps")} - still
    assert moved == {",".join(p["bound"]) for p in players.values()}  # everybody learnt


@pytest.mark.parametrize("algorithm", ["matd3", "masac"])
def test_a_delayed_actor_that_is_stopped_while_it_waits(algorithm, tmp_path, mine):
    """After seven updates it has moved three times; what it is waiting for, and its last metrics, go on."""
    how = {"algorithm": algorithm, "env": TALK, "options": {"algo.delay": 2, **SMOOTH}}
    asked, lap = plan(mine, **how)
    state = train(tmp_path / "b", asked, until=5 * lap).load("last")["algorithms"]["listener"]
    steps = {k: int(state[f"{k}_optimiser.steps"]) for k in ("critic", "actor")}
    assert (steps, int(state["target.updates"])) == ({"critic": 7, "actor": 3}, 7)
    assert state["held"].all()
    assert_exact(tmp_path, mine, **how)
    hook = Witness()
    shoal.resume(tmp_path / "b", quiet=True, hook=hook)
    assert hook.loop.learners[1].actor_optimiser.steps == 4  # of nine


def test_the_number_of_workers_changes_nothing(tmp_path, mine):
    how = {"algorithm": "ddqn", "env": CARTPOLE, "options": {**MEMORY, **RANKED}}
    runs = [play(tmp_path / str(n), mine, **how, env_config={"workers": n}) for n in (1, 2)]
    assert differing(*runs) == []


def test_what_was_in_the_ring_is_in_what_is_learnt(tmp_path, mine):
    """The net of the tests above: a ring that comes back with one reward changed gives other weights."""
    how = {"algorithm": "ddqn", "env": "simple_spread", "options": {}}
    whole = play(tmp_path / "a", mine, **how)
    asked, lap = plan(mine, **how)
    run = train(tmp_path / "b", asked, until=5 * lap)
    for path in (run.checkpoints / "replay").iterdir():
        part = torch.load(path, weights_only=True)
        part["moments"]["torch.float32"][..., -3:] += 1
        torch.save(part, path)
    hook = Witness()
    apart = differing(whole, told(shoal.resume(run, quiet=True, hook=hook), hook.loop))
    assert any(k.startswith("/algorithms") for k in apart)
    assert any(k.startswith("/ring") for k in apart)


def test_episodes_that_do_not_go_on_are_broken_off_in_the_ring_and_on_disk(tmp_path, mine):
    """A toy of six steps that does not repeat: episodes under way at the stops, after steps 14 and 17, end there. Of
    twenty-four steps the last ten are in the ring: the first of them is step 14."""
    asked, lap = plan(mine, "ddqn", "{mine}/toy.py", {"algo.n_step": 3}, {"honest": False, "workers": 0})
    run = train(tmp_path / "r", asked, steps=8 * lap, until=5 * lap)
    for until in (6 * lap, None):
        hook = Witness(until)
        run = shoal.resume(run, quiet=True, hook=hook)
    over = hook.loop.replay[:, :][-1]
    assert over.all(-1).tolist() == over.any(-1).tolist() == [bool(x) for x in (1, 0, 0, 1, 0, 0, 0, 0, 0, 1)]
    saved = saved_ring(run, run.load("last"))["/files/moments/torch.bool"]
    last = hook.loop.replay.transitions.leaves[-1]
    assert torch.equal(saved[..., last.start], over)
    log = (run.path / "train.log").read_text()
    assert log.count("4 of 4 rows did not come out the same when their episode was played again") == 2


class Once(shoal.Hook):
    def after_iteration(self, loop):
        self.loop = loop
        loop.stop("for now")


def test_resume_is_exact_at_every_lap(tmp_path, mine):
    """Stopped after each of them, from a run that has begun and no checkpoint on: a file each, and a ring of four."""
    how = {"algorithm": "ddqn", "env": "simple_tag", "options": {**MEMORY, **RANKED, "algo.n_step": 2}}
    whole = play(tmp_path / "whole", mine, **how)
    run = shoal.Run(shutil.copytree(tmp_path / "whole", tmp_path / "laps"))
    shutil.rmtree(run.checkpoints)
    for name in ("metrics.jsonl", "train.log"):
        (run.path / name).unlink()
    for k in range(1, LAPS + 1):
        hook = Once()
        run = shoal.resume(run.path, hook=hook, quiet=True)
        last = run.load("last")
        assert last["step"] == k * 12
        assert last["replay"]["spans"] == [[3 * i, 3 * i + 3] for i in range(max(0, k - 4), k)]
    assert differing(whole, told(run, hook.loop)) == []


def test_a_longer_total_goes_on_with_the_ring(tmp_path, mine):
    """To one total, and then to another: it is that of the second but for what is scheduled over a run."""
    asked, lap = plan(mine, "ddqn", "simple_spread", {"algo.lr_schedule": "constant", "algo.epsilon_steps": 60})
    whole = train(tmp_path / "a", asked, steps=9 * lap, eval={"every": 0})
    run = train(tmp_path / "b", asked, eval={"every": 0})
    assert run.load("last")["step"] == LAPS * lap
    run = shoal.resume(run, steps=9 * lap, quiet=True)
    a, b = (saved_ring(r, r.load("last")) for r in (whole, run))
    assert differing(a, b) == []
    a, b = (leaves(r.load("last")["algorithms"]) for r in (whole, run))
    assert differing(a, b) == []


# --- files ---


@pytest.fixture
def written(monkeypatch):
    """Names of what is written, in order, with how many steps a part of the replay has."""
    names: list[tuple[str, int]] = []
    write = checkpoint.write

    def spy(path, state):
        write(path, state)
        part = state.get("moments")
        names.append((path.name, 0 if part is None else len(next(iter(part.values())))))

    monkeypatch.setattr(checkpoint, "write", spy)
    return names


def frequent(mine, laps, **more):
    """A run that saves every so many laps."""
    asked, lap = plan(mine, "ddqn", "simple_spread", RANKED)
    return {**asked, "save": {"every": laps * lap, "keep": 0, "best": "none", **more}}, lap


def test_a_save_writes_what_is_new_and_then_the_checkpoint(tmp_path, mine, written):
    asked, _ = frequent(mine, 2)
    run = train(tmp_path / "r", asked)
    parts = [f"{t:012d}-{t + 6:012d}.pt" for t in range(0, 18, 6)]
    assert written == [("last.pt", 0), *[x for name in parts for x in ((name, 6), ("last.pt", 0))]]
    assert [p.name for p in sorted((run.checkpoints / "replay").iterdir())] == parts[1:]  # ten steps are in these two
    assert run.load("last")["replay"]["spans"] == [[6, 12], [12, 18]]


def test_files_are_never_changed_and_resume_adds_to_them(tmp_path, mine, written):
    asked, lap = frequent(mine, 2)
    run = train(tmp_path / "r", asked, until=5 * lap)
    there = {p.name: (p.read_bytes(), p.stat().st_ino) for p in (run.checkpoints / "replay").iterdir()}
    assert sorted(there) == [f"{a:012d}-{b:012d}.pt" for a, b in ((0, 6), (6, 12), (12, 15))]
    written.clear()
    shoal.resume(run, quiet=True, hook=Witness(6 * lap))
    assert written[0] == ("000000000015-000000000018.pt", 3)
    now = {p.name: (p.read_bytes(), p.stat().st_ino) for p in (run.checkpoints / "replay").iterdir()}
    assert {k: now[k] for k in there if k in now} == {k: x for k, x in there.items() if k in now}
    assert sorted(now) == [f"{a:012d}-{b:012d}.pt" for a, b in ((6, 12), (12, 15), (15, 18))]


def test_only_the_last_checkpoint_has_the_replay(tmp_path, mine):
    asked, lap = frequent(mine, 3, keep=-1, best="auto")
    asked["eval"] = {"episodes": 2, "every": 3 * lap}
    run = train(tmp_path / "r", asked)
    names = sorted(p.stem for p in run.checkpoints.glob("*.pt"))
    assert names == ["best", "last", *[f"step-{k * lap:012d}" for k in (3, 6)]]
    for name in names:
        assert ("replay" in run.load(name)) == (name == "last")
    sizes = {p.stem: p.stat().st_size for p in run.checkpoints.glob("*.pt")}
    ring = sum(p.stat().st_size for p in (run.checkpoints / "replay").iterdir())
    assert all(size < sizes["last"] for name, size in sizes.items() if name != "last")
    assert ring > 10 * ROWS * 100  # there is something to leave out


class CrashedError(Exception):
    pass


def crash(monkeypatch, which, part=False):
    """The save of the last checkpoint that is the `which`-th ends before it is there."""
    write, seen = checkpoint.write, []

    def die(path, state):
        if path.name == "last.pt":
            seen.append(path)
            if len(seen) == which:
                if part:
                    path.with_name("last.pt.0a1b2c3d.part").write_bytes(b"half of it")
                raise CrashedError
        write(path, state)

    monkeypatch.setattr(checkpoint, "write", die)


@pytest.mark.parametrize("which", [2, 3, 4])  # of four: that of the beginning is the first
def test_a_save_that_ended_before_the_checkpoint(tmp_path, mine, monkeypatch, which):
    """Its part of the replay is there and is not named: the run goes on from the checkpoint before."""
    asked, lap = frequent(mine, 2)
    whole = train(tmp_path / "a", asked)
    with monkeypatch.context() as m:
        crash(m, which, part=True)
        with pytest.raises(CrashedError):
            train(tmp_path / "b", asked)
    run = Run(tmp_path / "b")
    last = run.load("last")
    assert last["step"] == (which - 2) * 2 * lap
    left = {p.name for p in (run.checkpoints / "replay").iterdir()}
    named = {f"{a:012d}-{b:012d}.pt" for a, b in last.get("replay", {}).get("spans", [])}
    assert len(left - named) == 1
    assert named <= left  # what the checkpoint needs is not yet removed
    assert differing(told(whole), told(shoal.resume(run, quiet=True))) == []
    assert not list(run.path.rglob("*.part"))


@pytest.mark.parametrize("name", ["last.pt", "000000000006-000000000012.pt"])
def test_a_save_that_ended_in_the_middle_of_a_file(tmp_path, mine, monkeypatch, name):
    """What was there under that name is whole, or nothing is."""
    asked, lap = frequent(mine, 2)
    whole, save = train(tmp_path / "a", asked), torch.save

    def half(state, file):
        if Path(file.name).name.startswith(name) and (name != "last.pt" or state["step"] == 4 * lap):
            file.write(b"half of it")
            raise CrashedError
        save(state, file)

    with monkeypatch.context() as m:
        m.setattr(torch, "save", half)
        with pytest.raises(CrashedError):
            train(tmp_path / "b", asked)
    run = Run(tmp_path / "b")
    assert run.load("last")["step"] == 2 * lap
    assert not (run.checkpoints / "replay" / name).exists()
    assert differing(told(whole), told(shoal.resume(run, quiet=True))) == []
    assert not list(run.path.rglob("*.part"))


def test_leftovers_are_removed_by_the_next_save(tmp_path, mine, monkeypatch):
    asked, lap = frequent(mine, 3)
    whole = train(tmp_path / "a", asked)
    with monkeypatch.context() as m:
        crash(m, 3)
        with pytest.raises(CrashedError):
            train(tmp_path / "b", asked, hook=Witness(4 * lap))  # the save of a stop between two
    run, folder = Run(tmp_path / "b"), tmp_path / "b" / "checkpoints" / "replay"
    (folder / "000000000012-000000000021.pt.part").write_bytes(b"half")
    assert {p.name for p in folder.glob("*.pt")} == {"000000000000-000000000009.pt", "000000000009-000000000012.pt"}
    assert run.load("last")["replay"]["spans"] == [[0, 9]]
    loop_at: list[set[str]] = []

    class Look(shoal.Hook):
        def before_iteration(self, loop):
            loop_at.append({p.name for p in folder.iterdir()})

    run = shoal.resume(run, quiet=True, hook=Look())
    assert len(loop_at[0]) == 3  # until then they lie there
    assert {p.name for p in folder.iterdir()} == {"000000000000-000000000009.pt", "000000000009-000000000018.pt"}
    assert differing(told(whole), told(run)) == []


def test_kill_9_among_saves(tmp_path, mine):
    """Every iteration saves, so that most of the time is spent there."""
    flags = (
        "--steps 1600 --envs 4 --seed 3 --quiet --compile off --net.hidden 8 --env.max-cycles 5 --algo.rollout 3 "
        "--algo.every 24 --algo.batch 4 --algo.capacity 400 --algo.learning-starts 24 --algo.prioritised true "
        "--log.tensorboard false --log.csv false --log.every 800 --eval.episodes 2 --eval.every 1600 --save.keep 0 "
        "--save.best none"
    ).split()
    words = ["train", "ddqn", "simple_spread", *flags]
    assert main([*words, "--save.every", "0", "--out", str(tmp_path / "whole")]) == 0
    out = tmp_path / "killed"
    commands = [[*words, "--save.every", "12", "--out", str(out)], ["resume", str(out), "--quiet"]]
    for aim, command in zip(
        ("replay/*.part", "last.pt.*.part"), commands, strict=True
    ):  # while one is written, if seen in time
        before = Run(out).load("last")["step"] if out.exists() else 0
        process = subprocess.Popen([sys.executable, "-m", "shoal.cli", *command])
        folder, deadline = out / "checkpoints", time.time() + 240
        while time.time() < deadline:
            newest = max((p.name for p in (folder / "replay").glob("*-*.pt")), default="0" * 12)
            if int(newest[:12]) * ROWS > before + 60:
                break
            time.sleep(0.002)
        seen = time.time() + 0.1
        while time.time() < seen and not list(folder.glob(aim)):
            pass
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert before + 60 <= Run(out).load("last")["step"] < 1600
    last = Run(out).load("last")
    assert len(last["replay"]["spans"]) > 10
    whole, killed = Run(tmp_path / "whole"), shoal.resume(out, quiet=True)
    assert not list(out.rglob("*.part"))
    assert differing(told(whole), told(killed)) == []


# --- files that are not as they were ---


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, mine):
    asked, lap = frequent(mine, 2)
    return train(tmp_path_factory.mktemp("stopped") / "r", asked, until=5 * lap).path


def damage_missing(path, other):
    path.unlink()


def damage_cut(path, other):
    path.write_bytes(path.read_bytes()[:1000])


def damage_empty(path, other):
    path.write_bytes(b"")


def damage_words(path, other):
    path.write_text("these are no tensors")


def damage_other(path, other):
    shutil.copy(other, path)


def damage_shapes(path, other):
    part = torch.load(path, weights_only=True)
    torch.save({k: {d: x[..., :-1] for d, x in xs.items()} for k, xs in part.items()}, path)


def damage_steps(path, other):
    part = torch.load(path, weights_only=True)
    torch.save({k: {d: x[:-1] for d, x in xs.items()} for k, xs in part.items()}, path)


@pytest.mark.parametrize(
    "damage",
    [
        damage_missing,
        damage_cut,
        damage_empty,
        damage_words,
        damage_other,
        damage_shapes,
        damage_steps,
    ],
)
@pytest.mark.parametrize("which", [0, -1])
def test_a_file_that_is_not_as_it_was_is_one_sentence(tmp_path, stopped, capsys, damage, which):
    run = shutil.copytree(stopped, tmp_path / "r")
    path = sorted((run / "checkpoints" / "replay").iterdir())[which]
    torch.save({"moments": {}, "firsts": {}}, tmp_path / "other.pt")
    damage(path, tmp_path / "other.pt")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    assert main(["resume", str(run)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"shoal: [^\n]+\.\n", err)
    assert "Traceback" not in err
    assert "replay" in err  # what it is about
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == before
    assert main(["eval", str(run), "--episodes", "2", "--json"]) == 0  # what was learnt is there nevertheless
    assert json.loads(capsys.readouterr().out)["episodes"] == 2


@pytest.mark.parametrize("name", ["best", "step"])
def test_a_checkpoint_without_the_replay_in_place_of_the_last_is_one_sentence(tmp_path, mine, capsys, name):
    """As one does who is told that the last is damaged, and to use another."""
    asked, lap = frequent(mine, 2, keep=1, best="auto")
    run = train(tmp_path / "r", asked, until=5 * lap)
    (other,) = run.checkpoints.glob(f"{name}*.pt")
    shutil.copy(other, run.checkpoints / "last.pt")
    assert main(["resume", str(run.path)]) == 2
    assert re.fullmatch(r"shoal: [^\n]+\.\n", capsys.readouterr().err)


# --- how long it takes ---


def test_a_million_moments_are_saved_in_seconds(tmp_path, monkeypatch, capsys):
    """Measured and printed; how long it takes is the machine's affair."""
    took: dict[str, list[float]] = {"save": [], "load": []}
    for name, times in took.items():
        real = getattr(Segments, name)

        def timed(*args, real=real, times=times):
            began = time.perf_counter()
            out = real(*args)
            times.append(time.perf_counter() - began)
            return out

        monkeypatch.setattr(Segments, name, timed)
    run = shoal.train(
        "ddqn",
        "CartPole-v1",
        steps=1_100_000,
        until=1_000_000,
        envs=1000,
        quiet=True,
        algo={"rollout": 50, "capacity": 1_000_000, "learning_starts": 10_000_000},
        net={"hidden": (8,)},
        eval={"every": 0},
        log={"tensorboard": False},
        save={"every": 0, "keep": 0},
        out=tmp_path / "r",
    )
    size = sum(p.stat().st_size for p in (run.checkpoints / "replay").iterdir())
    run = shoal.resume(run, quiet=True)
    with capsys.disabled():
        print(f"\na million moments of CartPole, {size / 1e6:.0f} MB: saved in {took['save'][1]:.2f} s, ", end="")
        print(f"loaded in {took['load'][0]:.2f} s, a tenth more saved in {took['save'][-1]:.2f} s")
    assert run.load("last")["replay"]["spans"] == [[0, 1000], [1000, 1100]]
