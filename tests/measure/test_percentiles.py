"""Intervals hold what they promise: literal tables, the exact binomial, and simulated coverage."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as oracle

from loadgen.measure.statistics.intervals import mean_bounds
from loadgen.measure.statistics.percentiles import (
    Percentile,
    effective_n,
    has_few,
    interval_places,
    nearest_rank,
    order_ranks,
    percentile,
    percentile_bounds,
)
from loadgen.measure.statistics.proportions import exact_bounds, least_n, needed_n, wilson

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
    assert percentile(np.arange(368.0), 0.99, 0.95).high == pytest.approx(367.0, abs=0.1)


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


SHAPES = {
    "uniform": oracle.uniform(),
    "exponential": oracle.expon(),
    "lognormal": oracle.lognorm(1.0),
    "pareto, infinite mean": oracle.pareto(0.8),
    "reversed exponential": oracle.gumbel_l(),
}
NO_MEAN = ("pareto, infinite mean",)
SIZES = [50, 59, 100, 299, 400, 1000, 3000, 10_000]


def miss_rates(place, n, truth, rng, shape):
    """How often the value at a place among n samples is above the truth, and how often below.

    Only the two neighbours are drawn: the r-th of n uniform samples is Beta(r, n − r + 1), and the
    next one takes a share of the rest, the least of n − r.
    """
    rank, part = int(place), place - int(place)
    first = rng.beta(rank, n - rank + 1, N_DRAWS)
    rest = 1 - rng.random(N_DRAWS) ** (1 / max(1, n - rank)) if rank < n else 0.0
    second = first + (1 - first) * rest
    values = (1 - part) * shape.ppf(first) + (part * shape.ppf(second) if part else 0.0)
    return float(np.mean(values > truth)), float(np.mean(values < truth))


N_DRAWS = 20_000


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95, 0.99])
def test_percentile_intervals_cover_the_truth_as_often_as_they_say(shape, quantile) -> None:
    """Within two points of 95 % from 50 samples to 10⁴, open ends included; three points where
    fewer than 368 samples leave the end of a P99 open and their law is too heavy to have a mean.

    The standard error of a coverage is 0.15 points and the largest true deviation 0.8: a false
    alarm is eight standard errors away. Seed 20.
    """
    rng, law = np.random.default_rng(20), SHAPES[shape]
    truth = law.ppf(quantile)
    for n in SIZES:
        low, high = interval_places(n, quantile, 0.95)
        above = 0.0 if low is None else miss_rates(low, n, truth, rng, law)[0]
        below = 0.0 if high is None else miss_rates(high, n, truth, rng, law)[1]
        assert low is not None
        allowed = 0.03 if high is None and shape in NO_MEAN else 0.02
        assert abs(1 - above - below - 0.95) < allowed, (n, above, below)


@pytest.mark.parametrize(("n", "quantile"), [(50, 0.5), (200, 0.9), (500, 0.99)])
def test_whole_samples_give_the_coverage_that_their_neighbours_do(n: int, quantile: float) -> None:
    """The function itself on 4000 samples each; two points are six standard errors. Seed 22."""
    rng = np.random.default_rng(22)
    truth = -math.log(1 - quantile)
    covered = 0
    for sample in np.sort(rng.exponential(size=(N_SIMULATIONS, n)), axis=1):
        covered += _covers(percentile(sample, quantile, 0.95), truth)
    assert abs(covered / N_SIMULATIONS - 0.95) < 0.02


@given(
    st.integers(1, 3000),
    st.sampled_from([0.5, 0.9, 0.99, 0.999]),
    st.sampled_from([0.9, 0.95, 0.99]),
)
def test_an_interval_is_inside_the_exact_one_unless_an_end_is_open(n, quantile, confidence) -> None:
    places, ranks = interval_places(n, quantile, confidence), order_ranks(n, quantile, confidence)
    assert [end is None for end in places] == [end is None for end in ranks]
    low, high = places
    exact_low, exact_high = ranks
    if low is not None and high is not None:
        assert exact_low is not None
        assert exact_high is not None
        assert exact_low <= low <= min(n, exact_low + 1)
        assert max(1, exact_high - 1) <= high <= exact_high
    for end in places:
        assert end is None or 1 <= end <= n


def test_the_interval_of_a_median_is_hettmansperger_and_sheathers() -> None:
    """n = 10: d = 2 covers 97.8516 %, d = 3 89.0625 %, so I = 2.8516/8.7891 = 0.32445 and
    λ = (n − d)·I / (d + (n − 2d)·I) = 2.5956/3.9467 = 0.65766. Worked by hand."""
    low, high = interval_places(10, 0.5, 0.95)
    assert low == pytest.approx(2.65766, abs=2e-5)
    assert high == pytest.approx(11 - 2.65766, abs=2e-5)


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=80),
    st.integers(0, 10),
    st.sampled_from([0.5, 0.9, 0.99]),
    st.tuples(st.floats(1, 90), st.floats(1, 90)),
)
def test_an_interval_holds_its_estimate_and_lies_within_the_samples(
    values, n_infinite, quantile, times
) -> None:
    found = percentile(np.sort(values), quantile, 0.95, n_infinite, times)
    assert found.low is None or min(values) <= found.low <= found.value
    assert found.high is None or found.value <= found.high
    assert found.low is None or found.low < math.inf or found.value == math.inf


def test_proof_stays_with_the_exact_bounds() -> None:
    """299 samples without a miss prove a P99 at 95 %, 298 do not: MLPerf's rule."""
    assert percentile_bounds(np.arange(299.0), 0.99, 0.95).high == 298.0
    assert percentile_bounds(np.arange(298.0), 0.99, 0.95).high is None


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
        time = gaps.size / worth
        ours += _covers(percentile(ordered, 0.9, 0.95, times=(time, time)), truth)
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


def test_ends_lie_between_their_neighbours_in_logarithms():
    # Of powers of ten, the exponent is the share of the way that plain numbers go.
    powers = percentile(np.logspace(0, 49, 50), 0.9, 0.95)
    plain = percentile(np.arange(-60.0, -10.0), 0.9, 0.95)  # not positive: as they stand
    assert powers.low is not None
    assert plain.low is not None
    assert math.log10(powers.low) == pytest.approx(plain.low + 60, rel=1e-9)


def test_bounds_of_dependent_samples_round_away_from_the_percentile():
    """1000 samples with τ = 32 are 250 of τ = 8: whole ranks of 250 become ranks of 1000, the lower
    rounded down and the upper up, at least as far out as those of the exact distribution."""
    bounds = percentile_bounds(np.arange(1.0, 1001.0), 0.5, 0.95, times=(32.0, 32.0))
    assert (bounds.low, bounds.value, bounds.high) == (352.0, 500.0, 652.0)
