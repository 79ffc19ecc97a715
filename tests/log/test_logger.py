"""The logger: numbers once, in files that can be read, cut back and read again."""

from __future__ import annotations

import csv
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.log.logger import LogConfig, Logger, cut, read_metrics, to_numbers, write_csv
from shoal.spec import UserError

torch.set_num_threads(1)
QUIET = LogConfig(tensorboard=False)


def logger(folder: Path, config: LogConfig = QUIET, **more: Any) -> Logger:
    return Logger(folder, config, "a/run", {"algo": "ppo"}, **more)


def scalar(x: float) -> torch.Tensor:
    return torch.tensor(x)


def test_to_numbers() -> None:
    out = to_numbers(
        {
            "half": torch.tensor(0.5),
            "vector": torch.tensor([1.0, math.nan, -math.inf]),
            "nan": torch.tensor(math.nan),
            "inf": torch.tensor(math.inf, dtype=torch.float64),
            "count": torch.tensor(3),
            "yes": torch.tensor(True),
            "plain": 2.5,  # type: ignore[dict-item]
            "empty": torch.zeros(0),
            "learnt": torch.tensor(7.0, requires_grad=True),
            "fine": torch.tensor(0.1, dtype=torch.float64),
            "matrix": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        }
    )
    assert out == {
        "half": 0.5,
        "vector": [1.0, None, None],
        "nan": None,
        "inf": None,
        "count": 3.0,
        "yes": 1.0,
        "plain": 2.5,
        "empty": [],
        "learnt": 7.0,
        "fine": 0.1,
        "matrix": [1.0, 2.0, 3.0, 4.0],
    }
    assert json.loads(json.dumps(out, allow_nan=False)) == out  # JSON that every reader takes
    assert to_numbers({}) == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_to_numbers_from_two_devices() -> None:
    """A hook's metrics, and counts made on the host, come beside those of the device."""
    assert to_numbers({"here": scalar(1.0), "there": scalar(2.0).cuda(), "count": 3}) == {
        "here": 1.0,
        "there": 2.0,
        "count": 3.0,
    }  # type: ignore[dict-item]


def test_lines(tmp_path: Path) -> None:
    log = logger(tmp_path)
    back = log.write(10, 1.23456, "train", {"loss": scalar(0.5), "nan": scalar(math.nan)})
    log.write(20, 2.0, "eval", {"return/a": scalar(3.0), "each": torch.tensor([1.0, 2.0])})
    assert back == {"loss": 0.5, "nan": None}
    text = (tmp_path / "metrics.jsonl").read_text()  # it is there before closing: a crash costs nothing
    assert text.splitlines() == [
        '{"step": 10, "time": 1.235, "kind": "train", "loss": 0.5, "nan": null}',
        '{"step": 20, "time": 2.0, "kind": "eval", "return/a": 3.0, "each": [1.0, 2.0]}',
    ]
    log.say("for people")
    assert (tmp_path / "train.log").read_text() == "for people\n"
    log.close()
    assert [x["step"] for x in read_metrics(tmp_path)] == [10, 20]


def test_cut_back_to_a_mark(tmp_path: Path) -> None:
    """What a resumed run writes follows the mark, as if what came after it had never been; also where text is not ASCII."""
    log = logger(tmp_path)
    log.say("Größe ½")
    log.write(10, 1.0, "train", {"x": scalar(1.0)})
    mark = log.mark()
    kept = {n: (tmp_path / n).read_bytes() for n in ("metrics.jsonl", "train.log")}
    assert mark == {n: len(b) for n, b in kept.items()}
    log.write(20, 2.0, "train", {"x": scalar(2.0)})
    log.say("gone")
    log.close()
    cut(tmp_path, mark)
    assert {n: (tmp_path / n).read_bytes() for n in kept} == kept
    again = logger(tmp_path, resumed_at=10)
    assert again.mark() == mark  # a log that is opened again knows how long it is
    again.write(20, 2.5, "train", {"x": scalar(3.0)})
    again.close()
    assert [(x["step"], x["x"]) for x in read_metrics(tmp_path)] == [(10, 1.0), (20, 3.0)]


def test_cut_does_not_lengthen_or_make_files(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    cut(tmp_path, {"metrics.jsonl": 100, "train.log": 5})
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"
    assert not (tmp_path / "train.log").exists()


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "train"}\n{"step": 2, "kind": "train"}\n{"step": 3, "ki')
    assert [x["step"] for x in read_metrics(tmp_path)] == [1, 2]
    path.write_text("")
    assert read_metrics(tmp_path) == []


def test_csv_columns(tmp_path: Path) -> None:
    log = logger(tmp_path)
    log.write(1, 0.5, "eval", {"return/a": scalar(1.0)})
    log.write(2, 1.0, "train", {"loss": scalar(0.25), "vector": torch.tensor([1.0, 2.0])})
    log.write(3, 1.5, "train", {"loss": scalar(math.nan), "late": scalar(9.0)})
    log.refresh()
    with (tmp_path / "metrics.csv").open(newline="") as f:
        rows = list(csv.reader(f))
    assert rows == [
        ["step", "time", "kind", "return/a", "loss", "late"],
        ["1", "0.5", "eval", "1.0", "", ""],
        ["2", "1.0", "train", "", "0.25", ""],
        ["3", "1.5", "train", "", "", "9.0"],
    ]
    log.write(4, 2.0, "train", {"loss": scalar(8.0)})
    log.close()  # and made anew at the end
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 5
    assert not list(tmp_path.glob("*.part"))


def test_no_csv_where_none_is_wanted(tmp_path: Path) -> None:
    log = logger(tmp_path, LogConfig(tensorboard=False, csv=False))
    log.write(1, 0.5, "eval", {})
    log.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "train.log"]
    write_csv(tmp_path)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,time,kind", "1,0.5,eval"]


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return reader


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    log = logger(tmp_path, LogConfig())
    log.write(10, 1.0, "train", {"loss": scalar(0.5), "nan": scalar(math.nan), "vector": torch.tensor([1.0, 2.0])})
    log.write(20, 2.0, "train", {"loss": scalar(0.25)})
    log.write(20, 2.0, "eval", {"return/a": scalar(-3.0)})
    log.close()
    reader = events(tmp_path / "tb")
    assert sorted(reader.Tags()["scalars"]) == ["eval/return/a", "train/loss"]
    assert [(e.step, e.value) for e in reader.Scalars("train/loss")] == [(10, 0.5), (20, 0.25)]
    assert [(e.step, e.value) for e in reader.Scalars("eval/return/a")] == [(20, -3.0)]


def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    log = logger(tmp_path, LogConfig())
    for step in (10, 20, 30):
        log.write(step, 1.0, "train", {"loss": scalar(float(step))})
    log.close()
    again = logger(tmp_path, LogConfig(), resumed_at=20)
    again.write(30, 1.0, "train", {"loss": scalar(99.0)})
    again.close()
    assert [(e.step, e.value) for e in events(tmp_path / "tb").Scalars("train/loss")] == [(10, 10.0), (20, 20.0), (30, 99.0)]


def test_tensorboard_events_are_what_its_own_library_would_write(tmp_path: Path) -> None:
    """And they are in the file before it is closed: a crash costs nothing."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary

    log = logger(tmp_path, LogConfig(), resumed_at=2**40)
    log.write(3_000_000_000, 1.0, "train", {"größe": scalar(-0.1), "huge": torch.tensor(1e300, dtype=torch.float64)})
    (path,) = (tmp_path / "tb").iterdir()
    assert ".tfevents." in path.name
    seen = [Event.FromString(x) for x in RawEventFileLoader(str(path)).Load()]
    assert all(abs(e.wall_time - time.time()) < 60 for e in seen)
    values = [Summary.Value(tag="train/größe", simple_value=-0.1), Summary.Value(tag="train/huge", simple_value=3.4028234e38)]
    expected = [
        Event(file_version="brain.Event:2"),
        Event(step=2**40 + 1, file_version="brain.Event:2"),
        Event(step=2**40 + 1, session_log=SessionLog(status=SessionLog.START)),
        *[Event(step=3_000_000_000, summary=Summary(value=[v])) for v in values],
    ]
    for e in seen:
        e.ClearField("wall_time")
    assert seen == expected
    log.close()


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    args = "job_type=sweeping,notes='first, and last',save_code=false"
    config = LogConfig(
        tensorboard=False, wandb=True, wandb_mode="offline", wandb_group="g", wandb_tags=("one", "two"), wandb_args=args
    )
    log = logger(tmp_path, config)
    log.write(10, 1.0, "train", {"loss": scalar(0.5), "nan": scalar(math.nan), "vector": torch.tensor([1.0, 2.0])})
    log.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    words = (b"train/loss", b"a/run", b"one", b"two", b"ppo", b"sweeping", b"first, and last")
    deadline = time.monotonic() + 20
    while not all(w in run.read_bytes() for w in words) and time.monotonic() < deadline:
        time.sleep(0.1)  # wandb's own process may still be writing when `finish` returns, on a busy machine
    content = run.read_bytes()
    for word in words:
        assert word in content
    assert b"train/nan" not in content


def test_what_a_sink_gets(tmp_path: Path) -> None:
    """Sinks see the numbers that metrics.jsonl holds, and are closed with it."""

    class Spy:
        lines: list[Any] = []
        closed = 0

        def write(self, step: int, kind: str, metrics: dict[str, Any]) -> None:
            self.lines.append((step, kind, metrics))

        def close(self) -> None:
            self.closed += 1

    log, spy = logger(tmp_path), Spy()
    log.sinks.append(spy)
    log.write(5, 0.0, "train", {"x": scalar(math.nan), "y": torch.tensor([1.0])})
    log.close()
    assert spy.lines == [(5, "train", {"x": None, "y": [1.0]})]
    assert spy.closed == 1


def test_config() -> None:
    with pytest.raises(UserError, match=r"--log.every is 0: it is a number of steps, at least 1\."):
        LogConfig(every=0)


def test_wandb_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from shoal.log.wandb import require

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'shoal\[wandb\]'\.$"):
        require(LogConfig(wandb=True))


def test_wandb_online_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    from shoal.log.wandb import require

    monkeypatch.setattr(type(wandb.api), "api_key", None, raising=False)
    with pytest.raises(UserError, match="wandb login"):
        require(LogConfig(wandb=True))
    assert require(LogConfig(wandb=True, wandb_mode="offline")) is wandb


def test_further_arguments_of_wandb_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    asked: list[dict[str, Any]] = []

    class Run:
        def finish(self) -> None:
            pass

    def init(name: Any = None, notes: Any = None, force: Any = None, mode: Any = None, **more: Any) -> Run:
        asked.append({"name": name, "notes": notes, "force": force, "mode": mode})
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    for args, name, notes, force in (("", "a/run", None, None), ("notes=a b,force=true,name=mine", "mine", "a b", True)):
        asked.clear()
        logger(tmp_path, LogConfig(tensorboard=False, wandb=True, wandb_mode="offline", wandb_args=args)).close()
        assert asked[-1] == {"name": name, "notes": notes, "force": force, "mode": "offline"}
        assert [x["mode"] for x in asked[:-1]] == ["disabled"] * bool(args)  # tried first


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("nots=a", r"'nots=a', and init takes no 'nots' \(did you mean 'notes'\?\): it takes name, .*"),
        ("project=a", "'project=a', and 'project' is not to be given there: take --log.wandb-project"),
        ("dir=a", "'dir=a', and 'dir' is not to be given there: it is the run's own"),
        ("save_code=maybe", "'save_code=maybe', which W&B does not take: .*Input should be a valid boolean.*"),
        ("notes", "'notes': it takes name=value,name=value"),
    ],
)
def test_further_arguments_of_wandb_that_are_wrong(args: str, sentence: str, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    log = {"wandb": True, "wandb_mode": "offline", "wandb_args": args}
    with pytest.raises(UserError) as e:
        shoal.train("ippo", "simple", log=log, out=tmp_path / "r", quiet=True)
    assert re.fullmatch(f"--log.wandb-args is {sentence}\\.", str(e.value))
    assert not (tmp_path / "r").exists()
