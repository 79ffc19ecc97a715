"""Benches measure what training runs: every mode, in one table, with ratios to a base."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from shoal.cli import main
from shoal.tools.bench import EnvBench, TrainBench, bench_env, bench_train, trainer

FAST: dict[str, Any] = {"seconds": 0.01, "repeats": 2, "device": "cpu"}


def test_stepping_in_both_modes_and_the_reference() -> None:
    result = bench_env("simple_spread", EnvBench(**FAST, rows=(2, 4), compile="fused"))
    shoal = [f"shoal, {n} rows, {mode}" for n in (2, 4) for mode in ("fused", "off")]
    assert list(result.rates) == [*shoal, "mpe2, bare stepping"]
    assert all(len(r) == 2 and min(r) > 0 for r in result.rates.values())
    assert result.ratio("mpe2, bare stepping") == 1.0
    assert result.as_json()["base"] == "mpe2, bare stepping"


@pytest.mark.parametrize("part", ["train", "update"])
def test_training_and_updates(part: str) -> None:
    options = TrainBench(**FAST, rows=2, rollout=5, epochs=1, minibatches=1, compile="fused")
    result = bench_train("ippo", "probe_copy", options, part)
    assert list(result.rates) == ["shoal, ippo, fused", "shoal, ippo, off"]
    assert result.base == "shoal, ippo, off"  # the reference has no such world
    assert ("updates of ippo" in result.title) == (part == "update")


def test_an_update_learns_from_one_rollout_and_steps_no_world() -> None:
    options = TrainBench(**FAST, rows=2, rollout=5, epochs=1, minibatches=1)
    work = trainer("ippo", "probe_copy", options, torch.device("cpu"), "off", "update")
    loop = next(c.cell_contents for c in work.__closure__ or () if hasattr(c.cell_contents, "env"))
    clock, weights = loop.env.state["clock"].clone(), loop.learners[0].actor_optimiser.steps.clone()
    assert work() == 10
    assert torch.equal(loop.env.state["clock"], clock)
    assert loop.learners[0].actor_optimiser.steps == weights + 1


def test_recorded_updates_on_the_cpu_are_compared_with_plain_ones() -> None:
    options = TrainBench(**FAST, rows=4, rollout=5, batch=16, compile="graph")
    result = bench_train("ddqn", "probe_copy", options, "update")
    assert list(result.rates) == ["shoal, ddqn, graph", "shoal, ddqn, off"]
    assert result.base == "shoal, ddqn, off"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench update ippo probe_copy --rows 2 --rollout 5 --seconds 0.01 --repeats 1 --device cpu --compile off --json"
    assert main(words.split()) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["medians"]) == ["shoal, ippo, off"]
    assert result["ratios"] == {"shoal, ippo, off": 1.0}
