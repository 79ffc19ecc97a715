"""Whether two checkouts compute the same: short runs of many settings in each, compared number by number.

    python scripts/same.py OLD/src NEW/src [--only WORD]

Weights, targets, optimisers, statistics, generators, the world's state and the metrics of every run must be equal, bit for bit;
clocks are left out, and so are names: tensors are compared in the order in which a checkpoint holds them.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHORT = {"learning_starts": 100, "batch": 16, "capacity": 4000}
TEAM = {"reward": "team-mean"}
CONTINUOUS = {"env": {"actions": "continuous"}}
GRU = {"net": {"memory": "gru", "memory_width": 16}}


def off(**algo: Any) -> dict[str, Any]:
    return {"algo": {**SHORT, **algo}}


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # on-policy
    "ppo-cartpole": ("ppo", "CartPole-v1", {}),
    "ppo-pendulum": ("ppo", "Pendulum-v1", {"algo": {"squash": True, "noise_keep": 0.5, "random_steps": 900}}),
    "ippo": ("ippo", "simple_spread", {}),
    "mappo": ("mappo", "simple_spread", {}),
    "mappo-graph": ("mappo", "simple_spread", {"compile": "graph"}),
    "mappo-fused": ("mappo", "simple_spread", {"compile": "fused"}),
    "mappo-gru": ("mappo", "simple_spread", {**GRU, "algo": {"chunk": 5, "minibatches": 2}}),
    "mappo-lstm-target": ("mappo", "simple_spread", {"net": {"memory": "lstm"}, "algo": {"target_tau": 0.1}}),
    "mappo-attention": ("mappo", "simple_spread", {"net": {"attention": "both"}}),
    "mappo-agent": ("mappo", "simple_spread", {"algo": {"critic_input": "agent"}}),
    "mappo-own-nets": ("mappo", "simple_spread", {"net": {"share": "none"}, "algo": {"advantage_scope": "agent"}}),
    "mappo-slices": ("mappo", "simple_spread", {"algo": {"critic_slices": 5, "advantage_every": "epoch"}}),
    "mappo-minibatch": ("mappo", "simple_spread", {"algo": {"advantage_every": "minibatch", "advantage_scope": "batch"}}),
    "mappo-kl": ("mappo", "simple_spread", {"algo": {"lr_schedule": "kl", "kl_stop": 0.001, "learning_starts": 500}}),
    "mappo-norm": ("mappo", "simple_spread", {"algo": {"normalise_reward": True, "reward_scale": 0.5, "time_limit": False}}),
    "mappo-shared": ("ippo", "simple_spread", {"net": {"trunk": "shared"}}),
    "mappo-trunk": ("mappo", "simple_spread", {"algo": {"critic_input": "agent"}, "net": {"trunk": "shared"}}),
    "mappo-deaths": ("mappo", "probe_deaths", {}),
    "mappo-deaths-team": ("mappo", "probe_leave", TEAM),
    "mappo-deaths-gru": ("mappo", "probe_leave", {**TEAM, **GRU, "algo": {"critic": "team"}}),
    "ppo-turns": ("ppo", "probe_turns", {}),
    "ppo-turns-gru": ("ppo", "probe_turns", GRU),
    "ppo-masks": ("ppo", "probe_illegal", {}),
    "ppo-image": ("ppo", "probe_image", {}),
    "mappo-image": ("mappo", "probe_image", GRU),
    "a2c": ("a2c", "CartPole-v1", {}),
    "maa2c": ("maa2c", "simple_spread", {"algo": {"critic_slices": 3}}),
    "mappo-tag": ("mappo", "simple_tag", {"team": {"agent": "ippo"}}),
    "mappo-comm": ("mappo", "simple_world_comm", {}),
    # values
    "ddqn-cartpole": ("ddqn", "CartPole-v1", off()),
    "dqn-dueling-noisy": ("dqn", "CartPole-v1", off(dueling=True, noisy=True, epsilon=0.0, n_step=3)),
    "ddqn-keep": ("ddqn", "simple_spread", off(epsilon_keep=0.7, normalise_reward=True, prioritised=True)),
    "ddqn-turns": ("ddqn", "probe_turns", off(prioritised=True)),
    "ddqn-image": ("ddqn", "probe_image", off()),
    "ddqn-masks": ("ddqn", "probe_illegal", off()),
    "iql-deaths-gru": ("iql", "probe_leave", {**TEAM, **GRU, **off(prioritised=True)}),
    "iql-graph": ("iql", "simple_spread", {**off(), "compile": "graph"}),
    "vdn": ("vdn", "simple_spread", {**TEAM, **off(n_step=2)}),
    "vdn-unlike": ("vdn", "simple_speaker_listener", {**off(), **GRU, "reward": "team-sum"}),
    "qmix": ("qmix", "simple_spread", {**TEAM, **off()}),
    "qmix-fused": ("qmix", "simple_spread", {**TEAM, **off(), "compile": "fused"}),
    "qmix-deaths": ("qmix", "probe_leave", {**TEAM, **off(target_every=3)}),
    "qmix-gru": ("qmix", "simple_spread", {**TEAM, **off(burn_in=2, chunk=6), **GRU}),
    # COMA
    "coma": ("coma", "simple_spread", {**TEAM, "algo": {"critic_slices": 5}}),
    "coma-gru": ("coma", "simple_spread", {**TEAM, **GRU, "algo": {"normalise_reward": True}}),
    "coma-replay": ("coma", "simple_spread", {**TEAM, "algo": {"replay": 64, "batch": 4}}),
    "coma-deaths": ("coma", "probe_leave", {**TEAM, "algo": {"advantage_scope": "agent"}}),
    "coma-unlike": ("coma", "simple_speaker_listener", {"reward": "team-sum"}),
    # actor-critics with a replay
    "ddpg-pendulum": ("ddpg", "Pendulum-v1", off(noise_keep=0.8, random_steps=100)),
    "td3": ("td3", "Pendulum-v1", off(random_steps=100)),
    "sac": ("sac", "Pendulum-v1", off(random_steps=100, n_step=2)),
    "sac-discrete": ("sac", "CartPole-v1", off(random_steps=0)),
    "maddpg": ("maddpg", "simple_spread", {**CONTINUOUS, **off()}),
    "maddpg-own-pay": ("maddpg", "simple_tag", {**off(others="policy"), "team": {"agent": "iddpg"}}),
    "maddpg-discrete": ("maddpg", "simple_spread", {**TEAM, **off(others="policy", random_steps=100)}),
    "maddpg-gru": ("maddpg", "simple_spread", {**TEAM, **CONTINUOUS, **GRU, **off()}),
    "maddpg-deaths": ("maddpg", "probe_leave", {**TEAM, **off()}),
    "matd3-fused": ("matd3", "simple_spread", {**CONTINUOUS, **off(prioritised=True), "compile": "fused"}),
    "masac": ("masac", "simple_spread", {**TEAM, **CONTINUOUS, **off()}),
    "masac-unlike": ("masac", "simple_speaker_listener", {**off(random_steps=0), "team": {"speaker": "iql"}}),
    "masac-image": ("masac", "probe_image", off()),
    "isac-turns": ("isac", "probe_turns", off()),
    "isac-attention": ("isac", "simple_spread", {**off(), "net": {"attention": "both"}}),
    # several learners of several kinds, and worlds in Python
    "mixed": ("mappo", "simple_adversary", {"team": {"adversary": "iql"}, "groups": {"adversary": {"algo": SHORT}}}),
    "random": ("mappo", "simple_tag", {"team": {"agent": "random"}}),
    "gymnasium": ("ppo", "gymnasium/Acrobot-v1", {}),
}  # fmt: skip

RUN = """
import json, sys
import shoal
algo, env, settings, out = json.loads(sys.argv[1])
rows = 16
settings.setdefault("compile", "off")
shoal.train(algo, env, **settings, envs=rows, steps=10 * rows * 25, quiet=True, out=out, seed=7,
            eval={"every": 2000, "episodes": 8}, save={"every": 0}, log={"every": 400})
"""


def play(source: str, case: str, out: Path) -> dict[str, list[Any]] | str:
    """What a run left: its tensors and its metrics; or what went wrong."""
    algo, env, settings = CASES[case]
    words = [sys.executable, "-c", RUN, json.dumps([algo, env, settings, str(out / "run")])]
    done = subprocess.run(words, env={"PYTHONPATH": source, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, cwd=out)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    import torch

    state = torch.load(out / "run" / "checkpoints" / "last.pt", weights_only=True)
    for gone in ("seconds", "logs", "last_train"):
        state.pop(gone, None)
    text = (out / "run" / "metrics.jsonl").read_text().replace(str(out), "")  # remarks may name the folder
    lines = [json.loads(x) for x in text.splitlines()]
    return {"state": leaves(state), "metrics": [sorted((k, v) for k, v in line.items() if k != "time") for line in lines]}


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [x for v in tree.values() for x in leaves(v)]
    return [x for v in tree for x in leaves(v)] if isinstance(tree, list | tuple) else [tree]


def difference(old: Any, new: Any) -> float:
    """The largest, of what is the same shape; infinite where nothing can be compared."""
    import torch

    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if old.shape != new.shape or old.dtype != new.dtype:
            return math.inf
        return 0.0 if torch.equal(old, new) else float((old.double() - new.double()).abs().max())
    if isinstance(old, float) and isinstance(new, float):
        return 0.0 if old == new or (math.isnan(old) and math.isnan(new)) else abs(old - new)
    return 0.0 if type(old) is type(new) and old == new else math.inf


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path, help="keep what the old checkout computed here, for the next time")
    options = parser.parse_args()
    import torch

    wrong = 0
    chosen = [c for c in CASES if all(c.find(w) >= 0 for w in options.only.split())]
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / name for name in ("old", "new")]
            for path in paths:
                path.mkdir()
            kept = options.keep / f"{case}.pt" if options.keep else None
            if kept is not None and kept.exists():
                old = torch.load(kept, weights_only=False)
            else:
                old = play(str(Path(options.old).resolve()), case, paths[0])
                if kept is not None:
                    options.keep.mkdir(exist_ok=True)
                    torch.save(old, kept)
            if options.new == "none":
                print(f"{case}: {old if isinstance(old, str) else 'kept'}", flush=True)
                continue
            new = play(str(Path(options.new).resolve()), case, paths[1])
        if isinstance(old, str) or isinstance(new, str):
            verdict = f"old: {old if isinstance(old, str) else 'ran'}; new: {new if isinstance(new, str) else 'ran'}"
            wrong += 1
        elif len(old["state"]) != len(new["state"]) or len(old["metrics"]) != len(new["metrics"]):
            verdict, wrong = f"{len(old['state'])} and {len(new['state'])} tensors", wrong + 1
        else:
            apart = [difference(a, b) for a, b in zip(old["state"], new["state"], strict=True)]
            named = [difference(a, b) for x, y in zip(old["metrics"], new["metrics"], strict=True)
                     for (_, a), (_, b) in zip(x, y, strict=False)]  # fmt: skip
            bad = sum(x > 0 for x in (*apart, *named))
            wrong += bad > 0
            verdict = (
                f"equal: {len(apart)} values of the state, {len(named)} metrics"
                if not bad
                else f"{sum(x > 0 for x in apart)} of {len(apart)} values differ, by {max(apart):.3g}; "
                f"{sum(x > 0 for x in named)} of {len(named)} metrics, by {max(named):.3g}"
            )
        print(f"{case}: {verdict}", flush=True)
    print(f"{len(chosen)} settings, {wrong} differ")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
