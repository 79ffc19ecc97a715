"""Values above any return are named: what returns can come to, by hand, and the sentence in a run."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_resume import leaves, metrics

import shoal
from shoal.log.logger import read_remarks
from shoal.nets.norm import Running
from shoal.ops.returns import most_return, steps_that_count
from shoal.spec import UserError
from shoal.training.hooks import Hook
from shoal.training.loop import Loop
from shoal.training.overestimation import Overestimation
from shoal.training.return_limits import ReturnLimit
from shoal.training.run import Run
from shoal.training.settings import Settings, resolve

OLDER = Path(__file__).parents[1] / "data" / "older_runs"


@pytest.mark.parametrize(
    ("reward", "stretch", "steps", "gamma", "most"),
    [
        (1.0, 500.0, 500, 0.99, 100.0),  # CartPole: 1 for ever
        (100.0, 120.0, 1000, 0.99, 120 / (1 - 0.99**1000)),  # LunarLander: a landing an episode
        (1.0, 1.0, 25, 0.9, 1 / (1 - 0.9**25)),  # once an episode
        (2.0, 2.0, 1, 0.5, 4.0),
        (-0.25, -0.25, 25, 0.95, -0.25),  # nothing but costs: the least of them, and then the end
        (0.0, 0.0, 25, 1.0, 0.0),
        (1.0, 3.0, 25, 1.0, math.inf),  # what is cut off goes on for ever
        (3.0, 3.0, 10, 0.0, 3.0),
    ],
)
def test_what_returns_can_come_to(reward: float, stretch: float, steps: float, gamma: float, most: float) -> None:
    assert most_return(reward, stretch, steps, gamma) == pytest.approx(most)


def test_no_return_is_above_it() -> None:
    """Discounted sums of episodes that end, and of those that are played over and over."""
    draw = torch.Generator().manual_seed(3)
    for _ in range(200):
        steps = int(torch.randint(1, 12, (), generator=draw))
        r = (torch.randn(steps, generator=draw, dtype=torch.float64) * 2 + torch.randn((), generator=draw)).tolist()
        sums = [sum(r[a:b]) for a in range(steps) for b in range(a + 1, steps + 1)]
        most = most_return(max(r), max(sums), steps, 0.9)
        for start in range(steps):
            assert sum(0.9**k * x for k, x in enumerate(r[start:])) <= most + 1e-9
        assert sum(0.9**k * r[k % steps] for k in range(300)) <= most + 1e-9


def limit_of(algo: str = "ddqn", env: str = "cartpole", rows: int = 2, **more: Any) -> ReturnLimit:
    settings = Settings(
        algo, env, {"envs": rows, "compile": "off"}, {"algo": {"capacity": 1000, **more}, "net": {"hidden": (4,)}}
    )
    loop = Loop(resolve(settings))
    assert list(loop.overestimation.limits) == [",".join(loop.learners[0].groups)]
    return next(iter(loop.overestimation.limits.values()))


def batch(reward: Any, over: Any) -> Any:
    """Rewards [T, B, N]."""
    return SimpleNamespace(learner_reward={"agents": torch.tensor(reward)}, over=torch.tensor(over, dtype=torch.bool))


def seen(limit: ReturnLimit) -> dict[str, float]:
    return {k: float(x) for k, x in limit.seen.items()}


def test_what_is_seen_of_rewards_by_hand() -> None:
    """Row 0: 1, -3, 2, 2, and on to 5. Row 1: 2, 1, the end, 3, -1, and on to 1.5."""
    limit = limit_of()
    first = [[[1.0], [2.0]], [[-3.0], [1.0]], [[2.0], [3.0]], [[2.0], [-1.0]]]
    limit.count(batch(first, [[0, 0], [0, 1], [0, 0], [0, 0]]))
    assert seen(limit) == {"reward": 3, "stretch": 4, "steps": 4, "unit": 1, "bonus": 0, "size": 15, "count": 8}
    limit.count(batch([[[5.0], [1.5]]], [[1, 0]]))
    assert seen(limit) == {"reward": 5, "stretch": 9, "steps": 5, "unit": 1, "bonus": 0, "size": 21.5, "count": 10}
    assert limit.under_way["stretch"].tolist() == [[0.0], [3.5]]
    assert limit.under_way["steps"].tolist() == [0.0, 3.0]


def test_the_best_stretch_is_that_of_every_stretch() -> None:
    draw = torch.Generator().manual_seed(1)
    limit, reward, over = limit_of(), torch.randn(60, 2, 1, generator=draw), torch.rand(60, 2, generator=draw) < 0.1
    for a in range(0, 60, 4):
        limit.count(SimpleNamespace(learner_reward={"agents": reward[a : a + 4]}, over=over[a : a + 4]))
    best, longest = -math.inf, 0
    for row in range(2):
        for a in range(60):
            total = 0.0
            for b in range(a, 60):
                total, longest = total + float(reward[b, row, 0]), max(longest, b - a + 1)
                best = max(best, total)
                if over[b, row]:
                    break
    assert (float(limit.seen["stretch"]), float(limit.seen["steps"])) == (pytest.approx(best, rel=1e-6), longest)


def named(limit: ReturnLimit, *values: float | None) -> list[int]:
    """Which of these lines name it."""
    return [k for k, v in enumerate(values) if limit.exceeded(v) is not None]


def paid(limit: ReturnLimit, *rewards: float) -> ReturnLimit:
    """One row's steps; the other is paid nothing that matters."""
    limit.count(batch([[[r], [rewards[0]]] for r in rewards], [[False] * 2] * len(rewards)))
    return limit


def test_the_rule_of_lines() -> None:
    """1 at every step, gamma 0.99: 100, a tenth of it, and a fiftieth of 1 + 0.99 + ... + 0.99^3 = 3.94."""
    most = 100 + 10 + 0.02 * steps_that_count(4, 0.99)
    assert most == pytest.approx(110.0788, abs=1e-4)

    def fresh() -> ReturnLimit:
        return paid(limit_of(), 1.0, 1.0, 1.0, 1.0)

    assert named(fresh(), *[200.0] * 14) == [12, 13]  # ten lines aside, three in a row
    assert fresh().exceeded(None) is None
    assert named(fresh(), *[50.0] * 10, 110.07, 110.07, 110.07, 110.07) == []
    assert named(fresh(), *[50.0] * 10, 110.09, 110.09, 110.09) == [12]
    assert named(fresh(), *[50.0] * 10, 120.0, 120.0, 100.0, 120.0, 120.0) == []
    assert named(fresh(), *[50.0] * 10, 130.0, 125.0, 120.0, 115.0, 112.0) == []  # it is falling
    assert named(fresh(), None, None, *[50.0] * 10, 120.0, 121.0, 122.0) == [14]  # lines without a value are none


def test_where_all_rewards_are_costs_no_value_is_above_zero() -> None:
    """-1 or -0.1 a step, gamma 0.99: -0.1, 0.01, and a fiftieth of 0.55 (1 + ... + 0.99^3) = 0.0433."""
    limit = paid(limit_of(), -1.0, -0.1, -1.0, -0.1)
    limit.under_way["stretch"].zero_()
    size = 0.02 * (1 * 6 + 0.1 * 2) / 8 * steps_that_count(4, 0.99)
    most = -0.1 + 0.01 + size
    assert most < 0
    assert named(limit, *[-3.0] * 10, *[most - 1e-4] * 3) == []
    assert named(limit, *[most + 1e-4] * 3) == [2]


def test_units_are_those_of_the_values() -> None:
    scaled = paid(limit_of(reward_scale=10.0), 1.0, 1.0)
    assert scaled.exceeded(0.0) is None
    assert scaled.seen["unit"] == 10
    assert named(scaled, *[1100.0] * 14) == []
    assert named(scaled, *[1102.0] * 14) != []
    halved = limit_of(normalise_reward=True)
    norm = halved.learner.reward_norm
    assert isinstance(norm, Running)
    norm.update(torch.full((10,), 2.0))
    paid(halved, 1.0, 1.0)
    assert halved.seen["unit"] == pytest.approx(0.5)
    assert named(halved, *[55.0] * 14) == []
    assert named(halved, *[55.1] * 14) != []


def test_an_entropy_is_worth_something_on_top() -> None:
    """Of SAC: alpha log 2 a step at most, of two choices; of a dimension alpha log 2 as well, of a range of 2."""
    for env in ("cartpole", "pendulum"):
        limit = paid(limit_of("sac", env, alpha=0.5), 1.0, 1.0)
        assert limit.seen["bonus"] == pytest.approx(0.5 * math.log(2), rel=1e-5)
        most = 100 + 50 * math.log(2)
        assert named(limit, *[1.1 * most] * 14) == []
        assert named(limit, *[1.1 * most + 0.1] * 14) != []
    one = limit_of("masac", "simple_spread", alpha=0.5)
    assert float(one.learner.most_bonus()) == pytest.approx(0.5 * math.log(5), rel=1e-5)  # type: ignore[arg-type]
    limit = limit_of("ddpg", "pendulum")
    assert limit.learner.most_bonus() is None


def test_what_is_not_asked() -> None:
    def limits(algo: str, env: str, **run: Any) -> dict[str, ReturnLimit]:
        sections = {"net": {"hidden": (4,)}, "algo": {} if algo == "ppo" else {"capacity": 1000}}
        return Loop(resolve(Settings(algo, env, {"envs": 2, "compile": "off", **run}, sections))).overestimation.limits

    assert limits("ppo", "cartpole") == {}  # it tells no mean value
    assert limits("ddqn", "probe_turns") == {}
    assert list(limits("vdn", "simple_world_comm")) == ["leadadversary,adversary", "agent"]
    nothing = paid(limit_of(), 0.0, 0.0)
    assert named(nothing, *[5.0] * 20) == []
    begun = Overestimation([nothing.learner], 2, torch.device("cpu"), known=False).limits["agents"]
    assert named(paid(begun, 1.0, 1.0), *[500.0] * 20) == []


class Climb(Hook):
    """Values that run away: a little more with every update."""

    def __init__(self, by: float = 5.0):
        self.by = by

    def after_iteration(self, loop: Loop) -> None:
        with torch.no_grad():
            for p in loop.learners[0].parameters():
                if p.shape[-1:] == (2,):
                    p.add_(self.by)


QUICK: dict[str, Any] = {
    "envs": 4,
    "quiet": True,
    "compile": "off",
    "algo": {"learning_starts": 32, "every": 16, "batch": 16, "capacity": 5_000, "gamma": 0.5},
    "net": {"hidden": (4,)},
    "eval": {"episodes": 4, "every": 0},
    "log": {"tensorboard": False, "every": 16},
    "save": {"keep": 0},
}


def said(run: Run) -> list[str]:
    return [x for x in (run.path / "train.log").read_text().splitlines() if x.startswith("The mean value of")]


def test_a_run_whose_values_run_away_says_so_once(tmp_path: Path) -> None:
    """CartPole pays 1 a step: with gamma 0.5 nothing is worth more than 2. And a run that is stopped in between says it once,
    whether before the stop or after it."""
    whole = shoal.train("ddqn", "cartpole", out=tmp_path / "whole", steps=480, hook=Climb(), **QUICK)
    (sentence,) = whole.remarks
    (line,) = read_remarks(whole.path)
    found = re.fullmatch(
        r"The mean value of agents \(q\) is (\S+) at step (\d+), and the rewards so far allow 2 at most: values are "
        r"overestimated\. Try slower targets \(a larger --algo.target-every, a smaller --algo.target-tau\), a smaller learning "
        r"rate \(--algo.lr\) or a larger --algo.batch\.",
        sentence,
    )
    assert found is not None
    assert (line["step"], line["about"]) == (int(found[2]), "values of agents")
    assert float(found[1]) > 2.2
    assert said(whole) == [sentence]
    for stop in (line["step"] - 16, line["step"] + 16):
        run = shoal.train("ddqn", "cartpole", out=tmp_path / f"run{stop}", steps=480, until=stop, hook=Climb(), **QUICK)
        assert len(run.remarks) == (stop > line["step"])
        shoal.resume(run, hook=Climb(), quiet=True)
        assert (run.remarks, said(run), metrics(run.path)) == ([sentence], [sentence], metrics(whole.path))
        a, b = leaves(whole.load("last")), leaves(run.load("last"))
        kept = [k for k in a if k.startswith("/return_limits")]
        assert len(kept) == 12
        assert all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in kept)


@pytest.mark.parametrize(
    ("algo", "env", "more"),
    [("ddqn", "cartpole", {}), ("qmix", "simple_spread", {}), ("maddpg", "simple_spread", {"env": {"actions": "continuous"}})],
)
def test_a_sound_run_says_nothing(tmp_path: Path, algo: str, env: str, more: dict[str, Any]) -> None:
    quick = {"gamma": 0.95, "lr": 1e-2, "target_every": 1, "target_tau": 0.2}  # values that have left where they began
    settings = {**QUICK, "algo": {**QUICK["algo"], **quick}, **more}
    run = shoal.train(algo, env, out=tmp_path / "run", steps=800, **settings)
    state = run.load("last")["return_limits"]["agents"]
    assert state["lines"] > 20
    assert run.remarks == []


def test_an_older_run_has_counted_nothing_and_names_nothing(tmp_path: Path) -> None:
    path = tmp_path / "matd3"
    shutil.copytree(OLDER / "matd3", path)
    shoal.resume(path, quiet=True)
    limits = Run(path).load("last")["return_limits"]
    assert all(float(x["seen"]["reward"]) == math.inf for x in limits.values())
    assert limits


@pytest.mark.parametrize(("name", "value"), [("count", math.nan), ("count", 0.0), ("count", -1.0), ("unit", math.inf)])
def test_sums_that_are_no_numbers_are_refused(name: str, value: float, tmp_path: Path) -> None:
    run = Run(shutil.copytree(OLDER / "matd3", tmp_path / "matd3"))
    shoal.resume(run, steps=404, quiet=True)  # an older run has none
    state = run.load("last")
    seen = state["return_limits"]["agents"]["seen"]
    seen[name].fill_(value)
    seen["size"].clamp_(min=1)
    torch.save(state, run.checkpoints / "last.pt")
    with pytest.raises(UserError, match=r"does not fit its run: the sums of the rewards of 'agents' are no numbers\."):
        shoal.resume(run, steps=500, quiet=True)


def test_lines_that_are_no_remarks_are_left_out(tmp_path: Path) -> None:
    lines = [{"step": 1, "kind": "remark", "about": 3, "sentence": "x"}, {"step": 1, "kind": "remark"}]
    lines += [{"step": 2, "kind": "remark", "about": "a", "sentence": "b"}, {"step": 3, "kind": "train", "x": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert [x["sentence"] for x in read_remarks(tmp_path)] == ["b"]
