"""The command line: one short function a verb.

What a user typed wrong is one sentence on stderr and exit status 2; nothing is written then. A run that failed on its way
exits with 1, after Ctrl-C with 130, after SIGTERM with 143.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import sys
import textwrap
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shoal.flags import Flag, build, flags_of, split
from shoal.ids import catalog, find, near
from shoal.spec import StoppedError, TerminatedError, UserError

HELP = """\
Shoal trains, measures, watches and ships teams of reinforcement-learning agents.

  shoal train ALGO ENV [flags]      train; `shoal train ALGO ENV --help` lists every flag
  shoal resume RUN [--steps N]      go on as if it had never stopped; --steps sets a new total
  shoal eval RUN [flags]            play a run's policies, or those of a folder of seeds, and measure them
  shoal watch RUN [flags]           film a run's policies
  shoal plot RUN... [--out F.png]   learning curves, scores, performance profiles; seeds are one curve with its interval
  shoal table RUN... [--out F.md]   scores of algorithms on tasks, with intervals over seeds
  shoal check ENV [flags]           look an environment over: what it is, what is wrong with it, who can play it
  shoal envs | algos | runs         what there is
  shoal bench env|train|update ...  measure speed

  shoal VERB --help                 more about a verb
  shoal --version

For example:  shoal train mappo simple_spread --steps 2M --envs 256
"""


@dataclass(frozen=True)
class ResumeOptions:
    steps: int | None = None  # a new total of environment steps
    device: str | None = None  # go on there; default: as it was
    quiet: bool = False  # print nothing
    trust: bool = False  # run the code that the run brings along, though you did not make it; it is yours from then on


@dataclass(frozen=True)
class EvalOptions:
    episodes: int = 100  # episodes to play
    sampled: bool = False  # act as in training; else greedily
    seed: int | None = None  # of starts and draws; default: the run's, on a branch of its own
    checkpoint: str = "auto"  # best, last or a step's number; auto: best where there is one
    regroup: str | None = None  # who is in which group: first=player_0 second=player_1; default: as the run learnt them
    longest: int | None = None  # steps that an episode may last; default: the run's --eval.longest
    csv: str | None = None  # write an episode a line into this file
    device: str = "cpu"  # auto, cpu, cuda or cuda:1
    json: bool = False  # print one JSON value and nothing else
    trust: bool = False  # run the code that the run brings along, though you did not make it; it is yours from then on


@dataclass(frozen=True)
class WatchOptions:
    episodes: int = 5  # greedy episodes to film
    gif: str | None = None  # write a GIF here; default: media/watch.gif in the run
    mp4: str | None = None  # write a video here; needs `pip install 'shoal[video]'`
    seed: int | None = None  # of starts and draws
    regroup: str | None = None  # who is in which group: first=player_0 second=player_1; default: as the run learnt them
    checkpoint: str = "auto"  # best, last or a step's number; auto: best where there is one
    trust: bool = False  # run the code that the run brings along, though you did not make it; it is yours from then on


@dataclass(frozen=True)
class ScoreOptions:
    metric: str | None = None  # what was scored; default: each group's return
    statistic: Literal["mean", "iqm"] = "mean"  # over seeds: mean and t-interval; or IQM and stratified bootstrap
    at: str | None = None  # scores at the last evaluation, the best checkpoint's, or the last up to a step: last, best, 2M
    normalise: str | None = None  # TASK=LOW:HIGH,... or a .json file {"TASK": [LOW, HIGH]}: scores from LOW, 0, to HIGH, 1


@dataclass(frozen=True)
class PlotOptions(ScoreOptions):
    kind: Literal["curve", "scores", "profile", "improvement"] = "curve"  # what to draw
    x: Literal["steps", "time"] = "steps"  # curves over environment steps or wall time
    smooth: int = 1  # curves of a running mean of so many evaluations
    out: str = "curve.png"  # the picture, .png, .svg or .pdf; or the numbers in it, .csv


@dataclass(frozen=True)
class TableOptions(ScoreOptions):
    kind: Literal["scores", "profile", "improvement"] = "scores"  # what to list
    rows: Literal["algorithms", "tasks"] = "algorithms"  # what has a row
    out: str | None = None  # write a file: .csv, .md, .tex; or .json, all evaluations in marl-eval's format
    json: bool = False  # print one JSON value and nothing else


CURVE = "  curve         learning curves (sample efficiency)\n"
KINDS = """\
  scores        each algorithm's mean or IQM on each task, with its interval
  profile       performance profiles: the share of runs above each score
  improvement   probability of improvement of one algorithm over another
"""


@dataclass(frozen=True)
class ListOptions:
    json: bool = False  # print one JSON value and nothing else


OPTIONS: dict[str, Any] = {
    "resume": ResumeOptions,
    "eval": EvalOptions,
    "watch": WatchOptions,
    "plot": PlotOptions,
    "table": TableOptions,
    "envs": ListOptions,
    "algos": ListOptions,
    "runs": ListOptions,
}

TRUST = Flag("trust", bool, False, "")  # of train, whose other flags are those of the run
LONGEST_LINE = 1000
interrupted = threading.Event()


def script() -> None:
    """The command. Python itself overrules the status of an interruption that struck in odd places, hence the short way out."""

    def interrupt(number: int, frame: Any) -> None:
        interrupted.set()
        raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)  # until a loop takes over
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name need not be text
    status = main()
    if status in (130, 143):
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    verb, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    verbs = {
        "train": train,
        "resume": resume,
        "eval": evaluate,
        "watch": watch,
        "plot": plot,
        "table": table,
        "check": check,
        "envs": envs,
        "algos": algos,
        "runs": runs,
        "bench": bench,
    }
    try:
        if verb in ("--help", "-h", "help"):
            print(HELP, end="")
            return 0
        if verb == "--version":
            from shoal import __version__

            print(f"shoal {__version__}")
            return 0
        if verb not in verbs:
            raise UserError(f"there is no verb {verb!r}{near(verb, verbs)}; `shoal --help` lists them.")
        return verbs[verb](*read(verb, whole_groups(["--help" if a == "-h" else a for a in rest])))
    except UserError as e:
        print(f"shoal: {one_line(str(e))}", file=sys.stderr)
        return 1 if isinstance(e, StoppedError) else 2
    except TerminatedError:
        print("shoal: terminated.", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("shoal: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe went away
        sys.stderr.close()
        return 1


# --- verbs -----------------------------------------------------------------------------------------------------------


def train(words: list[str], flags: dict[str, str | None]) -> int:
    config = Flag("config", str | None, None, "").parse(flags.pop("config", "none"))
    base = begun = None  # settings to start from, and the run that they are of
    trusts = TRUST.parse(flags.pop("trust", "false"))
    if config is not None and "help" not in flags:
        from shoal.training.players import trusted
        from shoal.training.run import Run
        from shoal.training.settings import Settings
        from shoal.training.trust import require

        base = Run(config).settings if os.path.isdir(config) else Settings.from_json(Path(config))
        folder = Path(config) if os.path.isdir(config) else Path(config).parent
        signs = ("checkpoints", "code", "signature")  # of a run, whose settings bring code along
        if os.path.isdir(config) or ((folder / "config.json").is_file() and any((folder / x).exists() for x in signs)):
            begun = Run(folder).path
            trusted([begun] if trusts else [])
            require(begun)
        words = words or [base.algo, base.env]
    if "help" in flags and len(words) < 2:
        name = words[0] if words else "mappo"
        print(f"shoal train ALGO ENV [flags]\n\nName the two and every flag is listed: shoal train {name} simple_spread --help")
        return 0
    if len(words) != 2:
        raise UserError(f"train takes an algorithm and an environment; it was given {' '.join(words) or 'neither'}.")
    algo, env = find("algos", words[0]), find("envs", words[1])
    from shoal.training.settings import all_flags, from_flags

    if "help" in flags:
        print_flags(f"shoal train {words[0]} {words[1]} [flags]", all_flags(algo, env), TRAIN_NOTES)
        return 0
    from shoal.api import seeds_of, start, start_several

    settings = from_flags(words[0], words[1], flags, base)
    if trusts:
        from shoal.training.players import trusted

        trusted((), settings.team)
    code = _train(lambda: start_several(settings) if seeds_of(settings) > 1 else start(settings)[1])
    if begun is not None and code == 0:
        from shoal.training.trust import sign

        sign(begun)
    return code


TRAIN_NOTES = """\
also:
  --algo.GROUP.FIELD, --net.GROUP.FIELD   the same for one group: --algo.adversary.lr 1e-3
  --team.NAME ALGO|RUN|random             who plays a group or team: an algorithm that learns, a run that only acts
  --trust                                 run the code that such runs bring along, though you did not make them
  --config FILE                           start from a config.json (or a run's folder); flags are laid over it
"""


FROM = """\
  --from best|STEP|FILE   go on from another checkpoint than the last: later log
                          lines are cut off, later checkpoints moved to
                          checkpoints/left/1 (2, 3, ...), a replay begins empty
"""


def resume(words: list[str], flags: dict[str, str | None]) -> int:
    source = Flag("from", str, "last", "").parse(flags.pop("from", "last"))
    options = parse(ResumeOptions, words, flags, "resume RUN", FROM)
    if options is None:
        return 0
    (run,) = exactly(words, 1, "resume takes a run's folder")
    from shoal.api import go_on, go_on_several
    from shoal.training.players import trusted
    from shoal.training.several import runs_in

    found = runs_in(run)
    if options.trust:
        trusted(r.path for r in found)
    how = (options.steps, None, options.quiet, options.device, None, source)
    return _train(lambda: go_on_several(found, *how) if len(found) > 1 else go_on(found[0], *how))


def _train(work: Any) -> int:
    """Run a loop, or several, to the end and say what came of it."""
    from shoal.api import NO_ROOM, no_room
    from shoal.training.diverged import DivergedError
    from shoal.training.several import Several

    if interrupted.is_set():  # some library swallowed the exception while it was imported
        raise KeyboardInterrupt
    try:
        loop = work()
    except DivergedError as e:
        print(f"shoal: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"shoal: the run could not be written, and stopped: {e}.", file=sys.stderr)
        return 1
    except (RuntimeError, MemoryError) as e:
        if not no_room(e):
            raise
        print(f"shoal: the run stopped: {NO_ROOM}", file=sys.stderr)
        return 1
    if isinstance(loop, Several):
        return _summary(loop)
    if not loop.config.quiet:
        path = shlex.quote(str(loop.folder.path))
        if loop.stopped:
            print(f"stopped at step {loop.step:,}: {loop.stopped}. Go on with: shoal resume {path}")
        elif loop.step < loop.config.steps:
            print(f"saved at step {loop.step:,} of {loop.config.steps:,}. Go on with: shoal resume {path}")
        else:
            print(f"done: {loop.step:,} steps in {loop.seconds:.0f} s. The run is {path}\nSee them play: shoal watch {path}")
    return 128 + loop.signal if loop.signal else 0


def _summary(done: Any) -> int:
    """What came of several seeds: each one's last score, and their mean and standard deviation."""
    scores = {e.seed: e.score(done.score_name) for e in done.ended}
    if not done.config.quiet:
        known = [x for x in scores.values() if x is not None]
        mean = sum(known) / max(len(known), 1)
        std = (sum((x - mean) ** 2 for x in known) / max(len(known) - 1, 1)) ** 0.5  # of a sample
        rows = [
            [str(e.seed), f"{e.step:,}", _score(scores[e.seed]), _fate(e, done.config.steps), str(e.run.path)]
            for e in done.ended
        ]
        note = f"{done.score_name} over {len(known)} seeds: mean {mean:.2f}, standard deviation {std:.2f}." if known else ""
        print_table(["seed", "steps", f"last {done.score_name}", "", "run"], rows, note=note)
        where = _common([e.run.path for e in done.ended])
        print(f"{sum(e.step for e in done.ended):,} steps in {done.seconds:.0f} s. See the curve: shoal plot {where}")
        if any(e.stopped or e.step < done.config.steps for e in done.ended):
            print("Go on with: " + (f"shoal resume {where}" if "*" not in where else "shoal resume RUN, of each"))
    for sentence in done.failures:
        print(f"shoal: {sentence}", file=sys.stderr)
    return 1 if done.failures else 128 + done.signal if done.signal else 0


def _fate(ended: Any, steps: int) -> str:
    return "failed" if ended.failed else ended.stopped or ("done" if ended.step >= steps else "saved")


def _common(paths: list[Path]) -> str:
    """A word of the shell for all of these: the folder that is theirs alone, or what their names begin with."""
    parent, stem = paths[0].parent, os.path.commonprefix([p.name for p in paths])  # noqa: RUF071
    alone = {p.parent for p in parent.glob("*/config.json")} == set(paths)
    return shlex.quote(str(parent)) if alone else f"{shlex.quote(str(parent / stem))}*"


def evaluate(words: list[str], flags: dict[str, str | None]) -> int:
    team = under(flags, "team.")
    options = parse(EvalOptions, words, flags, "eval RUN", "  --team.NAME RUN|random   who plays a group or team instead")
    if options is None:
        return 0
    (run,) = exactly(words, 1, "eval takes a run's folder")
    from shoal import api
    from shoal.tools import measure
    from shoal.training.players import policy_name

    how_to = options.episodes, options.sampled, options.seed, options.checkpoint, team, options.device, options.longest
    found = measure.seeds_in(run, "evaluate")
    seeds = [r.recorded.run.get("seed", 0) for r in found]
    played = [api.evaluate(r, *how_to, options.trust, options.regroup) for r in found]
    each = [measure.summary(episodes) for episodes in played]
    if options.csv:
        measure.write_csv(list(zip(seeds, played, strict=True)), Path(options.csv))
    rows = each[0] if len(found) == 1 else measure.over_seeds(each)
    how, which = "sampled" if options.sampled else "greedy", policy_name(found[0], options.checkpoint)
    n = len(played[0].lengths)
    if options.json:
        value = {"run": run, "checkpoint": which, "episodes": n, "policy": how, "metrics": rows}
        several = [{"run": str(r.path), "seed": k, "metrics": m} for r, k, m in zip(found, seeds, each, strict=True)]
        print(json.dumps(value | ({"seeds": several} if len(found) > 1 else {})))
        return 0
    if len(found) > 1:
        shown = [k for k in rows if k.count("/") < 2 and not k.startswith("return_sum/")]
        lines = [[str(k), *(_spread(m[c]) for c in shown)] for k, m in zip(seeds, each, strict=True)]
        title = f"{n} {how} episodes of each seed in {run}, checkpoint {which}: mean ± 95 % interval"
        print_table(["seed", *shown], [*lines, [f"{len(found)} seeds", *(_spread(rows[c]) for c in shown)]], title)
        return 0
    print_table(
        ["metric", "mean", "95 % interval", "std", "min", "max"],
        [
            [k, f"{r['mean']:.3f}", f"± {r['interval']:.3f}", *(f"{r[c]:.3f}" for c in ("std", "min", "max"))]
            for k, r in rows.items()
        ],
        f"{n} {how} episodes of {found[0].path}, checkpoint {which}",
    )
    return 0


def _spread(row: dict[str, float]) -> str:
    return f"{row['mean']:.2f} ± {row['interval']:.2f}"


def watch(words: list[str], flags: dict[str, str | None]) -> int:
    team = under(flags, "team.")
    options = parse(WatchOptions, words, flags, "watch RUN", "  --team.NAME RUN|random   who plays a group or team instead")
    if options is None:
        return 0
    (run,) = exactly(words, 1, "watch takes a run's folder")
    from shoal.tools import watch as tool
    from shoal.tools.measure import best_of, seeds_in

    for path, suffix in ((options.gif, ".gif"), (options.mp4, ".mp4")):
        if path and not path.endswith(suffix):
            raise UserError(f"--{suffix[1:]} is {path!r}: the file's name ends in {suffix}.")
    found = seeds_in(run, "watch")
    one, which = best_of(found) if len(found) > 1 else (found[0], "")
    gif = options.gif or (None if options.mp4 else str(one.path / "media" / "watch.gif"))
    how = options.episodes, options.checkpoint, team, options.seed, options.trust, options.regroup
    episodes = tool.watch(one, gif, options.mp4, *how)
    scores = ", ".join(f"{g} {x.mean():.2f}" for g, x in episodes.returns.items())
    if which:
        print(which)
    print(f"{len(episodes.lengths)} greedy episodes, mean return: {scores}")
    print(f"filmed: {options.mp4 or gif}")
    return 0


def plot(words: list[str], flags: dict[str, str | None]) -> int:
    options = parse(
        PlotOptions,
        words,
        flags,
        "plot RUN...",
        KINDS.replace("\n", "\n  curve         learning curves (sample efficiency)\n", 1),
    )
    if options is None:
        return 0
    if not words:
        raise UserError("plot takes one run's folder or more.")
    curve = options.kind == "curve"
    if not curve and (options.x != "steps" or options.smooth != 1):
        raise UserError(f"--x and --smooth are of curves, and --kind is {options.kind}: leave them out.")
    if curve and options.at:
        raise UserError("--at says at which evaluation scores are read, and a curve shows all: take --kind scores.")
    from shoal.tools.plot import plot as draw

    how = options.kind, options.statistic, options.x, options.smooth, options.at or "last", options.normalise
    print(f"plotted: {draw(words, Path(options.out), options.metric, remark, *how)}")
    return 0


def table(words: list[str], flags: dict[str, str | None]) -> int:
    options = parse(TableOptions, words, flags, "table RUN...", f"kinds:\n{KINDS}")
    if options is None:
        return 0
    if not words:
        raise UserError("table takes one run's folder or more.")
    from shoal.tools import table as tool

    out = Path(options.out) if options.out is not None else None
    if out is not None:
        tool.check_out(out)
    how = options.kind, options.statistic, options.at or "last", options.normalise, options.rows
    made = tool.table(words, options.metric, remark, *how)
    if out is not None:
        tool.write(made, out)
    if options.json:
        print(json.dumps(made.as_json()))
    elif out is not None:
        print(f"written: {out}")
    else:
        columns, *rows = made.lines
        print_table(columns, rows, made.title)
    return 0


def check(words: list[str], flags: dict[str, str | None]) -> int:
    from shoal.tools import check as tool

    asked = {k: flags.pop(k) for k in list(flags) if k.startswith("env.")}
    notes = "  --env.FIELD   settings of the environment's own: `shoal train ippo ENV --help` lists them"
    options = parse(tool.CheckOptions, words, flags, "check ENV", notes)
    if options is None:
        return 0
    (env,) = exactly(words, 1, "check takes an environment")
    known = flags_of(find("envs", env).load().Config, "env.") if asked else {}
    config = {k[4:].replace("-", "_"): known[k].parse(t) if k in known else t for k, t in asked.items()}
    report = tool.check(env, options, config)
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        _print_check(report)
    return 1 if report.of("problem") else 0


def _print_check(report: Any) -> None:
    """What it is, what was seen, who can play it; and what is wrong last, where the eye is."""
    print(f"{report.env}: {report.summary}".rstrip(": "))
    if report.spec is not None:
        print_table(["group", "team", "agents", "sees", "paid", "does"], report.group_rows)
        print_table(["world", ""], report.lines)
    good = ", ".join(f.about for f in report.of("ok"))
    found = [[level, f.about, f.sentence] for level in ("note", "problem") for f in report.of(level)]
    print_table(["finding", "about", ""], [["ok", "", good], *found] if good else found)
    problems = len(report.of("problem"))
    print(f"{problems or 'no'} problem{'' if problems == 1 else 's'}.")


def envs(words: list[str], flags: dict[str, str | None]) -> int:
    return _list("envs", words, flags)


def algos(words: list[str], flags: dict[str, str | None]) -> int:
    return _list("algos", words, flags)


def _list(kind: str, words: list[str], flags: dict[str, str | None]) -> int:
    options = parse(ListOptions, words, flags, kind)
    if options is None:
        return 0
    exactly(words, 0, f"{kind} takes no words")
    entries = sorted(catalog(kind).values(), key=lambda e: (e.family, e.id))
    if options.json:
        print(json.dumps([{"id": e.form, "family": e.family, "summary": e.summary} for e in entries]))
    elif kind == "envs":
        print_table(["environment", "family", "what it is"], [[e.form, e.family, e.summary] for e in entries])
    else:
        known = {e.id: ", ".join(f"{k} {v}" for k, v in e.settings.items()) for e in entries}
        print_table(["algorithm", "what it is", "settings of the name"], [[e.id, e.summary, known[e.id]] for e in entries])
    return 0


def runs(words: list[str], flags: dict[str, str | None]) -> int:
    options = parse(ListOptions, words, flags, "runs [FOLDER]")
    if options is None:
        return 0
    if len(words) > 1:
        raise UserError(f"runs takes at most one folder; it was given {' '.join(words)}.")
    from shoal.tools.measure import list_runs

    folder = Path(words[0] if words else "runs")
    found = list_runs(folder, remark)
    if options.json:
        print(json.dumps(found))
    elif not found:
        print(f"no runs under {folder}/ yet: shoal train mappo simple_spread makes one.")
    else:
        _print_runs(found)
        _print_remarks(found)
    return 0


def _print_runs(found: list[dict[str, Any]]) -> None:
    """Rows by folder and by what was trained there; returns of several groups of agents have a line each."""
    from shoal.log.console import short

    columns = ["run", "seed", "begun", "state", "device", "steps", "last (best)"]
    parts: dict[str, list[list[str]]] = {}
    for r in found:
        folder, name, algo, env = *os.path.split(r["run"]), *(_file_name(r[k]) for k in ("algo", "env"))
        scores = [f"{_score(s['last'])} ({_score(s['best'])})" for s in r["scores"].values()] or ["-"]
        if len(scores) > 1:
            scores = [f"{k.removeprefix('return/')} {s}" for k, s in zip(r["scores"], scores, strict=True)]
        row = [one_line(name), str(r["seed"]), r["date"][5:10], r["state"], r["device"] or "-", short(r["step"]), scores[0]]
        rest = [[""] * (len(row) - 1) + [s] for s in scores[1:]]
        parts.setdefault(one_line(f"{algo} {env}, in {folder or '.'}"), []).extend([row, *rest])
    whole = [columns, *(row for rows in parts.values() for row in rows)]
    wide = [max(len(row[k]) for row in whole) for k in range(len(columns))]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    wide[0] = min(wide[0], max(width - sum(wide[1:]) - 2 * len(wide[1:]), 12))  # a long name is folded
    for title, rows in {"": [columns], **parts}.items():
        print(f"\n{title}" if title else "", end="\n" if title else "")
        for name, *cells in rows:
            first, *folded = textwrap.wrap(name, wide[0], break_on_hyphens=False) or [""]
            aligned = [c.rjust(w) if c[:1] in "-0123456789" else c.ljust(w) for c, w in zip(cells, wide[1:], strict=True)]
            print("  ".join((first.ljust(wide[0]), *aligned)).rstrip(), *folded, sep="\n")


def _print_remarks(found: list[dict[str, Any]]) -> None:
    """What runs said of themselves that is worth a look."""
    for r in found:
        for sentence in r["remarks"]:
            print(one_line(f"{r['run']}: {sentence}"))


def _file_name(id: str) -> str:
    """An id as a table has it: of a user's own file the name, without the folders."""
    return Path(id).name if id.rpartition(":")[0].endswith(".py") or id.endswith(".py") else id


def _score(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"


def bench(words: list[str], flags: dict[str, str | None]) -> int:
    from shoal.tools import bench as tool

    kinds = {"env": tool.EnvBench, "train": tool.TrainBench, "update": tool.TrainBench}
    usages = {"env": "bench env ENV", "train": "bench train ALGO ENV", "update": "bench update ALGO ENV"}
    if not words or words[0] not in kinds:
        if "help" in flags and not words:
            print("\n".join(f"shoal {usage} [flags]" for usage in usages.values()))
            return 0
        raise UserError(f"bench takes env, train or update; it was given {repr(words[0]) if words else 'none of them'}.")
    usage = usages[words[0]]
    options = parse(kinds[words[0]], words, flags, usage)
    if options is None:
        return 0
    exactly(words, 2 if words[0] == "env" else 3, f"{usage} is how it is written")
    if words[0] == "env":
        result = tool.bench_env(words[1], options)
    else:
        result = tool.bench_train(words[1], words[2], options, words[0])
    if options.json:
        print(json.dumps(result.as_json()))
    else:
        print_table(result.columns, result.rows, result.title, result.note)
    return 0


# --- reading and printing --------------------------------------------------------------------------------------------


def whole_groups(items: list[str]) -> list[str]:
    """The words `GROUP=AGENT,AGENT` after --regroup as one, wherever they stand."""
    out, groups, after = list[str](), list[str](), False
    for item in items:
        name, eq, value = item.partition("=")
        if after and "=" in item and not item.startswith("--"):
            groups.append(item)
        elif (after := name == "--regroup") and eq:
            groups.append(value)
        elif not after:
            out.append(item)
    asked = any(x.partition("=")[0] == "--regroup" for x in items)
    return [*out, *(["--regroup", *([" ".join(groups)] if groups else [])] if asked else [])]


@cache
def flags_of_verb(verb: str) -> dict[str, Flag]:
    """Those that a verb has whatever algorithm and environment are named."""
    if verb == "train":
        from shoal.training.settings import common_flags

        return {name: flag for flags in common_flags().values() for name, flag in flags.items()} | {TRUST.name: TRUST}
    if verb == "check":
        from shoal.tools.check import CheckOptions

        return flags_of(CheckOptions)
    if verb == "bench":
        from shoal.tools.bench import EnvBench, TrainBench

        return {**flags_of(EnvBench), **flags_of(TrainBench)}
    return flags_of(OPTIONS[verb])


def read(verb: str, items: list[str]) -> tuple[list[str], dict[str, str | None]]:
    """Words and flags. Which flags are switches is known from their types, and those of --algo.* and --env.* from the algorithm
    and environment that are named, which may stand after them: where a name is missing, some switch took it."""
    theirs: dict[str, Flag] = {}

    def takes(name: str, word: str) -> bool:
        if name == "help":
            return False
        section, dot, rest = name.partition(".")
        flag = {**flags_of_verb(verb), **theirs}.get(section + dot + rest.rpartition(".")[2])  # a group's is as everybody's
        return flag is None or flag.takes(word)

    words, flags = split(items, takes)
    needs = {"train": 2, "check": 1}.get(verb, 0)
    taken = [word for name, word in flags.items() if name.startswith(("algo.", "env.")) and word is not None]
    if len(words) < needs and taken and "help" not in flags:
        for word in (*words, *taken):
            theirs |= flags_of_named(word)
        words, flags = split(items, takes)
    return words, flags


def flags_of_named(word: str) -> dict[str, Flag]:
    """The flags of the algorithm or environment that a word may be the name of."""
    known: dict[str, Flag] = {}
    for kind, prefix in (("algos", "algo."), ("envs", "env.")):
        with suppress(Exception):  # it is said where the word is asked for as one
            known |= flags_of(find(kind, word).load().Config, prefix)
    return known


def under(flags: dict[str, str | None], prefix: str) -> dict[str, str]:
    """Takes the flags of a prefix, such as team., out of the others."""
    found = {}
    for name in [n for n in flags if n.startswith(prefix)]:
        if (text := flags.pop(name)) is None:
            raise UserError(f"--{name} was given no value.")
        found[name.removeprefix(prefix).replace("-", "_")] = text
    return found


def parse(cls: Any, words: list[str], flags: dict[str, str | None], usage: str, notes: str = "") -> Any:
    """A verb's options from its flags; none when it was only asked for help."""
    known = flags_of(cls)
    if "help" in flags:
        print_flags(f"shoal {usage} [flags]", {"flags": known}, notes)
        return None
    for name in flags:
        if name not in known:
            raise UserError(f"there is no flag --{name}{near(name, known)}; `shoal {usage.split()[0]} --help` lists them.")
    return build(cls, {n.replace("-", "_"): known[n].parse(t) for n, t in flags.items()}, "")


def one_line(text: str) -> str:
    """A sentence as a terminal takes it, whatever words of the user's are in it."""
    text = "".join(c if c.isprintable() else " " if c.isspace() else repr(c)[1:-1] for c in text)
    return text if len(text) <= LONGEST_LINE else f"{text[: LONGEST_LINE // 2]} ... {text[-LONGEST_LINE // 2 :]}"


def remark(sentence: str) -> None:
    """Of what is done without."""
    print(f"shoal: {one_line(sentence)}", file=sys.stderr)


def exactly(words: list[str], n: int, sentence: str) -> list[str]:
    if len(words) != n:
        raise UserError(f"{sentence}; it was given {' '.join(words) or 'none'}.")
    return words


def print_flags(usage: str, sections: dict[str, dict[str, Flag]], notes: str = "") -> None:
    print(usage)
    wide = max(len(f.name) for fs in sections.values() for f in fs.values())
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize  # a pipe gets a line a flag
    indent = " " * (wide + 6)
    for section, flags in sections.items():
        print(f"\n{section}:" if flags else "", end="\n" if flags else "")
        for f in flags.values():
            line = f"  --{f.name:<{wide}}  {f.help} ({f.kind}; {_shown(f.default)})"
            print(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False))
    if notes:
        print(f"\n{notes}".rstrip())


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value)


def print_table(columns: list[str], rows: list[list[str]], title: str = "", note: str = "") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [[one_line(cell) for cell in r] for r in rows]  # a run's folder and what it names may be called anything
    console = Console(highlight=False)
    if not console.is_terminal:  # for files and pipes: whole words, however wide
        console = Console(
            highlight=False, width=max(120, sum(max(map(len, c), default=0) + 4 for c in zip(columns, *rows, strict=True)))
        )
    if title:
        console.print(one_line(title), markup=False)
    t = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for k, c in enumerate(columns):
        numeric = bool(rows) and all(r[k][:1] in "-±0123456789" for r in rows)
        t.add_column(c, justify="right" if numeric else "left", overflow="fold")
    for r in rows:
        t.add_row(*map(Text, r))
    console.print(t)
    if note:
        console.print(note, markup=False)


if __name__ == "__main__":
    script()
