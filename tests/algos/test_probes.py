"""Every probe world by every algorithm that declares it can take it, at the answer stated in the world's own file."""

import dataclasses

import pytest
import torch

from shoal.algos.base import fits
from shoal.api import make
from shoal.envs.probe.base import Valued
from shoal.ids import catalog
from shoal.spec import UserError
from shoal.training.evaluate import evaluate
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve

GAMMA = 0.9


def learners():
    """Every algorithm that learns, once: names that stand for equal settings of one class are one."""
    by_config = {}
    for id, e in catalog("algos").items():
        if e.load().learns:
            by_config.setdefault((e.cls, e.load().Config(**e.settings)), id)
    return list(by_config.values())


PROBES = [id for id, e in catalog("envs").items() if e.family == "probe"]
# settings worth a run of their own, beside each world's defaults
VARIANTS = [
    *((p, {}) for p in PROBES),
    ("probe_copy", {"actions": "multi"}),
    ("probe_copy", {"actions": "continuous"}),
    ("probe_illegal", {"actions": "multi"}),
    ("probe_matrix", {"payoff": "penalty"}),
    ("probe_truncated", {"stagger": True, "n": 2}),
    ("probe_terminated", {"stagger": True, "n": 2}),
    ("probe_deaths", {"copy": False}),
    ("probe_turns", {"copy": False}),
    ("probe_teams", {"shaped": True}),  # one of the pair is to copy and the other to miss: nets of their own
]
NETS = {"probe_teams-True": {"share": "none"}}


def train(algo, env, config, solved=lambda loop: None, iterations=200, net=None):
    """The loop's own parts, without a folder. Stops as soon as `solved` raises no AssertionError; at the end it may."""
    wanted = {
        "rollout": 16,
        "epochs": 4,
        "minibatches": 2,
        "lr": 5e-3,
        "lr_schedule": "linear",
        "gamma": GAMMA,
        "entropy": 0.005,
    }
    known = {f.name for f in dataclasses.fields(catalog("algos")[algo].load().Config)}
    sections = {"algo": {k: v for k, v in wanted.items() if k in known}, "net": {"hidden": (32,), **(net or {})}, "env": config}
    run = {"envs": 32, "steps": iterations * 16 * 32, "quiet": True}
    loop = Loop(resolve(Settings(algo, env, run, sections)))
    for k in range(1, iterations + 1):
        batch = loop.collector.collect(loop.rollout)
        loop.step += batch.over.numel()
        loop.pay(batch)
        loop.update(batch)
        if k % 20 == 0 and k < iterations:
            try:
                solved(loop)
            except AssertionError:
                continue
            return loop
    solved(loop)
    return loop


def check(loop):
    world = make(loop.resolved.settings.env, 256, **loop.resolved.settings.section("env"))
    seen = evaluate(world, loop.players, 1, seed=7)
    answer = world.answer
    for g, returns in seen.returns.items():
        score = float(returns.mean())
        assert score >= answer.floor[g] - 1e-6, f"{g} reached {score:.3f}, floor {answer.floor[g]:.3f}"
        if getattr(world.config, "shaped", False):  # who ignores the shaping earns more than the answer
            assert abs(score - answer.best[g]) <= answer.slack
    assert float(seen.stats.get("illegal", torch.zeros(1)).sum()) == 0
    assert float(loop.collector.tally.done.get("stat/illegal", torch.zeros(1))) == 0  # nor while it explored
    if isinstance(world, Valued):
        frames, truth = world.frames(), world.values(GAMMA)
        batch_of_one = dataclasses.replace(frames, views={g: _timed(v) for g, v in frames.views.items()})
        for a in loop.learners:
            with torch.no_grad():
                value = a.values(batch_of_one)[0]  # [states, N]
            (g,) = a.groups
            acts = frames[g].acts
            wrong = (value - truth[g])[acts].abs().max()
            assert wrong < 0.12 * max(1.0, float(truth[g].abs().max())), f"{g}: values are off by {wrong:.3f}"


def _timed(view):
    return type(view)(*(None if x is None else x[None] for x in vars(view).values()))


@pytest.mark.parametrize("algo", learners())
@pytest.mark.parametrize(("env", "config"), VARIANTS, ids=[f"{e}-{'-'.join(map(str, c.values()))}" for e, c in VARIANTS])
def test_probe_is_solved(algo, env, config):
    cls = catalog("algos")[algo].load()
    world = make(env, 1, **config)
    try:
        fits(cls, world.spec, [g.name for g in world.spec.groups])
    except UserError:
        return  # declared: it cannot take this world; tests of `fits` see that it says so
    if env == "probe_memory" and not cls.recalls:  # what needs memory cannot be solved without: a coin's toss
        loop = train(algo, env, config, iterations=10)
        seen = evaluate(make(env, 256), loop.players, 1, seed=7)
        assert abs(float(seen.returns["agents"].mean())) < 0.3
        return
    train(algo, env, config, check, net=NETS.get(f"{env}-{'-'.join(map(str, config.values()))}"))
