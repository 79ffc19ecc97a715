"""Tables of runs: scores of algorithms on tasks, performance profiles, probabilities of improvement.

    made = table(["runs/simple_spread", "runs/simple_tag"])
    write(made, Path("scores.tex"))

What scores are, and when they are on one scale, is told in `scores.py`; what intervals say, in `statistics.py`. A file that
ends in .json is of the runs themselves, all their evaluations, in the format of marl-eval (Gorsane et al., 2022,
https://arxiv.org/abs/2209.10485): environment, task, algorithm, seed, evaluation. Its `absolute_metrics` are those of the best
evaluation in training, which is not played again.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal import files
from shoal.ids import catalog
from shoal.log.logger import is_number
from shoal.spec import UserError
from shoal.tools.scores import Estimate, Matrix, Result, best_evaluation, count, results_in
from shoal.tools.statistics import MEANINGS, Interval
from shoal.training.run import Run

Kind = Literal["scores", "profile", "improvement"]

SHOWN = 20  # of a profile's thresholds every so many are in the table
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", **{c: f"\\{c}" for c in "&%$#_{}"}}


@dataclass(frozen=True)
class Table:
    """Rows of algorithms, columns of tasks, thresholds or other algorithms; or the other way."""

    title: str
    corner: str
    estimates: list[Estimate]
    results: list[Result]
    turned: bool = False
    even: bool = False  # intervals reach as far on both sides
    counted: bool = False  # cells say of how many seeds or runs they are

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Of rows and of columns."""
        algos, of = list(dict.fromkeys(e.algo for e in self.estimates)), list(dict.fromkeys(e.of for e in self.estimates))
        columns = algos if set(algos) == set(of) else of
        return (columns, algos) if self.turned else (algos, columns)

    @property
    def lines(self) -> list[list[str]]:
        cells = {(e.of, e.algo) if self.turned else (e.algo, e.of): self.cell(e) for e in self.estimates}
        rows, columns = self.names
        return [[self.corner, *columns], *([r, *(cells.get((r, c), "-") for c in columns)] for r in rows)]

    def cell(self, e: Estimate) -> str:
        """-9.81 ± 0.42 (5 seeds), or of a bootstrap its ends: 0.83 [0.61, 0.97] (40 runs)."""
        x, low, high = map(_number, (e.interval.estimate, e.interval.low, e.interval.high))
        spread = (
            "" if low == "nan" else f" ± {_number(e.interval.high - e.interval.estimate)}" if self.even else f" [{low}, {high}]"
        )
        return f"{x}{spread} ({e.count})" if self.counted else f"{x}{spread}"

    def as_json(self) -> dict[str, Any]:
        def number(x: Any) -> float | None:
            return None if math.isnan(x) else float(x)

        return {
            "title": self.title,
            "estimates": [
                {
                    "algorithm": e.algo,
                    "of": e.of,
                    **{k: number(getattr(e.interval, k)) for k in ("estimate", "low", "high")},
                    "count": e.count,
                    "values": list(e.values),
                }
                for e in self.estimates
            ],
        }


def table(
    runs: Sequence[str | Path | Run],
    metric: str | None = None,
    remark: Callable[[str], None] = lambda sentence: None,
    kind: Kind = "scores",
    statistic: Literal["mean", "iqm"] = "mean",
    at: str = "last",
    normalise: str | None = None,
    rows: Literal["algorithms", "tasks"] = "algorithms",
) -> Table:
    """`remark` is told of runs that cannot be read, where others can, and of those that are not at their end."""
    found = results_in(runs, metric, normalise, remark)
    matrix, turned = Matrix(found, at, remark), rows == "tasks"
    measures = ", ".join(dict.fromkeys(r.measure for r in found))
    when = {"last": "the last evaluation", "best": "the best evaluation"}.get(at, f"step {at}")
    if kind == "scores":
        title, even = f"{measures} at {when}: {MEANINGS[statistic]}", statistic == "mean"
        return Table(title, "", matrix.estimates(statistic), found, turned, even, counted=True)
    meaning = "95 % stratified bootstrap"
    if kind == "improvement":
        return Table(f"P(X > Y) of {measures} at {when}: {meaning}", "X \\ Y", matrix.improvements(), found, turned)
    thresholds, profiles = matrix.profiles()
    made = [
        Estimate(a, f"> {_number(thresholds[k])}", Interval(i.estimate[k], i.low[k], i.high[k]), runs_of(matrix, a))
        for a, i in profiles.items()
        for k in range(0, len(thresholds), SHOWN)
    ]
    return Table(f"share of runs by {measures} at {when}: {meaning}", "", made, found, turned)


def runs_of(matrix: Matrix, algo: str) -> str:
    return count(sum(map(len, matrix.of(algo) or [])), "run")


def _number(x: float) -> str:
    return f"{x:.2f}" if abs(x) >= 0.095 or abs(x) < 1e-9 else f"{x:.2g}"


# --- files -----------------------------------------------------------------------------------------------------------


def check_out(out: Path) -> None:
    """Before anything is read."""
    if os.path.isdir(out):
        raise UserError(f"{out} is a folder: --out takes a file, such as scores.md.")
    if out.suffix.lower() not in WRITERS:
        pictures = "; `shoal plot` draws pictures" if out.suffix.lower() in (".png", ".svg", ".pdf") else ""
        raise UserError(f"{out} is of no kind that tables have: end it in .csv, .md, .tex or .json{pictures}.")


def write(made: Table, out: Path) -> Path:
    """As CSV, Markdown or LaTeX, or the runs as marl-eval's JSON, by the file's ending."""
    check_out(out)
    text = WRITERS[out.suffix.lower()](made)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(out, text)
    except OSError as e:
        raise UserError(f"{out} cannot be written: {e.strerror or e}.") from None
    return out


def as_csv(made: Table) -> str:
    """An estimate a line."""
    text = io.StringIO(newline="")
    rows = [{**e, "values": " ".join(map(repr, e["values"]))} for e in made.as_json()["estimates"]]
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(made: Table) -> str:
    head, *rows = ([" ".join(c.replace("|", "\\|").split()) for c in line] for line in made.lines)
    return "\n".join([made.title, "", *(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)), ""])


def as_latex(made: Table) -> str:
    def escaped(text: str) -> str:
        text = "".join(LATEX.get(c, c) for c in " ".join(text.split()))
        return re.sub(r"-(?=\d)", "$-$", text.replace("±", r"$\pm$").replace(">", "$>$"))

    lines = [" & ".join(map(escaped, line)) + r" \\" for line in made.lines]
    head = [f"% {made.title}; needs \\usepackage{{booktabs}}", rf"\begin{{tabular}}{{l{'r' * (len(made.lines[0]) - 1)}}}"]
    return "\n".join([*head, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", ""])


def as_marl_eval(made: Table) -> str:
    """environment -> task -> algorithm -> seed -> step_N -> step_count, elapsed_time and each metric in a list."""
    data: dict[str, Any] = {}
    for algo, run in {run.path: (r.algo, run) for r in made.results for run in r.runs}.values():
        environment, task = _environment(run)
        runs = data.setdefault(environment, {}).setdefault(task, {}).setdefault(algo.replace(",", " "), {})
        lines = run.metrics
        evaluations = [x for x in lines if x["kind"] == "eval"]
        if not evaluations:
            raise UserError(f"the run {run.path} has no evaluations, and marl-eval's format is of those.")
        name = f"seed_{run.recorded.run.get('seed', 0)}"
        steps = {
            f"step_{k}": {"step_count": x["step"], "elapsed_time": x.get("time", 0.0), **_metrics(x)}
            for k, x in enumerate(evaluations)
        }
        absolute = _metrics(best_evaluation(run, lines) or evaluations[-1])
        runs[f"{name}_{run.path.name}" if name in runs else name] = {**steps, "absolute_metrics": absolute}
    return json.dumps(data, indent=1) + "\n"


def _environment(run: Run) -> tuple[str, str]:
    """A library or family, and the task of it."""
    env = run.recorded.env
    known = catalog("envs").get(env)
    if known is not None:
        return known.family, env
    library, slash, task = env.partition("/")
    return (library, task) if slash and ".py" not in env else ("own", Path(env).name)


def _metrics(line: dict[str, Any]) -> dict[str, list[float]]:
    return {k: [v] for k, v in line.items() if is_number(v) and k not in ("step", "time")}


WRITERS: dict[str, Callable[[Table], str]] = {".csv": as_csv, ".md": as_markdown, ".tex": as_latex, ".json": as_marl_eval}
