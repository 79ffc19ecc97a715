"""Learning curves of any number of runs, as a picture.

    plot(["runs/simple_spread/mappo/a", ".../b"], Path("curves.png"))

Runs of one algorithm on one environment with the same settings, whatever their seed, are one curve: the mean over the
seeds as a line, and from the least to the greatest of them as a band. Seeds are read off one grid of steps, over the
span that all of them have reached; between two points of a seed the line is straight. Values are those of evaluations;
a metric that evaluations do not have is taken from the training lines, and the picture says so.

With no metric asked for it is `return/<group>`: every group's line in one panel where there is one curve, else a panel
for each group (and each environment).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from shoal import files
from shoal.ids import near, slug
from shoal.log.console import short
from shoal.log.logger import is_number
from shoal.spec import UserError
from shoal.training.run import Run
from shoal.training.settings import RunConfig
from shoal.training.several import found_in

Series = tuple[NDArray[np.float64], NDArray[np.float64]]  # steps, values

ALIKE = ("seed", "out", "quiet", "until", "time", "threads", "device")  # run settings that make no other curve
ASIDE = ("log", "save", "eval")  # sections that make no other curve
INK, PALE = "#262b38", "#767e8f"
COLORS = ("#3b6cf6", "#e4572e", "#17a673", "#8e5bd0", "#e6a817", "#1aa5c8", "#d6438a", "#6b7280")
STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Band:
    """Seeds of one curve: their mean, least and greatest, at the same steps."""

    steps: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Runs that differ by the seed alone."""

    label: str
    env: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Line:
    """What is drawn: one curve's band of one metric."""

    label: str
    band: Band
    training: bool  # of training lines, for want of evaluations


# --- numbers ---------------------------------------------------------------------------------------------------------


def aggregate(seeds: Sequence[Series]) -> Band:
    """Seeds on one grid: every step that any of them has, within the span that all of them have."""
    start, end = max(s[0] for s, _ in seeds), min(s[-1] for s, _ in seeds)
    steps = np.unique(np.concatenate([s for s, _ in seeds]))
    steps = steps[(steps >= start) & (steps <= end)]
    values = np.stack([np.interp(steps, s, v) for s, v in seeds])  # [seeds, steps]
    return Band(steps, values.mean(0), values.min(0), values.max(0))


def series(run: Run, metric: str) -> tuple[Series, bool]:
    """Steps and values of a metric in a run's evaluations, else in its training lines; and whether it was these."""
    lines = run.metrics
    if not lines:
        raise UserError(f"the run {run.path} has no metrics yet: let it train first.")
    for kind in ("eval", "train"):
        points = {x["step"]: x[metric] for x in lines if x["kind"] == kind and is_number(x.get(metric))}
        if points:
            steps = sorted(points)
            return (np.array(steps, float), np.array([points[s] for s in steps], float)), kind == "train"
    known = list(dict.fromkeys(k for x in lines for k, v in x.items() if is_number(v) and k not in ("step", "time")))
    if metric in known:
        raise UserError(f"the run {run.path} has no numbers for {metric!r} yet.")
    some = near(metric, known) or f"; it has {', '.join(known)}"
    raise UserError(f"the run {run.path} has no metric {metric!r}{some}.")


def returns(run: Run) -> list[str]:
    """The metrics `return/<group>` of a run, in the world's order of groups."""
    names = dict.fromkeys(k for line in run.metrics for k in line if k.startswith("return/") and k.count("/") == 1)
    if not names:
        raise UserError(f"the run {run.path} has no metrics yet: let it train first.")
    return list(names)


# --- which runs are seeds of one curve -------------------------------------------------------------------------------


def _short(value: Any) -> str:
    """A setting as a legend has it: of a path, the name."""
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)


def curves(runs: Sequence[Run]) -> list[Curve]:
    """Runs sorted into curves, in the order given. A run named twice counts once."""
    bundles: dict[str, list[Run]] = {}
    for run in {r.path.resolve(): r for r in runs}.values():
        bundles.setdefault(repr(sorted(_traits(run).items())), []).append(run)
    traits = [_traits(b[0]) for b in bundles.values()]
    out = []
    for bundle, mine in zip(bundles.values(), traits, strict=True):
        label = mine["algo"]
        rivals = [t for t in traits if t["env"] == mine["env"] and t["algo"] == mine["algo"]]
        names = dict.fromkeys(k for t in rivals for k in t)
        told = [f"{k} {_short(mine[k])}" for k in names if k in mine and len({repr(t.get(k)) for t in rivals}) > 1]
        told = told[:3] + [f"and {len(told) - 3} more"] * (len(told) > 3)  # a legend is for reading
        seeds = f"{len(bundle)} seeds, min to max" if len(bundle) > 1 else "1 seed"
        out.append(Curve(f"{' '.join((label, *told))} ({seeds})", mine["env"], tuple(bundle)))
    return out


def _traits(run: Run) -> dict[str, Any]:
    """What makes a run's curve another one, flat, by the flag's name; of files of the user's own, what was in them as well."""
    settings = run.recorded
    flat: dict[str, Any] = {k: v for k, v in {**dataclasses.asdict(RunConfig()), **settings.run}.items() if k not in ALIKE}
    for section, values in settings.sections.items():
        flat |= {f"{section}.{k}": v for k, v in values.items() if section not in ASIDE}
    for group, sections in settings.groups.items():
        flat |= {f"{s}.{group}.{k}": v for s, values in sections.items() for k, v in values.items()}
    flat |= {f"team.{k}": v for k, v in settings.team.items()}
    files = [p for p in sorted((run.path / "code").rglob("*.py")) if p.is_file()]
    flat |= {"code": hashlib.sha1(b"".join(p.read_bytes() for p in files)).hexdigest()[:8]} if files else {}
    return {"algo": slug(settings.algo), "env": slug(settings.env), **flat}


# --- the picture -----------------------------------------------------------------------------------------------------


def plot(
    runs: Sequence[str | Path | Run],
    out: str | Path,
    metric: str | None = None,
    remark: Callable[[str], None] = lambda sentence: None,
) -> Path:
    """Write the runs' learning curves to `out` (.png, or another kind that Matplotlib writes) and return its path. `remark` is
    told of runs that cannot be read, where others can."""
    out = Path(out)
    if not runs:
        raise UserError("name at least one run to plot.")
    if os.path.isdir(out):
        raise UserError(f"{out} is a folder: --out takes a picture's file, such as curve.png.")
    kinds = FigureCanvasAgg.get_supported_filetypes()
    kind = out.suffix[1:].lower() or "png"
    if kind not in kinds:
        raise UserError(f"{out} is of no kind that can be drawn: end it in .png, .pdf or .svg.")
    found = [_begun(r) for r in runs]
    named, bad = [r for begun, _ in found for r in begun], [e for _, problems in found for e in problems]
    if not named:
        raise bad[0]
    for problem in bad:
        remark(str(problem))
    figure = draw(panels(curves(named), metric))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.writing(out) as f:
            figure.savefig(f, format=kind, dpi=150)
    except OSError as e:
        raise UserError(f"{out} cannot be written: {e.strerror or e}.") from None
    return out


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


def panels(found: Sequence[Curve], metric: str | None) -> dict[tuple[str, str], list[Line]]:
    """(heading, what the numbers are) -> lines."""
    whole: dict[tuple[str, str], list[Line]] = {}
    for curve in found:
        names = [metric] if metric else returns(curve.runs[0])
        for name in names:
            read = [series(r, name) for r in curve.runs]
            group = name.partition("/")[2]
            label = curve.label
            key = (f"{curve.env} · {group}" if len(names) > 1 else curve.env, name)
            if len(found) == 1 and len(names) > 1:
                label, key = f"{group} · {label}", (curve.env, "return")
            band = aggregate([s for s, _ in read])
            if not len(band.steps):
                raise UserError(f"{name!r} was measured at no common steps in {', '.join(str(r.path) for r in curve.runs)}.")
            whole.setdefault(key, []).append(Line(label, band, any(t for _, t in read)))
    return whole


def draw(content: dict[tuple[str, str], list[Line]]) -> Figure:
    """A panel a key, side by side, at most three in a row. A curve has one colour in all of them."""
    columns = 2 if len(content) == 4 else min(len(content), 3)
    rows = math.ceil(len(content) / columns)
    figure = Figure(
        figsize=(7.2 if columns == 1 else 5.2 * columns, 4.4 * rows), layout=ConstrainedLayoutEngine(h_pad=0.14, w_pad=0.14)
    )
    FigureCanvasAgg(figure)
    order = list(dict.fromkeys(line.label for lines in content.values() for line in lines))
    for i, ((heading, what), lines) in enumerate(content.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        for line in lines:
            at = order.index(line.label)
            _draw_line(axes, line, COLORS[at % len(COLORS)], STYLES[at // len(COLORS) % len(STYLES)])
        _dress(axes, heading, what, all(line.training for line in lines))
    return figure


def _draw_line(axes: Axes, line: Line, color: str, style: str) -> None:
    band = line.band
    dot = "o" if len(band.steps) == 1 else None
    axes.plot(band.steps, band.mean, color=color, linestyle=style, linewidth=2, marker=dot, label=line.label, zorder=3)
    axes.fill_between(band.steps, band.low, band.high, color=color, alpha=0.16, linewidth=0, zorder=2)


def _dress(axes: Axes, heading: str, what: str, training: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c3c8d2")
    title = axes.set_title(heading, loc="left", fontsize=12, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel("environment steps", fontsize=10.5, color=INK)
    ylabel = axes.set_ylabel(f"{what} (training)" if training else what, fontsize=10.5, color=INK)
    axes.tick_params(labelsize=9.5, colors=PALE, length=3)
    axes.grid(color="#edeff3", linewidth=1)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
    legend = axes.legend(frameon=False, fontsize=9.5, labelcolor=INK, loc="best")
    for text in (title, ylabel, *legend.get_texts()):
        text.set_parse_math(False)  # a name with a $ is no formula
