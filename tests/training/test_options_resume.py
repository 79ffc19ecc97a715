"""Exact resume with every option of the PPO family: each on alone, and one combination of as many as go together."""

import json
import shutil
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import shoal
from shoal.algos.a2c import A2C
from shoal.algos.ppo import PPO
from shoal.nets.config import NetConfig

MINE = '''"""Objects of a user's own."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.nets.norm import Running


class Halving:
    def __init__(self, first, last):
        self.first, self.last = first, last

    def __call__(self, now):
        return max(self.first * 0.5**now.updates, self.last)


class Halves(LRScheduler):
    def get_lr(self):
        return [lr * 0.5**self.last_epoch for lr in self.base_lrs]


class Bound(Running):
    def __init__(self, *shape, bound=1.0, **more):
        super().__init__(*shape, **more)
        self.bound = bound

    def normalise(self, x, clip=None):
        return super().normalise(x, self.bound if clip else None)


class Mine(nn.Module):
    def __init__(self, width_in, width_out, agents):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width_in, 8), nn.Tanh(), nn.Linear(8, width_out))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen.add_(1)
        return self.layers(x) + self.seen * 1e-3


def fading(reward, obs, step, steps):
    return reward * (1 - step / steps) + obs[..., 0]
'''

STATED = '''"""A world with a state of its own."""

import dataclasses

from shoal.envs.probe.probe_copy import ProbeCopy


class Stated(ProbeCopy):
    def setup(self):
        super().setup()
        self.spec = dataclasses.replace(self.spec, state=3)

    def observe(self, state):
        return dataclasses.replace(super().observe(state), state=state["symbol"].sum(1).to(self.dtype) + self.tensor([0, 1, 5]))
'''

WORLDS: dict[str, Any] = {  # short, and out of step with rollouts of 6: the stop falls into episodes
    "simple_spread": {"max_cycles": 5},
    "simple_tag": {"max_cycles": 5},
    "probe_copy": {"actions": "continuous"},
    "probe_leave": {"common": True},
    "probe_terminated": {"n": 2, "length": 5, "stagger": True},  # episodes of 1 to 5 steps
    "gymnasium/CartPole-v1": {"horizon": 20, "workers": 2},
}
LONGEST = ("max_cycles", "length", "horizon")  # names of what says how long an episode can be
ALGO = {"rollout": 6, "epochs": 2, "minibatches": 2}
NET = {"hidden": (8,), "memory_width": 4, "attention_width": 8, "heads": 2}
ROWS = 4
NAMED = "agent_0=a,agent_1=b,agent_2=a"


@dataclass(frozen=True)
class Case:
    """An option and its value; `beside` is what it needs to matter."""

    option: str  # algo.NAME or net.NAME
    value: Any
    env: str = "simple_spread"
    algorithm: str = "mappo"
    beside: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        return " ".join([self.algorithm, self.env, self.option, str(self.value), *map(str, self.beside.values())])

    @property
    def plain(self):
        return {"algorithm": self.algorithm, "env": self.env, "options": self.beside}

    @property
    def whole(self):
        return {**self.plain, "options": {**self.beside, self.option: self.value}}


def each(option, values, env="simple_spread", algorithm="mappo", **beside):
    return [Case(option, v, env, algorithm, {k.replace("__", "."): x for k, x in beside.items()}) for v in values]


SCHEDULES = ["cosine", "exponential", "exponential:0.9/update", "exponential:0.99/step", "{mine}/mine.py:Halving"]
CASES = [
    *each("algo.rollout", [5]),
    *each("algo.episodes", [1]),
    *each("algo.episodes", [1, 2], "probe_terminated"),
    *each("algo.episodes", [2], "probe_terminated", net__memory="gru", algo__normalise_reward=True),
    *each("algo.episodes", [1], "gymnasium/CartPole-v1", "ppo"),
    *each("algo.episodes", [2], "probe_terminated", "maa2c", algo__critic_slices=2),
    *each("algo.minibatch_episodes", [3], algo__episodes=2),
    *each("algo.minibatch_episodes", [3], "probe_terminated", algo__episodes=2),
    *each("algo.chunk", ["all", 2, 3]),
    *each("algo.chunk", [2, 1], net__memory="gru"),
    *each("algo.chunk", [3], "probe_deaths", net__memory="lstm"),
    *each("algo.gamma", [0.9]),
    *each("algo.lam", [0.5]),
    *each("algo.time_limit", [False]),
    *each("algo.after_death", ["own"], "probe_leave"),
    *each("algo.after_death", ["team"], "probe_leave", algo__after_death="own", net__memory="gru"),
    *each("algo.entropy", [0.5]),
    *each("algo.entropy_schedule", ["linear", *SCHEDULES]),
    *each("algo.entropy_last", [0.5], algo__entropy_schedule="linear"),
    *each("algo.value_weight", [0.5]),
    *each("algo.huber", [0.1]),
    *each("algo.lr", [3e-3]),
    *each("algo.lr_critic", [3e-3]),
    *each("algo.lr_schedule", ["constant", *SCHEDULES, "kl", "kl:0.01"]),
    *each("algo.lr_schedule", ["kl"], algo__lr_critic=3e-3),
    *each("algo.lr_last", [0.5], algo__lr_schedule="linear"),
    *each("algo.lr_schedule", ["StepLR:step_size=1,gamma=0.5", "{mine}/mine.py:Halves"]),
    *each("algo.lr_kl_factor", [3.0], algo__lr_schedule="kl"),
    *each("algo.lr_kl_least", [2e-3], algo__lr_schedule="kl:1e-9"),
    *each("algo.lr_kl_most", [1.1e-3], algo__lr_schedule="kl:1.0"),
    *each("algo.optimiser", ["adam"], algo__weight_decay=0.1),
    *each("algo.optimiser", ["rmsprop", "sgd"]),
    *each("algo.beta1", [0.5]),
    *each("algo.beta2", [0.5]),
    *each("algo.eps", [0.1]),
    *each("algo.momentum", [0.9], algo__optimiser="sgd"),
    *each("algo.momentum", [0.5], algo__optimiser="rmsprop"),
    *each("algo.weight_decay", [0.1]),
    *each("algo.grad_clip", [None, 0.01]),
    *each("algo.random_steps", [24, 30, 48, 60, 96]),  # the stop, at 48, falls after them and inside
    *each("algo.random_steps", [60], "probe_copy"),
    *each("algo.random_steps", [60], "probe_illegal"),
    *each("algo.learning_starts", [24, 30, 48, 60, 96]),
    *each("algo.learning_starts", [60], algo__critic_slices=2, algo__target_tau=0.1),
    *each("algo.critic", ["team", "world"], "simple_tag", "ippo"),
    *each("algo.critic", ["own"]),
    *each("algo.critic_input", ["agent"], "probe_deaths"),
    *each("algo.critic_input", ["joined", "agent"], "{mine}/stated.py"),
    *each("algo.critic_slices", [1, 3, 100]),
    *each("algo.critic_slices", [2], "probe_deaths", net__memory="gru"),
    *each("algo.critic_slices", [2], algo__advantage_every="minibatch", algo__episodes=2, algo__minibatch_episodes=3),
    *each(
        *("algo.critic_slices", [2], "probe_terminated"),
        **{"algo__advantage_every": "minibatch", "algo__episodes": 2, "algo__minibatch_episodes": 3, "net__memory": "lstm"},
    ),
    *each("algo.target_tau", [0.0, 0.1, 1.0]),
    *each("algo.target_tau", [0.1], "probe_deaths", net__memory="gru"),
    *each("algo.target_tau", [0.1], algorithm="ippo", net__trunk="shared"),
    *each("algo.advantage_scope", ["none", "batch", "agent"]),
    *each("algo.normalise_value", [False]),
    *each("algo.normalise_obs", [False]),
    *each("algo.normalise_reward", [True]),
    *each("algo.normaliser", ["{mine}/mine.py:Bound", "{mine}/mine.py:Bound:bound=0.5"]),
    *each("algo.normalise_state", [False]),
    *each("algo.normalise_state", [False], "{mine}/stated.py"),
    *each("algo.normalise_state", [True], "probe_deaths", algo__normalise_obs=False),
    *each("algo.state_normaliser", ["{mine}/mine.py:Bound:bound=0.5"]),
    *each("algo.state_normaliser", ["{mine}/mine.py:Bound:bound=0.5"], "{mine}/stated.py", algo__critic_input="agent"),
    *each("algo.reward_scale", [0.1]),
    *each("algo.shaper", ["{mine}/mine.py:fading"]),
    *each("algo.squash", [True], "probe_copy"),
    *each("algo.log_std", [-1.0], "probe_copy"),
    *each("algo.noise_keep", [0.5], "probe_copy"),
    *each("algo.noise_keep", [0.9], "probe_copy", net__memory="gru", algo__random_steps=60),
    *each("algo.epochs", [1, 3]),
    *each("algo.minibatches", [1, 5]),
    *each("algo.clip", [0.01], algo__lr=1e-2),
    *each("algo.clip_schedule", SCHEDULES, algo__lr=1e-2, algo__clip=0.02),
    *each("algo.clip_last", [0.5], algo__lr=1e-2, algo__clip=0.02, algo__clip_schedule="linear"),
    *each("algo.value_clip", [None, 0.01], algo__lr=1e-2),
    *each("algo.kl_stop", [1e-6]),
    *each("algo.kl_stop", [1e-6], algo__learning_starts=60),
    *each("algo.advantage_every", ["epoch", "minibatch"]),
    *each("algo.advantage_every", ["epoch", "minibatch"], "probe_deaths", net__memory="lstm"),
    *each("net.hidden", [(), (8, 4)]),
    *each("net.critic_hidden", [(4,)]),
    *each("net.activation", ["relu", "elu", "gelu", "silu"]),
    *each("net.layer_norm", [True]),
    *each("net.init", ["xavier"]),
    *each("net.gain", [0.5]),
    *each("net.gain_actor", [1.0]),
    *each("net.gain_critic", [0.1]),
    *each("net.share", ["plain", "none", NAMED]),
    *each("net.share", ["plain", "none", NAMED], "probe_deaths", net__memory="gru"),
    *each("net.share", [NAMED], algorithm="ippo", net__attention="actor"),
    *each("net.trunk", ["shared"], algorithm="ippo"),
    *each("net.trunk", ["shared"], "probe_deaths", "ippo", net__memory="lstm"),
    *each("net.trunk", ["shared"], "probe_deaths", algo__critic_input="agent", net__critic_hidden=(4,)),
    *each("net.trunk", ["shared"], algo__critic_input="agent", algo__critic="team", net__memory="gru", algo__target_tau=0.1),
    *each("net.memory", ["gru", "lstm"]),
    *each("net.memory", ["gru", "lstm"], "probe_deaths"),
    *each("net.memory", ["gru", "lstm"], "probe_turns", algo__rollout=5),
    *each("net.memory", ["gru"], "probe_image"),
    *each("net.memory_width", [6], net__memory="lstm"),
    *each("net.attention", ["actor", "critic", "both"]),
    *each("net.attention", ["critic"], "probe_deaths", net__memory="gru"),
    *each("net.attention_width", [4], net__attention="both"),
    *each("net.heads", [1], net__attention="both"),
    *each("net.convolutions", ["4x3/2"], "probe_image"),
    *each("net.convolutions", ["4x3/2,4x2/1"], "probe_image", net__share="none"),
    *each("net.precision", ["bf16"]),
    *each("net.precision", ["bf16"], "probe_image", net__memory="gru"),
    *each("net.module", ["{mine}/mine.py:Mine"]),
    *each("net.module", ["{mine}/mine.py:Mine"], "probe_deaths", net__memory="gru", algo__target_tau=0.1),
    *each("algo.lr_schedule", ["constant"], algorithm="a2c"),
    *each("algo.lam", [0.9], algorithm="maa2c"),
    *each("algo.rollout", [5], algorithm="maa2c"),
    *each("algo.target_tau", [0.1], algorithm="maa2c", algo__critic_slices=2),
    *each("algo.squash", [True], "probe_copy", "maa2c"),
    *each("net.memory", ["lstm"], "probe_deaths", "maa2c", algo__chunk=2),
    *each("net.trunk", ["shared"], algorithm="a2c", net__memory="gru"),
]

# all at once: those that are not here contradict one that is, or need another world
EVERYTHING = {
    "algo.rollout": 6,
    "algo.chunk": 3,
    "algo.gamma": 0.9,
    "algo.lam": 0.9,
    "algo.time_limit": False,
    "algo.entropy": 0.1,
    "algo.entropy_schedule": "linear",
    "algo.entropy_last": 0.1,
    "algo.value_weight": 0.5,
    "algo.huber": 1.0,
    "algo.lr": 2e-3,
    "algo.lr_critic": 2e-3,
    "algo.lr_schedule": "kl:0.01",
    "algo.weight_decay": 0.01,
    "algo.grad_clip": 1.0,
    "algo.random_steps": 20,
    "algo.learning_starts": 20,
    "algo.critic": "world",
    "algo.critic_slices": 3,
    "algo.target_tau": 0.1,
    "algo.advantage_scope": "agent",
    "algo.optimiser": "rmsprop",
    "algo.beta2": 0.9,
    "algo.eps": 1e-4,
    "algo.momentum": 0.5,
    "algo.lr_kl_factor": 2.0,
    "algo.lr_kl_least": 1e-5,
    "algo.lr_kl_most": 5e-3,
    "algo.normalise_reward": True,
    "algo.normaliser": "{mine}/mine.py:Bound",
    "algo.state_normaliser": "{mine}/mine.py:Bound:bound=0.5",
    "algo.reward_scale": 0.1,
    "algo.shaper": "{mine}/mine.py:fading",
    "algo.squash": True,
    "algo.log_std": -0.5,
    "algo.epochs": 2,
    "algo.minibatches": 2,
    "algo.clip": 0.1,
    "algo.clip_schedule": "cosine",
    "algo.clip_last": 0.1,
    "algo.value_clip": None,
    "algo.kl_stop": 1e-4,
    "algo.advantage_every": "epoch",
    "net.hidden": (8, 8),
    "net.critic_hidden": (4,),
    "net.activation": "silu",
    "net.layer_norm": True,
    "net.init": "xavier",
    "net.gain": 1.0,
    "net.gain_actor": 0.1,
    "net.gain_critic": 0.5,
    "net.share": NAMED,
    "net.memory": "lstm",
    "net.memory_width": 4,
    "net.attention": "both",
    "net.attention_width": 8,
    "net.heads": 2,
    "net.precision": "bf16",
}
APART = {
    "algo.noise_keep",  # not for choices
    "algo.after_death",  # nobody dies
    "algo.episodes",  # or a rollout
    "algo.minibatch_episodes",
    "algo.lr_last",  # not with kl
    "algo.beta1",  # of Adam
    "algo.critic_input",  # not with attention over agents
    "algo.normalise_value",  # or no normaliser to be replaced
    "algo.normalise_obs",
    "algo.normalise_state",
    "net.trunk",  # a net of both has no critic of its own
    "net.convolutions",  # images
    "net.module",  # has no layers to normalise
}


def every_option():
    return {f"{s}.{f.name}": f for s, cls in (("algo", PPO.Config), ("net", NetConfig)) for f in fields(cls)}


def test_every_option_has_a_case_and_every_word_of_it():
    assert {c.option for c in CASES} == every_option().keys()
    hints = {f"{s}.{k}": h for s, cls in (("algo", PPO.Config), ("net", NetConfig)) for k, h in get_type_hints(cls).items()}
    for name, f in every_option().items():
        tried = {c.value for c in CASES if c.option == name}
        assert tried != {f.default}, name
        parts = get_args(hints[name]) if get_origin(hints[name]) is not Literal else (hints[name],)
        words = {w for p in parts if get_origin(p) is Literal for w in get_args(p)}
        assert words - {f.default} - tried <= {"auto"}, name
    assert {f.name for f in fields(A2C.Config)} < {f.name for f in fields(PPO.Config)}


def test_everything_is_all_that_goes_together():
    assert EVERYTHING.keys() | APART == every_option().keys()
    assert not EVERYTHING.keys() & APART
    base = {f"{s}.{k}": v for s, values in (("algo", ALGO), ("net", NET)) for k, v in values.items()}
    assert {n for n, f in every_option().items() if n in EVERYTHING and EVERYTHING[n] == f.default} <= {"algo.critic", *base}


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    (folder / "stated.py").write_text(STATED)
    return folder


def play(out, mine, algorithm, env, options, groups=None, team=None, env_config=None, half=False, compile="off"):
    """Four iterations; with `half` stopped after two, and resumed. What is in the last checkpoint, and the metrics."""
    sections: dict[str, dict[str, Any]] = {
        "algo": {"rollout": 6} if algorithm.endswith("a2c") else dict(ALGO),
        "net": dict(NET),
    }
    for name, value in options.items():
        section, _, key = name.partition(".")
        sections[section][key] = value.replace("{mine}", str(mine)) if isinstance(value, str) else value
    world = {**WORLDS.get(env, {}), **(env_config or {})}
    longest = next((world[name] for name in LONGEST if name in world), 0)
    lap = ROWS * (sections["algo"]["episodes"] * longest if "episodes" in sections["algo"] else sections["algo"]["rollout"])
    how = {"envs": ROWS, "steps": 4 * lap, "seed": 3, "quiet": True, "compile": compile, "until": 2 * lap if half else None}
    sections["log"] = {"tensorboard": False, "csv": False, "every": 3 * lap}  # two laps are under way when it stops
    sections["eval"] = {"episodes": 2, "every": 4 * lap}
    sections["save"] = {"every": 0, "keep": 0, "best": "none"}
    run = shoal.train(
        algorithm, env.replace("{mine}", str(mine)), out=out, env=world, groups=groups, team=team, **sections, **how
    )
    if half:
        assert [x["kind"] for x in run.metrics] == ["eval"]
        run = shoal.resume(out, quiet=True)
    return told(run)


def told(run):
    lines = [{k: v for k, v in line.items() if k != "time"} for line in run.metrics]
    assert [x["kind"] for x in lines] == ["eval", "train", "train", "eval"]
    state = {
        k: x for k, x in leaves(run.load("last")).items() if k not in ("/seconds", "/logs/metrics.jsonl", "/logs/train.log")
    }
    assert sum(isinstance(x, torch.Tensor) for x in state.values()) > 30
    return {**state, **leaves(lines, "/metrics")}


def leaves(tree, path=""):
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, x in items for k, v in leaves(x, f"{path}/{key}").items()}
    return {path: tree}


def differing(a, b):
    """The names of what is not the same in both, bit for bit."""

    def same(x, y):
        return torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y

    return sorted(k for k in a.keys() | b.keys() if k not in a or k not in b or not same(a[k], b[k]))


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_resume_is_exact_with(case, tmp_path, mine, plain):
    whole = play(tmp_path / "whole", mine, **case.whole)
    assert differing(whole, play(tmp_path / "halves", mine, **case.whole, half=True)) == []
    assert differing(whole, plain(case.plain)) != []  # the option does something


@pytest.mark.parametrize("compile", ["off", "auto"])
def test_resume_is_exact_with_everything(compile, tmp_path, mine):
    how = {"algorithm": "mappo", "env": "simple_spread", "options": EVERYTHING, "env_config": {"actions": "continuous"}}
    whole = play(tmp_path / "whole", mine, **how, compile=compile)
    assert differing(whole, play(tmp_path / "halves", mine, **how, compile=compile, half=True)) == []
    assert 0 < whole["/metrics/2/agents/kept"] < 1  # the actor takes steps, and not all


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("simple_spread", {}),
        ("simple_spread", {"algo.lr_schedule": "kl", "algo.kl_stop": 1e-6, "algo.weight_decay": 0.1}),
        ("simple_spread", {"algo.learning_starts": 60, "algo.random_steps": 60, "algo.target_tau": 0.1}),
        ("probe_deaths", {"net.memory": "gru", "algo.chunk": 3}),
        ("probe_turns", {"algo.critic_slices": 2, "algo.rollout": 5}),
    ],
)
def test_resume_is_exact_with_kernels_of_our_own(env, options, tmp_path, mine):
    how = {"algorithm": "mappo", "env": env, "options": options, "compile": "fused"}
    assert differing(play(tmp_path / "a", mine, **how), play(tmp_path / "b", mine, **how, half=True)) == []


GROUPS = {
    "adversary": {
        "algo": {"lr_schedule": "kl", "entropy": 0.1, "target_tau": 0.1, "shaper": "{mine}/mine.py:fading", "critic": "own"},
        "net": {"memory": "lstm", "share": "none", "hidden": (4,)},
    },
    "agent": {
        "algo": {
            "kl_stop": 1e-6,
            "epochs": 3,
            "minibatches": 1,
            "learning_starts": 60,
            "clip_schedule": "{mine}/mine.py:Halving",
        },
        "net": {"attention": "actor", "precision": "bf16"},
    },
}


def test_resume_is_exact_where_groups_have_settings_of_their_own(tmp_path, mine):
    groups = json.loads(json.dumps(GROUPS).replace("{mine}", str(mine)))
    how = {"algorithm": "mappo", "env": "simple_tag", "options": {}, "groups": groups}
    whole = play(tmp_path / "a", mine, **how)
    assert differing(whole, play(tmp_path / "b", mine, **how, half=True)) == []
    apart = differing(whole, play(tmp_path / "c", mine, "mappo", "simple_tag", {}))
    assert {k.split("/")[2].split(".")[0] for k in apart if k.startswith("/algorithms")} == {"adversary", "agent"}


def test_resume_is_exact_against_an_opponent_that_remembers(tmp_path, mine):
    play(tmp_path / "foe", mine, "ippo", "simple_tag", {"net.memory": "lstm", "net.gain_actor": 20.0})
    how = {"algorithm": "ippo", "env": "simple_tag", "options": {}, "team": {"adversary": str(tmp_path / "foe")}}
    whole = play(tmp_path / "a", mine, **how)
    assert differing(whole, play(tmp_path / "b", mine, **how, half=True)) == []
    assert whole["/collector/memory/adversary/actor/hidden"].abs().sum() > 0


def test_resume_is_exact_at_every_lap(tmp_path, mine):
    """Stopped after each of them: nothing is lost that the next one needs."""
    how = {"algorithm": "mappo", "env": "simple_spread", "options": {**EVERYTHING, "algo.learning_starts": 60}}
    whole = play(tmp_path / "whole", mine, **how)
    run = shoal.Run(shutil.copytree(tmp_path / "whole", tmp_path / "laps"))  # once more from the beginning
    for path in (run.checkpoints / "last.pt", run.path / "metrics.jsonl", run.path / "train.log"):
        path.unlink()

    class Once(shoal.Hook):
        def after_iteration(self, loop):
            loop.stop("for now")

    for k in range(1, 5):
        run = shoal.resume(run.path, hook=Once(), quiet=True)
        assert run.load("last")["step"] == k * ROWS * 6
    assert differing(whole, told(run)) == []
