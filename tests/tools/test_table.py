"""Tables: cells, their order, and each kind of file."""

import csv
import json

import pytest
from runfolders import evals, folder

from shoal.cli import main
from shoal.spec import UserError
from shoal.tools.table import table, write


@pytest.fixture
def runs(tmp_path):
    """x on two tasks with two seeds, y on one with one."""
    asked = [("x", "s", 0, 1.0), ("x", "s", 1, 3.0), ("x", "t_1", 0, 5.0), ("x", "t_1", 1, 5.0), ("y", "s", 0, 0.01234)]
    return [folder(tmp_path / f"{a}{t}{k}", evals(9.0, v), a, t, seed=k) for a, t, k, v in asked]


def test_cells(runs):
    """2 +- 12.7062 sqrt(2 / 2)."""
    made = table(runs)
    assert made.lines == [
        ["", "s", "t_1"],
        ["x", "2.00 ± 12.71 (2 seeds)", "5.00 ± 0.00 (2 seeds)"],
        ["y", "0.012 (1 seed)", "-"],
    ]
    assert made.title == "return/agents at the last evaluation: mean, 95 % t-interval"
    assert table(runs, rows="tasks").lines[1] == ["s", "2.00 ± 12.71 (2 seeds)", "0.012 (1 seed)"]
    assert table(runs, at="best").lines[1][1] == "9.00 ± 0.00 (2 seeds)"
    assert table(runs, at="0").title.startswith("return/agents at step 0")


def test_iqm_shows_the_ends(runs):
    made = table(runs, statistic="iqm", normalise="s=1:3,t_1=0:10")
    assert made.lines[0] == ["", "s", "t_1", "all 2 tasks"]
    assert made.lines[1] == ["x", "0.50 [0.00, 1.00] (2 seeds)", "0.50 [0.50, 0.50] (2 seeds)", "0.50 [0.25, 0.75] (4 runs)"]


def test_improvement_has_the_algorithms_in_one_order(tmp_path, runs):
    z = folder(tmp_path / "z", evals(9.0), "z", "s")
    made = table([*runs, z], kind="improvement")
    assert made.lines[:2] == [["X \\ Y", "x", "y", "z"], ["x", "-", "1.00", "0.00"]]
    assert [line[0] for line in made.lines[1:]] == ["x", "y", "z"]


def test_profile(runs):
    made = table(runs[:2], kind="profile")
    assert made.lines[0][-1] == "> 3.00"
    assert made.lines[1][1].startswith("1.00 [1.00, 1.00]")
    assert made.lines[1][-1] == "0.00 [0.00, 0.00]"


def test_files(tmp_path, runs):
    made = table(runs)
    assert write(made, tmp_path / "new" / "t.md").read_text().splitlines()[2:5] == [
        "|  | s | t_1 |",
        "| --- | --- | --- |",
        "| x | 2.00 ± 12.71 (2 seeds) | 5.00 ± 0.00 (2 seeds) |",
    ]
    tex = write(made, tmp_path / "t.tex").read_text()
    assert r"x & 2.00 $\pm$ 12.71 (2 seeds) & 5.00 $\pm$ 0.00 (2 seeds) \\" in tex
    assert r" & s & t\_1 \\" in tex
    assert r"\begin{tabular}{lrr}" in tex
    rows = list(csv.DictReader(write(made, tmp_path / "t.csv").open()))
    assert [rows[0][k] for k in ("algorithm", "of", "estimate", "count")] == ["x", "s", "2.0", "2 seeds"]
    assert rows[0]["values"] == "1.0 3.0"
    assert rows[2]["low"] == ""
    for name, sentence in (("t.txt", r"\.csv, \.md, \.tex or \.json"), ("t.png", "`shoal plot` draws"), ("new", "is a folder")):
        with pytest.raises(UserError, match=sentence):
            write(made, tmp_path / name)


def test_marl_eval(tmp_path, runs):
    """environment -> task -> algorithm -> seed -> step -> metrics, as its README has it."""
    spread = folder(tmp_path / "m", evals(-20.0, -9.0, -11.0), "mappo", "simple_spread", seed=3)
    found = json.loads(write(table([*runs, spread]), tmp_path / "t.json").read_text())
    assert found["mpe"]["simple_spread"]["mappo"]["seed_3"] == {
        "step_0": {"step_count": 0, "elapsed_time": 0.0, "return/agents": [-20.0]},
        "step_1": {"step_count": 100, "elapsed_time": 60.0, "return/agents": [-9.0]},
        "step_2": {"step_count": 200, "elapsed_time": 120.0, "return/agents": [-11.0]},
        "absolute_metrics": {"return/agents": [-9.0]},
    }
    assert set(found["own"]["s"]["x"]) == {"seed_0", "seed_1"}


def test_the_command(tmp_path, runs, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [str(r.path) for r in runs]
    assert main(["table", *words]) == 0
    out = capsys.readouterr().out
    assert "2.00 ± 12.71 (2 seeds)" in out
    assert main(["table", *words, "--json", "--out", "t.md"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["estimates"][0] == {
        "algorithm": "x",
        "of": "s",
        "estimate": 2.0,
        "low": pytest.approx(-10.706, abs=1e-3),
        "high": pytest.approx(14.706, abs=1e-3),
        "count": "2 seeds",
        "values": [1.0, 3.0],
    }
    assert value["estimates"][2]["low"] is None
    before = sorted(tmp_path.rglob("*"))
    for wrong, word in (
        (["--at", "9M"], "has not reached step 9,000,000"),
        (["--out", "t.png"], "`shoal plot` draws"),
        (["--normalise", "s=0:1"], "no range for 't_1'"),
        (["--normalize", "s=0:1"], "'normalise'"),
        (["--kind", "profiles"], "'profile'"),
        (["--statistic", "iqr"], "'iqm'"),
        (["--metric", "return/agent"], "'return/agents'"),
    ):
        assert main(["table", *words, *wrong]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert word in err
    assert main(["table"]) == 2
    assert sorted(tmp_path.rglob("*")) == before
