"""The rate of the events of users, its interval, and whether users act together."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure.statistics.event_rate import coherence, event_rate, product, wider
from loadgen.measure.statistics.intervals import Interval


def test_the_interval_is_students_t_over_the_counts_of_the_batches():
    """Batches of 1 s with 8, 12, 10, 9 and 11 events: mean 10, standard deviation √2.5, t 2.7764
    with 4 degrees of freedom."""
    counts = (8, 12, 10, 9, 11)
    times_s = np.concatenate([k + (np.arange(n) + 0.5) / n for k, n in enumerate(counts)])
    found = event_rate(times_s, 0.0, 5.0, 1.0, 0.95)
    assert found.value == 10.0
    assert found.low == pytest.approx(10 - 2.7764 * math.sqrt(2.5 / 5), abs=1e-3)
    assert found.high == pytest.approx(10 + 2.7764 * math.sqrt(2.5 / 5), abs=1e-3)


def test_equal_cycles_leave_the_ends_of_the_window_open():
    """20 users with cycles of 1 s, ten cycles: no batch differs from another. Sending in turn, the
    count has the variance 20/6, less nothing for coherence; all at once, 20²/6. t with 9 degrees
    of freedom is 2.2622."""
    in_turn = event_rate(np.arange(200) / 20, 0.0, 10.0, 1.0, 0.95, 20)
    at_once = event_rate(np.repeat(np.arange(10.0), 20) + 0.4, 0.0, 10.0, 1.0, 0.95, 20)
    assert in_turn.high == pytest.approx(20 * (1 + 2.2622 * math.sqrt(20 / 6) / 200), rel=1e-4)
    assert at_once.high == pytest.approx(20 * (1 + 2.2622 * 20 / math.sqrt(6) / 200), rel=1e-4)
    assert at_once.low == pytest.approx(20 * (1 - 2.2622 * 20 / math.sqrt(6) / 200), rel=1e-4)


def test_the_wider_of_two_intervals_has_the_outer_bounds():
    assert wider(Interval(5.0, 4.0, 6.0), Interval(5.1, 3.0, 5.5)) == Interval(5.0, 3.0, 6.0)
    assert wider(Interval(5.0, 4.0, 6.0), Interval(5.1)) == Interval(5.0, 4.0, 6.0)
    assert wider(Interval(5.0), Interval(5.1, 3.0, 5.5)) == Interval(5.0)


def test_fewer_than_five_cycles_have_no_interval():
    times_s = np.arange(0.0, 4.9, 0.1)
    assert event_rate(times_s, 0.0, 4.9, 1.0, 0.95) == Interval(49 / 4.9)
    assert event_rate(times_s, 0.0, 4.9, 0.9, 0.95).low is not None
    assert event_rate(times_s, 0.0, 4.9, math.nan, 0.95).low is None
    assert math.isnan(event_rate(times_s, 2.0, 2.0, 1.0, 0.95).value)


def test_events_outside_of_the_window_do_not_count():
    times_s = np.array([0.5, 1.0, 1.5, 2.0, 2.5])
    assert event_rate(times_s, 1.0, 2.5, 1.0, 0.95).value == 2.0


def test_neighbouring_batches_that_are_alike_widen_the_interval():
    """Ten slow seconds and ten fast ones: no 20 independent batches."""
    slow = np.concatenate([k + np.arange(8) / 8 for k in range(10)])
    fast = np.concatenate([10 + k + np.arange(12) / 12 for k in range(10)])
    mixed = np.concatenate([k + np.arange(n) / n for k, n in enumerate([8, 12] * 10)])
    rising = event_rate(np.r_[slow, fast], 0.0, 20.0, 1.0, 0.95)
    alternating = event_rate(mixed, 0.0, 20.0, 1.0, 0.95)
    assert rising.value == alternating.value == 10.0
    assert rising.high is not None
    assert alternating.high is not None
    assert rising.high - 10 > 3 * (alternating.high - 10)


def test_the_interval_covers_the_rate_of_users_with_random_cycles():
    """16 users with lognormal cycles, 20 each after a run-in, 300 runs: at 95 %, fewer than 275
    covered runs happen once in 500 times."""
    rng = np.random.default_rng(11)
    mean_s = math.exp(0.18)
    covered = 0
    for _ in range(300):
        ends_s = np.cumsum(rng.lognormal(0.0, 0.6, (16, 60)), axis=1).ravel()
        found = event_rate(ends_s, 10.0, 10.0 + 20 * mean_s, mean_s, 0.95)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 16 / mean_s <= found.high
    assert covered >= 275, "seed 11"


def test_the_relative_errors_of_a_product_add_in_squares():
    found = product(Interval(10.0, 9.7, 10.3), Interval(0.5, 0.48, 0.52))
    assert found.value == 5.0
    assert found.low == pytest.approx(5 - math.hypot(0.15, 0.2))
    assert found.high == pytest.approx(5 + math.hypot(0.15, 0.2))
    assert product(Interval(10.0), Interval(0.5, 0.4, 0.6)) == Interval(5.0)
    assert product(Interval(10.0, 9.0, 11.0), Interval(0.5, None, 0.6)).low is None


def test_users_that_send_at_the_same_instants_are_coherent():
    waves_s = np.repeat(np.arange(10.0), 8) + 0.3
    assert coherence(waves_s, 0.0, 10.0, 1.0) == pytest.approx(1.0)


def test_users_that_send_in_turn_are_not():
    assert coherence(np.arange(80) / 8, 0.0, 10.0, 1.0) == pytest.approx(-1 / 7)
    assert math.isnan(coherence(np.arange(80) / 8, 0.0, 0.5, 1.0))
    assert math.isnan(coherence(np.array([0.5]), 0.0, 10.0, 1.0))


@given(st.integers(0, 2**32 - 1))
def test_independent_users_are_about_0_coherent(seed):
    """800 events: a standard deviation of about 0.05 (1/√(pairs of a window · windows))."""
    times_s = np.random.default_rng(seed).uniform(0, 100, 800)
    assert abs(coherence(times_s, 0.0, 100.0, 1.0)) < 0.3
