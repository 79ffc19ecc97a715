"""Several seeds at once: each run is what it is alone, nobody is left behind, and what fails is named."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import alive, children, wait_for

import shoal
from shoal.cli import main
from shoal.log.console import Board
from shoal.spec import UserError
from shoal.training.diverged import DivergedError
from shoal.training.loop import Loop
from shoal.training.players import record
from shoal.training.run import Run
from shoal.training.settings import RunConfig, Settings, resolve
from shoal.training.several import (
    Job,
    SeedsFailedError,
    branch,
    room,
    run_apart,
    run_together,
    runs_in,
    streams,
)

TINY = "--steps 1600 --envs 8 --algo.rollout 20 --eval.episodes 4 --eval.every 800 --log.every 400 --save.every 800".split()
QUICK = {"envs": 8, "quiet": True, "algo": {"rollout": 10}, "eval": {"episodes": 4}, "log": {"tensorboard": False}}


def leaves(tree, path=""):
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, x in items for k, v in leaves(x, f"{path}/{key}").items()}
    return {path: tree}


def metrics(run):
    return [{k: v for k, v in line.items() if k != "time"} for line in run.metrics]


def assert_same(a, b):
    """Every tensor of the last checkpoints, and every metric but time."""
    mine, theirs = leaves(a.load("last")), leaves(b.load("last"))
    assert mine.keys() == theirs.keys()
    tensors = [k for k, x in mine.items() if isinstance(x, torch.Tensor)]
    assert len(tensors) > 30
    assert [k for k in tensors if not torch.equal(mine[k], theirs[k])] == []
    assert metrics(a) == metrics(b)
    assert {line["kind"] for line in metrics(a)} == {"train", "eval"}


def command(*args):
    return [sys.executable, "-m", "shoal.cli", *map(str, args)]


def refused(capsys, *argv):
    assert main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Seeds 5 and 6, each by itself."""
    folder = tmp_path_factory.mktemp("alone")
    for k in (5, 6):
        assert (
            main(["train", "mappo", "simple_spread", *TINY, "--quiet", "--seed", str(k), "--out", str(folder / f"seed{k}")])
            == 0
        )
    return folder


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """The same two, in processes; and what was printed."""
    folder = tmp_path_factory.mktemp("apart") / "X"
    done = subprocess.run(
        command("train", "mappo", "simple_spread", *TINY, "--seed", 5, "--seeds", 2, "--out", folder),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder, done.stdout


# --- the same numbers ---


def test_processes_give_what_each_seed_gives_alone(alone, apart):
    folder, _ = apart
    assert sorted(p.name for p in folder.iterdir()) == ["seed5", "seed6"]
    for k in (5, 6):
        assert_same(Run(folder / f"seed{k}"), Run(alone / f"seed{k}"))
    assert metrics(Run(folder / "seed5")) != metrics(Run(folder / "seed6"))


def test_each_is_a_run_like_any_other(alone, apart):
    folder, _ = apart
    for k in (5, 6):
        mine, theirs = (json.loads((f / f"seed{k}" / "config.json").read_text()) for f in (folder, alone))
        assert (mine["run"].pop("seed"), mine["run"].pop("seeds")) == (k, 1)
        assert mine["run"].pop("out") == str(folder / f"seed{k}")
        assert mine["run"].pop("quiet") is False
        rest = {name: theirs["run"][name] for name in mine["run"]}
        assert {**mine, "run": mine["run"]} == {**theirs, "run": rest}
    assert shoal.evaluate(folder / "seed6", 4).lengths.shape == (4,)


def test_loops_in_turn_give_what_each_seed_gives_alone(alone, tmp_path):
    """What CUDA does, without its streams: iterations of the two are interleaved in one process."""
    order = []

    class Watch(shoal.Hook):
        def after_iteration(self, loop):
            order.append(loop.config.seed)

    runs = shoal.train(
        "mappo",
        "simple_spread",
        seed=5,
        seeds=2,
        steps=1600,
        envs=8,
        quiet=True,
        algo={"rollout": 20},
        eval={"episodes": 4, "every": 800},
        log={"every": 400},
        save={"every": 800},
        hook=Watch(),
        out=tmp_path,
    )
    assert order == [5, 6] * 10
    for k, run in zip((5, 6), runs, strict=True):
        assert run.path == tmp_path / f"seed{k}"
        assert_same(run, Run(alone / f"seed{k}"))


def test_until_and_resume_of_the_whole_folder(alone, tmp_path, capsys):
    folder = tmp_path / "X"
    words = ["train", "mappo", "simple_spread", *TINY, "--quiet", "--seed", "5", "--seeds", "2", "--out", str(folder)]
    assert main([*words, "--until", "800"]) == 0
    assert [r.load("last")["step"] for r in runs_in(folder)] == [800, 800]
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    for k in (5, 6):
        assert_same(Run(folder / f"seed{k}"), Run(alone / f"seed{k}"))


def test_a_run_that_never_began_begins_of_its_own_seed(alone, tmp_path):
    """Its folder is there from the start, and its turn may not have come."""
    folder = tmp_path / "X"
    one = shoal.train("mappo", "simple_spread", seed=6, steps=1600, envs=8, quiet=True, out=folder / "a", algo={"rollout": 20},
                      eval={"episodes": 4, "every": 800}, log={"every": 400}, save={"every": 800})  # fmt: skip
    for path in (*one.checkpoints.iterdir(), one.path / "metrics.jsonl", one.path / "train.log"):
        path.unlink()
    assert_same(shoal.resume(one, quiet=True), Run(alone / "seed6"))


# --- what is printed ---


def test_lines_say_whose_they_are_and_a_summary_ends(apart):
    folder, out = apart
    lines = out.splitlines()
    for k in (5, 6):
        said = [line for line in lines if line.startswith(f"seed {k}  step")]
        assert [line.split()[3] for line in said] == ["0", "800", "1,600"]
        score = Run(folder / f"seed{k}").evaluations()[-1]["return/agents"]
        assert said[-1].endswith(f"agents {score:.2f}")
        (row,) = [line for line in lines if line.split()[:1] == [str(k)]]
        assert row.split()[1:4] == ["1,600", f"{score:.2f}", "done"]
    scores = torch.tensor([r.evaluations()[-1]["return/agents"] for r in runs_in(folder)], dtype=torch.float64)
    assert f"over 2 seeds: mean {scores.mean():.2f}, standard deviation {scores.std():.2f}." in out
    assert f"shoal plot {folder}" in out


def test_a_board_adds_up(capsys):
    board = Board({0: 0, 10: 50}, 100, quiet=False)
    told = {}
    board.terminal.show = told.update
    board.advance(0, 20, 1000.0)
    board.advance(10, 60, 500.0)
    assert (told["completed"], told["rate"]) == (80, "1.5k steps/s, slowest at 20%")
    board.leave(10)
    assert told["rate"].startswith("1k steps/s")
    board.leave(0)
    assert told["rate"].startswith("1k steps/s")  # at the end, what it was
    board.scores(0, {"return/a": 1.0, "return/b": None}, ["a", "b"])
    board.scores(10, {"return/a": 2.0}, ["a", "b"])
    assert told["scores"] == "a 1.50"
    board.line(0, "here")
    assert capsys.readouterr().out == "seed  0  here\n"
    quiet = Board({0: 0}, 100, quiet=True)
    quiet.line(0, "nothing")
    assert capsys.readouterr().out == ""


# --- before anything is written ---

WRONG = [
    ("--seeds 0", "--seeds is 0"),
    ("--seeds many", "whole number"),
    ("--seeds 2 --algo.lr nan", "--algo.lr is nan"),
    ("--seeds 2 --net.hidden 64,0", "--net.hidden"),
    ("--seeds 2 --team.agents nobody", "'nobody'"),
    ("--seeds 2 --init nowhere", "is no run"),
    ("--seeds 2 --save.best nothing", "--save.best"),
    ("--seeds 2 --envs 1e12", "not enough memory"),
]


@pytest.mark.parametrize(("line", "word"), WRONG, ids=[w[0] for w in WRONG])
def test_a_mistake_is_one_sentence_and_no_folder(capsys, tmp_path, monkeypatch, line, word):
    monkeypatch.chdir(tmp_path)
    assert word in refused(capsys, "train", "mappo", "simple_spread", *line.split())
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_taken_are_refused_before_any_is_made(capsys, tmp_path, alone):
    (tmp_path / "X" / "seed1").mkdir(parents=True)
    (tmp_path / "X" / "seed1" / "something").write_text("of somebody's")
    assert "seed1 exists" in refused(capsys, "train", "mappo", "simple_spread", "--seeds", 3, "--out", tmp_path / "X")
    assert [p.name for p in (tmp_path / "X").iterdir()] == ["seed1"]
    assert "shoal resume" in refused(capsys, "train", "mappo", "simple_spread", "--seed", 4, "--seeds", 2, "--out", alone)
    assert "is a run" in refused(capsys, "train", "mappo", "simple_spread", "--seeds", 2, "--out", alone / "seed5")
    assert sorted(p.name for p in alone.iterdir()) == ["seed5", "seed6"]


def test_names_of_folders_where_none_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings("mappo", "simple_spread", {"seeds": 3, "seed": 9})
    config = RunConfig(seeds=3, seed=9)
    made = branch(settings, config)
    assert [(s.run["seed"], s.run["seeds"]) for s in made] == [(9, 1), (10, 1), (11, 1)]
    folders = [Path(s.run["out"]) for s in made]
    assert {f.parent for f in folders} == {Path("runs/simple_spread/mappo")}
    stems = {f.name.removesuffix(f"-seed{k}") for f, k in zip(folders, (9, 10, 11), strict=True)}
    assert len(stems) == 1  # one time for all
    folders[1].mkdir(parents=True)
    again = [Path(s.run["out"]) for s in branch(settings, config)]
    assert not any(f.exists() for f in again)


def test_runs_in_a_folder(apart, tmp_path):
    folder, _ = apart
    assert [r.path.name for r in runs_in(folder)] == ["seed5", "seed6"]
    assert [r.path.name for r in runs_in(folder / "seed5")] == ["seed5"]
    assert [r.path.name for r in runs_in(folder.parent, deep=True)] == ["seed5", "seed6"]
    for name in ("seed10", "seed9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((folder / "seed5" / "config.json").read_text())
    assert [r.path.name for r in runs_in(tmp_path)] == ["seed9", "seed10"]
    with pytest.raises(UserError, match="is no run"):
        runs_in(tmp_path / "nowhere")


def test_resume_of_runs_that_are_no_seeds_of_one_another(capsys, tmp_path):
    for name in "ab":
        shoal.train("ippo", "simple", steps=400, out=tmp_path / name, **QUICK)
    assert "differ by more than the seed" in refused(capsys, "resume", tmp_path)


def test_how_many_at_a_time(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [room(n) for n in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


# --- what fails ---


class Poison(shoal.Hook):
    def after_iteration(self, loop):
        if loop.config.seed == 1 and loop.step == 480:
            loop.learners[0].actor.net.body.weights[0].data[0, 0] = float("inf")


def test_one_that_diverges_is_named_and_the_others_go_on(tmp_path):
    with pytest.raises(SeedsFailedError, match=r"^seed 1 failed: a loss was not finite") as e:
        shoal.train("ippo", "simple", steps=1600, seeds=3, hook=Poison(), out=tmp_path, **QUICK)
    assert "seed 0" not in str(e.value)
    assert [Run(tmp_path / f"seed{k}").load("last")["step"] for k in (0, 2)] == [1600, 1600]
    assert Run(tmp_path / "seed1").load("last")["step"] < 480
    Run(tmp_path / "seed1").lock().close()  # was let go


def test_a_process_that_is_killed_is_named_and_the_others_go_on(tmp_path, capsys):
    """At most two at a time: the third takes the place of the one that went, which would have gone on for long."""
    run = {"steps": 4000, "envs": 8}
    settings = Settings("ippo", "simple", run, {"eval": {"episodes": 4}, "log": {"tensorboard": False}})
    made = branch(settings, RunConfig(seeds=3, out=str(tmp_path)))
    made[0] = dataclasses.replace(made[0], run={**made[0].run, "steps": 50_000_000})
    resolved = [resolve(s) for s in made]
    loop = Loop(resolved[0])
    runs = [Run.create(r, record(loop.players), loop.env) for r in resolved]
    board = Board(dict.fromkeys(range(3), 0), 4000, quiet=True)
    jobs = [Job(k, str(r.path), fresh=True) for k, r in enumerate(runs)]
    told = []

    class Assassin(Board):
        def line(self, seed, text):
            told.append((seed, text))
            if seed == 0 and "evaluation" in text and "step          0" in text:
                for pid, line in children().items():
                    if "seed0" in line:
                        os.kill(pid, signal.SIGKILL)

    ended = run_apart(jobs, Assassin(board.steps, 4000, quiet=True), most=2)
    assert [e.failed for e in ended] == ["its process was killed by SIGKILL.", None, None]
    assert [e.step for e in ended[1:]] == [4000, 4000]
    assert (0, "failed: its process was killed by SIGKILL.") in told


def test_the_exit_status_of_a_failure(tmp_path):
    """A learning rate that no weight survives."""
    words = [*TINY, "--algo.lr", "1e30", "--algo.grad-clip", "1e30", "--algo.normalise-obs", "true"]
    done = subprocess.run(
        command("train", "ippo", "simple", *words, "--env.actions", "continuous", "--seeds", 2, "--out", tmp_path / "X"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == ["seed 0 failed", "seed 1 failed"]
    assert "a loss was not finite" in done.stderr


# --- signals ---


@pytest.fixture
def begun(tmp_path):
    """Two seeds that train for long, in processes as far as there is room, and have learnt something: parent and children."""
    words = "--steps 50M --envs 8 --eval.episodes 4 --eval.every 50M --save.every 0 --log.every 1 --log.tensorboard false"
    line = command("train", "ippo", "simple", *words.split(), "--seeds", 2, "--out", tmp_path / "X")
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        logs = tmp_path.glob
        assert wait_for(lambda: sum(b"train" in p.read_bytes() for p in logs("X/*/metrics.jsonl")) == min(2, room(1)))
        yield process, children(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def gone(processes):
    return wait_for(lambda: not any(map(alive, processes)))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_all_and_leave(tmp_path, begun, number, status):
    process, started = begun
    assert started
    os.killpg(process.pid, number)  # as a terminal does: to all of the group
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (status, "")
    assert gone(started)
    begun = [r for r in runs_in(tmp_path / "X") if (r.checkpoints / "last.pt").exists()]
    assert len(begun) == len(started)
    for run in begun:
        assert run.load("last")["step"] > 0
    assert f"shoal resume {tmp_path / 'X'}" in out


def test_a_signal_to_processes_that_have_not_begun_yet(tmp_path):
    """It waits until their loops take it: they save at step 0."""
    words = "--steps 50M --envs 8 --eval.episodes 4 --log.tensorboard false".split()
    line = command("train", "ippo", "simple", *words, "--seeds", 2, "--out", tmp_path / "X")
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_for(lambda: len(children(process.pid)) == min(2, room(1)))
    started = children(process.pid)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "")
    assert gone(started)
    assert [r.load("last")["step"] for r in runs_in(tmp_path / "X") if (r.checkpoints / "last.pt").exists()] == [0] * len(
        started
    )


def status(pid):
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def test_ctrl_c_twice_and_nobody_is_left(begun):
    process, started = begun
    for pid in started:
        os.kill(pid, signal.SIGSTOP)  # one that does not listen
    assert wait_for(lambda: all(status(pid)["State"].startswith("T") for pid in started))
    os.kill(process.pid, signal.SIGINT)
    assert wait_for(lambda: all(int(status(pid)["ShdPnd"], 16) for pid in started))  # it was passed on
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in err
    assert started
    assert gone(started)


def test_when_the_parent_is_killed_the_children_save_and_leave(tmp_path, begun):
    process, started = begun
    assert started
    process.kill()
    process.communicate(timeout=120)
    assert gone(started)
    for run in (r for r in runs_in(tmp_path / "X") if (r.checkpoints / "last.pt").exists()):
        assert run.load("last")["step"] > 0


def test_a_signal_to_loops_in_turn_stops_all_of_them(tmp_path):
    class Signal(shoal.Hook):
        def after_iteration(self, loop):
            if loop.config.seed == 0 and loop.step == 160:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    shoal.train("ippo", "simple", steps=1600, seeds=2, hook=Signal(), out=tmp_path, **QUICK)
    assert [Run(tmp_path / f"seed{k}").load("last")["step"] for k in (0, 1)] == [160, 80]  # between two laps
    assert signal.getsignal(signal.SIGTERM) is before


# --- other ways in ---


def test_from_python_in_processes(tmp_path):
    """No `if __name__ == "__main__"` is asked of a script."""
    script = tmp_path / "script.py"
    script.write_text(
        "import shoal\n"
        f"runs = shoal.train('ippo', 'simple', steps=400, seeds=2, out={str(tmp_path / 'X')!r}, envs=8, quiet=True,\n"
        "                   algo={'rollout': 10}, eval={'episodes': 4}, log={'tensorboard': False})\n"
        "print([r.load('last')['step'] for r in runs])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[400, 400]\n", "")


def test_with_opponents_weights_and_clips(tmp_path):
    shoal.train("ippo", "simple_tag", steps=400, out=tmp_path / "opp", **QUICK)
    extra = {"team": {"adversary": str(tmp_path / "opp")}, "init": str(tmp_path / "opp"), "render": True}
    runs = shoal.train("ippo", "simple_tag", steps=800, time="1h", seeds=2, out=tmp_path / "X", **extra, **QUICK)
    theirs = Run(tmp_path / "opp").load("best")["algorithms"]["adversary"]
    for run in runs:
        mine = run.load("last")["algorithms"]["adversary"]
        assert all(torch.equal(mine[k], x) for k, x in theirs.items())
        assert list((run.path / "media").glob("*.gif"))


def test_wandb_is_refused_where_seeds_share_a_process(tmp_path):
    with pytest.raises(UserError, match="one seed at a time"):
        shoal.train(
            "ippo", "simple", seeds=2, hook=Poison(), out=tmp_path / "X", envs=8, log={"wandb": True, "wandb_mode": "offline"}
        )
    assert not (tmp_path / "X").exists()


def test_streams_are_for_cuda():
    assert streams(torch.device("cpu"), 3) == [None] * 3


def test_each_loop_works_on_its_own_stream(tmp_path, monkeypatch):
    """With streams that only tell: all of a lap (iteration, evaluation, checkpoint) is inside."""
    current, waited, seen = ["main"], [], []

    class Stream:
        device = "cuda:0"

    class Main:
        wait_stream = waited.append

    @contextlib.contextmanager
    def stream(s):
        current.append(s)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Main)
    save = Loop.save

    def look(_, loop, *rest):
        seen.append((loop.config.seed, current[-1]))

    class Look(shoal.Hook):
        before_iteration = on_evaluation = look

    monkeypatch.setattr(Loop, "save", lambda loop, **how: (look(None, loop), save(loop, **how))[1])
    loops, two = [], [Stream(), Stream()]
    for k in (0, 1):
        settings = Settings("ippo", "simple", {"steps": 400, "envs": 8, "seed": k, "out": str(tmp_path / f"{k}")})
        loop = Loop(resolve(settings), [Look()])
        loop.folder = Run.create(loop.resolved, record(loop.players), loop.env)
        loops.append(loop)
    run_together(loops, Board({0: 0, 1: 0}, 400, quiet=True), two)
    assert len(seen) > 8
    assert all(at is two[k] for k, at in seen)
    assert {k for k, _ in seen} == {0, 1}
    assert current == ["main"]
    assert waited == two  # what comes after on the caller's stream comes after them


def test_run_together_without_hooks(tmp_path):
    """Two loops that a caller made."""
    loops = []
    for k in (0, 1):
        settings = Settings(
            "ippo", "simple", {"steps": 400, "envs": 8, "seed": k, "out": str(tmp_path / f"{k}")}, {"eval": {"every": 0}}
        )
        loop = Loop(resolve(settings))
        loop.folder = Run.create(loop.resolved, record(loop.players), loop.env)
        loops.append(loop)
    ended = run_together(loops, Board({0: 0, 1: 0}, 400, quiet=True))
    assert [(e.seed, e.step, e.failed, e.score("return/agents")) for e in ended] == [(0, 400, None, None), (1, 400, None, None)]


def test_plot_of_a_folder_is_one_curve(apart, tmp_path):
    from shoal.tools.plot import plot
    from shoal.tools.scores import seeds_of

    folder, _ = apart
    (seeds,) = seeds_of(runs_in(folder))
    assert len(seeds.runs) == 2
    assert plot([folder], tmp_path / "c.png").stat().st_size > 10_000


def test_diverged_is_still_raised_by_one(tmp_path):
    class Always(shoal.Hook):
        def after_iteration(self, loop):
            loop.learners[0].actor.net.body.weights[0].data[0, 0] = float("inf")

    with pytest.raises(DivergedError):
        shoal.train("ippo", "simple", steps=1600, hook=Always(), out=tmp_path / "r", **QUICK)


def test_seeds_of_an_environment_of_ones_own_go_on_together(tmp_path):
    """Each run has a copy of its file: they are one environment all the same."""
    world = "from shoal.envs.probe.probe_copy import ProbeCopy\n\n\nclass Mine(ProbeCopy):\n    pass\n"
    (tmp_path / "mine.py").write_text(world)
    how = {"hook": shoal.Hook(), "quiet": True}
    shoal.train("random", tmp_path / "mine.py", steps=100, seeds=2, envs=4, eval={"episodes": 2}, out=tmp_path / "r", **how)
    runs = shoal.resume(tmp_path / "r", steps=200, **how)
    assert [run.load()["step"] for run in runs] == [200, 200]
