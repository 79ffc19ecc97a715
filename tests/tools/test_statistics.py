"""Intervals and comparisons against numbers worked out by hand; and that 95 % intervals cover as often as is said."""

import math

import numpy as np
import pytest

from shoal.tools.statistics import bootstrap, improvement, interval_of, iqm, mean, profile, t_interval


def array(*values):
    return np.array(values, float)


def test_t_interval_of_one_task():
    """1, 2, 3, 4, 5: mean 3, s^2 = 10/4, so 2.7764 sqrt(2.5 / 5) = 1.9632."""
    i = t_interval([array(1, 2, 3, 4, 5)])
    assert (i.estimate, i.low, i.high) == (3, pytest.approx(3 - 1.9632, abs=1e-4), pytest.approx(3 + 1.9632, abs=1e-4))


def test_t_interval_over_tasks_is_welchs():
    """Means 1 and 4 of variances 2 / 2 = 1 and 8 / 2 = 4 make a mean of 2.5 with variance (1 + 4) / 4; the degrees of freedom
    are 1.25^2 / (0.25^2 / 1 + 1^2 / 1) = 1.47, so 1."""
    i = t_interval([array(0, 2), array(2, 6)])
    assert i.estimate == 2.5
    assert i.high - i.estimate == pytest.approx(12.7062 * math.sqrt(1.25), abs=1e-3)


def test_t_interval_of_many_steps_at_once():
    i = t_interval([array([1, 2, 3, 4, 5], [7, 7, 7, 7, 7])])
    assert i.estimate.tolist() == [3, 7]
    assert (i.high - i.low).tolist() == [pytest.approx(2 * 1.9632, abs=1e-4), 0]


def test_a_single_seed_has_no_interval():
    for statistic in ("mean", "iqm"):
        i = interval_of(statistic, [array(5), array(1, 2)])
        assert math.isnan(i.low)
        assert math.isnan(i.high)
    assert interval_of("mean", [array(5), array(1, 2)]).estimate == 3.25


@pytest.mark.parametrize(
    ("values", "middle"),
    [
        ((7,), 7),
        ((1, 100), 50.5),
        ((8, 1, 3, 2), 2.5),  # a whole one off at each end
        ((1, 2, 3, 4, 100), (0.75 * 2 + 3 + 0.75 * 4) / 2.5),  # one and a quarter
        ((0, 10, 20), (0.25 * 0 + 10 + 0.25 * 20) / 1.5),  # three quarters
        ((1, 2, 3, 4, 5, 60), (0.5 * 2 + 3 + 4 + 0.5 * 5) / 3),  # one and a half
        (tuple(range(8)), 3.5),
        ((-50, 0, 1, 5, 6, 7, 8, 900), 4.75),
    ],
)
def test_iqm_trims_the_fraction(values, middle):
    assert iqm([array(*values)]) == pytest.approx(middle)


def test_iqm_is_over_all_runs_of_all_tasks():
    assert iqm([array(0, 10), array(2, 3)]) == 2.5
    assert mean([array(0, 10), array(2, 3, 4)]) == 4  # and the mean over tasks


def test_profile_is_the_share_above():
    """Of the first task's seeds and the second's, averaged over tasks; above is strictly."""
    i = profile([array(0.1, 0.5), array(0.5, 0.9)], array(0, 0.1, 0.4, 0.5, 0.9))
    assert i.estimate.tolist() == [1, 0.75, 0.75, 0.25, 0]
    assert i.low.tolist() == [1, 0.5, 0.5, 0, 0]  # 0.1 is drawn twice with chance 1/4: more than 2.5 %
    assert i.high.tolist() == [1, 1, 1, 0.5, 0]


def test_improvement_counts_ties_half():
    """Pairs of (1, 2) with (1, 0): tie, win, win, win; with (3, 3) none."""
    assert improvement([array(1, 2)], [array(1, 0)]) == 3.5 / 4
    assert improvement([array(1, 2), array(1, 2)], [array(1, 0), array(3, 3, 3)]) == 3.5 / 8
    assert improvement([array(4, 4)], [array(4, 4)]) == 0.5
    i = bootstrap(improvement, [array(1, 2)], [array(1, 0)])
    assert (i.low, i.high) == (0.5, 1)  # from (1, 1) against (1, 1) to (2, 2)


def test_bootstrap_draws_within_each_task():
    """Seeds of one task agree, so that the mean of tasks can only move by the other's."""
    i = bootstrap(mean, [array(0, 0, 0), array(100, 101)])
    assert (i.estimate, i.low, i.high) == (50.25, 50, 50.5)


def test_bootstrap_repeats():
    scores = [np.arange(10.0) ** 2]
    one, two = bootstrap(iqm, scores), bootstrap(iqm, scores)
    assert (one.low, one.high) == (two.low, two.high)


# --- 95 % -------------------------------------------------------------------------------------------------------------

SIMULATIONS = 2000
MARGIN = 0.015  # three standard errors of a share of 95 % in so many


def coverage(interval, draw, runs, tasks=1, truth=0.0):
    i = interval([draw(size=(SIMULATIONS, runs)) for _ in range(tasks)])
    return float(((i.low <= truth) & (truth <= i.high)).mean())


@pytest.mark.parametrize(("runs", "tasks"), [(3, 1), (5, 1), (10, 1), (5, 8)])
def test_the_t_interval_covers_as_often_as_it_says(runs, tasks):
    assert coverage(t_interval, np.random.default_rng(0).normal, runs, tasks) == pytest.approx(0.95, abs=MARGIN)


@pytest.mark.parametrize(("runs", "tasks", "covered"), [(3, 1, 0.75), (5, 1, 0.90), (10, 1, 0.93), (20, 1, 0.94), (5, 8, 0.93)])
def test_the_bootstrap_covers_as_often_as_its_docstring_says(runs, tasks, covered):
    found = coverage(lambda x: bootstrap(iqm, x, resamples=400), np.random.default_rng(0).normal, runs, tasks)
    assert found == pytest.approx(covered, abs=0.02)


@pytest.mark.parametrize(("runs", "covered"), [(5, 0.89), (20, 0.91)])
def test_the_t_interval_of_skewed_scores_is_too_narrow(runs, covered):
    found = coverage(t_interval, np.random.default_rng(0).exponential, runs, truth=1.0)
    assert found == pytest.approx(covered, abs=0.02)
