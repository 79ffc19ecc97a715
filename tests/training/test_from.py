"""Going on from another checkpoint than the last, and what is refused when that is missing."""

import re
import shutil

import pytest
import torch
from commands import contents, refused

import shoal
from shoal.cli import main
from shoal.spec import UserError
from shoal.training.run import Run

QUICK = {"envs": 4, "quiet": True, "eval": {"episodes": 2, "every": 80}, "log": {"tensorboard": False, "every": 40}}
KEEP = {"every": 80, "keep": -1}


def train(out, name="ippo", steps=320, **more):
    given = {"algo": {"rollout": 10}, "save": KEEP, **QUICK, **more}
    return shoal.train(name, "probe_copy", steps=steps, out=out, **given)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return train(tmp_path_factory.mktemp("made") / "r").path


@pytest.fixture
def run(made, tmp_path):
    return Run(shutil.copytree(made, tmp_path / "r"))


def metrics(run):
    return [{k: v for k, v in line.items() if k != "time"} for line in run.metrics]


def steps_of(text):
    return re.findall(r"^Step: +(\d+)", text, re.MULTILINE)


def test_a_run_whose_last_checkpoint_is_gone_is_refused_and_left_alone(capsys, run):
    (run.checkpoints / "last.pt").unlink()
    before = contents(run.path)
    err = refused(capsys, "resume", run.path)
    assert "last.pt is missing" in err
    assert "--from best|STEP|FILE" in err
    assert "step-000000000240" in err
    with pytest.raises(UserError, match=r"last\.pt is missing"):
        shoal.resume(run, quiet=True)
    for path in run.checkpoints.glob("*.pt"):
        path.unlink()
    assert "it has none" in refused(capsys, "resume", run.path)
    assert {p: x for p, x in before.items() if p.suffix != ".pt"} == contents(run.path)


def test_metrics_that_were_lost_with_it_make_no_new_run(capsys, run):
    (run.checkpoints / "last.pt").unlink()
    (run.path / "metrics.jsonl").unlink()
    assert "last.pt is missing" in refused(capsys, "resume", run.path)
    for path in run.checkpoints.glob("step-*.pt"):
        path.unlink()
    assert run.load("best")["step"] > 0
    assert "last.pt is missing" in refused(capsys, "resume", run.path)


@pytest.mark.parametrize("how", ["80", "step-000000000160", "file", "best"])
def test_from_another_checkpoint_it_is_the_run_that_it_was(capsys, run, tmp_path, how):
    """One that learns from rollouts alone goes on exactly: every tensor and every line."""
    whole, last = metrics(run), run.load("last")
    if how == "file":
        shutil.copy(run.checkpoints / "step-000000000080.pt", tmp_path / "kept.pt")
    if how == "best":  # one that is not of the end
        shutil.copy(run.checkpoints / "step-000000000240.pt", run.checkpoints / "best.pt")
    (run.checkpoints / "last.pt").unlink()
    at = {"80": 80, "step-000000000160": 160, "file": 80, "best": 240}[how]
    assert main(["resume", str(run.path), "--from", str(tmp_path / "kept.pt") if how == "file" else how]) == 0
    assert f"Goes on from step {at}" in capsys.readouterr().out
    assert metrics(run) == whole
    assert steps_of((run.path / "train.log").read_text()) == ["0", "80", "160", "240", "320"]
    again = run.load("last")
    for name, mine in last["algorithms"]["agents"].items():
        assert torch.equal(mine, again["algorithms"]["agents"][name])
    left = {p.stem for p in (run.checkpoints / "left" / "1").glob("*.pt")}
    assert {f"step-{s:012d}" for s in (160, 240, 320) if s > at} <= left
    assert ("best" in left) == (how != "best")
    assert run.load(str(at))["step"] == at  # what came before is where it was
    assert run.load("320")["step"] == 320


def test_what_is_left_is_never_written_over(run):
    """A branch of the run each: a folder each."""
    left = run.checkpoints / "left"
    shoal.resume(run, quiet=True, checkpoint="240")
    first = contents(left)
    assert {p.parent.name for p in first} == {"1"}
    shoal.resume(run, quiet=True, checkpoint="160")
    assert {p: x for p, x in contents(left).items() if p in first} == first
    assert sorted(p.name for p in left.iterdir()) == ["1", "2"]
    for path in (*run.checkpoints.glob("*.pt"), run.path / "metrics.jsonl"):
        path.unlink()
    with pytest.raises(UserError, match=r"last\.pt is missing"):
        shoal.resume(run, quiet=True)


def test_a_checkpoint_that_is_later_than_the_logs_is_of_another_branch(capsys, run):
    class Stop(shoal.Hook):
        def after_iteration(self, loop):
            loop.stop("enough")

    shoal.resume(run, quiet=True, hook=Stop(), checkpoint="80")
    before = contents(run.path)
    later = run.checkpoints / "left" / "1" / "step-000000000320.pt"
    assert "the logs end before it: it is of another branch" in refused(capsys, "resume", run.path, "--from", later)
    assert contents(run.path) == before
    for name in ("metrics.jsonl", "train.log"):  # who deleted them knows
        (run.path / name).unlink()
    assert main(["resume", str(run.path), "--from", str(later), "--steps", "400"]) == 0


def test_stopped_before_its_first_new_checkpoint_it_is_not_the_old_run(run):
    """The last checkpoint is set aside before the logs are cut, and a new one is there at once."""
    seen = []

    class Look(shoal.Hook):
        def before_iteration(self, loop):
            seen.append((run.load("last")["step"], max(line["step"] for line in run.metrics)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shoal.resume(run, quiet=True, hook=Look(), checkpoint="160")
    assert seen == [(160, 160)]


def test_a_replay_begins_empty_and_is_learnt_from_once_it_has_filled(capsys, tmp_path):
    algo = {"rollout": 5, "capacity": 200, "learning_starts": 60, "batch": 8}
    run = train(tmp_path / "r", "ddqn", algo=algo)
    before = run.load("160")
    assert main(["resume", str(run.path), "--from", "160"]) == 0
    assert "The replay begins empty" in capsys.readouterr().out
    state = run.load("last")
    assert state["step"] == 320
    (told,) = state["lessons"].values()
    assert told["since"] == 160
    (was,) = before["lessons"].values()
    assert was == {"since": 0, "done": 0}
    assert state["replay"]["count"] == (320 - 160) // 4
    assert "begins empty" in (run.path / "train.log").read_text()
    # updates: as many as if it had been a run of 160 steps, on top of those of before
    updates = next(k for k in state["algorithms"]["agents"] if k.endswith("target.updates"))
    of = lambda s: int(s["algorithms"]["agents"][updates])  # noqa: E731
    assert of(before) > 0
    assert of(state) == 2 * of(before)
    assert told["done"] == of(before)
    shoal.resume(run, steps=480, quiet=True)  # and it is resumed as any other
    assert run.load("last")["replay"]["count"] == (480 - 160) // 4


def test_until_the_replay_has_filled_again_nothing_is_learnt(tmp_path):
    algo = {"rollout": 5, "capacity": 200, "learning_starts": 60, "batch": 8}
    run = train(tmp_path / "r", "ddqn", algo=algo)
    before = run.load("160")["algorithms"]["agents"]

    class Stop(shoal.Hook):
        def after_iteration(self, loop):
            if loop.step == 220:
                loop.stop("enough")

    shoal.resume(run, quiet=True, hook=Stop(), checkpoint="160")
    after = run.load("last")
    assert after["step"] == 220
    assert all(torch.equal(x, after["algorithms"]["agents"][k]) for k, x in before.items() if "online" in k or "weights" in k)


def test_what_names_no_checkpoint_is_refused(capsys, run):
    before = contents(run.path)
    for word in ("77", "nothing", "²", "9" * 5000, "x" * 5000, str(run.path / "none.pt"), "", "."):
        assert "has no checkpoint" in refused(capsys, "resume", run.path, "--from", word)
    assert contents(run.path) == before


@pytest.mark.parametrize("verb", ["resume", "eval", "watch", "plot"])
def test_no_name_at_all_is_no_run(capsys, run, monkeypatch, verb):
    monkeypatch.chdir(run.path.parent)
    before = contents(run.path.parent)
    for word in ("", " "):
        assert "is empty" in refused(capsys, verb, word)
    assert contents(run.path.parent) == before
