"""Files of a run that were damaged, edited, swapped, or replaced by what is no file: hundreds of them, always the same.

Whatever is done to a run, a command ends with a status that it may have, without a traceback and without waiting; and where it
refuses, nothing in the run has changed.
"""

import collections
import copy
import hashlib
import json
import os
import random
import shutil
import signal
import stat
import traceback
from pathlib import Path

import pytest
import torch
from torch import Tensor

import shoal
from shoal.cli import main
from shoal.training import checkpoint

STATUSES = {0, 1, 2, 130, 143}
LONGEST = 30  # seconds
QUICK = {
    "envs": 4,
    "quiet": True,
    "compile": "off",
    "eval": {"episodes": 2, "every": 40},
    "log": {"tensorboard": False, "every": 40},
    "net": {"hidden": (8,)},
}
REPLAY = {"rollout": 5, "capacity": 100, "learning_starts": 20, "batch": 4}
SAVE = {"every": 20, "keep": 2}


class HungError(BaseException):
    pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One that learns from rollouts, one from a replay with priorities."""
    folder = tmp_path_factory.mktemp("runs")
    given = {**QUICK, "save": SAVE, "steps": 160, "until": 80}
    return {
        "ippo": shoal.train("ippo", "probe_copy", out=folder / "ippo", algo={"rollout": 5}, **given).path,
        "ddqn": shoal.train("ddqn", "probe_copy", out=folder / "ddqn", algo={**REPLAY, "prioritised": True}, **given).path,
    }


# --- what is done to a run: (kind, what, damage) -------------------------------------------------------------------------


def paths_in(tree, path=()):
    """Every place in a tree of dicts and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for k, x in items:
        yield (*path, k)
        yield from paths_in(x, (*path, k))


def edited(tree, rng, values):
    """A copy in which one place is something else, is gone, or has a neighbour that does not belong there."""
    tree = copy.deepcopy(tree)
    path = rng.choice(list(paths_in(tree)))
    at = tree
    for k in path[:-1]:
        at = at[k]
    was, how = at[path[-1]], rng.random()
    if how < 0.15:
        del at[path[-1]]
    elif how < 0.2 and isinstance(at, dict):
        at["strange"] = 1
    else:
        at[path[-1]] = values(was, rng)
    return tree, "/".join(map(str, path))


def other_value(was, rng):
    """Of a checkpoint."""
    plain = [None, "word", -1, 0, 7, 10**30, float("nan"), float("inf"), -float("inf"), [], {}, [1, "a"], {"a": 1}, True, b"x"]
    if not isinstance(was, Tensor) or rng.random() < 0.2:
        return rng.choice([*plain, torch.zeros(3), torch.zeros(())])
    changed = [
        lambda x: x[..., None],
        lambda x: x.flatten()[:-1],
        lambda x: x.flatten().repeat(2),
        lambda x: x.double() if x.dtype != torch.float64 else x.float(),
        lambda x: x.long() if x.dtype != torch.int64 else x.int(),
        lambda x: x.bool() if x.dtype != torch.bool else x.float(),
        lambda x: torch.full_like(x, float("nan")) if x.is_floating_point() else torch.full_like(x, 1),
        lambda x: torch.full_like(x, float("inf")) if x.is_floating_point() else torch.zeros_like(x),
        lambda x: torch.full_like(x, -3) if x.dtype not in (torch.bool, torch.uint8) else ~x,
        lambda x: torch.full_like(x, 10**6) if x.dtype not in (torch.bool, torch.uint8) else x.flatten()[:0],
        lambda x: x.to_sparse() if x.dim() else x[None],
        lambda x: x.new_zeros(0),
    ]
    return rng.choice(changed)(was)


def other_setting(was, rng):
    """Of a config.json."""
    return rng.choice([None, "word", "", -1, 0, 3.5, float("nan"), [], {}, [1], {"a": {"b": {"c": 1}}}, True, "999", "²"])


def edit_checkpoint(run, rng, name):
    path = run / "checkpoints" / name
    state, where = edited(torch.load(path, weights_only=True), rng, other_value)
    checkpoint.write(path, state)
    return where


def edit_part(run, rng, name=None):
    path = rng.choice(sorted((run / "checkpoints" / "replay").glob("*.pt")))
    state, where = edited(torch.load(path, weights_only=True), rng, other_value)
    checkpoint.write(path, state)
    return where


def edit_config(run, rng, name="config.json"):
    values, where = edited(json.loads((run / name).read_text()), rng, other_setting)
    (run / name).write_text(json.dumps(values))
    return where


def edit_metrics(run, rng, name=None):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    k = rng.randrange(len(lines))
    value, where = edited(json.loads(lines[k]), rng, other_setting)
    lines[k] = rng.choice([json.dumps(value), json.dumps(value), "", "{", "[1]", "null", "9" * 5000, "[" * 5000, '{"step": 1}'])
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return where


def any_file(run, rng, name):
    return run / name if name else rng.choice(sorted(p for p in run.rglob("*") if p.is_file() and p.name != ".lock"))


def flip(run, rng, name):
    path = any_file(run, rng, name)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"{path.relative_to(run)} byte {at}"


def cut_short(run, rng, name):
    path = any_file(run, rng, name)
    at = rng.choice([0, 1, rng.randrange(path.stat().st_size), path.stat().st_size - 1])
    path.write_bytes(path.read_bytes()[:at])
    return f"{path.relative_to(run)} at {at}"


def garbage(run, rng, name):
    path = any_file(run, rng, name)
    path.write_bytes(
        rng.choice([rng.randbytes(200), b"\0" * 500, b"null", b"[]", b'"x"', b"9" * 5000, b"[" * 5000, b"{" * 5000])
    )
    return str(path.relative_to(run))


def swap(run, rng, name):
    a, b = rng.sample(sorted(p for p in run.rglob("*") if p.is_file()), 2)
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)
    return f"{a.relative_to(run)} and {b.relative_to(run)}"


def remove(run, rng, name):
    path = rng.choice(sorted(run.rglob("*")))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return str(path.relative_to(run))


def replace(run, rng, name):
    """By what is no file, or a link."""
    path = any_file(run, rng, name)
    how = rng.choice(["pipe", "folder", "link", "loop", "gone"])
    kept = path.rename(run.parent / "kept")
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": kept, "loop": path, "gone": run.parent / "nowhere"}[how])
    return f"{path.relative_to(run)} by a {how}"


def link_folder(run, rng, name):
    path = rng.choice(sorted(p for p in run.rglob("*") if p.is_dir()))
    path.symlink_to(path.rename(run.parent / "kept"))
    return str(path.relative_to(run))


LAST, BEST, CONFIG, METRICS = "checkpoints/last.pt", "checkpoints/best.pt", "config.json", "metrics.jsonl"
PLAN = [  # how many of a kind, what is done, to which file (none: any), to which run (none: either)
    (35, flip, LAST, None),
    (20, flip, BEST, None),
    (30, flip, None, None),
    (20, flip, CONFIG, None),
    (15, flip, METRICS, None),
    (20, cut_short, LAST, None),
    (25, cut_short, None, None),
    (80, edit_checkpoint, "last.pt", "ippo"),
    (80, edit_checkpoint, "last.pt", "ddqn"),
    (30, edit_checkpoint, "best.pt", None),
    (25, edit_part, None, "ddqn"),
    (45, edit_config, CONFIG, None),
    (10, edit_config, "versions.json", None),
    (25, edit_metrics, None, None),
    (30, garbage, None, None),
    (15, garbage, CONFIG, None),
    (20, swap, None, None),
    (20, remove, None, None),
    (30, replace, None, None),
    (10, link_folder, None, None),
]
MUST_REFUSE = {(flip, LAST), (cut_short, LAST)}  # what resume never takes


def tree(folder):
    """All that is there: what it is, and what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        told = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else ""
        found[str(path.relative_to(folder))] = (stat.S_IFMT(mode), os.readlink(path) if stat.S_ISLNK(mode) else told)
    return found


def hung(number, frame):
    raise HungError


@pytest.mark.slow
def test_whatever_is_done_to_a_run_a_command_ends_as_it_should(runs, tmp_path, capsys):
    rng, found, failures = random.Random(15), collections.Counter(), []
    before_alarm = signal.signal(signal.SIGALRM, hung)
    cases = [(damage, name, only) for n, damage, name, only in PLAN for _ in range(n)]
    assert len(cases) >= 500
    for k, (damage, name, only) in enumerate(cases):
        place = tmp_path / f"case{k}"
        run = Path(shutil.copytree(runs[only or rng.choice(sorted(runs))], place / "run"))
        what = f"{damage.__name__}({damage(run, rng, name)})"
        commands = {
            "resume": ["resume", run, "--steps", 120, "--quiet"],
            "eval": ["eval", run, "--episodes", 2],
            "runs": ["runs", place],
            "plot": ["plot", place, "--out", tmp_path / "x.png"],
        }
        for verb in (*list(commands)[1 + k % 3 : 2 + k % 3], "resume"):
            before = tree(place)
            signal.alarm(LONGEST)
            try:
                status = main([*map(str, commands[verb])])
            except HungError:
                status = "hung"
            except BaseException:
                status = traceback.format_exc()
            finally:
                signal.alarm(0)
            out, err = capsys.readouterr()
            found[verb, status if status in STATUSES else "failed"] += 1
            wrong = (
                status not in STATUSES
                or "Traceback" in out + err
                or (status == 2 and tree(place) != before)
                or (status in (1, 2) and not err.startswith("shoal: "))
                or (verb == "resume" and (damage, name) in MUST_REFUSE and status != 2)
            )
            if wrong:
                failures.append(f"{run.name} {k} {what}: {verb} -> {status}\n{err}")
        shutil.rmtree(place)
    signal.signal(signal.SIGALRM, before_alarm)
    with capsys.disabled():
        told = ", ".join(f"{verb} {status}: {n}" for (verb, status), n in sorted(found.items(), key=str))
        print(f"\n{len(cases)} damaged runs, {sum(found.values())} commands: {told}")
    assert not failures, f"{len(failures)} of {sum(found.values())}\n" + "\n".join(failures[:40])
