"""Pictures of any number of runs: learning curves, scores, performance profiles, probabilities of improvement.

    plot(["runs/simple_spread/mappo/a", ".../b"], Path("curves.png"))

A curve is the mean or the IQM over an algorithm's seeds, and its band the interval of that (`statistics.py`); a single seed has
none. Seeds are read off one grid, over the span that all of them have reached; between two points of a seed the line is
straight. With ranges to normalise by there is a panel of all tasks as well: the sample-efficiency curve of Agarwal et al.

With no metric asked for it is `return/<group>`: every group's line in one panel where there is one algorithm, else a panel for
each group (and each environment).
"""

from __future__ import annotations

import csv
import io
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from shoal import files
from shoal.log.console import short
from shoal.spec import UserError
from shoal.tools.scores import Estimate, Matrix, Result, Series, count, results_in
from shoal.tools.statistics import MEANINGS, Array, Interval, interval_of
from shoal.training.run import Run

Kind = Literal["curve", "scores", "profile", "improvement"]

VERSUS = "  >  "  # between the two that a probability of improvement is of
MOST_POINTS = 500  # of a curve
INK, PALE, FAINT = "#262b38", "#767e8f", "#c3c8d2"
COLORS = ("#3b6cf6", "#e4572e", "#17a673", "#8e5bd0", "#e6a817", "#1aa5c8", "#d6438a", "#6b7280")
STYLES = ("-", "--", ":", "-.")
UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True)
class Line:
    """What is drawn of an algorithm, or of a group of agents: a line with its band."""

    name: str
    count: str  # of what it was made: 5 seeds
    x: Array
    y: Interval


@dataclass(frozen=True)
class Panel:
    title: str
    x: str
    y: str
    meaning: str  # of line and band, or of point and bar
    lines: tuple[Line, ...] = ()
    points: tuple[Estimate, ...] = ()
    half: bool = False  # a line where neither is better


# --- what is drawn ---------------------------------------------------------------------------------------------------


def aggregate(
    tasks: Sequence[Sequence[Series]], statistic: str = "mean", x: Literal["steps", "time"] = "steps"
) -> tuple[Array, Interval]:
    """Seeds of one task or several on one grid: every step that any of them has, within the span that all of them have."""
    at = [[s.times if x == "time" else s.steps for s in seeds] for seeds in tasks]
    flat = [a for seeds in at for a in seeds]
    grid = np.unique(np.concatenate(flat))
    grid = grid[(grid >= max(a[0] for a in flat)) & (grid <= min(a[-1] for a in flat))]
    if len(grid) > MOST_POINTS:
        grid = grid[np.linspace(0, len(grid) - 1, MOST_POINTS).round().astype(int)]
    scores = [
        np.stack([np.interp(grid, a, s.values) for a, s in zip(ats, seeds, strict=True)], -1)  # [steps, seeds]
        for ats, seeds in zip(at, tasks, strict=True)
    ]
    return grid, interval_of(statistic, scores, resamples=2000)


def smoothed(points: Series, window: int) -> Series:
    """The mean of each value and those before it, `window` in all; of fewer at the beginning."""
    sums = np.cumsum(np.concatenate([[0.0], points.values]))
    end = np.arange(1, len(sums))
    begin = np.maximum(end - window, 0)
    return Series(points.steps, points.times, (sums[end] - sums[begin]) / (end - begin), points.training)


def curves(
    found: Sequence[Result], statistic: str = "mean", x: Literal["steps", "time"] = "steps", smooth: int = 1
) -> list[Panel]:
    """A panel a task, and one of all tasks where they are on one scale."""
    smoothing = f", running mean of {smooth} evaluations" if smooth > 1 else ""
    series = {(r.algo, r.task): [smoothed(s, smooth) for s in r.series] for r in found}
    algos, tasks = (list(dict.fromkeys(getattr(r, k) for r in found)) for k in ("algo", "task"))
    panels: dict[tuple[str, str], list[Line]] = {}
    for r in found:
        line = _curve(r.algo, [series[r.algo, r.task]], statistic, x)
        if not len(line.x):
            raise UserError(f"{r.metric!r} was measured at no common {x} in {', '.join(str(run.path) for run in r.runs)}.")
        key = r.task, r.measure
        env, _, group = r.task.partition("/")
        if group and len(algos) == 1:
            line, key = Line(f"{group} · {r.algo}", line.count, line.x, line.y), (env, r.measure.replace(r.metric, "return"))
        panels.setdefault(key, []).append(line)
    if len(tasks) > 1 and all(r.scaled for r in found):
        whole = [a for a in algos if all((a, t) in series for t in tasks)]
        lines = [_curve(a, [series[a, t] for t in tasks], statistic, x) for a in whole]
        panels[f"all {len(tasks)} tasks", "normalised score"] = [line for line in lines if len(line.x)]
    scale, across = 1.0, "environment steps"
    if x == "time":
        longest = max(line.x[-1] for lines in panels.values() for line in lines)
        scale, unit = next((u for u in UNITS if longest >= 2 * u[0]), UNITS[-1])
        across = f"wall time ({unit})"
    return [
        Panel(title, across, y + smoothing, MEANINGS[statistic], tuple(_over(line, scale) for line in lines))
        for (title, y), lines in panels.items()
        if lines
    ]


def _curve(name: str, tasks: list[list[Series]], statistic: str, x: Literal["steps", "time"]) -> Line:
    runs = sum(map(len, tasks))
    return Line(name, count(runs, "seed" if len(tasks) == 1 else "run"), *aggregate(tasks, statistic, x))


def _over(line: Line, scale: float) -> Line:
    return Line(line.name, line.count, line.x / scale, line.y)


def score_panels(found: Sequence[Result], matrix: Matrix, statistic: str) -> list[Panel]:
    """A panel a task, of a point and a bar for every algorithm."""
    made, measures = matrix.estimates(statistic), {r.task: r.measure for r in found}
    panels = {e.of: [p for p in made if p.of == e.of] for e in made}
    return [
        Panel(of, measures.get(of, "normalised score"), "", MEANINGS[statistic], points=tuple(points))
        for of, points in panels.items()
    ]


def profile_panels(found: Sequence[Result], matrix: Matrix) -> list[Panel]:
    thresholds, profiles = matrix.profiles()
    runs = {a: count(sum(len(matrix.scores[a, t]) for t in matrix.tasks), "run") for a in matrix.algos}
    lines = tuple(Line(a, runs[a], thresholds, band) for a, band in profiles.items())
    title = matrix.tasks[0] if len(matrix.tasks) == 1 else f"all {len(matrix.tasks)} tasks"
    measure = found[0].measure if len({r.measure for r in found}) == 1 else "normalised score"
    meaning = "95 % stratified bootstrap"
    return [Panel(f"performance profile · {title}", f"{measure} τ", "share of runs that score above τ", meaning, lines)]


def improvement_panels(matrix: Matrix) -> list[Panel]:
    """Of each pair the one that is likelier to be better."""
    made = {(e.algo, e.of): e for e in matrix.improvements()}
    better = [e for (x, y), e in made.items() if (e.interval.estimate, y) > (0.5, x)]
    named = tuple(Estimate(f"{e.algo}{VERSUS}{e.of}", "", e.interval, e.count) for e in better)
    title = matrix.tasks[0] if len(matrix.tasks) == 1 else count(len(matrix.tasks), "task")
    meaning = "95 % stratified bootstrap"
    return [Panel(f"probability of improvement · {title}", "P(X > Y)", "", meaning, points=named, half=True)]


# --- files -----------------------------------------------------------------------------------------------------------


def plot(
    runs: Sequence[str | Path | Run],
    out: str | Path,
    metric: str | None = None,
    remark: Callable[[str], None] = lambda sentence: None,
    kind: Kind = "curve",
    statistic: Literal["mean", "iqm"] = "mean",
    x: Literal["steps", "time"] = "steps",
    smooth: int = 1,
    at: str = "last",
    normalise: str | None = None,
) -> Path:
    """Write a picture of the runs to `out` (.png, .svg, .pdf, or the numbers that are drawn as .csv) and return its path.
    `remark` is told of runs that cannot be read, where others can."""
    out = Path(out)
    if smooth < 1:
        raise UserError(f"--smooth is {smooth}: it takes a number of evaluations, at least 1.")
    if os.path.isdir(out):
        raise UserError(f"{out} is a folder: --out takes a picture's file, such as curve.png.")
    ending = out.suffix[1:].lower() or "png"
    if ending not in (*FigureCanvasAgg.get_supported_filetypes(), "csv"):
        raise UserError(f"{out} is of no kind that can be drawn: end it in .png, .svg, .pdf or .csv{_elsewhere(ending)}.")
    found = results_in(runs, metric, normalise, remark)
    if kind == "curve":
        panels = curves(found, statistic, x, smooth)
    else:
        matrix = Matrix(found, at, remark)
        panels = {
            "scores": lambda: score_panels(found, matrix, statistic),
            "profile": lambda: profile_panels(found, matrix),
            "improvement": lambda: improvement_panels(matrix),
        }[kind]()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.writing(out) as f:
            if ending == "csv":
                f.write(numbers(panels).encode())
            else:
                draw(panels).savefig(f, format=ending, dpi=150)
    except OSError as e:
        raise UserError(f"{out} cannot be written: {e.strerror or e}.") from None
    return out


def _elsewhere(ending: str) -> str:
    return "; `shoal table` writes .md, .tex and .json" if ending in ("md", "tex", "json") else ""


def numbers(panels: Sequence[Panel]) -> str:
    """What is drawn, a point a line."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(("panel", "name", "of", "x", "y", "estimate", "low", "high"))
    for p in panels:
        for line in p.lines:
            for row in zip(line.x, line.y.estimate, line.y.low, line.y.high, strict=True):
                x, *y = map(_cell, row)
                writer.writerow((p.title, line.name, line.count, x, p.y, *y))
        for e in p.points:
            i = e.interval
            writer.writerow((p.title, e.algo, e.count, "", p.x, *map(_cell, (i.estimate, i.low, i.high))))
    return text.getvalue()


def _cell(x: Any) -> str:
    return "" if math.isnan(x) else repr(float(x))


# --- the picture -----------------------------------------------------------------------------------------------------


def draw(panels: Sequence[Panel]) -> Figure:
    """Panels side by side, at most three in a row. A name has one colour in all of them."""
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    names = list(dict.fromkeys([x.name for p in panels for x in p.lines] + [e.algo for p in panels for e in p.points]))
    if panels[0].lines:
        wide, high = 5.2, 3.9 + 0.22 * max(len(p.lines) for p in panels)
    else:  # room for names beside the bars
        labels = [_label(e).split("\n") for p in panels for e in p.points]
        wide = 3.9 + 0.075 * max(len(line) for label in labels for line in label)
        high = 1.8 + max(len(p.points) for p in panels) * max(0.36, 0.06 + 0.17 * max(map(len, labels)))
    wide = max(wide, 7.2) if columns == 1 else wide * columns
    figure = Figure(figsize=(wide, high * rows), layout=ConstrainedLayoutEngine(h_pad=0.14, w_pad=0.14))
    FigureCanvasAgg(figure)
    below = ScaledTranslation(0.0, -0.55, figure.dpi_scale_trans)  # of the axis's own labels
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        for line in panel.lines:
            k = names.index(line.name)
            _draw_line(axes, line, COLORS[k % len(COLORS)], STYLES[k // len(COLORS) % len(STYLES)])
        if panel.points:
            _draw_points(axes, panel, names)
        _dress(axes, panel, below)
    return figure


def _draw_line(axes: Axes, line: Line, color: str, style: str) -> None:
    dot = "o" if len(line.x) == 1 else None
    label = f"{line.name} ({line.count})"
    axes.plot(line.x, line.y.estimate, color=color, linestyle=style, linewidth=2, marker=dot, label=label, zorder=3)
    if not np.isnan(line.y.low).all():
        axes.fill_between(line.x, line.y.low, line.y.high, color=color, alpha=0.18, linewidth=0, zorder=2)
        if dot:
            axes.errorbar(line.x, line.y.estimate, [line.y.estimate - line.y.low, line.y.high - line.y.estimate], color=color)


def _draw_points(axes: Axes, panel: Panel, names: list[str]) -> None:
    """From top to bottom."""
    axes.use_sticky_edges = False  # no bar touches the frame
    for k, e in enumerate(panel.points):
        color = COLORS[0 if panel.half else names.index(e.algo) % len(COLORS)]
        i = e.interval
        if not np.isnan(i.low):
            axes.barh(k, i.high - i.low, 0.56, i.low, color=color, alpha=0.3, linewidth=0, zorder=2)
        axes.plot([i.estimate] * 2, [k - 0.28, k + 0.28], color=color, linewidth=2.5, solid_capstyle="butt", zorder=3)
    axes.set_yticks(range(len(panel.points)), [_label(e) for e in panel.points])
    axes.set_ylim(len(panel.points) - 0.4, -0.6)
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    if panel.half:
        axes.axvline(0.5, color=PALE, linewidth=1, linestyle="--", zorder=1)
        axes.set_xlim(-0.02, 1.02)


def _label(e: Estimate) -> str:
    x, *y = f"{e.algo} ({e.count.replace(' ', chr(160))})".split(VERSUS)
    return "\n> ".join(_folded(name, 44) for name in (x, *y)) if y and len(e.algo) > 36 else _folded(VERSUS.join((x, *y)), 44)


def _folded(name: str, width: int) -> str:
    return textwrap.fill(name, width, break_on_hyphens=False)


def _dress(axes: Axes, panel: Panel, below: ScaledTranslation) -> None:
    """Labels, and the legend beneath, where it hides nothing."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    texts = [axes.set_title(_folded(panel.title, 36), loc="left", fontsize=12, fontweight="bold", color=INK, pad=10)]
    texts.append(axes.set_ylabel(panel.y.replace(", ", ",\n"), fontsize=10.5, color=INK))
    axes.tick_params(labelsize=9.5, colors=PALE, length=3)
    axes.grid(color="#edeff3", linewidth=1)
    axes.set_axisbelow(True)
    if panel.points:
        texts.append(axes.set_xlabel(f"{panel.x}\n{panel.meaning}", fontsize=10.5, color=INK))
        axes.tick_params(axis="y", labelcolor=INK)
        axes.xaxis.set_major_locator(MaxNLocator(6))
    else:
        texts.append(axes.set_xlabel(panel.x, fontsize=10.5, color=INK))
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
        single = all(np.isnan(line.y.low).all() for line in panel.lines)
        legend = axes.legend(
            title=None if single else panel.meaning,
            title_fontsize=9.5,
            alignment="left",
            frameon=False,
            fontsize=9.5,
            labelcolor=INK,
            loc="upper left",
            bbox_to_anchor=(0.0, 0.0),
            bbox_transform=axes.transAxes + below,
            borderaxespad=0.0,
        )
        legend.get_title().set_color(PALE)
        texts += legend.get_texts()
    for text in texts:
        text.set_parse_math(False)  # a name with a $ is no formula
