"""Files: whole or not there, devices are written into, and nothing waits for a pipe."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal import files
from shoal.cli import main
from shoal.spec import UserError
from shoal.training.run import Run

QUICK = {"envs": 4, "quiet": True, "algo": {"rollout": 10}, "eval": {"episodes": 2}, "log": {"tensorboard": False}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return shoal.train("ippo", "probe_copy", steps=80, out=tmp_path_factory.mktemp("files") / "r", **QUICK)


@pytest.fixture
def null(tmp_path):
    """A null device of our own."""
    path = tmp_path / "null.png"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        path.write_bytes(b"")
    except OSError:
        pytest.skip("no device can be made here")
    return path


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "x"
    files.write_text(path, "old")
    with pytest.raises(ZeroDivisionError), files.writing(path) as f:  # noqa: PT012
        f.write(b"half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_file_of_the_users_beside_it_stays(tmp_path):
    (tmp_path / "x.part").write_text("theirs")
    files.write_text(tmp_path / "x", "mine")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"x.part": "theirs", "x": "mine"}


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "x"
    with files.writing(path) as one, files.writing(path) as other:
        one.write(b"one")
        other.write(b"the other")
    assert path.read_text() == "one"  # which took its name last
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_file_that_is_written_again_keeps_its_mode(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(0o640)
    files.write_text(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["config.json.1a2b.part", "checkpoints/last.pt.1a2b.part", "media/step-1.gif.1a2b.part"])
def test_what_a_killed_run_left_half_written_is_removed(run, tmp_path, name):
    copy = Run(shutil.copytree(run.path, tmp_path / "copy"))
    (copy.path / name).write_text("half")
    (copy.path / "mine.part").write_text("whole")
    copy.lock().close()
    assert [p.name for p in copy.path.rglob("*.part")] == ["mine.part"]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_a_file_that_is_open_is_written_on(tmp_path, name):
    """As a shell's `> f` has it: each goes on where the other ended, and f stays the file that it was."""
    if not os.path.lexists("/dev/stdout"):
        pytest.skip("there is no /dev/stdout here")
    if name == "link":
        (tmp_path / "link").symlink_to("/dev/stdout")
    code = "import sys; from pathlib import Path; from shoal.files import write_text as w; "
    code += "print('before'); w(Path(sys.argv[1]), 'a,b' * 3 + chr(10)); print('after')"
    with (tmp_path / "f").open("wb") as f:
        f.write(b"first\n")
        f.flush()
        subprocess.run([sys.executable, "-c", code, tmp_path / name], stdout=f, check=True)
        assert os.fstat(f.fileno()).st_ino == (tmp_path / "f").stat().st_ino
    assert (tmp_path / "f").read_text() == "first\nbefore\na,ba,ba,b\nafter\n"


def test_a_device_stays_one(capsys, run, null):
    before = null.stat()
    assert main(["plot", str(run.path), "--out", str(null)]) == 0
    assert main(["eval", str(run.path), "--episodes", "2", "--csv", str(null)]) == 0
    assert stat.S_ISCHR(null.stat().st_mode)
    assert null.stat().st_ino == before.st_ino
    assert [p.name for p in null.parent.iterdir()] == [null.name]


def test_a_film_does_not_take_a_devices_place(run, null):
    from shoal.tools.watch import watch

    watch(shoal.train("ippo", "simple", steps=40, out=null.parent / "r", **QUICK), gif=null, episodes=1)
    assert stat.S_ISCHR(null.stat().st_mode)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_pipe_that_nobody_reads_and_a_folder_are_refused(capsys, run, tmp_path, kind):
    path = tmp_path / "x.png"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    for words in (["plot", str(run.path), "--out"], ["eval", str(run.path), "--episodes", "2", "--csv"]):
        assert main([*words, str(path)]) == 2
        assert f"{path} is a {'named pipe that nobody reads' if kind == 'pipe' else 'folder'}" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["x.png"]


def test_a_pipe_that_somebody_reads_is_written_into(run, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert main(["eval", str(run.path), "--episodes", "2", "--csv", str(path)]) == 0
    assert os.read(reader, 1 << 16).startswith(b"episode,return/agents")
    os.close(reader)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoints/last.pt", ".lock"])
def test_a_pipe_in_a_run_is_refused_and_not_waited_for(capsys, run, tmp_path, name):
    copy = Path(shutil.copytree(run.path, tmp_path / "copy"))
    (copy / name).unlink()
    os.mkfifo(copy / name)
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*")}
    assert main(["resume", str(copy), "--steps", "160"]) == 2
    assert {p: p.stat().st_mtime_ns for p in copy.rglob("*")} == before
    assert capsys.readouterr().err.count("\n") == 1
    if name != "config.json":
        with pytest.raises(UserError, match="a named pipe"):
            Run(copy).lock()


@pytest.mark.parametrize(
    "name", ["checkpoints/replay", "checkpoints", "media", "tb", "metrics.jsonl", "checkpoints/last.pt.part"]
)
def test_links_in_a_run_are_not_followed(capsys, tmp_path, name):
    given = {**QUICK, "algo": {"rollout": 10, "capacity": 80, "learning_starts": 20, "batch": 4}}
    run = shoal.train("ddqn", "probe_copy", steps=80, out=tmp_path / "r", **given)
    theirs = tmp_path / "theirs"
    if (run.path / name).exists():
        (run.path / name).rename(theirs)
    else:
        theirs.mkdir()
    if theirs.is_dir():
        (theirs / "1-2.pt").write_text("theirs")
    (run.path / name).symlink_to(theirs)
    before = {p: p.read_bytes() for p in (*theirs.rglob("*"), *run.path.rglob("*"), theirs) if p.is_file()}
    assert main(["resume", str(run.path), "--steps", "160"]) == 2
    assert f"{run.path / name} is a symbolic link" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in (*theirs.rglob("*"), *run.path.rglob("*"), theirs) if p.is_file()} == before


def test_a_run_that_is_reached_by_a_link_goes_on(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    shoal.resume(tmp_path / "link", steps=160, quiet=True)
    assert Run(tmp_path / "copy").load("last")["step"] == 160


def test_a_full_disk_leaves_the_config_as_it_was(run, tmp_path, monkeypatch):
    copy = Run(shutil.copytree(run.path, tmp_path / "copy"))
    before = (copy.path / "config.json").read_bytes()
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        copy.set_steps(1000)
    assert (copy.path / "config.json").read_bytes() == before
    assert not list(copy.path.glob("*.part"))


@pytest.mark.parametrize("what", ["folder", "metrics.jsonl"])
def test_a_run_whose_folder_is_deleted_stops(capsys, tmp_path, what):
    out = tmp_path / "r"

    class Delete(shoal.Hook):
        def after_iteration(self, loop):
            if loop.step == 160:
                shutil.rmtree(out) if what == "folder" else (out / what).unlink()

    given = {**QUICK, "log": {"tensorboard": False, "every": 40}, "save": {"every": 0}}
    with pytest.raises(FileNotFoundError, match="deleted") as e:
        shoal.train("ippo", "probe_copy", steps=800, out=out, hook=Delete(), **given)
    assert "metrics.jsonl was deleted" in str(e.value)
    assert out.exists() == (what != "folder")


def test_a_deleted_run_ends_the_command_with_a_sentence(capsys, tmp_path, monkeypatch):
    from shoal.training.loop import Loop

    iterate, out = Loop.iterate, tmp_path / "r"

    def delete(self):
        iterate(self)
        shutil.rmtree(out, ignore_errors=True)

    monkeypatch.setattr(Loop, "iterate", delete)
    flags = "--steps 400 --envs 4 --algo.rollout 10 --eval.episodes 2 --log.every 10000 --eval.every 0 --quiet".split()
    assert main(["train", "ippo", "probe_copy", *flags, "--out", str(out)]) == 1
    assert capsys.readouterr().err == f"shoal: the run could not be written, and stopped: its folder {out} is gone.\n"
    assert not out.exists()


def test_one_bad_run_does_not_hide_the_others(capsys, run, tmp_path):
    for k in range(3):
        shutil.copytree(run.path, tmp_path / f"r{k}")
    (tmp_path / "r0" / "config.json").write_text("{")
    (tmp_path / "r1" / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "r1" / "metrics.jsonl")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "r2" in out
    assert "r1" not in out
    assert err.count("shoal: ") == 2
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "x.png")]) == 0
    out, err = capsys.readouterr()
    assert (tmp_path / "x.png").stat().st_size > 1000
    assert "r0/config.json is not JSON" in err
    assert "r1/metrics.jsonl is a named pipe" in err


def test_any_name_is_listed_as_it_is(capsys, run, tmp_path):
    shutil.copytree(run.path, tmp_path / "br" / "[old]")
    shutil.copytree(run.path, tmp_path / "br" / "other\x1b[2J")
    config = tmp_path / "br" / "[old]" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "env": "[/x]"}))
    assert main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\n[old] " in out
    assert "[/x]" in out
    assert "other\\x1b[2J" in out


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_bad_run_among_those_to_be_plotted_is_a_remark(capsys, run, tmp_path, name):
    bad = Path(shutil.copytree(run.path, tmp_path / "bad"))
    (bad / name).unlink()
    if name == "config.json":
        (bad / name).write_text("{")
    else:
        os.mkfifo(bad / name)
    picture = tmp_path / "x.png"
    assert main(["plot", str(bad), "--out", str(picture)]) == 2
    assert main(["plot", str(run.path), str(tmp_path / "nowhere"), "--out", str(picture)]) == 2  # a name that was mistyped
    assert not picture.exists()
    capsys.readouterr()
    assert main(["plot", str(bad), str(run.path), "--out", str(picture)]) == 0
    assert f"shoal: {bad / name} is " in capsys.readouterr().err
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("flags", ["--out=", "--init=", "--out= --seeds 2", "--init= --seeds 2"])
def test_an_empty_name_is_not_as_if_none_were_given(capsys, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ippo", "probe_copy", "--steps", "40", "--envs", "4", "--quiet", *flags.split()]) == 2
    assert "the name of the run is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
