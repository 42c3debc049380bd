"""The margin of a run: known answers, hand-worked numbers and properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure.statistics.dependence import Dependence
from loadgen.measure.statistics.margin import (
    growth,
    is_clear,
    is_missed_by_far,
    margin_ratios,
    rises,
    share_beyond,
)


@pytest.mark.parametrize(
    ("n", "time", "share"),
    [
        (59, 1.0, 0.04951),  # 1 − 0.05^(1/59), the rule of three
        (299, 1.0, 0.009969),
        (1, 1.0, 0.95),
        (1, 40.0, 0.95),  # a single request shows nothing of runs
        (2, 3.0, 0.908392),  # (1 − s)(1 − s/2) = 0.05, so s = (3 − √1.4) / 2
    ],
)
def test_the_share_beyond_the_slowest_by_known_answers(n, time, share):
    assert share_beyond(n, time, 0.95) == pytest.approx(share, abs=5e-6)


@given(
    n=st.integers(2, 3000),
    time=st.floats(1, 500),
    longer=st.floats(1.01, 5),
    more=st.integers(1, 2000),
)
def test_the_share_beyond_falls_with_more_requests_and_rises_with_longer_runs(
    n, time, longer, more
):
    share = share_beyond(n, time, 0.95)
    assert 0 < share <= 0.95 + 1e-9
    assert share_beyond(n + more, time, 0.95) <= share
    assert share_beyond(n, time * longer, 0.95) >= share


def test_margins_are_counted_from_the_median():
    """Median 3; (5 − 3) / (11 − 3) = 0.25."""
    ratios = margin_ratios(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), 11.0)
    assert ratios.tolist() == [-0.25, -0.125, 0.0, 0.125, 0.25]


def test_each_value_has_its_own_limit_and_none_below_the_median_leaves_room():
    ratios = margin_ratios(np.array([1.0, 2.0, 3.0]), np.array([4.0, 2.0, 6.0]))
    assert ratios.tolist() == [-0.5, math.inf, 0.25]


@pytest.mark.parametrize(("n", "share"), [(59, 0.95), (299, 0.99)])
def test_the_least_n_is_that_of_early_stopping(n, share):
    """Independent requests at 1 % of their limit need no more than a run without any margin."""
    assert is_clear(n, 0.01, share, 1 / 3, 0.95)
    assert not is_clear(n - 1, 0.01, share, 1 / 3, 0.95)


def test_a_margin_of_three_pays_for_runs_of_misses():
    """62 requests whose τ of 1 is taken for 3: (1 − s)(1 − s/2)⁶¹ = 0.05 at s = 0.0928, of which
    0.05 allows a ratio of up to 0.54."""
    share = share_beyond(62, 3.0, 0.95)
    assert (1 - share) * (1 - share / 2) ** 61 == pytest.approx(0.05, abs=1e-6)
    assert 0.05 / share == pytest.approx(0.5388, abs=1e-3)
    assert is_clear(62, 0.5, 0.95, 1.0, 0.95)
    assert not is_clear(62, 0.6, 0.95, 1.0, 0.95)


def test_a_late_answer_is_never_clear():
    assert not is_clear(100_001, 1.01, 0.95, 1.0, 0.95)


def test_failures_take_their_own_part_of_the_error():
    """2 of 300 failed: at most 2.39 % with 97.5 % confidence (Clopper and Pearson). The rest of 5 %
    is left for late answers."""
    assert is_clear(298, 0.01, 0.95, 1.0, 0.95, n_failed=2)
    assert not is_clear(290, 0.01, 0.95, 1.0, 0.95, n_failed=10)  # at most 6 %
    assert not is_clear(298, 0.01, 0.98, 1.0, 0.95, n_failed=2)


def test_failures_whose_memory_the_run_does_not_show_are_not_clear():
    failing = Dependence(300, 100.0)
    assert not is_clear(298, 0.01, 0.95, 1.0, 0.95, n_failed=2, failing=failing)


def test_half_of_the_requests_late_in_each_quarter_is_missed_by_far():
    missed, quarters = np.arange(200) % 2 == 0, np.arange(200) // 50
    assert is_missed_by_far(missed, quarters, 0.95, 1.0, 0.95)
    assert not is_missed_by_far(missed & (quarters > 0), quarters, 0.95, 1.0, 0.95)
    assert not is_missed_by_far(missed, quarters, 0.55, 1.0, 0.95)
    assert not is_missed_by_far(missed, quarters, 0.95, 60.0, 0.95)


def test_a_steady_rise_is_found_and_a_fall_is_none():
    noise = np.random.default_rng(5).normal(size=400)
    line = np.linspace(0, 3, 400)
    assert rises(noise + line)
    assert not rises(noise - line)
    assert not rises(noise)
    assert not rises(np.full(400, 0.1))
    assert not rises(np.arange(19.0))


def test_independent_values_rise_in_one_of_twenty_series():
    """2 000 series of 62: 5 % ± 1.5 points (three standard deviations)."""
    rng = np.random.default_rng(41)
    found = sum(rises(rng.normal(size=62)) for _ in range(2000))
    assert 60 <= found <= 140


def fcfs(load, n, seed):
    """Waits and services of a queue with one server, empty at first, and its numbers in flight."""
    rng = np.random.default_rng(seed)
    arrivals, free, ends = np.cumsum(rng.exponential(1 / load, n)), 0.0, []
    for at, service in zip(arrivals, rng.exponential(size=n), strict=True):
        free = max(free, at) + service
        ends.append(free)
    in_flight = np.array([sum(end > at for end in ends[:k]) for k, at in enumerate(arrivals)])
    return np.array(ends) - arrivals, in_flight.astype(float)


def n_without_growth(load, n, limit=1000.0, n_runs=100):
    found = 0
    for seed in range(n_runs):
        values, in_flight = fcfs(load, n, seed)
        found += growth(values, margin_ratios(values, limit), in_flight, is_wait=True) is None
    return found


@pytest.mark.parametrize("load", [1.02, 1.2])
def test_a_queue_above_its_capacity_is_hardly_ever_taken_for_settled(load):
    """At most 5 % of runs, 12 of 100 with three standard deviations, however far the limit."""
    assert n_without_growth(load, 62) <= 12


def test_a_queue_at_half_of_its_capacity_settles_within_300_requests():
    assert n_without_growth(0.5, 300) >= 95


def test_latencies_without_a_queue_may_follow_each_other():
    """An AR(1) of 0.97 with nothing in flight: 62 requests, limit 10 times the true p99."""
    rng, found = np.random.default_rng(8), 0
    for _ in range(100):
        noise = [rng.normal()]
        for step in rng.normal(size=61) * math.sqrt(1 - 0.97**2):
            noise.append(0.97 * noise[-1] + step)
        values = np.exp(0.3 * np.array(noise))
        found += growth(values, margin_ratios(values, 20.0), np.zeros(62), is_wait=True) is None
    assert found >= 90


def test_the_signs_of_a_growing_load():
    rng = np.random.default_rng(3)
    noise, at = rng.normal(size=200) / 10, np.linspace(0, 1, 200)
    calm = np.arange(200) % 2.0
    for values, in_flight, limit, sign in (
        (1 + 2.5 * at + noise, calm, 1000.0, "latency"),
        (1 + 0.5 * at + noise, calm, 1000.0, None),  # a rise that would take an age
        (1 + 0.5 * at + noise, calm, 2.0, "limit"),
        (1 + noise, 20 * at, 1000.0, "in_flight"),
        (1 + noise, 2 * at, 1000.0, None),  # two requests more are none that pile up
        (1 + at * at + noise, 20 * at * at, 1000.0, "queue"),
    ):
        ratios, numbers = margin_ratios(values, limit), np.asarray(in_flight, np.float64)
        assert growth(values, ratios, numbers, is_wait=True) == sign
