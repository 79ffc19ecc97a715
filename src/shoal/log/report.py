"""train.log, for people: a header that records what was trained, then a line an evaluation.

    Step:     500, Reward: [-24.1 -24.1 -24.1] [3.376], Avg: [-24.9 -24.9 -24.9] (0.1000) <00:00:02> ({r_i: None, ...})

Reward is each agent's mean return over the evaluation's episodes, in the world's order of groups; [] for each team the
standard deviation over episodes of its agents' mean; Avg the mean of all evaluations so far; () the exploration (epsilon, or
the entropy weight); <> the time; {} r_t, the training reward that each agent earned in a row since the last such line, and the
last training metrics.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.algos.base import Algorithm
from shoal.algos.samples import Samples
from shoal.envs.base import Environment
from shoal.log.console import clock
from shoal.ops.distributions import params_of
from shoal.spec import EnvSpec

if TYPE_CHECKING:
    from shoal.training.evaluate import Episodes
    from shoal.training.settings import Resolved

RULE = "=" * 100


@dataclass(frozen=True)
class Facts:
    """What a line of an evaluation tells, beside its episodes."""

    step: int
    seconds: float
    spec: EnvSpec
    learners: list[Algorithm]
    average: list[float]  # of all evaluations so far, each agent's
    earned: list[float] | None  # what each agent earned in a row since the last such line
    last_train: dict[str, Any]  # the last line of training metrics


def header(resolved: Resolved, folder: Path, env: Environment, players: list[Algorithm], shapers: dict[str, Any]) -> str:
    """What is trained, by what code, with which settings."""
    spec, config = env.spec, resolved.run
    everyone = [g for g in spec.groups for _ in g.agents]
    shaped = "".join(f", {g} by {getattr(f, '__qualname__', f)}" for g, f in shapers.items())
    facts = {
        "Model": ", ".join(f"{a.id} ({type(a).__name__}) for {'+'.join(a.groups)}" for a in players),
        "Dir": folder,
        "Date": datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
        "num_envs": config.envs,
        "agents": [name for g in spec.groups for name in g.agents],
        "state_size": [g.obs for g in everyone],
        "action_size": [params_of(g.action) for g in everyone],
        "action_space": [g.action for g in everyone],
        "envs": f"{resolved.settings.env}, {resolved.env_entry.load().__name__} ({resolved.env_entry.family}), {env.kind}",
        "reward_shape": f"reward {config.reward}, with the world's own shaping where it has some{shaped}",
        "icm": None,
    }
    lines = [f"{k}: {v}" for k, v in facts.items()]
    parts = [cls for a in players if a.learns for m in a.modules() for cls in type(m).__mro__]
    learning = [c for c in (*parts, Samples) if issubclass(c, Algorithm) or c.__module__.startswith("shoal.algos.")]
    files = dict.fromkeys(Path(inspect.getfile(cls)) for cls in learning)
    for path in files:
        lines += [RULE, f"# {path.parent.name}/{path.name}", RULE, path.read_text().rstrip()]
    return "\n".join([*lines, RULE, "config:", resolved_json(resolved, players), RULE])


def resolved_json(resolved: Resolved, players: list[Algorithm]) -> str:
    """Every setting with its value, defaults filled in."""
    parts = {"run": resolved.run, "env": resolved.env_config}
    parts.update({k: getattr(resolved, k) for k in ("eval", "save", "log")})
    for a in players:
        parts[f"algo.{'+'.join(a.groups)}"] = a.config
        parts[f"net.{'+'.join(a.groups)}"] = a.net
    return json.dumps({k: dataclasses.asdict(v) for k, v in parts.items()}, indent=2)


def evaluation_line(facts: Facts, episodes: Episodes) -> str:
    first = facts.learners[0] if facts.learners else None
    explore = float(getattr(first, "epsilon", getattr(first, "entropy_weight", 0.0)))
    groups = {k: v for k, v in facts.last_train.items() if not re.search(r"/\d+/", k)}  # and not agent by agent
    losses = {k: v for k, v in groups.items() if "loss" in k or k.endswith(("/entropy", "/predictQ"))}
    spread = " ".join(f"{x:.3f}" for x in episodes.spread(facts.spec))
    items = ", ".join(f"{k}: {_brief(v)}" for k, v in {"r_i": None, "r_t": facts.earned, "eps": explore, **losses}.items())
    return (
        f"Step: {facts.step:7d}, Reward: {_brief(episodes.each().tolist())} [{spread}], "
        f"Avg: {_brief(facts.average)} ({explore:.4f}) <{clock(facts.seconds)}> ({{{items}}})"
    )


def _brief(x: Any) -> str:
    if isinstance(x, list):
        return "[" + " ".join(_brief(v) for v in x) + "]"
    return f"{x:.4g}" if isinstance(x, float) else str(x)
