"""Learning curves: the band's numbers, which runs are seeds of one curve, and the picture."""

import json

import numpy as np
import pytest
from PIL import Image

import shoal
from shoal.spec import UserError
from shoal.tools.plot import aggregate, curves, draw, panels, plot, returns, series
from shoal.training.run import Run


def seed(*points):
    return np.array([p[0] for p in points], float), np.array([p[1] for p in points], float)


def folder(path, lines, algo="mappo", env="simple_tag", team=None, sections=None, **run):
    path.mkdir(parents=True)
    settings = {"algo": algo, "env": env, "run": run, "sections": sections or {}, "team": team or {}}
    (path / "config.json").write_text(json.dumps(settings))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(path)


def evals(*values, group="agents"):
    return [{"step": 100 * i, "time": 0.0, "kind": "eval", f"return/{group}": v} for i, v in enumerate(values)]


# --- numbers ---


def test_band_at_the_same_steps():
    band = aggregate([seed((0, 1.0), (10, 5.0)), seed((0, 3.0), (10, 5.0)), seed((0, 8.0), (10, -1.0))])
    assert band.steps.tolist() == [0, 10]
    assert band.mean.tolist() == [4, 3]
    assert band.low.tolist() == [1, -1]
    assert band.high.tolist() == [8, 5]


def test_band_of_other_steps_is_read_off_straight_lines_where_all_seeds_are():
    band = aggregate([seed((0, 0.0), (10, 10.0), (30, 30.0)), seed((5, 1.0), (15, 3.0), (20, 3.0))])
    assert band.steps.tolist() == [5, 10, 15, 20]  # from where the later began to where the shorter ended
    assert band.low.tolist() == [1, 2, 3, 3]
    assert band.high.tolist() == [5, 10, 15, 20]
    assert band.mean.tolist() == [3, 6, 9, 11.5]


def test_one_seed_is_its_own_band():
    band = aggregate([seed((0, 2.0), (7, 4.0))])
    assert band.mean.tolist() == band.low.tolist() == band.high.tolist() == [2, 4]


def test_evaluations_come_first_and_holes_are_left_out(tmp_path):
    lines = [*evals(1.0, None, 3.0), {"step": 50, "time": 0.0, "kind": "train", "return/agents": 9.0, "loss": 0.5, "x": [1, 2]}]
    run = folder(tmp_path / "a", lines)
    (steps, values), training = series(run, "return/agents")
    assert (steps.tolist(), values.tolist(), training) == ([0, 200], [1, 3], False)
    (steps, values), training = series(run, "loss")
    assert (steps.tolist(), values.tolist(), training) == ([50], [0.5], True)


def test_a_run_without_evaluations_shows_its_training(tmp_path):
    run = folder(tmp_path / "a", [{**x, "kind": "train"} for x in evals(1.0, 2.0)])
    ((heading, what), (line,)) = next(iter(panels(curves([run]), None).items()))
    assert (heading, what) == ("simple_tag", "return/agents")
    assert line.training
    assert draw(panels(curves([run]), None)).axes[0].get_ylabel() == "return/agents (training)"


def test_groups_are_in_order_and_agents_are_not_groups(tmp_path):
    both = {"return/b": 1.0, "return/b/0": 1.0, "return/a": 2.0, "return_std/a": 0.0}
    assert returns(folder(tmp_path / "a", [{"step": 0, "time": 0.0, "kind": "eval", **both}])) == ["return/b", "return/a"]


# --- which runs are one curve ---


def test_seeds_are_one_curve_and_settings_are_others(tmp_path):
    def one(name, **kwargs):
        return folder(tmp_path / name, evals(1.0), **kwargs)

    runs = [
        one("a", seed=0, out="x", quiet=True),
        one("b", seed=1, envs=64, device="cpu", sections={"log": {"csv": False}}),  # 64 is the default
        one("c", algo="ippo"),
        one("d", sections={"algo": {"lr": 0.1}}),
        one("e", team={"agents": "random"}),
        one("f", env="simple"),
    ]
    found = curves([*runs, Run(tmp_path / "a")])  # a run named twice counts once
    assert [[r.path.name for r in c.runs] for c in found] == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert [c.label for c in found] == [
        "mappo (2 seeds, min to max)",
        "ippo (1 seed)",
        "mappo algo.lr 0.1 (1 seed)",
        "mappo team.agents random (1 seed)",
        "mappo (1 seed)",
    ]


# --- the picture ---


def test_one_curve_has_its_groups_in_one_panel_and_several_have_a_panel_a_group(tmp_path):
    lines = [{**x, "return/prey": -x["return/foe"]} for x in evals(1.0, 2.0, group="foe")]
    a, b, c = (
        folder(tmp_path / n, lines, algo, seed=s) for n, algo, s in (("a", "mappo", 0), ("b", "mappo", 1), ("c", "ippo", 0))
    )
    alone = draw(panels(curves([a, b]), None))
    assert len(alone.axes) == 1
    assert [x.get_label() for x in alone.axes[0].lines] == [f"{g} · mappo (2 seeds, min to max)" for g in ("foe", "prey")]
    rivals = draw(panels(curves([a, b, c]), None))
    assert [x.get_title("left") for x in rivals.axes] == ["simple_tag · foe", "simple_tag · prey"]
    for axes in rivals.axes:
        mappo, ippo = axes.lines
        assert mappo.get_color() != ippo.get_color()
        assert not axes.spines["top"].get_visible()
    assert [x.lines[0].get_color() for x in rivals.axes] == [rivals.axes[0].lines[0].get_color()] * 2  # in every panel
    assert rivals.axes[1].lines[0].get_ydata().tolist() == [-1, -2]


def test_steps_are_in_human_units(tmp_path):
    run = folder(tmp_path / "a", [{"step": s, "time": 0.0, "kind": "eval", "return/agents": 1.0} for s in (0, 2_000_000)])
    axes = draw(panels(curves([run]), None)).axes[0]
    assert axes.xaxis.get_major_formatter()(1_500_000, 0) == "1.5M"
    assert axes.get_xlabel() == "environment steps"


def test_two_real_seeds(tmp_path):
    quiet = {"quiet": True, "log": {"tensorboard": False}, "eval": {"episodes": 8}, "env": {"max_cycles": 5}}
    runs = [shoal.train("mappo", "simple_spread", steps=1000, envs=8, seed=s, out=tmp_path / str(s), **quiet) for s in (0, 1)]
    ((what, (line,)),) = panels(curves(runs), None).items()
    assert what == ("simple_spread", "return/agents")
    first = [r.evaluations()[0]["return/agents"] for r in runs]
    assert (line.band.low[0], line.band.high[0]) == (min(first), max(first))
    assert line.band.mean[0] == pytest.approx(sum(first) / 2)
    assert line.band.low[0] < line.band.high[0]
    out = plot([r.path for r in runs], tmp_path / "new" / "curve.png")
    assert out == tmp_path / "new" / "curve.png"
    assert [p.name for p in out.parent.iterdir()] == ["curve.png"]
    with Image.open(out) as image:
        assert image.format == "PNG"
        assert image.width > 800
        assert len(image.convert("RGB").getcolors(1 << 20)) > 50


def test_other_kinds_of_file(tmp_path):
    run = folder(tmp_path / "a", evals(1.0, 2.0))
    assert plot([run], tmp_path / "c.svg").read_text().startswith("<?xml")
    with pytest.raises(UserError, match=r"end it in \.png"):
        plot([run], tmp_path / "c.txt")


def test_names_are_no_formulas(tmp_path):
    run = folder(tmp_path / "a", evals(1.0, 2.0), env="$\\frac{$", algo="$\\x$")
    assert plot([run], tmp_path / "c.png").stat().st_size > 1000


def test_mistakes_are_sentences(tmp_path):
    empty, run = folder(tmp_path / "empty", []), folder(tmp_path / "a", evals(1.0, 2.0))
    for metric in (None, "return/agents"):
        with pytest.raises(UserError, match=r"empty has no metrics yet"):
            plot([run, empty], tmp_path / "c.png", metric)
    with pytest.raises(UserError, match=r"did you mean 'return/agents'"):
        plot([run], tmp_path / "c.png", "return/agent")
    with pytest.raises(UserError, match=r"no metric 'zzz'; it has return/agents"):
        plot([run], tmp_path / "c.png", "zzz")
    with pytest.raises(UserError, match="is no run"):
        plot([tmp_path / "nowhere"], tmp_path / "c.png")
    with pytest.raises(UserError, match="at least one run"):
        plot([], tmp_path / "c.png")
    with pytest.raises(UserError, match="cannot be written"):
        plot([run], run.path / "config.json" / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_seeds_that_share_no_steps_are_refused(tmp_path):
    late = [{**x, "step": x["step"] + 1000} for x in evals(1.0, 2.0)]
    runs = [folder(tmp_path / "a", evals(1.0, 2.0)), folder(tmp_path / "b", late, seed=1)]
    with pytest.raises(UserError, match="at no common steps"):
        plot(runs, tmp_path / "c.png")
