"""Pictures of runs: the band's numbers, what is drawn where and how it is labelled, and the files."""

import csv

import numpy as np
import pytest
from PIL import Image
from runfolders import evals, folder

import shoal
from shoal.spec import UserError
from shoal.tools.plot import aggregate, curves, draw, improvement_panels, plot, profile_panels, score_panels, smoothed
from shoal.tools.scores import Matrix, Series, ranges_of, results, seeds_of


def seed(*points):
    steps, values = (np.array(x, float) for x in zip(*points, strict=True))
    return Series(steps, steps / 10, values)


def panels(runs, metric=None, ranges=None, **how):
    return curves(results(seeds_of(runs), metric, ranges_of(ranges) if ranges else None), **how)


def legend(axes):
    return [x.get_text() for x in axes.get_legend().get_texts()]


# --- numbers ---


def test_band_at_the_same_steps():
    """4 +- 4.3027 sqrt(13 / 3), for (1 - 4)^2 + (3 - 4)^2 + (8 - 4)^2 = 26, halved 13."""
    steps, band = aggregate([[seed((0, 1.0), (10, 5.0)), seed((0, 3.0), (10, 5.0)), seed((0, 8.0), (10, 5.0))]])
    assert steps.tolist() == [0, 10]
    assert band.estimate.tolist() == [4, 5]
    assert band.low.tolist() == [pytest.approx(4 - 8.957, abs=1e-3), 5]
    assert band.high.tolist() == [pytest.approx(4 + 8.957, abs=1e-3), 5]


def test_band_of_other_steps_is_read_off_straight_lines_where_all_seeds_are():
    steps, band = aggregate([[seed((0, 0.0), (10, 10.0), (30, 30.0)), seed((5, 1.0), (15, 3.0), (20, 3.0))]])
    assert steps.tolist() == [5, 10, 15, 20]  # from where the later began to where the shorter ended
    assert band.estimate.tolist() == [3, 6, 9, 11.5]
    assert (band.high - band.estimate).tolist() == [pytest.approx(12.7062 * half, abs=1e-2) for half in (2, 4, 6, 8.5)]


def test_iqm_over_tasks_is_of_all_runs():
    one, two = [seed((0, x), (10, x)) for x in (0.0, 1.0)], [seed((0, x), (10, x)) for x in (3.0, 9.0)]
    _, band = aggregate([one, two], "iqm")
    assert band.estimate.tolist() == [2, 2]
    assert band.low.tolist() == [1.5, 1.5]  # (0, 0, 3, 3) is drawn in 1 of 16
    assert band.high.tolist() == [5, 5]


def test_a_single_seed_has_no_band():
    _, band = aggregate([[seed((0, 2.0), (7, 4.0))]])
    assert band.estimate.tolist() == [2, 4]
    assert np.isnan(band.low).all()


def test_by_time():
    times, band = aggregate([[seed((0, 0.0), (10, 10.0)), seed((0, 2.0), (20, 2.0))]], x="time")
    assert times.tolist() == [0, 1]
    assert band.estimate.tolist() == [1, 6]


def test_long_curves_are_thinned():
    steps, _ = aggregate([[seed(*((k, 0.0) for k in range(5000)))]])
    assert len(steps) == 500
    assert (steps[0], steps[-1]) == (0, 4999)


def test_smoothing_is_of_what_came_before():
    assert smoothed(seed((0, 3.0), (1, 5.0), (2, 10.0), (3, 0.0)), 3).values.tolist() == [3, 4, 6, 5]
    assert smoothed(seed((0, 3.0), (1, 5.0)), 1).values.tolist() == [3, 5]


# --- the picture ---


def test_one_curve_has_its_groups_in_one_panel_and_several_have_a_panel_a_group(tmp_path):
    lines = [{**x, "return/prey": -x["return/foe"]} for x in evals(1.0, 2.0, group="foe")]
    a, b, c = (
        folder(tmp_path / n, lines, algo, seed=s) for n, algo, s in (("a", "mappo", 0), ("b", "mappo", 1), ("c", "ippo", 0))
    )
    (alone,) = draw(panels([a, b])).axes
    assert legend(alone) == [f"{g} · mappo (2 seeds)" for g in ("foe", "prey")]
    assert alone.get_legend().get_title().get_text() == "mean, 95 % t-interval"
    rivals = draw(panels([a, b, c]))
    assert [x.get_title("left") for x in rivals.axes] == ["simple_tag/foe", "simple_tag/prey"]
    for axes in rivals.axes:
        mappo, ippo = axes.lines
        assert mappo.get_color() != ippo.get_color()
        assert legend(axes) == ["mappo (2 seeds)", "ippo (1 seed)"]
        assert len(axes.collections) == 1  # a band of mappo's
        assert not axes.spines["top"].get_visible()
    assert [x.lines[0].get_color() for x in rivals.axes] == [rivals.axes[0].lines[0].get_color()] * 2  # in every panel
    assert rivals.axes[1].lines[0].get_ydata().tolist() == [-1, -2]


def test_a_legend_hides_nothing(tmp_path):
    runs = [folder(tmp_path / str(k), evals(1.0, 2.0), "mappo", sections={"algo": {"lr": k}}) for k in range(12)]
    figure = draw(panels(runs))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    box = axes.get_legend().get_window_extent()
    assert box.y1 < axes.xaxis.label.get_window_extent().y0
    assert box.y0 > 0
    looks = {(x.get_color(), x.get_linestyle()) for x in axes.lines}
    assert len(looks) == 12


def test_a_single_seed_says_so(tmp_path):
    (axes,) = draw(panels([folder(tmp_path / "a", evals(1.0, 2.0))])).axes
    assert legend(axes) == ["mappo (1 seed)"]
    assert axes.get_legend().get_title().get_text() == ""
    assert not axes.collections


def test_labels_say_what_was_done_to_the_numbers(tmp_path):
    runs = [folder(tmp_path / f"{e}{s}", evals(1.0, 2.0, 3.0), env=e, seed=s) for e in ("one", "two") for s in (0, 1)]
    found = panels(runs, None, "one=1:3,two=3:1", statistic="iqm", x="time", smooth=2)
    assert [p.title for p in found] == ["one", "two", "all 2 tasks"]
    assert found[0].y == "normalised return/agents, running mean of 2 evaluations"
    assert {p.x for p in found} == {"wall time (minutes)"}
    assert {p.meaning for p in found} == {"IQM, 95 % stratified bootstrap"}
    assert [x.count for p in found for x in p.lines] == ["2 seeds", "2 seeds", "4 runs"]
    assert found[0].lines[0].x.tolist() == [0, 1, 2]
    assert found[0].lines[0].y.estimate.tolist() == [0, 0.25, 0.75]
    assert found[1].lines[0].y.estimate.tolist() == [1, 0.75, 0.25]  # where less is better
    assert found[2].lines[0].y.estimate.tolist() == [0.5, 0.5, 0.5]


def test_training_lines_are_called_that(tmp_path):
    run = folder(tmp_path / "a", [{**x, "kind": "train"} for x in evals(1.0, 2.0)])
    assert draw(panels([run])).axes[0].get_ylabel() == "return/agents (training)"


def test_steps_are_in_human_units(tmp_path):
    run = folder(tmp_path / "a", [{"step": s, "time": 0.0, "kind": "eval", "return/agents": 1.0} for s in (0, 2_000_000)])
    axes = draw(panels([run])).axes[0]
    assert axes.xaxis.get_major_formatter()(1_500_000, 0) == "1.5M"
    assert axes.get_xlabel() == "environment steps"


def test_scores_profiles_and_improvements(tmp_path):
    runs = [
        folder(tmp_path / f"{a}{s}", evals(0.0, x + s), a, seed=s) for a, x in (("good", 5.0), ("bad", 0.5)) for s in (0, 1)
    ]
    found = results(seeds_of(runs))
    matrix = Matrix(found, "last")
    (scores,) = score_panels(found, matrix, "mean")
    assert [(e.algo, e.interval.estimate, e.count) for e in scores.points] == [("good", 5.5, "2 seeds"), ("bad", 1, "2 seeds")]
    (profile,) = profile_panels(found, matrix)
    assert [line.y.estimate[0] for line in profile.lines] == [1, 1]
    assert [line.y.estimate[-1] for line in profile.lines] == [0, 0]
    (better,) = improvement_panels(matrix)
    assert [(e.algo, e.interval.estimate) for e in better.points] == [("good  >  bad", 1)]
    for kind in ("scores", "profile", "improvement"):
        assert plot(runs, tmp_path / f"{kind}.png", kind=kind).stat().st_size > 5000
    (axes,) = draw([scores]).axes
    assert [x.get_text().replace("\xa0", " ") for x in axes.get_yticklabels()] == ["good (2 seeds)", "bad (2 seeds)"]
    low, high = axes.get_xlim()
    assert all(low < p.get_x() and p.get_x() + p.get_width() < high for p in axes.patches)  # whole bars


# --- files ---


def test_two_real_seeds(tmp_path):
    quiet = {"quiet": True, "log": {"tensorboard": False}, "eval": {"episodes": 8}, "env": {"max_cycles": 5}}
    runs = [shoal.train("mappo", "simple_spread", steps=1000, envs=8, seed=s, out=tmp_path / str(s), **quiet) for s in (0, 1)]
    (panel,) = panels(runs)
    assert (panel.title, panel.y) == ("simple_spread", "return/agents")
    one, two = [r.evaluations()[0]["return/agents"] for r in runs]
    band = panel.lines[0].y
    assert band.estimate[0] == pytest.approx((one + two) / 2)
    assert band.high[0] - band.estimate[0] == pytest.approx(12.7062 * abs(one - two) / 2, rel=1e-4)
    out = plot([r.path for r in runs], tmp_path / "new" / "curve.png")
    assert out == tmp_path / "new" / "curve.png"
    assert [p.name for p in out.parent.iterdir()] == ["curve.png"]
    with Image.open(out) as image:
        assert image.format == "PNG"
        assert image.width > 800
        assert len(image.convert("RGB").getcolors(1 << 20)) > 50


def test_other_kinds_of_file(tmp_path):
    runs = [folder(tmp_path / str(s), evals(1.0, 2.0 + s), seed=s) for s in (0, 1)]
    assert plot(runs, tmp_path / "c.svg").read_text().startswith("<?xml")
    rows = list(csv.DictReader(plot(runs, tmp_path / "c.csv").open()))
    assert [(float(r["x"]), float(r["estimate"])) for r in rows] == [(0, 1), (100, 2.5)]
    assert float(rows[1]["high"]) == pytest.approx(2.5 + 12.7062 / 2, abs=1e-3)
    assert {r["of"] for r in rows} == {"2 seeds"}
    rows = list(csv.DictReader(plot(runs[:1], tmp_path / "c.csv", kind="scores").open()))
    assert [(r["name"], r["estimate"], r["low"]) for r in rows] == [("mappo", "2.0", "")]
    for name, sentence in (("c.txt", r"end it in \.png"), ("c.md", "`shoal table` writes")):
        with pytest.raises(UserError, match=sentence):
            plot(runs, tmp_path / name)


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
    with pytest.raises(UserError, match="--smooth is 0"):
        plot([run], tmp_path / "c.png", smooth=0)
    with pytest.raises(UserError, match="cannot be written"):
        plot([run], run.path / "config.json" / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_seeds_that_share_no_steps_are_refused(tmp_path):
    late = [{**x, "step": x["step"] + 1000} for x in evals(1.0, 2.0)]
    runs = [folder(tmp_path / "a", evals(1.0, 2.0)), folder(tmp_path / "b", late, seed=1)]
    with pytest.raises(UserError, match="at no common steps"):
        plot(runs, tmp_path / "c.png")
