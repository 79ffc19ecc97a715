"""Writes the tables of README.md and docs/*.md, between their markers: `make readme`. A test sees that they are current.

A marker names a table: `<!-- scores: made by scripts/readme.py -->` ... `<!-- end of scores -->`, in whichever page it stands.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from shoal import make
from shoal.ids import Entry, catalog
from shoal.log.console import short

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))  # for what the scores are called

PEERS = {"jaxmarl": "JaxMARL", "sb3": "Stable-Baselines3", "skrl": "skrl", "xuance": "XuanCe", "benchmarl": "BenchMARL"}
# the README's five: an algorithm of every family, and environments of several
FIVE = (("mappo", "spread"), ("qmix", "spread"), ("masac", "spread-continuous"), ("ppo", "lunar-lander"), ("sac", "pendulum"))
# the README's columns of speed: result file -> sizes (rows, steps)
SPEEDS = {"peers-cpu-ippo": ((16, 128), (256, 25)), "peers-cuda-ippo": ((1024, 128),)}

ALGORITHMS = {  # family -> what its algorithms have in common
    "value learners": "learn the value of each choice from a replay; VDN and QMIX add or mix agents' values into the team's",
    "policy gradients": "learn from what was just played; the critic sees the agent, its team or the world",
    "actor-critics with a replay": "learn an actor and critics from a replay; critics of MADDPG, MATD3, MASAC see all agents",
    "baseline": "random legal actions: what everything must beat",
}
NATIVE = {  # folder of src/shoal/envs -> what the README and the docs call it, and what is said of it there
    "mpe": ("particle worlds", "native: batched tensors on CPU or GPU, equal to `mpe2` step by step"),
    "classic": ("classic control", "native too, equal to Gymnasium's"),
    "probe": ("probes", "tiny worlds with known answers, on which every algorithm is tested"),
}
ADAPTERS = {  # what the README calls environments of other libraries -> ids of their adapters, and what is said of them
    "Box2D, any Gymnasium id": (("gymnasium",), "LunarLander, BipedalWalker, CarRacing, or whatever is installed"),
    "PettingZoo": (("pettingzoo", "mpe2"), "agents that move at once, or in turn"),
    "football": (("football",), "Google Research Football; `make football` builds it"),
    "foraging, warehouse, VMAS, MaMuJoCo, EnvPool": (
        ("lbforaging", "rware", "vmas", "mamujoco", "envpool"),
        "each by an extra: `.venv/bin/pip install -e '.[mamujoco]'`",
    ),
    "your own": (("own",), "a Gymnasium or PettingZoo class in a file: `./mine.py`"),
}


def environments() -> str:
    """Every environment, a table a family."""
    parts = []
    for family, entries in by_family().items():
        title = "Other libraries" if family == "adapter" else NATIVE.get(family, (family,))[0].capitalize()
        if family == "adapter":
            rows = [(f"`{e.form}`", e.summary) for e in entries]
            made = table(("environment", "what it is"), rows)
        else:
            rows = [(names(same), who_plays(same[0]), same[0].summary) for same in by_file(entries)]
            made = table(("environment", "who plays", "what it is"), rows)
        parts.append(f"### {title}\n\n{made}")
    return "\n\n".join(parts)


def environment_families() -> str:
    families = by_family()
    adapters = {e.id: e for e in families.pop("adapter")}
    probes = families.pop("probe")
    rows = []
    for family, entries in families.items():
        name, about = NATIVE.get(family, (family, ""))
        rows.append((name, ", ".join(f"`{same[0].id}`" for same in by_file(entries)), about))
    for name, (mine, about) in ADAPTERS.items():
        rows.append((name, ", ".join(f"`{adapters.pop(i).form}`" for i in mine), about))
    rows += [(e.id, f"`{e.form}`", e.summary) for e in adapters.values()]
    name, about = NATIVE["probe"]
    rows.append((name, f"{len(probes)}, from `{probes[0].id}` to `{probes[-1].id}`", about))
    return table(("family", "ids", "what they are"), rows)


def by_family() -> dict[str, list[Entry]]:
    """The environments, by the folder they live in: those of NATIVE in its order, further ones, other libraries'."""
    found: dict[str, list[Entry]] = {family: [] for family in NATIVE}
    for entry in sorted(catalog("envs").values(), key=lambda e: (e.family == "adapter", e.family, e.id.lower(), e.id)):
        found.setdefault(entry.family, []).append(entry)
    return {family: entries for family, entries in found.items() if entries}


def by_file(entries: list[Entry]) -> list[list[Entry]]:
    """Names of the same world together, its file's own name first."""
    found: dict[Path, list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: e.id != e.path.stem):
        found.setdefault(entry.path, []).append(entry)
    return list(found.values())


def names(same: list[Entry]) -> str:
    settings = {e.id: ", ".join(f"{k} {v}" for k, v in e.settings.items()) for e in same}
    return ", ".join(f"`{i}`" + (f" ({s})" if s else "") for i, s in settings.items())


def who_plays(entry: Entry) -> str:
    teams = make(entry.id).spec.teams.values()
    return " against ".join(
        " and ".join(f"{g.n} {'agent' if (g.n, g.name) == (1, 'agents') else g.name}" for g in t) for t in teams
    )


def algorithms() -> str:
    rows = []
    for family, entries in algorithms_by_family().items():
        for entry in entries:
            cls = entry.load()
            setting = ", ".join(f"`{k}` is `{v}`" for k, v in entry.settings.items()) or "defaults"
            reward = "any" if cls.reward == "any" else "common only"
            rows.append((f"`{entry.id}`", family, ", ".join(cls.takes), reward, setting))
    return table(("algorithm", "family", "actions", "reward", "settings of the name"), rows)


def metrics() -> str:
    """Each metric and its meaning once, with the files of the algorithms that log it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for stem, entry in {e.path.stem: e for e in catalog("algos").values()}.items():
        for name, meaning in entry.metrics.items():
            rows.setdefault((name, meaning), []).append(stem)
    return table(
        ("metric", "what it is", "of"),
        [(f"`{n}`", text.replace("|", "\\|"), " ".join(stems)) for (n, text), stems in sorted(rows.items())],
    )


def algorithm_families() -> str:
    rows = []
    for family, entries in algorithms_by_family().items():
        ids = " ".join(f"`{e.id}`" for e in entries)
        takes = {kind: [f"`{e.id}`" for e in entries if kind in e.load().takes] for e in entries for kind in e.load().takes}
        kinds = [
            k if len(who) == len(entries) else f"{k} (not {', '.join(i for i in ids.split() if i not in who)})"
            for k, who in takes.items()
        ]
        rows.append((family, ids, ", ".join(kinds), ALGORITHMS[family]))
    return table(("family", "algorithms", "actions", "how they learn"), rows)


def algorithms_by_family() -> dict[str, list[Entry]]:
    """An algorithm's flags tell its family: a replay has a capacity, and choices by value are explored by epsilon."""
    found: dict[str, list[Entry]] = {family: [] for family in ALGORITHMS}
    for entry in catalog("algos").values():
        flags = {f.name for f in fields(entry.load().Config)}
        if "capacity" in flags:
            family = "value learners" if "epsilon" in flags else "actor-critics with a replay"
        else:
            family = "policy gradients" if flags else "baseline"
        found[family].append(entry)
    return found


def speed() -> str:
    """From the results of `benchmarks/peers/run.py --json benchmarks/results/NAME.json`."""
    rows = []
    for path in sorted(RESULTS.glob("peers-*.json")):
        result = json.loads(path.read_text())
        settings = result["settings"]
        for size in result["sizes"]:
            ours = size["sides"]["shoal"]
            work = f"{settings['algo'].upper()}, {size['rows']} x {size['steps']}"
            if "batch" in settings:
                work += f", a batch of {settings['batch']} every {settings['every']} steps"
            if settings.get("part") == "update":
                work = f"{settings['algo'].upper()}, updates alone, batches of {settings['batch']}"
            for name, label in PEERS.items():
                r = size["sides"].get(name, {})
                if "median" in r:
                    ratio, low, high = (f"{r[k]:.3g}" for k in ("ratio", "ratio_lowest", "ratio_highest"))
                    spread = f"{ratio} ({low} to {high})"
                    rows.append((machine(result), work, short(ours["median"]), label, short(r["median"]), spread))
    return table(("on", "work: rows x steps", "Shoal, steps (updates)/s", "peer", "its", "Shoal is, times (range)"), rows)


def speed_commands() -> str:
    """The commands that measured `speed`, in its order."""
    commands = [json.loads(path.read_text())["command"] for path in sorted(RESULTS.glob("peers-*.json"))]
    return "\n".join(("```", *commands, "```"))


def peers() -> str:
    """A row a peer: how many times as fast Shoal is, and steps a second of both; the commands that measured them."""
    columns, sides, commands = ["times as fast as"], [], []
    for name, sizes in SPEEDS.items():
        result = json.loads((RESULTS / f"{name}.json").read_text())
        commands.append(result["command"].split(" --json")[0])
        measured = {(size["rows"], size["steps"]): size["sides"] for size in result["sizes"]}
        for rows, steps in sizes:
            columns.append(f"{machine(result).split(',')[0]}, {rows} x {steps}")
            sides.append(measured[rows, steps])

    def cell(side: dict[str, Any], peer: str) -> str:
        if "median" not in side.get(peer, {}):
            return ""
        return f"**{side[peer]['ratio']:.3g}** ({short(side['shoal']['median'])} : {short(side[peer]['median'])})"

    made = table(tuple(columns), [(label, *(cell(side, peer) for side in sides)) for peer, label in PEERS.items()])
    return "\n".join((made, "", "```", *commands, "```"))


def machine(result: dict[str, Any]) -> str:
    settings = result["settings"]
    if settings["device"] == "cpu":
        return f"{settings['threads']} core{'s' if settings['threads'] > 1 else ''}"
    return f"{result['sizes'][0]['sides']['shoal']['description']['device']}, {settings['precision']}"


def scores() -> str:
    """From the results of `benchmarks/scores.py`."""
    from scores import SCORES

    rows = []
    for name in SCORES:
        if name in score_results():
            rows += score_rows(name)
    return table(("`shoal train ...`", "`return/...`, by seed", "episodes", "trained for", "published, this scale"), rows)


def five_scores() -> str:
    """From the results of `benchmarks/defaults.py`: what comes of no flags."""
    from defaults import RESULTS, TASKS, confirmed, read, rows

    found = {
        (task, who): (steps, score, seeds, took) for task, who, steps, score, *_, seeds, took in rows(confirmed(read(RESULTS)))
    }
    out = []
    for who, name in FIVE:
        (steps, score, seeds, took), task = found[name, who], TASKS[name]
        train = f"`{who} {task.words} --steps {short(int(steps.replace(',', '')))}`"
        out.append(
            (
                train,
                f"{task.metric.removeprefix('return/')} {score} ({seeds} {'seed' if seeds == '1' else 'seeds'})",
                f"{took} s",
                f"{task.random:g}",
                f"{task.best:g}, {task.source}",
            )
        )
    return table(("`shoal train ...`", "score", "one core", "random", "best known"), out)


def score_rows(name: str) -> list[tuple[str, ...]]:
    """A row for the score; of two teams that learn, one for each against a random opponent as well."""
    from scores import SCORES

    score, result = SCORES[name], score_results()[name]
    runs = result["runs"]
    low, high = (f"{f(r['seconds'] for r in runs):.0f}" for f in (min, max))
    seconds = f"{low if low == high else f'{low} to {high}'} s, {'H200' if 'H200' in result['device'] else 'CPU'}"
    rows = []
    for setting in runs[0]["played"]:
        played = [r["played"][setting] for r in runs]
        metrics = list(score.wanted) or list(played[0])
        seen = "; ".join(f"{m.removeprefix('return/')} {' / '.join(f'{p[m][0]:.2f}' for p in played)}" for m in metrics)
        command = f"`{result['command'].removeprefix('shoal train ')}`" if not setting else f"the same, {setting}"
        first = (f"{result['episodes']:,}", seconds, score.beside) if not setting else ("", "", "")
        rows.append((command, seen, *first))
    return rows


@cache
def score_results() -> dict[str, Any]:
    return json.loads((RESULTS / "scores.json").read_text())


def defaults() -> str:
    """From the results of `benchmarks/defaults.py`."""
    from defaults import COLUMNS, RESULTS, confirmed, read, rows

    return table(COLUMNS, rows(confirmed(read(RESULTS))))


def tag() -> str:
    """Touches an episode: predators down, prey across."""
    kinds = ("maddpg", "ddpg")

    def touches(predators: str, prey: str) -> str:
        seen = [r["played"][""]["touches"] for r in score_results()[f"tag-{predators}-{prey}"]["runs"]]
        return " / ".join(f"{mean:.2f} ± {half:.2f}" for mean, half in seen)

    columns = ("predators, touches an episode", *(f"against {prey.upper()} prey" for prey in kinds))
    return table(columns, [(p.upper(), *(touches(p, prey) for prey in kinds)) for p in kinds])


def workers() -> str:
    """From the results of `benchmarks/vector.py --json benchmarks/results/vector.json`."""
    result, rows = json.loads((RESULTS / "vector.json").read_text()), []
    for work, r in result["results"].items():
        base = r["medians"]["Gymnasium, shared"]
        rows += [(work, who, f"{x:,.0f}", f"{x / base:.2f}") for who, x in r["medians"].items()]
    columns = (f"{result['workers']} workers", "who", "steps/s", "times Gymnasium's AsyncVectorEnv")
    return table(columns, rows)


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "algorithm families": algorithm_families,
    "algorithms": algorithms,
    "defaults": defaults,
    "environment families": environment_families,
    "environments": environments,
    "five scores": five_scores,
    "metrics": metrics,
    "peers": peers,
    "scores": scores,
    "speed": speed,
    "speed commands": speed_commands,
    "tag": tag,
    "workers": workers,
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def current(text: str) -> str:
    """A page with its tables made anew."""
    for name, made in TABLES.items():
        begin, end = f"<!-- {name}: made by scripts/readme.py -->", f"<!-- end of {name} -->"
        if begin in text:
            whole = f"{begin}\n{made()}\n{end}"
            text = re.sub(f"{begin}.*?{end}", lambda _, whole=whole: whole, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for page in pages():
        page.write_text(current(page.read_text()))
    sys.exit(0)
