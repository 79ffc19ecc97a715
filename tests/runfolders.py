"""Runs that were never trained: their settings and what they logged."""

import json

from shoal.training.run import Run


def folder(path, lines, algo="mappo", env="simple_tag", team=None, sections=None, **run):
    path.mkdir(parents=True)
    settings = {"algo": algo, "env": env, "run": run, "sections": sections or {}, "team": team or {}}
    (path / "config.json").write_text(json.dumps(settings))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(path)


def evals(*values, group="agents"):
    return [{"step": 100 * i, "time": 60.0 * i, "kind": "eval", f"return/{group}": v} for i, v in enumerate(values)]
