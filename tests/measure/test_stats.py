"""Intervals hold what they promise: literal tables, the exact binomial, and simulated coverage."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as oracle

from loadgen.measure.stats import (
    Percentile,
    effective_n,
    exact_bounds,
    has_few,
    least_n,
    mean_bounds,
    nearest_rank,
    needed_n,
    order_ranks,
    percentile,
    wilson,
)

N_SIMULATIONS = 4000


@pytest.mark.parametrize(
    ("n", "quantile", "rank"),
    [
        (1, 0.5, 1),
        (100, 0.99, 99),
        (101, 0.99, 100),
        (100, 0.07, 7),
        (10, 0.9, 9),
        (1000, 0.999, 999),
    ],
)
def test_the_nearest_rank_is_the_ceiling_of_q_n(n: int, quantile: float, rank: int) -> None:
    assert nearest_rank(n, quantile) == rank


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=60),
    st.integers(0, 20),
    st.sampled_from([0.5, 0.9, 0.95, 0.99, 0.999]),
)
def test_the_percentile_is_the_least_value_that_enough_samples_do_not_exceed(
    values: list[float], n_infinite: int, quantile: float
) -> None:
    found = percentile(np.sort(values), quantile, 0.95, n_infinite)
    everything = values + [math.inf] * n_infinite
    enough = [
        v for v in everything if sum(w <= v for w in everything) >= quantile * len(everything)
    ]
    assert found.value == min(enough)
    assert found.low is None or found.low <= found.value
    assert found.high is None or found.high >= found.value


@given(st.integers(1, 3000), st.sampled_from([0.5, 0.9, 0.99, 0.999]), st.sampled_from([0.9, 0.95]))
def test_order_ranks_are_the_tightest_with_half_alpha_on_each_side(
    n: int, quantile: float, confidence: float
) -> None:
    low, high = order_ranks(n, quantile, confidence)
    tail = (1 - confidence) / 2
    below = oracle.binom(n, quantile)
    assert below.cdf((low or 0) - 1) <= tail
    assert below.cdf(low or 0) > tail
    if high is None:
        assert below.sf(n - 1) > tail
    else:
        assert below.sf(high - 1) <= tail
        assert below.sf(high - 2) > tail


def test_the_upper_end_is_open_where_no_sample_could_hold_it() -> None:
    assert percentile(np.arange(50.0), 0.99, 0.95).high is None
    assert percentile(np.arange(367.0), 0.99, 0.95).high is None
    assert percentile(np.arange(368.0), 0.99, 0.95).high == 367.0


def test_no_samples_give_no_value_and_no_ends() -> None:
    nothing = percentile(np.empty(0), 0.99, 0.95)
    assert math.isnan(nothing.value)
    assert (nothing.low, nothing.high, nothing.few) == (None, None, True)


@pytest.mark.parametrize(
    ("n", "quantile", "few"),
    [
        (999, 0.99, True),
        (1000, 0.99, False),
        (100, 0.9, False),
        (19, 0.5, True),
        (9999, 0.999, True),
    ],
)
def test_fewer_than_ten_samples_beyond_a_percentile_are_few(
    n: int, quantile: float, few: bool
) -> None:
    assert has_few(n, quantile) is few


@pytest.mark.parametrize("n", [50, 200, 1000])
@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_percentile_intervals_cover_the_truth_as_often_as_they_say(n: int, quantile: float) -> None:
    """Exact intervals never cover less than 95 %; false alarms of this test: 3·10⁻⁵ per case."""
    rng = np.random.default_rng(20)
    samples = np.sort(rng.random((N_SIMULATIONS, n)), axis=1)  # the q-quantile is q
    low, high = order_ranks(n, quantile, 0.95)
    above = samples[:, low - 1] <= quantile if low else np.ones(N_SIMULATIONS, bool)
    below = samples[:, high - 1] >= quantile if high else np.ones(N_SIMULATIONS, bool)
    coverage = np.mean(above & below)
    assert coverage >= 0.95 - 4 * math.sqrt(0.95 * 0.05 / N_SIMULATIONS), f"{coverage=} seed=20"
    if high and n >= 1000 * (1 - quantile):
        assert coverage <= 0.985, f"{coverage=}: needlessly wide; seed=20"


def test_gaps_of_one_request_are_not_counted_as_independent() -> None:
    """Requests differ, gaps within one barely do: the naive interval covers rarely, ours does.

    Sized for a false alarm below 10⁻⁴ (400 runs, a coverage of 95 % and four standard errors).
    """
    rng = np.random.default_rng(21)
    n_requests, n_gaps = 150, 40
    truth = float(oracle.norm.ppf(0.9, scale=math.hypot(1.0, 0.3)))
    naive = ours = 0
    for _ in range(400):
        gaps = rng.normal(size=(n_requests, 1)) + 0.3 * rng.normal(size=(n_requests, n_gaps))
        ordered = np.sort(gaps, axis=None)
        value = percentile(ordered, 0.9, 0.95).value
        worth = effective_n((gaps <= value).sum(axis=1, dtype=float), np.full(n_requests, 40.0))
        naive += _covers(percentile(ordered, 0.9, 0.95), truth)
        ours += _covers(percentile(ordered, 0.9, 0.95, n_effective=worth), truth)
    assert naive / 400 < 0.5
    assert ours / 400 > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 400), "seed=21"


def _covers(found: Percentile, truth: float) -> bool:
    return (found.low is None or found.low <= truth) and (found.high is None or found.high >= truth)


def test_independent_gaps_are_worth_about_what_they_are() -> None:
    rng = np.random.default_rng(22)
    hits = rng.binomial(50, 0.9, size=2000).astype(float)
    assert effective_n(hits, np.full(2000, 50.0)) == pytest.approx(100_000, rel=0.15)


def test_identical_gaps_within_a_request_are_worth_one_each() -> None:
    hits = np.repeat([50.0, 0.0], [900, 100])
    assert effective_n(hits, np.full(1000, 50.0)) == pytest.approx(1000, rel=0.01)


@given(st.integers(1, 5000), st.data(), st.sampled_from([0.9, 0.95, 0.99]))
def test_wilson_and_exact_bounds_agree_with_scipy(
    n: int, data: st.DataObject, confidence: float
) -> None:
    hits = data.draw(st.integers(0, n))
    scipy_wilson = oracle.binomtest(hits, n).proportion_ci(confidence, method="wilson")
    ours = wilson(hits, n, confidence)
    assert ours.low == pytest.approx(scipy_wilson.low, abs=1e-9)
    assert ours.high == pytest.approx(scipy_wilson.high, abs=1e-9)
    least = oracle.binomtest(hits, n, alternative="greater").proportion_ci(confidence, "exact")
    most = oracle.binomtest(hits, n, alternative="less").proportion_ci(confidence, "exact")
    exact = exact_bounds(hits, n, confidence)
    assert exact.low == pytest.approx(least.low, abs=1e-9)
    assert exact.high == pytest.approx(most.high, abs=1e-9)


@given(st.integers(1, 10_000))
def test_an_interval_of_all_or_nothing_ends_exactly_there(n: int) -> None:
    assert wilson(n, n, 0.95).high == 1.0
    assert wilson(0, n, 0.95).low == 0.0


def test_a_share_of_nothing_is_unknown() -> None:
    assert math.isnan(wilson(0, 0, 0.95).value)
    assert exact_bounds(0, 0, 0.95).high is None


@pytest.mark.parametrize(
    ("misses", "quantile", "confidence", "n"),
    [(0, 0.99, 0.95, 299), (0, 0.99, 0.99, 459), (1, 0.99, 0.99, 662), (0, 0.9, 0.95, 29)],
)
def test_the_least_n_is_that_of_mlperf_early_stopping(
    misses: int, quantile: float, confidence: float, n: int
) -> None:
    assert least_n(misses, quantile, confidence) == n


def test_a_closer_call_needs_more_samples_and_a_tie_can_not_be_settled() -> None:
    assert needed_n(0, 50, 0.99, 0.95) == 299
    clear, close = needed_n(1, 1000, 0.99, 0.95), needed_n(9, 1000, 0.99, 0.95)
    assert clear is not None
    assert close is not None
    assert 299 < clear < 1500 < 20_000 < close
    assert needed_n(10, 1000, 0.99, 0.95) is None
    broken = needed_n(30, 100, 0.99, 0.95)
    assert broken is not None
    assert broken < 10


def test_mean_bounds_are_students_t_for_independent_samples() -> None:
    values = np.random.default_rng(23).normal(5.0, 2.0, size=40)
    found = mean_bounds(values, np.ones(40), 0.95)
    expected = oracle.ttest_1samp(values, 0.0).confidence_interval(0.90)
    assert found.low == pytest.approx(expected.low)
    assert found.high == pytest.approx(expected.high)


def test_the_mean_of_one_sample_has_no_ends() -> None:
    assert mean_bounds(np.array([3.0]), np.ones(1), 0.95).low is None
