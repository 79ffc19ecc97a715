"""What runs scored: which are seeds of one result, which line counts, and the scale."""

import json

import pytest
from runfolders import evals, folder

from shoal.spec import UserError
from shoal.tools.scores import Matrix, best_evaluation, ranges_of, results, returns, scores_at, seeds_of, series
from shoal.training.run import Run


def test_evaluations_come_first_and_holes_are_left_out(tmp_path):
    lines = [*evals(1.0, None, 3.0), {"step": 50, "time": 0.0, "kind": "train", "return/agents": 9.0, "loss": 0.5, "x": [1, 2]}]
    run = folder(tmp_path / "a", lines)
    found = series(run, lines, "return/agents")
    assert (found.steps.tolist(), found.times.tolist(), found.values.tolist()) == ([0, 200], [0, 120], [1, 3])
    assert not found.training
    found = series(run, lines, "loss")
    assert (found.steps.tolist(), found.values.tolist(), found.training) == ([50], [0.5], True)


def test_groups_are_in_order_and_agents_are_not_groups(tmp_path):
    lines = [{"step": 0, "kind": "eval", "return/b": 1.0, "return/b/0": 1.0, "return/a": 2.0, "return_std/a": 0.0}]
    run = folder(tmp_path / "a", lines)
    assert returns(run, lines) == ["return/b", "return/a"]
    assert [r.task for r in results(seeds_of([run]))] == ["simple_tag/b", "simple_tag/a"]
    assert [r.task for r in results(seeds_of([run]), "return/a")] == ["simple_tag"]


def test_seeds_are_one_result_and_settings_are_others(tmp_path):
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
    found = seeds_of([*runs, Run(tmp_path / "a")])  # a run named twice counts once
    assert [[r.path.name for r in s.runs] for s in found] == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert [s.algo for s in found] == ["mappo", "ippo", "mappo algo.lr 0.1", "mappo team.agents random", "mappo"]


def test_labels_differ_where_settings_beyond_the_third_do(tmp_path):
    settings = [{"a": k > 0, "b": k > 0, "c": k > 0, "d": k > 0, "e": k} for k in range(3)]
    found = seeds_of(folder(tmp_path / str(k), evals(1.0), sections={"algo": x}) for k, x in enumerate(settings))
    label = "mappo algo.a True algo.b True algo.c True and 2 more"
    assert [s.algo for s in found][1:] == [label, f"{label} #2"]


def test_the_line_that_counts(tmp_path):
    run = folder(tmp_path / "a", evals(1.0, 7.0, 7.0, 2.0))
    assert best_evaluation(run, run.metrics)["step"] == 200  # of equals the later, as for the checkpoint
    (result,) = results(seeds_of([run]))
    assert {at: scores_at(result, at).tolist() for at in ("last", "best", "100", "150", "0.3k")} == {
        "last": [2],
        "best": [7],
        "100": [7],
        "150": [7],
        "0.3k": [2],
    }
    for at, sentence in (
        ("400", "has not reached step 400: it is at 300"),
        ("lst", "did you mean 'last'"),
        ("-1", "up to step"),
    ):
        with pytest.raises(UserError, match=sentence):
            scores_at(result, at)


def test_runs_that_are_not_at_their_end_are_named(tmp_path):
    said = []
    (result,) = results(seeds_of([folder(tmp_path / "a", evals(1.0, 2.0), steps=5000)]))
    assert scores_at(result, "last", said.append).tolist() == [2]
    assert "at step 100 of 5,000" in said[0]


def test_ranges(tmp_path):
    assert ranges_of("a=-26:-6.7,b/c=1:0") == {"a": (-26, -6.7), "b/c": (1, 0)}
    (tmp_path / "r.json").write_text(json.dumps({"a": [0, 2]}))
    assert ranges_of(str(tmp_path / "r.json")) == {"a": (0, 2)}
    run = folder(tmp_path / "x", evals(1.0), env="gymnasium/A-v1")
    for name in ("gymnasium-A-v1", "gymnasium/A-v1"):  # as tables have it, or its id
        assert results(seeds_of([run]), None, {name: (0.0, 4.0)})[0].series[0].values.tolist() == [0.25]
    with pytest.raises(UserError, match=r"no range for 'gymnasium-A-v1'.*it has a: add gymnasium-A-v1=LOW:HIGH"):
        results(seeds_of([run]), None, {"a": (0.0, 1.0)})


@pytest.mark.parametrize("text", ["a", "a=1", "a=1:1", "a=x:y", "=1:2", "a=1:2:3", "a=nan:1", "", ","])
def test_ranges_that_are_none(text):
    with pytest.raises(UserError, match="TASK=LOW:HIGH"):
        ranges_of(text)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}', '{"a": [1, "2"]}', '{"a": [2, 2]}'])
def test_files_of_ranges_that_are_none(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError, match="--normalise"):
        ranges_of(str(tmp_path / "r.json"))
    with pytest.raises(UserError, match="there is no file"):
        ranges_of(str(tmp_path / "s.json"))


def matrix(tmp_path, scores, ranges=None):
    """{algorithm: {task: its seeds' scores}}"""
    runs = [
        folder(tmp_path / f"{a}-{t}-{k}", evals(x), a, t, seed=k)
        for a, tasks in scores.items()
        for t, values in tasks.items()
        for k, x in enumerate(values)
    ]
    return Matrix(results(seeds_of(runs), None, ranges), "last")


def test_all_tasks_are_joined_where_they_are_on_one_scale(tmp_path):
    scores = {"x": {"s": [0.0, 10.0], "t": [2.0, 4.0]}, "y": {"s": [5.0]}}
    assert [(e.algo, e.of) for e in matrix(tmp_path / "a", scores).estimates("mean")] == [("x", "s"), ("x", "t"), ("y", "s")]
    found = matrix(tmp_path / "b", scores, {"s": (0.0, 10.0), "t": (0.0, 4.0)}).estimates("mean")
    assert [(e.algo, e.of, float(e.interval.estimate), e.count) for e in found] == [
        ("x", "s", 0.5, "2 seeds"),
        ("x", "t", 0.75, "2 seeds"),
        ("x", "all 2 tasks", 0.625, "4 runs"),
        ("y", "s", 0.5, "1 seed"),  # and it has no run of t
    ]


def test_improvement_is_over_the_tasks_of_both(tmp_path):
    found = matrix(tmp_path, {"x": {"s": [1.0, 3.0], "t": [0.0, 0.0]}, "y": {"s": [2.0, 2.0], "u": [1.0]}}).improvements()
    assert {(e.algo, e.of): (e.interval.estimate, e.count) for e in found} == {
        ("x", "y"): (0.5, "1 task"),
        ("y", "x"): (0.5, "1 task"),
    }
    with pytest.raises(UserError, match="share a task"):
        matrix(tmp_path / "n", {"x": {"s": [1.0]}, "y": {"t": [1.0]}}).improvements()


def test_profiles_ask_for_one_scale_and_the_same_tasks(tmp_path):
    with pytest.raises(UserError, match="--normalise s=LOW:HIGH"):
        matrix(tmp_path / "a", {"x": {"s": [1.0], "t": [2.0]}}).profiles()
    ranges = {"s": (0.0, 2.0), "t": (0.0, 2.0)}
    with pytest.raises(UserError, match="y has no run of t"):
        matrix(tmp_path / "b", {"x": {"s": [1.0], "t": [2.0]}, "y": {"s": [1.0]}}, ranges).profiles()
    thresholds, found = matrix(tmp_path / "c", {"x": {"s": [1.0, 1.5], "t": [2.0, 2.0]}}, ranges).profiles()
    assert (thresholds[0], thresholds[-1]) == (0, 1)
    at = dict(zip(thresholds.round(2), found["x"].estimate, strict=True))
    assert (at[0.0], at[0.49], at[0.5], at[0.75], at[1.0]) == (1, 1, 0.75, 0.5, 0)
