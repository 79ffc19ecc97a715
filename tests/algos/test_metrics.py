"""What an algorithm logs is what the part "Metrics" of its docstring says, and nothing else."""

import pytest

from shoal.ids import catalog
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve

SHORT = {"learning_starts": 8, "batch": 4, "capacity": 4000, "every": 16}
OPTIONS = {  # settings that log more
    "ppo": [{"env": {"actions": "continuous"}}, {"net": {"trunk": "shared"}}, {"algo": {"kl_stop": 0.01}}],
    "a2c": [{"env": {"actions": "continuous"}}, {"net": {"trunk": "shared"}}],
}
ONES = {e.cls: id for id, e in reversed(catalog("algos").items()) if e.load().learns}  # a name of each class


def logged(id, sections):
    cls = catalog("algos")[id].load()
    replays = "capacity" in cls.Config.__dataclass_fields__
    algo = {**(SHORT if replays else {"rollout": 8}), **sections.get("algo", {})}
    run = {"envs": 4, "steps": 400, "quiet": True, **({"reward": "team-mean"} if cls.reward == "common" else {})}
    loop = Loop(resolve(Settings(id, "probe_copy", run, {**sections, "algo": algo})))
    for _ in range(4 if replays else 1):
        loop.iterate()
    return {k.removeprefix("agents/") for k in loop.means.take()}


@pytest.mark.parametrize("id", ONES.values())
def test_what_is_logged_is_explained(id):
    entry = catalog("algos")[id]
    names = set().union(*(logged(id, s) for s in ({}, *OPTIONS.get(entry.path.stem, ()))))
    assert names == set(entry.metrics)
    assert all(entry.metrics.values())
