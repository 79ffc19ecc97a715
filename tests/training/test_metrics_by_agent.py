"""Metrics of learning agent by agent (`--log.agents`): each agent's part in the group's mean, and nothing learnt otherwise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_graph import assert_equal

import shoal
from shoal.ids import catalog
from shoal.kernels import native
from shoal.ops.losses import EACH
from shoal.spec import UserError
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve
from shoal.training.stats import MetricMeans

torch.set_num_threads(1)
ONES = {e.cls: id for id, e in reversed(catalog("algos").items()) if e.load().learns}  # a name of each class
PAST = {"learning_starts": 8, "batch": 4, "capacity": 4000, "every": 16}
GROUPS_ALONE = {  # what is no mean over agents
    *("episodes", "explained_variance", "learning_rate", "learning_rate_actor", "learning_rate_critic", "grad_norm"),
    *("grad_norm_actor", "grad_norm_critic", "target_lag", "epsilon", "noise", "std", "kept"),
}


def loop_of(id: str, env: str = "probe_leave", agents: bool = True, compile: str = "off", **algo: Any) -> Loop:
    cls = catalog("algos")[id].load()
    known = cls.Config.__dataclass_fields__
    given = {
        **(PAST if "capacity" in known else {"rollout": 6}),
        **({"epochs": 1, "minibatches": 1} if "clip" in known else {}),
    }
    reward = "team-mean" if cls.reward == "common" else "own"
    run = {"envs": 4, "steps": 400, "quiet": True, "reward": reward, "compile": compile, "device": "cpu"}
    return Loop(resolve(Settings(id, env, run, {"algo": {**given, **algo}, "log": {"agents": agents}})))


@pytest.mark.parametrize("compile", ["off", *([] if native.why_not() else ["fused"])])
@pytest.mark.parametrize("id", ONES.values())
def test_agents_means_make_up_their_groups_and_nothing_is_learnt_otherwise(id: str, compile: str) -> None:
    loop, plain = loop_of(id, compile=compile), loop_of(id, agents=False, compile=compile)
    for x in (loop, plain):
        x.on_device_updates[:] = x.trainers  # not recorded: what is told is looked at here
    add, seen = loop.means.add, set()

    def compared(whose: str, metrics: dict[str, Any]) -> None:
        for name, (sums, counts) in ((k, x) for k, x in metrics.items() if k.endswith(EACH)):
            if counts.sum():  # of an actor that waits there are none
                torch.testing.assert_close(sums.sum() / counts.sum(), metrics[name.removesuffix(EACH)], rtol=1e-4, atol=1e-5)
                seen.add(name.removesuffix(EACH))
        add(whose, metrics)

    loop.means.add = compared  # type: ignore[method-assign]
    for _ in range(8):
        loop.iterate()
        plain.iterate()
    loop.means.add = add  # type: ignore[method-assign]
    assert plain.means.each == {}
    groups = {k.removeprefix("agents/") for k in plain.means.names["agents"]}
    apart = set() if loop.learners[0].as_one and not hasattr(loop.learners[0], "actor") else groups - GROUPS_ALONE
    assert seen == apart
    assert seen or loop.learners[0].as_one
    loop.means.each.clear()
    assert_equal(loop, plain)


def test_what_an_agent_is_told_is_its_own() -> None:
    """In probe_leave agent_0 may be gone after the first step: it has fewer entropies to count."""
    loop = loop_of("ippo")
    loop.iterate()
    (counts,) = (x[1] for k, x in loop.means.each["agents"].items() if k == f"entropy{EACH}")
    assert counts[0] < counts[1]
    assert counts[1] == 6 * 4
    told = loop.means.take()
    assert told["agents/0/entropy"] != told["agents/1/entropy"]
    assert told["agents/0/policy_loss"] != told["agents/1/policy_loss"]


def test_critics_of_a_team_are_one_and_its_actors_are_not() -> None:
    vdn = loop_of("vdn")
    for _ in range(6):
        vdn.iterate()
    assert vdn.means.each == {}
    team = loop_of("coma", env="simple_speaker_listener", critic_slices=2)
    team.iterate()
    told = {k for k in team.means.take() if k.count("/") == 2}
    assert {k.rpartition("/")[0] for k in told} == {"speaker/0", "listener/0"}
    assert {k.rpartition("/")[2] for k in told} == {"critic_loss", "td_error", "q", "policy_loss", "entropy", "advantage"}


def test_means_by_agent_are_of_all_that_an_agent_did() -> None:
    """Sums of 3 over 2 and 1 over 2: 1; an agent that did nothing has none. Groups are named as returns are."""
    means = MetricMeans({"a": 2, "b": 1})
    each = [torch.tensor([[3.0, 0, 5], [2, 0, 1]]), torch.tensor([[1.0, 0, 3], [2, 0, 1]])]
    for x in each:
        means.add("a,b", {"x": torch.tensor(1.0), f"x{EACH}": x})
    again = MetricMeans({"a": 2, "b": 1})
    again.load_state_dict(means.state_dict(), torch.device("cpu"))
    for one in (means, again):
        told = {k: x.item() for k, x in one.take().items()}
        assert math.isnan(told.pop("a/1/x"))
        assert told == {"a/x": 1.0, "b/x": 1.0, "a/0/x": 1.0, "b/0/x": 4.0}
        assert math.isnan(one.take()["a/0/x"])
    again.load_state_dict(means.state_dict(), torch.device("cpu"))
    older = {k: x for k, x in means.state_dict().items() if k != "each"}
    mine = again.each["a,b"][f"x{EACH}"]
    again.load_state_dict(older, torch.device("cpu"))
    assert again.each["a,b"][f"x{EACH}"] is mine  # emptied in place: a graph may write there
    assert not mine.any()


@pytest.mark.parametrize("compile", ["graph", *([] if native.why_not() else ["fused"])])
@pytest.mark.parametrize("id", ["ddqn", "matd3", "sac"])
def test_recorded_updates_tell_agents_apart_to_the_same_bits(id: str, compile: str) -> None:
    plain, replayed = (loop_of(id, "simple_spread", compile=compile) for _ in range(2))
    plain.on_device_updates[:] = plain.trainers
    for _ in range(10):
        plain.iterate()
        replayed.iterate()
    assert_equal(plain, replayed)
    assert plain.means.each["agents"].keys() == replayed.means.each["agents"].keys()
    assert all(torch.equal(x, replayed.means.each["agents"][k]) for k, x in plain.means.each["agents"].items())


def test_an_actor_that_waits_adds_nothing() -> None:
    """Also where nobody has looked whether it is due, as on CUDA."""
    looked, blind = (loop_of("matd3", "simple_spread", delay=3) for _ in range(2))
    blind.on_device_updates[:] = [trainer.update_once for trainer in blind.trainers]
    for _ in range(6):
        looked.iterate()
        blind.iterate()
    assert_equal(looked, blind)
    each, same = looked.means.each["agents"], blind.means.each["agents"]
    assert each.keys() == same.keys()
    assert all(torch.equal(x, same[k]) for k, x in each.items())
    updates = int(looked.learners[0].target.updates)
    assert each[f"loss_critic{EACH}"][1].tolist() == [4.0 * updates] * 3
    assert each[f"loss_actor{EACH}"][1].tolist() == [4.0 * (updates // 3)] * 3


# --- a run ---

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ippo": ("probe_deaths", {"algo": {"rollout": 6, "critic_slices": 2}}),
    "matd3": ("simple_tag", {"algo": {"rollout": 6, **PAST}, "env": {"max_cycles": 5}}),
    "coma": ("simple_speaker_listener", {"algo": {"rollout": 6}, "env": {"max_cycles": 5}}),
}


def run_of(out: Path, id: str, until: int | None = None, agents: bool = True) -> shoal.Run:
    env, sections = RUNS[id]
    log = {"agents": agents, "every": 48, "tensorboard": False}
    how: dict[str, Any] = {
        "envs": 4,
        "steps": 96,
        "until": until,
        "quiet": True,
        "compile": "off",
        "eval": {"episodes": 2, "recheck": False, "every": 48},
    }
    return shoal.train(id, env, out=out, log=log, **sections, **how)


def lines(run: shoal.Run) -> list[dict[str, Any]]:
    return [{k: x for k, x in line.items() if k != "time"} for line in run.metrics]


@pytest.mark.parametrize("id", RUNS)
def test_a_run_that_was_stopped_between_lines_goes_on_as_if_it_had_not(id: str, tmp_path: Path) -> None:
    whole, half = run_of(tmp_path / "a", id), run_of(tmp_path / "b", id, until=72)
    half = shoal.resume(half, quiet=True)
    assert lines(whole) == lines(half)
    told = [line for line in lines(whole) if line["kind"] == "train"][-1]
    apart = {k for k in told if k.count("/") == 2 and not k.startswith("return/")}
    for g in whole.spec.groups:
        assert {k.split("/")[1] for k in apart if k.startswith(f"{g.name}/")} == {str(i) for i in range(g.n)}
    off = run_of(tmp_path / "c", id, agents=False)
    assert [{k: x for k, x in line.items() if k not in apart} for line in lines(whole)] == lines(off)
    assert told_people(whole) == told_people(off)


def told_people(run: shoal.Run) -> list[str]:
    """What train.log says at each evaluation, which is of groups."""
    return [x.partition("({")[2] for x in (run.path / "train.log").read_text().splitlines() if x.startswith("Step:")]


def test_sums_by_agent_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", "ippo", until=24)
    path = run.checkpoints / "last.pt"
    state = run.load("last")
    assert state["means"]["each"]["agents"]
    for wrong in ("x", {"agents": None}, {"agents": {"x": torch.zeros(2, 7)}}, {"nobody": {"x": torch.zeros(2, 3)}}):
        torch.save({**state, "means": {**state["means"], "each": wrong}}, path)
        with pytest.raises(UserError, match=r"does not fit its run: the metrics of the agents of '.*' are not theirs\."):
            shoal.resume(run, quiet=True)
    config = json.loads((run.path / "config.json").read_text())
    assert config["sections"]["log"]["agents"] is True
