"""Code that a run brings along is run only where this user made the run, or trusts it."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from commands import contents, refused

import shoal
from shoal.cli import main
from shoal.spec import UserError
from shoal.training import trust
from shoal.training.run import Run
from shoal.training.settings import Settings

QUICK = {"envs": 4, "quiet": True, "eval": {"episodes": 2}, "log": {"tensorboard": False}}
ALGO = '''"""Says that it was run."""
from pathlib import Path

from shoal.algos.random import Random

Path(__file__).parents[3].joinpath("ran").touch() if SPY else None


class Mine(Random):
    pass
'''
TEAM = ("simple_tag", "adversary")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of somebody else's, with an algorithm of its own that leaves a mark where it is run."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "mine.py").write_text(ALGO.replace("SPY", "False"))
    run = shoal.train(str(folder / "mine.py"), "probe_copy", steps=80, out=folder / "r", **QUICK)
    return run.path


@pytest.fixture
def sent(made, tmp_path):
    """It came in the post: signed by nobody here, and its code was changed on the way."""
    run = Path(shutil.copytree(made, tmp_path / "sent"))
    (run / "signature").unlink()
    (copy,) = run.glob("code/algos/*/mine.py")
    copy.write_text(ALGO.replace("SPY", "True"))
    trust.ACCEPTED.clear()
    return run


def ran(run):
    return bool(list(run.rglob("ran")))


def verbs(run, tmp_path):
    short = ["--steps", 80, "--envs", 4, "--quiet", "--out", tmp_path / "new"]
    return {
        "resume": ["resume", run, "--steps", 160],
        "eval": ["eval", run, "--episodes", 2],
        "watch": ["watch", run, "--episodes", 1],
        "team": ["train", "random", "probe_copy", "--team.agents", run, *short],
        "eval team": ["eval", run.parent / "other", "--team.agents", run, "--episodes", 2],
        "config": ["train", "--config", run, *short],
        "config file": ["train", "random", "probe_copy", "--config", run / "config.json", *short],
    }


@pytest.mark.parametrize("verb", ["resume", "eval", "watch", "team", "eval team", "config", "config file"])
def test_what_somebody_sent_is_not_run(capsys, sent, tmp_path, verb):
    shoal.train("random", "probe_copy", steps=40, out=tmp_path / "other", **QUICK)
    before = contents(tmp_path)
    err = refused(capsys, *verbs(sent, tmp_path)[verb])
    assert "mine.py" in err
    assert "--trust" in err
    assert not ran(sent)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("verb", "left"), [("config", "code"), ("config", "none"), ("config file", "code"), ("config file", "signature")]
)
def test_a_run_is_one_without_its_checkpoints(capsys, sent, tmp_path, verb, left):
    shutil.rmtree(sent / "checkpoints")
    if left != "code":
        (tmp_path / "evil.py").write_text(ALGO.replace("SPY", "True"))
        config = json.loads((sent / "config.json").read_text())
        (sent / "config.json").write_text(json.dumps({**config, "algo": str(tmp_path / "evil.py")}))
        shutil.rmtree(sent / "code")
    if left == "signature":
        (sent / "signature").write_text("theirs")
    assert "--trust" in refused(capsys, *verbs(sent, tmp_path)[verb])
    assert not ran(tmp_path.parent)


def test_a_run_by_the_name_of_an_algorithm(sent, tmp_path, monkeypatch):
    sent.rename(tmp_path / "ppo")
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "ppo", "--episodes", "2", "--trust"]) == 0


def test_a_run_that_another_began_from_is_trusted_from_then_on(sent, tmp_path):
    words = ["train", "--config", str(sent), "--steps", "80", "--envs", "4", "--quiet", "--out"]
    assert main([*words, str(tmp_path / "a"), "--trust"]) == 0
    trust.ACCEPTED.clear()  # another process
    assert main([*words, str(tmp_path / "b")]) == 0


def test_nor_from_python(sent):
    for use in (shoal.load, shoal.evaluate, lambda run: shoal.resume(run, quiet=True), lambda run: Run(run).resolve()):
        with pytest.raises(UserError, match="--trust"):
            use(sent)
    assert not ran(sent)


def test_lists_and_plots_run_nothing_and_ask_nothing(capsys, sent, tmp_path):
    assert main(["runs", str(tmp_path)]) == 0
    assert main(["plot", str(sent), "--out", str(tmp_path / "x.png")]) == 0
    Run(sent).evaluations()
    assert not ran(sent)
    assert not (sent / "signature").exists()


def test_trust_is_given_once(capsys, sent):
    assert main(["eval", str(sent), "--episodes", "2", "--trust"]) == 0
    (mark,) = sent.rglob("ran")
    mark.unlink()
    trust.ACCEPTED.clear()  # another process
    assert main(["eval", str(sent), "--episodes", "2"]) == 0
    assert main(["resume", str(sent), "--steps", "160", "--quiet"]) == 0
    (copy,) = sent.glob("code/algos/*/mine.py")
    copy.write_text(ALGO.replace("SPY", "True") + "\n# changed\n")
    capsys.readouterr()
    assert "was not signed by you, or has changed since" in refused(capsys, "eval", sent, "--episodes", "2")


@pytest.mark.parametrize("how", [shoal.evaluate, shoal.load])
def test_trust_from_python(sent, how):
    how(sent, trust=True)
    trust.ACCEPTED.clear()
    how(sent)


def test_where_it_is_refused_for_something_else_nothing_is_signed(capsys, sent):
    (sent / "checkpoints" / "last.pt").write_bytes(b"x")
    before = contents(sent)
    assert "damaged" in refused(capsys, "resume", sent, "--steps", "160", "--trust")
    for p in sent.rglob("ran"):
        p.unlink()
    assert contents(sent) == before


def test_a_run_made_here_goes_on_wherever_it_lies(made, tmp_path):
    run = Path(shutil.copytree(made, tmp_path / "moved"))
    trust.ACCEPTED.clear()
    shoal.evaluate(run, 2)
    assert not list(run.rglob("__pycache__"))
    shoal.resume(run, steps=160, quiet=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(env="EVIL.py:Name"),
        lambda c: c.update(env="evil:Name"),
        lambda c: c.update(env="gymnasium/evil:Name-v0"),
        lambda c: c["sections"].setdefault("net", {}).update(module="evil:Name"),
        lambda c: c["players"]["agents"].update(id="EVIL.py"),
        lambda c: c["players"]["agents"]["net"].update(module="evil:Name"),
        *(
            lambda c, word=word: c["players"]["agents"]["algo"].update(normaliser=word)
            for word in (
                "kl:/../evil.py:Name",
                "exponential:/../evil.py:Name",
                "python:/../evil.py:Name",
                "kl:0.01",
                "python:evil",
            )
        ),
        lambda c: c["players"]["agents"]["algo"].update(lr_schedule="kl:/../evil.py:Name"),
        lambda c: c["players"]["agents"]["algo"].update(lr_schedule="evil:x=1"),
        lambda c: c["players"]["agents"]["algo"].update(shaper="python:/../evil.py:Name"),
    ],
)
def test_a_config_that_names_what_lies_elsewhere_is_code_too(capsys, tmp_path, monkeypatch, change):
    run = shoal.train("ippo", "probe_copy", steps=80, out=tmp_path / "r", **QUICK).path
    assert not (run / "signature").exists()
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    config = json.loads((run / "config.json").read_text())
    change(config)
    (run / "config.json").write_text(json.dumps(config).replace("EVIL.py", str(tmp_path / "evil.py")))
    for verb in ("eval", "resume"):
        assert "--trust" in refused(capsys, verb, run)
    assert not ran(tmp_path)


PLAIN = [
    {"algo": {"lr_schedule": "StepLR:step_size=2, gamma=0.5", "entropy_schedule": "MultiStepLR:milestones=[3, 5]"}},
    {"algo": {"lr_schedule": "kl:0.01", "entropy_schedule": "exponential:0.999/update", "shaper": "python:main.<locals>.f"}},
    {"log": {"wandb_group": "a:b"}, "save": {"best": "eval/a:b"}},
    {"env": {"args": "x=1:2,y={'a': 1},z=(1, 2)"}},
]
CODE = [
    {"env": {"args": "env_id=evil:Name-v0"}},
    {"env": {"args": "env_id='evil\\x3aName-v0'"}},
    {"env": {"args": "env_id='evil' ':' 'Name-v0'"}},
    {"env": {"args": "x=[{'a': 'evil:Name'}]"}},
    {"env": {"id": "evil:Name-v0"}},
    {"env": {"shape": "evil:name"}},
    {"algo": {"schedule": "evil:Name", "shaper": "kl:0.01"}},
]


@pytest.mark.parametrize("sections", PLAIN)
def test_other_words_with_a_colon_are_no_code(sections):
    assert trust.names_of(Settings("ippo", "probe_copy", sections=sections, team={"agents": "/runs/a:b"})) == []


@pytest.mark.parametrize("sections", CODE)
def test_whatever_may_be_imported_is_code(sections):
    assert trust.names_of(Settings("ippo", "probe_copy", sections=sections))


def test_a_link_in_the_code_is_refused(capsys, made, tmp_path):
    run = Path(shutil.copytree(made, tmp_path / "r"))
    (run / "code" / "algos").rename(tmp_path / "theirs")
    (run / "code" / "algos").symlink_to(tmp_path / "theirs")
    assert "a symbolic link" in refused(capsys, "eval", run, "--trust")


def test_the_key_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    key = trust._key(str(trust._home()))
    path = tmp_path / "shoal" / "key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(key) == 32
    trust._key.cache_clear()
    assert trust._key(str(trust._home())) == key
    assert os.listdir(path.parent) == ["key"]
    path.write_bytes(b"short")
    trust._key.cache_clear()
    with pytest.raises(UserError, match="is no key"):
        trust._key(str(trust._home()))


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setattr(trust.tempfile, "gettempdir", lambda: str(tmp_path))
    key = trust._key(str(tmp_path / "home"))
    assert (tmp_path / f"shoal-{os.getuid()}" / "key").read_bytes() == key


@pytest.mark.parametrize("why", ["damaged", "nowhere to be kept"])
def test_without_a_key_no_run_is_left_behind(capsys, tmp_path, monkeypatch, why):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    if why == "damaged":
        (tmp_path / "home" / "shoal").mkdir(parents=True)
        (tmp_path / "home" / "shoal" / "key").write_bytes(b"short")
    else:
        (tmp_path / "home").write_text("no folder")
        monkeypatch.setattr(trust.tempfile, "gettempdir", lambda: str(tmp_path / "home"))
    (tmp_path / "mine.py").write_text(ALGO.replace("SPY", "False"))
    words = ["probe_copy", "--steps", 40, "--envs", 4, "--quiet", "--out", tmp_path / "new" / "r"]
    refused(capsys, "train", tmp_path / "mine.py", *words)
    assert not (tmp_path / "new").exists()
    assert main([*map(str, ("train", "random", *words))]) == 0  # which has no code of its own


def test_a_key_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    key = trust._key_in(tmp_path)
    assert trust._key_in(tmp_path) == key
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.slow
def test_the_tests_leave_no_key_behind(tmp_path):
    code = "import conftest, os; print(os.environ['XDG_CONFIG_HOME'])"
    home = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], env=home, capture_output=True, text=True)
    assert Path(done.stdout.strip()).parent == tmp_path
    assert not os.listdir(tmp_path)
