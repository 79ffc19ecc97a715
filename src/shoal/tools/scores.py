"""What runs scored: which of them are seeds of one algorithm on one task, their series, their scores at a checkpoint.

Runs of one algorithm on one environment with the same settings, whatever their seed, are one result. A task is an environment,
or, where it has several groups of agents and no metric was asked for, the return of one of them: `simple_tag/adversary`. Values
are those of evaluations; a metric that evaluations do not have is taken from the training lines. Nothing of a run is executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal import files
from shoal.flags import parse_value
from shoal.ids import near, slug
from shoal.log.logger import is_number
from shoal.spec import UserError
from shoal.tools.statistics import Array, Interval, bootstrap, improvement, interval_of, profile
from shoal.training.run import Run
from shoal.training.settings import RunConfig
from shoal.training.several import found_in

Lines = list[dict[str, Any]]  # of metrics.jsonl
Ranges = dict[str, tuple[float, float]]  # by task: the score that becomes 0, and the one that becomes 1

ALIKE = ("seed", "seeds", "out", "quiet", "until", "time", "threads", "device")  # run settings that make no other result
ASIDE = ("log", "save", "eval")  # sections that make no other result
POINTS = 101  # thresholds of a performance profile


@dataclass(frozen=True)
class Series:
    """A metric of one run."""

    steps: Array
    times: Array  # seconds of training
    values: Array
    training: bool = False  # of training lines, for want of evaluations

    def at(self, step: float) -> float | None:
        """The last value up to a step."""
        return float(self.values[self.steps <= step][-1]) if len(self.steps) and self.steps[0] <= step else None


@dataclass(frozen=True)
class Seeds:
    """Runs that differ by the seed alone."""

    algo: str  # with what distinguishes it from others of its name on this environment
    env: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Result:
    """One algorithm's seeds on one task."""

    algo: str
    task: str
    metric: str
    runs: tuple[Run, ...]
    series: tuple[Series, ...]  # of each run
    scaled: bool = False  # 0 is the low end of the task's range, 1 the high end

    @property
    def measure(self) -> str:
        """What the numbers are, for people."""
        training = " (training)" if any(s.training for s in self.series) else ""
        return f"{'normalised ' if self.scaled else ''}{self.metric}{training}"


@dataclass(frozen=True)
class Estimate:
    """A number with its interval: an algorithm's score on a task, or how likely it is to be better than another."""

    algo: str
    of: str  # a task, a threshold, or the other algorithm
    interval: Interval
    count: str  # of what it was made: 5 seeds, 40 runs
    values: tuple[float, ...] = ()  # each seed's


# --- reading ---------------------------------------------------------------------------------------------------------


def results_in(
    named: Sequence[str | Path | Run],
    metric: str | None = None,
    normalise: str | None = None,
    remark: Callable[[str], None] = lambda sentence: None,
) -> list[Result]:
    """The results of these runs, or of those in these folders. `remark` is told of what cannot be read, where others can."""
    ranges = None if normalise is None else ranges_of(normalise)
    found = [_begun(r) for r in named]
    runs, bad = [r for begun, _ in found for r in begun], [e for _, problems in found for e in problems]
    if not runs:
        raise bad[0] if bad else UserError("name at least one run.")
    for problem in bad:
        remark(str(problem))
    return results(seeds_of(runs), metric, ranges)


def _begun(path: str | Path | Run) -> tuple[list[Run], list[UserError]]:
    """A run, or of a folder's runs those that have something to show; all, where none has, so that one says so. And what is
    wrong with those that cannot be read."""
    runs, bad = ([path], []) if isinstance(path, Run) else found_in(path, deep=True, skip=True)
    begun = []
    for run in runs:
        try:
            begun += [run] if run.metrics else []
        except UserError as e:
            bad.append(e)
    return begun if begun or bad else runs, bad


def results(found: Sequence[Seeds], metric: str | None = None, ranges: Ranges | None = None) -> list[Result]:
    made = []
    for seeds in found:
        lines = [r.metrics for r in seeds.runs]
        names = [metric] if metric else returns(seeds.runs[0], lines[0])
        for name in names:
            task = f"{seeds.env}/{name.partition('/')[2]}" if len(names) > 1 else seeds.env
            read = [series(r, x, name) for r, x in zip(seeds.runs, lines, strict=True)]
            if ranges is not None:
                low, high = _range(ranges, task, seeds)
                read = [dataclasses.replace(s, values=(s.values - low) / (high - low)) for s in read]
            made.append(Result(seeds.algo, task, name, seeds.runs, tuple(read), ranges is not None))
    return made


def series(run: Run, lines: Lines, metric: str) -> Series:
    """A metric in a run's evaluations, else in its training lines."""
    if not lines:
        raise UserError(f"the run {run.path} has no metrics yet: let it train first.")
    for kind in ("eval", "train"):
        points = {x["step"]: x for x in lines if x["kind"] == kind and is_number(x.get(metric))}
        if points:
            steps = sorted(points)
            times = [points[s]["time"] if is_number(points[s].get("time")) else 0.0 for s in steps]
            values = [points[s][metric] for s in steps]
            return Series(np.array(steps, float), np.array(times, float), np.array(values, float), kind == "train")
    known = list(dict.fromkeys(k for x in lines for k, v in x.items() if is_number(v) and k not in ("step", "time")))
    if metric in known:
        raise UserError(f"the run {run.path} has no numbers for {metric!r} yet.")
    some = near(metric, known) or f"; it has {', '.join(known)}"
    raise UserError(f"the run {run.path} has no metric {metric!r}{some}.")


def returns(run: Run, lines: Lines) -> list[str]:
    """The metrics `return/<group>` of a run, in the world's order of groups."""
    names = dict.fromkeys(k for line in lines for k in line if k.startswith("return/") and k.count("/") == 1)
    if not names:
        raise UserError(f"the run {run.path} has no metrics yet: let it train first.")
    return list(names)


def score_name(run: Run) -> str:
    """What the run's best checkpoint goes by."""
    asked, players = run.settings.section("save").get("best", "auto"), run.settings.players
    learners = [g for g, p in players.items() if p["learns"]] or list(players) or ["agents"]
    return f"return/{learners[0]}" if asked in ("auto", "none") else asked


def best_evaluation(run: Run, lines: Lines) -> dict[str, Any] | None:
    """The evaluation that the best checkpoint is of; of equals the later."""
    name = score_name(run)
    scored = [x for x in lines if x["kind"] == "eval" and is_number(x.get(name))]
    return max(scored, key=lambda x: (x[name], x["step"]), default=None)


# --- which runs are seeds of one result ------------------------------------------------------------------------------


def seeds_of(runs: Iterable[Run]) -> list[Seeds]:
    """Runs sorted by all but their seeds, in the order given. A run named twice counts once."""
    bundles: dict[str, list[Run]] = {}
    for run in {r.path.resolve(): r for r in runs}.values():
        bundles.setdefault(repr(sorted(_traits(run).items())), []).append(run)
    traits = [_traits(b[0]) for b in bundles.values()]
    out: list[Seeds] = []
    for bundle, mine in zip(bundles.values(), traits, strict=True):
        rivals = [t for t in traits if t["env"] == mine["env"] and t["algo"] == mine["algo"]]
        names = dict.fromkeys(k for t in rivals for k in t)
        told = [f"{k} {_short(mine[k])}" for k in names if k in mine and len({repr(t.get(k)) for t in rivals}) > 1]
        told = told[:3] + [f"and {len(told) - 3} more"] * (len(told) > 3)  # a legend is for reading
        label = " ".join((mine["algo"], *told))
        alike = sum(s.env == mine["env"] and s.algo.partition(" #")[0] == label for s in out)
        out.append(Seeds(f"{label} #{alike + 1}" if alike else label, mine["env"], tuple(bundle)))
    return out


def _traits(run: Run) -> dict[str, Any]:
    """What makes a run's result another one, flat, by the flag's name; of files of the user's own, what was in them as well."""
    settings = run.recorded
    flat: dict[str, Any] = {k: v for k, v in {**dataclasses.asdict(RunConfig()), **settings.run}.items() if k not in ALIKE}
    for section, values in settings.sections.items():
        flat |= {f"{section}.{k}": v for k, v in values.items() if section not in ASIDE}
    for group, sections in settings.groups.items():
        flat |= {f"{s}.{group}.{k}": v for s, values in sections.items() for k, v in values.items()}
    flat |= {f"team.{k}": v for k, v in settings.team.items()}
    own = [p for p in sorted((run.path / "code").rglob("*.py")) if p.is_file()]
    flat |= {"code": hashlib.sha1(b"".join(p.read_bytes() for p in own)).hexdigest()[:8]} if own else {}
    return {"algo": slug(settings.algo), "env": slug(settings.env), **flat}


def _short(value: Any) -> str:
    """A setting as a legend has it: of a path, the name."""
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)


# --- normalisation ---------------------------------------------------------------------------------------------------


def ranges_of(text: str) -> Ranges:
    """TASK=LOW:HIGH,... or a file {"TASK": [LOW, HIGH], ...}: a random policy's score and the best known."""
    if text.endswith(".json"):
        try:
            values = json.loads(files.read_text(Path(text)))
        except OSError:
            raise UserError(f"--normalise: there is no file {text}.") from None
        except (ValueError, RecursionError) as e:
            raise UserError(f"--normalise: {text} is not JSON that can be read: {e}.") from None
        pairs = list(values.items()) if isinstance(values, dict) else [(text, None)]
    else:
        pairs = [(task, _numbers(ends.split(":"))) for task, _, ends in (part.rpartition("=") for part in text.split(","))]
    ranges: Ranges = {}
    for task, ends in pairs:
        if not (task and isinstance(ends, list) and len(ends) == 2 and all(map(is_number, ends)) and ends[0] != ends[1]):
            raise UserError(
                f"--normalise: {task or text!r} has no range of two numbers that differ: write TASK=LOW:HIGH, such as "
                'simple_spread=-26:-6.7, or name a .json file of {"TASK": [LOW, HIGH]}.'
            )
        ranges[task] = float(ends[0]), float(ends[1])
    return ranges


def _numbers(words: list[str]) -> list[float] | None:
    try:
        return [float(w) for w in words]
    except ValueError:
        return None


def _range(ranges: Ranges, task: str, seeds: Seeds) -> tuple[float, float]:
    for name in (task, seeds.env, seeds.runs[0].recorded.env):
        if name in ranges:
            return ranges[name]
    near_it = near(task, ranges) or f"; it has {', '.join(ranges)}"
    raise UserError(
        f"--normalise has no range for {task!r}{near_it}: add {task}=LOW:HIGH, a random policy's score and the best known."
    )


# --- scores at a checkpoint ------------------------------------------------------------------------------------------


def scores_at(result: Result, at: str, remark: Callable[[str], None] = lambda sentence: None) -> Array:
    """Each seed's value at its last evaluation, at the one that its best checkpoint is of, or at the last one up to a step."""
    values = []
    for run, points in zip(result.runs, result.series, strict=True):
        lines = run.metrics
        reached, total = max(x["step"] for x in lines), run.recorded.run.get("steps", 0)
        if at == "last":
            step = np.inf
            if reached < total:
                remark(f"the run {run.path} is at step {reached:,} of {total:,}: its last evaluation so far counts.")
        elif at == "best":
            best = best_evaluation(run, lines)
            if best is None:
                raise UserError(f"the run {run.path} has no evaluation by {score_name(run)!r}: take --at last.")
            step = best["step"]
        else:
            step = step_of(at)
            if reached < step:
                raise UserError(f"the run {run.path} has not reached step {step:,.0f}: it is at {reached:,}.")
        value = points.at(step)
        if value is None:
            raise UserError(
                f"the run {run.path} has no {result.metric} up to step {step:,.0f}: its first is at {points.steps[0]:,.0f}."
            )
        values.append(value)
    return np.array(values)


def step_of(at: str) -> float:
    try:
        return parse_value(at, int, "--at")
    except UserError:
        raise UserError(f"--at is {at!r:.60}{near(at, ('last', 'best'))}: it takes last, best or a step, such as 2M.") from None


# --- comparisons -----------------------------------------------------------------------------------------------------


class Matrix:
    """Scores at a checkpoint: of every algorithm on every task, its seeds'."""

    def __init__(self, found: Sequence[Result], at: str, remark: Callable[[str], None] = lambda sentence: None):
        self.scores = {(r.algo, r.task): scores_at(r, at, remark) for r in found}
        self.algos = list(dict.fromkeys(r.algo for r in found))
        self.tasks = list(dict.fromkeys(r.task for r in found))
        self.scaled = all(r.scaled for r in found)

    def of(self, algo: str, tasks: Sequence[str] | None = None) -> list[Array] | None:
        """An algorithm's scores on these tasks, on all unless told otherwise; none where it lacks one."""
        found = [self.scores.get((algo, t)) for t in tasks or self.tasks]
        return None if any(x is None for x in found) else [x for x in found if x is not None]

    def estimates(self, statistic: str) -> list[Estimate]:
        """A score a task; and over all tasks, where they are on one scale."""
        made = []
        for algo in self.algos:
            for task in self.tasks:
                if (scores := self.of(algo, [task])) is not None:
                    values = tuple(scores[0].tolist())
                    made.append(Estimate(algo, task, interval_of(statistic, scores), count(len(values), "seed"), values))
            if self.scaled and len(self.tasks) > 1 and (scores := self.of(algo)) is not None:
                runs = count(sum(map(len, scores)), "run")
                made.append(Estimate(algo, f"all {len(self.tasks)} tasks", interval_of(statistic, scores), runs))
        return made

    def improvements(self) -> list[Estimate]:
        """P(X > Y) of every pair, over the tasks that both have."""
        made = []
        for x in self.algos:
            for y in self.algos:
                shared = [t for t in self.tasks if x != y and {(x, t), (y, t)} <= set(self.scores)]
                if shared:
                    both = [[self.scores[a, t] for t in shared] for a in (x, y)]
                    made.append(Estimate(x, y, bootstrap(improvement, *both), count(len(shared), "task")))
        if not made:
            raise UserError("a probability of improvement compares algorithms that share a task, and there are no two.")
        return made

    def profiles(self) -> tuple[Array, dict[str, Interval]]:
        """Thresholds, and for each algorithm the share of its runs above them."""
        if len(self.tasks) > 1 and not self.scaled:
            raise UserError(
                f"a performance profile is over scores on one scale, and these are of {len(self.tasks)} tasks: give their "
                f"ranges, --normalise {self.tasks[0]}=LOW:HIGH,... or a .json file."
            )
        for algo, task in ((a, t) for a in self.algos for t in self.tasks if (a, t) not in self.scores):
            raise UserError(
                f"a performance profile is over the same tasks for all, and {algo} has no run of {task}: leave one out."
            )
        everything = np.concatenate(list(self.scores.values()))
        low, high = everything.min(), everything.max()
        low, high = (min(low, 0.0), max(high, 1.0)) if self.scaled else (low - 0.05 * (high - low), high)
        thresholds = np.linspace(low, high, POINTS)
        return thresholds, {a: profile(self.of(a) or [], thresholds, resamples=2000) for a in self.algos}


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
