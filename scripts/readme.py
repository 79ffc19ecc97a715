"""Writes the README's tables of what works today, between their markers: `make readme`. A test sees that they are current."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from shoal import make
from shoal.ids import catalog
from shoal.log.console import short

README = Path(__file__).parent.parent / "README.md"
sys.path.append(str(README.parent / "benchmarks"))  # for what the scores are called
PEERS = {"jaxmarl": "JaxMARL", "sb3": "Stable-Baselines3", "skrl": "skrl", "xuance": "XuanCe", "benchmarl": "BenchMARL"}


def environments() -> str:
    rows = []
    for entry in sorted(catalog("envs").values(), key=lambda e: (e.family, e.id)):
        if entry.rest:
            rows.append((f"`{entry.form}`", entry.family, "", entry.summary))
            continue
        spec = make(entry.id).spec
        teams = " against ".join(" and ".join(f"{g.n} {g.name}" for g in groups) for groups in spec.teams.values())
        rows.append((f"`{entry.id}`", entry.family, teams, entry.summary))
    return table(("environment", "family", "who plays", "what it is"), rows)


def algorithms() -> str:
    rows = []
    for entry in catalog("algos").values():
        cls = entry.load()
        setting = ", ".join(f"`{k}` is `{v}`" for k, v in entry.settings.items()) or "defaults"
        rows.append((f"`{entry.id}`", ", ".join(cls.takes), "any" if cls.pay == "any" else "common only", setting))
    return table(("algorithm", "actions", "pay", "settings of the name"), rows)


def speed() -> str:
    """From the results of `benchmarks/peers/run.py --json benchmarks/results/NAME.json`."""
    rows = []
    for path in sorted((README.parent / "benchmarks" / "results").glob("peers-*.json")):
        result = json.loads(path.read_text())
        settings = result["settings"]
        for size in result["sizes"]:
            ours = size["sides"]["shoal"]
            cores = f"{settings['threads']} core{'s' if settings['threads'] > 1 else ''}"
            where = cores if settings["device"] == "cpu" else f"{ours['description']['device']}, {settings['precision']}"
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
                    rows.append((where, work, short(ours["median"]), label, short(r["median"]), spread))
    return table(("on", "work: rows x steps", "Shoal, steps (updates)/s", "peer", "its", "Shoal is, times (range)"), rows)


def scores() -> str:
    """From the results of `benchmarks/scores.py`."""
    from scores import RESULTS, SCORES

    rows, results = [], json.loads(RESULTS.read_text())
    for name, score in SCORES.items():
        if name not in results:
            continue
        result, runs = results[name], results[name]["runs"]
        low, high = (f"{f(r['seconds'] for r in runs):.0f}" for f in (min, max))
        seconds = f"{low if low == high else f'{low} to {high}'} s, {'H200' if 'H200' in result['device'] else 'CPU'}"
        for setting in runs[0]["played"]:
            played = [r["played"][setting] for r in runs]
            metrics = list(score.wanted) or list(played[0])
            seen = "; ".join(f"{m.removeprefix('return/')} {' / '.join(f'{p[m][0]:.2f}' for p in played)}" for m in metrics)
            command = f"`{result['command'].removeprefix('shoal train ')}`" if not setting else f"the same, {setting}"
            rows.append((command, seen, seconds if not setting else "", score.beside if not setting else ""))
    return table(("`shoal train ...`", "`return/...`, seed 0 / 1 / 2", "trained for", "published, this scale"), rows)


def tag() -> str:
    """Touches an episode: predators down, prey across."""
    from scores import RESULTS

    results, kinds = json.loads(RESULTS.read_text()), ("maddpg", "ddpg")

    def touches(predators: str, prey: str) -> str:
        seen = [r["played"][""]["touches"] for r in results[f"tag-{predators}-{prey}"]["runs"]]
        return " / ".join(f"{mean:.2f} ± {half:.2f}" for mean, half in seen)

    columns = ("predators, touches an episode", *(f"against {prey.upper()} prey" for prey in kinds))
    return table(columns, [(p.upper(), *(touches(p, prey) for prey in kinds)) for p in kinds])


def workers() -> str:
    """From the results of `benchmarks/vector.py --json benchmarks/results/vector.json`."""
    path = README.parent / "benchmarks" / "results" / "vector.json"
    if not path.exists():
        return ""
    result, rows = json.loads(path.read_text()), []
    for work, r in result["results"].items():
        base = r["medians"]["Gymnasium, shared"]
        rows += [(work, who, f"{x:,.0f}", f"{x / base:.2f}") for who, x in r["medians"].items()]
    columns = (f"{result['workers']} workers", "who", "steps/s", "times Gymnasium's AsyncVectorEnv")
    return table(columns, rows)


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def current(text: str) -> str:
    """The README with its tables made anew."""
    for name, made in (
        ("environments", environments()),
        ("algorithms", algorithms()),
        ("speed", speed()),
        ("scores", scores()),
        ("tag", tag()),
        ("workers", workers()),
    ):
        begin, end = f"<!-- {name}: made by scripts/readme.py -->", f"<!-- end of {name} -->"
        text = re.sub(f"{begin}.*?{end}", lambda _, m=made, b=begin, e=end: f"{b}\n{m}\n{e}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    README.write_text(current(README.read_text()))
    sys.exit(0)
