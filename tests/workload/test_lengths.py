"""Length distributions against scipy and exact enumeration, at fixed seeds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import optimize, stats

from loadgen.workload.lengths import LENGTHS
from tests import strategies


def draw(spec, n=200_000, seed=31):
    return LENGTHS.build(spec).draw(np.random.Generator(np.random.PCG64(seed)), n)


def truncated_lognormal(median, sigma, low, high):
    """P(x), x = low … high, of a lognormal rounded to integers and cut to that range."""
    law = stats.lognorm(s=sigma, scale=median)
    cells = np.arange(low, high + 2) - 0.5
    weights = np.diff(law.cdf(cells))
    return weights / weights.sum()


def chi_square_p(sample, low, probabilities):
    """p of a chi-square test with neighbouring cells joined until each expects 20."""
    observed = np.bincount(sample - low, minlength=len(probabilities))
    expected = probabilities * len(sample)
    cell = np.minimum(np.cumsum(expected) // 20, expected.sum() // 20 - 1).astype(int)
    seen, awaited = np.bincount(cell, observed), np.bincount(cell, expected)
    is_cell = awaited > 0
    return stats.chisquare(seen[is_cell], awaited[is_cell]).pvalue


@given(strategies.lengths, st.integers(0, 200), st.integers(0, 2**32))
def test_lengths_are_positive_counts_within_their_bounds(spec, n, seed):
    lengths = LENGTHS.build(spec)
    drawn = lengths.draw(np.random.Generator(np.random.PCG64(seed)), n)
    assert drawn.dtype == np.uint32
    assert drawn.shape == (n,)
    assert np.all(drawn >= getattr(lengths, "min", 1))
    assert np.all(drawn <= getattr(lengths, "max", 10**7))


@settings(max_examples=25)
@given(strategies.lengths, st.integers(0, 2**32))
def test_the_mean_is_the_mean_of_what_is_drawn(spec, seed):
    lengths = LENGTHS.build(spec)
    drawn = lengths.draw(np.random.Generator(np.random.PCG64(seed)), 20_000)
    # 6 standard errors, and a part in 10 000 for rare lengths the sample has not seen
    allowed = 6 * drawn.std() / np.sqrt(20_000) + 1e-4 * lengths.mean
    assert abs(drawn.mean() - lengths.mean) <= allowed


def test_a_bare_integer_means_fixed():
    assert LENGTHS.build(64) == LENGTHS.build({"kind": "fixed", "tokens": 64})
    assert draw(64, 3).tolist() == [64, 64, 64]


def test_uniform_reaches_both_ends_equally_often():
    counts = np.bincount(draw({"kind": "uniform", "min": 3, "max": 7}), minlength=8)
    assert counts[:3].tolist() == [0, 0, 0]
    assert stats.chisquare(counts[3:]).pvalue > 0.01


@pytest.mark.parametrize(
    ("median", "sigma", "low", "high"), [(220, 0.9, 1, 4096), (100, 1.5, 80, 300), (2, 0.7, 1, 6)]
)
def test_lognormal_is_truncated_not_clamped(median, sigma, low, high):
    spec = {"kind": "lognormal", "median": median, "sigma": sigma, "min": low, "max": high}
    probabilities = truncated_lognormal(median, sigma, low, high)
    assert chi_square_p(draw(spec), low, probabilities) > 0.01
    oracle = np.arange(low, high + 1) @ probabilities
    assert LENGTHS.build(spec).mean == pytest.approx(oracle, rel=1e-9)


def test_no_lengths_pile_up_at_the_ends_of_a_lognormal():
    counts = np.bincount(
        draw({"kind": "lognormal", "median": 100, "sigma": 1.5, "min": 80, "max": 300})
    )
    assert counts[80] < 2 * counts[82]  # clamping would put 44 % of all at 80
    assert counts[300] < 2 * counts[290:300].mean()


@pytest.mark.parametrize("alpha", [0.6, 1.0, 1.8, 3.0])
def test_power_law_exponent_is_recovered_by_truncated_maximum_likelihood(alpha):
    low, high, n = 8, 1024, 200_000
    sample = draw({"kind": "power_law", "alpha": alpha, "min": low, "max": high}, n)
    support, mean_log = np.arange(low, high + 1), np.log(sample).mean()

    def negative_log_likelihood(a):
        return a * mean_log + np.log(np.sum(support.astype(float) ** -a))

    estimate = optimize.minimize_scalar(negative_log_likelihood, bounds=(0.01, 6), method="bounded")
    # Fisher information of the exponent is the variance of ln x; four standard errors
    weights = support.astype(float) ** -alpha / np.sum(support.astype(float) ** -alpha)
    logs = np.log(support)
    information = logs**2 @ weights - (logs @ weights) ** 2
    assert estimate.x == pytest.approx(alpha, abs=4 / np.sqrt(n * information))


def test_power_law_is_the_exact_discrete_law_at_small_values():
    # a rounded Pareto variable would be off by tens of per cent at x = 1
    sample = draw({"kind": "power_law", "alpha": 2.0, "min": 1, "max": 3}, 490_000)
    assert chi_square_p(sample, 1, np.array([36, 9, 4]) / 49) > 0.01
    mean = LENGTHS.build({"kind": "power_law", "alpha": 2.0, "min": 1, "max": 3}).mean
    assert mean == pytest.approx(66 / 49)


def test_power_law_agrees_with_scipys_zipfian():
    sample = draw({"kind": "power_law", "alpha": 1.3, "min": 1, "max": 500})
    probabilities = stats.zipfian(1.3, 500).pmf(np.arange(1, 501))
    assert chi_square_p(sample, 1, probabilities) > 0.01


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (0, "greater than or equal to 1"),
        ({"kind": "fixed", "tokens": 1.5}, "valid integer"),
        ({"kind": "uniform", "min": 9, "max": 3}, "min 9 is above max 3"),
        ({"kind": "lognormal", "median": 5, "sigma": 0.1, "max": 2}, r"less than 0\.1%"),
        ({"kind": "lognormal", "median": 5, "sigma": 0.1}, "Field required"),
        ({"kind": "power_law", "alpha": -1, "min": 1, "max": 2}, "greater than 0"),
        ({"kind": "power_law", "alpha": 1, "min": 1, "max": 10**9}, "less than or equal to"),
    ],
)
def test_parameters_that_cannot_be_meant_are_refused(spec, said):
    with pytest.raises(ValidationError, match=said):
        LENGTHS.build(spec)


@pytest.mark.parametrize("spec", [True, "64", None, 1.5, [1]])
def test_only_an_integer_is_short_for_fixed(spec):
    with pytest.raises(ValueError, match=r"expected \{kind: …\} naming the length distribution"):
        LENGTHS.build(spec)
