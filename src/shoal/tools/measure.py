"""Numbers about runs: summaries of evaluations, episodes as CSV, and the list of runs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal import files
from shoal.log.logger import is_number
from shoal.spec import UserError
from shoal.training.evaluate import Episodes
from shoal.training.run import Run


def summary(episodes: Episodes) -> dict[str, dict[str, float]]:
    """Metric -> mean, 95 % interval of the mean, spread and extremes over episodes."""
    tracks: dict[str, Tensor] = {}
    for g, x in episodes.returns.items():
        tracks[f"return/{g}"] = x.mean(-1)
        tracks[f"return_sum/{g}"] = x.sum(-1)
        tracks.update({f"return/{g}/{i}": x[:, i] for i in range(x.shape[1])})
    tracks |= {"episode_length": episodes.lengths, **episodes.stats}
    return {k: _describe(x.double().cpu()) for k, x in tracks.items()}


def _describe(x: Tensor) -> dict[str, float]:
    n = len(x)
    std = float(x.std(correction=1)) if n > 1 else 0.0
    interval = 1.96 * std / math.sqrt(n)  # of the mean, by the normal approximation
    return {"mean": float(x.mean()), "interval": interval, "std": std, "min": float(x.min()), "max": float(x.max())}


def write_csv(episodes: Episodes, path: Path) -> None:
    """An episode a line: each agent's return, the length, the stats."""
    columns: dict[str, list[float]] = {"episode": list(range(len(episodes.lengths)))}
    for g, x in episodes.returns.items():
        columns[f"return/{g}"] = x.mean(-1).tolist()
        columns.update({f"return/{g}/{i}": x[:, i].tolist() for i in range(x.shape[1])})
    columns["length"] = episodes.lengths.tolist()
    columns.update({k: x.tolist() for k, x in episodes.stats.items()})
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    try:
        files.write_text(path, text.getvalue())
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}.") from None


def list_runs(folder: Path, remark: Callable[[str], None] = lambda sentence: None) -> list[dict[str, Any]]:
    """Every run under a folder, with how far it got. `remark` is told of those that cannot be read."""
    out = []
    for config in sorted(folder.rglob("config.json")):
        try:
            run = Run(config.parent)
            lines, score = run.metrics, _score_name(run)
        except UserError as e:
            remark(str(e))
            continue
        scores = [e[score] for e in lines if e["kind"] == "eval" and is_number(e.get(score))]
        out.append(
            {
                "run": str(config.parent),
                "algo": run.recorded.algo,
                "env": run.recorded.env,
                "step": max((line["step"] for line in lines), default=0),
                "last": scores[-1] if scores else None,
                "best": max(scores, default=None),
                "remarks": run.remarks,
            }
        )
    return out


def _score_name(run: Run) -> str:
    """What the run's best checkpoint goes by."""
    asked, players = run.settings.section("save").get("best", "auto"), run.settings.players
    learners = [g for g, p in players.items() if p["learns"]] or list(players) or ["agents"]
    return f"return/{learners[0]}" if asked in ("auto", "none") else asked
