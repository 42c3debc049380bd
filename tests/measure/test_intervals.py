"""One number over several runs."""

import math

import pytest

from loadgen.measure.statistics.intervals import (
    BoundedSection,
    EstimateSection,
    Interval,
    estimate,
    mean_over,
    over_runs,
)


def test_several_runs_have_students_interval():
    # t(0.975, 2 df) = 4.302653; the standard error of 1, 2, 6 is sqrt(7/3).
    found = over_runs([BoundedSection(value=v) for v in (1.0, 2.0, 6.0)], 0.95)
    half = 4.302652729911275 * math.sqrt(7 / 3)
    assert (found.value, found.n) == (3.0, 3)
    assert found.low == pytest.approx(3 - half)
    assert found.high == pytest.approx(3 + half)


def test_a_single_run_keeps_its_own_interval():
    found = over_runs([estimate(Interval(2.0, 1.0, None))], 0.95)
    assert found == EstimateSection(value=2.0, low=1.0, high=None, n=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_one_run_has_no_finite_value_for_has_no_mean(bad):
    values = [estimate(Interval(1.0)), estimate(Interval(bad))]
    assert over_runs(values, 0.95) == EstimateSection(value=None, n=2)


def test_nothing_is_no_number():
    assert mean_over([], 0.95) == EstimateSection(value=None, n=0)
