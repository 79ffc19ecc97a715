"""Numbers about runs: summaries of evaluations, episodes as CSV, and the list of runs."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shoal import files
from shoal.log.logger import is_number
from shoal.spec import UserError
from shoal.tools.scores import best_evaluation, score_name, seeds_of
from shoal.tools.statistics import Array, t_interval
from shoal.training.evaluate import Episodes
from shoal.training.run import Run
from shoal.training.several import runs_in

Summary = dict[str, dict[str, float]]


def summary(episodes: Episodes) -> Summary:
    """Metric -> mean, 95 % t-interval of the mean, spread and extremes over episodes."""
    tracks: dict[str, Tensor] = {}
    for g, x in episodes.returns.items():
        tracks[f"return/{g}"] = x.mean(-1)
        tracks[f"return_sum/{g}"] = x.sum(-1)
        tracks.update({f"return/{g}/{i}": x[:, i] for i in range(x.shape[1])})
    tracks |= {"episode_length": episodes.lengths, **episodes.stats}
    return {k: _describe(x.double().cpu().numpy()) for k, x in tracks.items()}


def over_seeds(seeds: Sequence[Summary]) -> Summary:
    """The same over the seeds' means."""
    return {k: _describe(np.array([s[k]["mean"] for s in seeds])) for k in seeds[0]}


def _describe(x: Array) -> dict[str, float]:
    several = len(x) > 1
    half = float(t_interval([x]).high - x.mean()) if several else 0.0
    std = float(x.std(ddof=1)) if several else 0.0
    return {"mean": float(x.mean()), "interval": half, "std": std, "min": float(x.min()), "max": float(x.max())}


def write_csv(played: Sequence[tuple[int, Episodes]], path: Path) -> None:
    """An episode a line: its seed, each agent's return, the length, the stats."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    for k, (seed, episodes) in enumerate(played):
        n = len(episodes.lengths)
        columns: dict[str, Sequence[float]] = {"seed": [seed] * n} if len(played) > 1 else {}
        columns["episode"] = range(n)
        for g, x in episodes.returns.items():
            columns[f"return/{g}"] = x.mean(-1).tolist()
            columns.update({f"return/{g}/{i}": x[:, i].tolist() for i in range(x.shape[1])})
        columns["length"] = episodes.lengths.tolist()
        columns.update({k: x.tolist() for k, x in episodes.stats.items()})
        if k == 0:
            writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    try:
        files.write_text(path, text.getvalue())
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}.") from None


# --- seeds and runs --------------------------------------------------------------------------------------------------


def seeds_in(folder: str | Path, verb: str) -> list[Run]:
    """The run that a path names, or the runs in it, which must differ by the seed alone."""
    runs = runs_in(folder)
    if len(found := seeds_of(runs)) > 1:
        names = " and ".join(s.algo for s in found[:2])
        raise UserError(f"{folder} holds runs that differ by more than the seed, such as {names}: {verb} one of them.")
    return runs


def best_of(runs: Sequence[Run]) -> tuple[Run, str]:
    """Of several seeds the one with the best evaluation, or the first where none has any; and how to say so."""
    found = [(e[score_name(r)], r) for r in runs if (e := best_evaluation(r, r.metrics)) is not None]
    score, run = max(found, key=lambda x: x[0], default=(None, runs[0]))
    seed = f"seed {run.recorded.run.get('seed', 0)}"
    if score is None:
        return run, f"{seed}, the first of {len(runs)}"
    return run, f"{seed}, the best of {len(runs)} by {score_name(run)}: {score:.2f} in an evaluation"


def list_runs(folder: Path, remark: Callable[[str], None] = lambda sentence: None) -> list[dict[str, Any]]:
    """Every run under a folder, with how far it got. `remark` is told of those that cannot be read."""
    out = []
    for config in sorted(folder.rglob("config.json")) if os.path.isdir(folder) else ():  # false of names no system takes
        try:
            run = Run(config.parent)
            lines, name, best = run.metrics, score_name(run), best_evaluation(run, run.metrics) or {}
            state, made = state_of(run, lines), _made(run)
        except UserError as e:
            remark(str(e))
            continue
        evaluations = [x for x in reversed(lines) if x["kind"] == "eval"]
        names = dict.fromkeys(k for x in evaluations[:1] for k in x if k.startswith("return/") and k.count("/") == 1)
        scores = {
            k: {"last": next((y for x in evaluations if is_number(y := x.get(k))), None), "best": _number(best, k)}
            for k in {name: None, **names}
        }
        out.append(
            {
                "run": str(config.parent),
                "algo": run.recorded.algo,
                "env": run.recorded.env,
                "seed": run.recorded.run.get("seed", 0),
                **made,
                "state": state,
                "step": max((line["step"] for line in lines), default=0),
                "steps": run.recorded.run.get("steps"),
                **scores[name],
                "scores": {k: s for k, s in scores.items() if k in names or s["last"] is not None},
                "remarks": run.remarks,
            }
        )
    return out


def _number(line: dict[str, Any], name: str) -> float | None:
    return line[name] if is_number(line.get(name)) else None


def _made(run: Run) -> dict[str, str | None]:
    """When a run began and on which device, as versions.json has it."""
    try:
        versions = json.loads(files.read_text(run.path / "versions.json"))
    except (OSError, ValueError, RecursionError):
        versions = {}
    date, device = (versions.get(k) if isinstance(versions, dict) else None for k in ("date", "device"))
    if not isinstance(date, str):  # of an older run
        date = datetime.fromtimestamp((run.path / "config.json").stat().st_mtime).isoformat(" ", "seconds")
    return {"date": date, "device": device.partition(": ")[0] if isinstance(device, str) else None}


def state_of(run: Run, lines: list[dict[str, Any]]) -> str:
    """running, diverged, finished, stopped (by --time, a score, an error), not begun or interrupted: as far as files tell."""
    if run.is_locked():
        return "running"
    said = _last_line(run.path / "train.log")
    if said.startswith("Diverged: "):
        return "diverged"
    if lines and max(x["step"] for x in lines) >= run.recorded.run.get("steps", math.inf):
        return "finished"
    return "stopped" if said.startswith("Stopped: ") else "interrupted" if lines else "not begun"


def _last_line(path: Path) -> str:
    if not path.exists():
        return ""
    with files.reading(path) as f:
        f.seek(max(f.seek(0, os.SEEK_END) - 4096, 0))
        return f.read().decode(errors="replace").rstrip().rpartition("\n")[2]
