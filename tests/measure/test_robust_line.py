"""The Theil–Sen line, held against scipy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import theilslopes

from loadgen.measure.statistics.robust_line import median_slope, robust_line

points = st.lists(  # some x alike, no y: scipy has no interval where nearly all are
    st.tuples(st.integers(0, 30), st.integers(-1000, 1000)),
    min_size=20,
    max_size=80,
    unique_by=lambda point: point[1],
).filter(lambda ps: len({x for x, _ in ps}) > 5)


@given(points, st.sampled_from([0.8, 0.95, 0.99]))
def test_slope_interval_and_intercept_are_scipys(pairs, confidence):
    x, y = np.array(pairs, float).T
    found, asked = robust_line(x, y, confidence), theilslopes(y, x, confidence)
    assert found is not None
    assert found.slope == pytest.approx(asked.slope)
    assert found.intercept == pytest.approx(asked.intercept)
    assert (found.low, found.high) == pytest.approx((asked.low_slope, asked.high_slope))


def test_a_third_of_nonsense_does_not_turn_it():
    x = np.arange(90.0)
    y = 5.0 + 2.0 * x
    y[::4] = 1e6
    found = robust_line(x, y, 0.95)
    assert found is not None
    assert found.slope == pytest.approx(2.0)
    assert found.n == 90


def test_there_is_none_through_too_little():
    assert robust_line(np.arange(19.0), np.arange(19.0), 0.95) is None
    assert robust_line(np.ones(50), np.arange(50.0), 0.95) is None


def test_many_points_are_thinned_and_counted():
    x = np.arange(10_000.0)
    found = robust_line(x, 3 * x, 0.95)
    assert found is not None
    assert found.n == 10_000
    assert found.slope == pytest.approx(3.0)


def test_the_interval_of_a_series_covers_where_neighbours_depend_on_each_other():
    """x and y are unrelated AR(1) series with factor 0.8, so τ ≈ 4.6: stated 95 % cover in 63 %."""
    rng, n_runs = np.random.default_rng(41), 150
    steps = rng.normal(size=(n_runs, 2, 400))
    for k in range(1, 400):
        steps[:, :, k] += 0.8 * steps[:, :, k - 1]

    def covered(is_series):
        lines = [robust_line(x, y, 0.95, is_series) for x, y in steps[:, :, 100:]]
        return np.mean([line is not None and line.low <= 0 <= line.high for line in lines])

    assert covered(is_series=False) < 0.75
    assert covered(is_series=True) >= 0.93


def test_a_series_of_a_few_waves_has_the_widest_interval():
    x = np.sin(np.arange(100) / 10)
    y = np.sin(np.arange(100) / 10 + 1)
    found = robust_line(x, y, 0.95, is_series=True)
    assert found is not None
    slopes = [(y[i] - y[j]) / (x[i] - x[j]) for i in range(100) for j in range(i)]
    assert (found.low, found.high) == pytest.approx((min(slopes), max(slopes)))


@given(
    st.lists(st.floats(-100, 100), min_size=2, max_size=12, unique=True),
    st.floats(-5, 5),
    st.floats(-5, 5),
)
def test_the_slope_of_a_line_is_its_slope(x, slope, at_zero):
    at = np.array(sorted(x))
    if np.diff(at).min() < 1e-3:
        return
    assert median_slope(at, slope * at + at_zero) == pytest.approx(slope, abs=1e-6)


def test_one_wild_point_does_not_move_the_slope():
    at = np.arange(11.0)
    values = 2.0 * at
    values[7] = 1e6
    assert median_slope(at, values) == pytest.approx(2.0)
