"""Checkpoints: a checksum a file, and contents that are looked over before anything is written."""

import errno
import io
import random
import re
import shutil
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from commands import contents, refused

import shoal
from shoal.cli import main
from shoal.spec import UserError
from shoal.training import checkpoint

QUICK = {"envs": 4, "quiet": True, "compile": "off", "eval": {"episodes": 2}, "log": {"tensorboard": False}}
STATE = {"shoal": 1, "env": "e", "algo": "a", "step": 3, "algorithms": {"x": {"w": torch.arange(600.0)}}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    algo = {"rollout": 5, "capacity": 60, "learning_starts": 20, "batch": 4}
    out = tmp_path_factory.mktemp("made") / "r"
    return shoal.train("ddqn", "probe_copy", steps=120, until=80, out=out, algo=algo, save={"every": 20}, **QUICK).path


@pytest.fixture
def run(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "r"))


def test_pytorch_and_zip_read_it(tmp_path):
    checkpoint.write(tmp_path / "x.pt", STATE)
    assert torch.equal(torch.load(tmp_path / "x.pt", weights_only=True)["algorithms"]["x"]["w"], torch.arange(600.0))
    with zipfile.ZipFile(tmp_path / "x.pt") as z:
        assert z.testzip() is None
        assert re.fullmatch(rb"shoal sha256 [0-9a-f]{64}", z.comment)
    assert checkpoint.age_of(tmp_path / "x.pt") == []


def test_a_full_disk_is_told_as_what_it_is(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        name = "full"

        def write(self, data):
            if self.tell() + len(data) > 1000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(checkpoint.files, "writing", lambda path: nullcontext(Full()))
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(tmp_path / "x.pt", STATE)


def test_no_flipped_bit_is_loaded(tmp_path):
    path, rng = tmp_path / "x.pt", random.Random(0)
    checkpoint.write(path, STATE)
    whole = path.read_bytes()
    for at in {*rng.sample(range(len(whole)), 200), *range(len(whole) - 105, len(whole))}:
        data = bytearray(whole)
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with pytest.raises(UserError):
            checkpoint.read(path)


def test_an_older_file_is_loaded_with_a_remark(capsys, run):
    for path in (run / "checkpoints").rglob("*.pt"):
        torch.save(torch.load(path, weights_only=True), path)
    assert main(["eval", str(run), "--episodes", "2"]) == 0
    assert "best.pt has no checksum" in capsys.readouterr().err
    assert main(["resume", str(run)]) == 0
    assert "last.pt has no checksum" in (run / "train.log").read_text()


@pytest.mark.parametrize(
    "words",
    [
        "eval RUN --episodes 2",
        "eval RUN --episodes 2 --team.agents RUN --checkpoint last",
        "train ddqn probe_copy --steps 20 --envs 4 --quiet --out RUN/new --init RUN",
        "train ddqn probe_copy --steps 20 --envs 4 --quiet --out RUN/new --init RUN/checkpoints/best.pt",
    ],
)
def test_the_remark_is_made_wherever_policies_are_read(capsys, run, words):
    path = run / "checkpoints" / "best.pt"
    torch.save(torch.load(path, weights_only=True), path)
    assert main(words.replace("RUN", str(run)).split()) == 0
    assert (
        capsys.readouterr().err == f"shoal: {path} has no checksum, as an older version wrote it: damage would not be seen.\n"
    )


def test_the_remark_is_made_where_a_policy_is_loaded(capsys, run):
    path = run / "checkpoints" / "best.pt"
    torch.save(torch.load(path, weights_only=True), path)
    shoal.load(run)
    assert "best.pt has no checksum" in capsys.readouterr().err


def put(path, value):
    def change(state):
        *before, last = path.split("/")
        at = state
        for k in before:
            at = at[k] if isinstance(at, dict) else at[int(k)]
        at[last] = value(at[last]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("step", float("nan")),
        put("step", 81),
        put("step", -20),
        put("seconds", float("nan")),
        put("best", float("nan")),
        put("evaluations", "many"),
        put("evaluation_sum", lambda x: x[:-1]),
        put("algorithms/agents", []),
        put("collector/env/clock", lambda x: x + 1000),
        put("collector/frame", lambda x: x[:-1]),
        put("collector/generator", torch.zeros_like),
        put("collector/tally/episodes", None),
        put("update_noise", lambda x: x[:100]),
        put("means/names", lambda x: {k: [*names, "more"] for k, names in x.items()}),
        put("last_train", {"loss": "word"}),
        put("logs/metrics.jsonl", lambda x: x - 3),
        put("logs/train.log", 0.5),
        put("replay/spans", lambda x: x[1:]),
        put("replay/spans", lambda x: x[:-1]),
        put("replay/spans", lambda x: [x[0], *x[2:]]),
        put("replay/count", 3),
        put("replay/state/samplers", {}),
        put("lessons/agents/since", 7),
        lambda state: state.pop("noted"),
        lambda state: state.pop("collector"),
        lambda state: state.update(strange=1),
    ],
)
def test_what_was_edited_is_a_sentence_and_nothing_is_written(capsys, run, change):
    path = run / "checkpoints" / "last.pt"
    state = torch.load(path, weights_only=True)
    change(state)
    checkpoint.write(path, state)
    before = contents(run)
    refused(capsys, "resume", run)
    assert contents(run) == before


@pytest.mark.parametrize("value", [99, -1])
def test_a_replay_with_actions_that_there_are_not(capsys, run, value):
    path = min((run / "checkpoints" / "replay").iterdir())
    state = torch.load(path, weights_only=True)
    state["moments"]["torch.int64"][-1] = value
    checkpoint.write(path, state)
    assert "actions" in refused(capsys, "resume", run)


def test_weights_that_are_not_finite_are_not_played(capsys, run):
    path = run / "checkpoints" / "best.pt"
    state = torch.load(path, weights_only=True)
    next(x for x in state["algorithms"]["agents"].values() if x.is_floating_point()).fill_(float("nan"))
    checkpoint.write(path, state)
    assert "not finite" in refused(capsys, "eval", run)


def test_what_goes_wrong_once_it_is_under_way_is_no_refusal(capsys, run, monkeypatch):
    """Status 2 says that nothing was written."""
    from shoal.training.loop import Loop

    def fail(self):
        raise UserError("the world is flat.")

    monkeypatch.setattr(Loop, "iterate", fail)
    assert main(["resume", str(run)]) == 1
    assert capsys.readouterr().err == "shoal: the world is flat.\n"
