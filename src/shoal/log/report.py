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
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.algos.base import Algorithm
from shoal.log.console import clock
from shoal.ops.distributions import params_of

RULE = "=" * 100


def header(loop: Any) -> str:
    """What is trained, by what code, with which settings."""
    spec, settings, config = loop.env.spec, loop.resolved.settings, loop.config
    everyone = [g for g in spec.groups for _ in g.agents]
    shapers = "".join(f", {g} by {getattr(f, '__qualname__', f)}" for g, f in loop.shapers.items())
    facts = {
        "Model": ", ".join(f"{a.id} ({type(a).__name__}) for {'+'.join(a.groups)}" for a in loop.players.algorithms),
        "Dir": loop.folder.path,
        "Date": datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
        "num_envs": config.envs,
        "agents": [name for g in spec.groups for name in g.agents],
        "state_size": [g.obs for g in everyone],
        "action_size": [params_of(g.action) for g in everyone],
        "action_space": [g.action for g in everyone],
        "envs": f"{settings.env}, {type(loop.env).__name__} ({loop.resolved.env_entry.family}), {loop.env.kind}",
        "reward_shape": f"reward {config.reward}, with the world's own shaping where it has some{shapers}",
        "icm": None,
    }
    lines = [f"{k}: {v}" for k, v in facts.items()]
    classes = [cls for a in loop.learners for cls in type(a).__mro__ if issubclass(cls, Algorithm)]
    files = dict.fromkeys(Path(inspect.getfile(cls)) for cls in classes)
    for path in files:
        lines += [RULE, f"# {path.parent.name}/{path.name}", RULE, path.read_text().rstrip()]
    return "\n".join([*lines, RULE, "config:", resolved_json(loop), RULE])


def resolved_json(loop: Any) -> str:
    """Every setting with its value, defaults filled in."""
    parts = {"run": loop.config, "env": loop.resolved.env_config}
    parts.update({k: getattr(loop.resolved, k) for k in ("eval", "save", "log")})
    for a in loop.players.algorithms:
        parts[f"algo.{'+'.join(a.groups)}"] = a.config
        parts[f"net.{'+'.join(a.groups)}"] = a.net
    return json.dumps({k: dataclasses.asdict(v) for k, v in parts.items()}, indent=2)


def evaluation_line(loop: Any, episodes: Any) -> str:
    average = (loop.evaluation_sum / loop.evaluations).tolist()
    first = loop.learners[0] if loop.learners else None
    explore = float(getattr(first, "epsilon", getattr(first, "entropy_weight", 0.0)))
    told = loop.last_train
    total = loop.collector.episode_stats.take_earned().tolist()
    earned = total if loop.step else None
    losses = {k: v for k, v in told.items() if "loss" in k or k.endswith(("/entropy", "/predictQ"))}
    spread = " ".join(f"{x:.3f}" for x in episodes.spread(loop.env.spec))
    items = ", ".join(f"{k}: {_brief(v)}" for k, v in {"r_i": None, "r_t": earned, "eps": explore, **losses}.items())
    return (
        f"Step: {loop.step:7d}, Reward: {_brief(episodes.each().tolist())} [{spread}], "
        f"Avg: {_brief(average)} ({explore:.4f}) <{clock(loop.seconds)}> ({{{items}}})"
    )


def _brief(x: Any) -> str:
    if isinstance(x, list):
        return "[" + " ".join(_brief(v) for v in x) + "]"
    return f"{x:.4g}" if isinstance(x, float) else str(x)
