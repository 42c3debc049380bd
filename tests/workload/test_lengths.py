"""Length distributions against scipy and exact enumeration, at fixed seeds."""

from typing import Annotated

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from scipy import optimize, stats

from loadgen.workload.lengths import LENGTHS, Lengths, Uniform
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


@settings(max_examples=50)
@given(strategies.lengths, st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=50))
def test_a_quantile_is_the_least_length_beyond_its_share(spec, shares):
    lengths, asked = LENGTHS.build(spec), np.array(shares)
    low, high = lengths.support
    quantiles = lengths.ppf(asked).astype(np.int64)
    assert np.all((quantiles >= low) & (quantiles <= high))
    # a part in 1e12: a share this near to a step may fall on either side of it
    assert np.all(lengths.cdf(quantiles) > asked - 1e-12)
    has_below = quantiles > low
    assert np.all(lengths.cdf(quantiles[has_below] - 1) <= asked[has_below] + 1e-12)


@settings(max_examples=50)
@given(strategies.lengths)
def test_mean_and_deviation_are_those_of_the_distribution_function(spec):
    lengths = LENGTHS.build(spec)
    low, high = lengths.support
    support = np.arange(low, high + 1)
    shares = lengths.cdf(support)
    assert shares[-1] == pytest.approx(1.0, abs=1e-12)
    probabilities = np.diff(shares, prepend=0.0)
    assert np.all(probabilities >= -1e-12)
    mean = support @ probabilities
    assert lengths.mean == pytest.approx(mean, rel=1e-9)
    assert lengths.sd == pytest.approx(np.sqrt((support - mean) ** 2 @ probabilities), abs=1e-4)


@settings(max_examples=25)
@given(strategies.lengths, st.integers(0, 2**32))
def test_quantiles_of_uniform_shares_have_the_law_of_the_draws(spec, seed):
    lengths = LENGTHS.build(spec)
    rng = np.random.Generator(np.random.PCG64(seed))
    drawn, quantiles = lengths.draw(rng, 5000), lengths.ppf(rng.random(5000))
    both = np.unique(np.concatenate([drawn, quantiles]))
    apart = [np.searchsorted(np.sort(x), both, side="right") / 5000 for x in (drawn, quantiles)]
    # P(√(n/2) · D > 2.9) < 2 exp(−2 · 2.9²) = 1e-7 (Smirnov); ties only make it smaller
    assert np.max(np.abs(apart[0] - apart[1])) < 2.9 * np.sqrt(2 / 5000)


def test_a_wide_law_is_inverted_by_bisection_as_exactly_as_a_narrow_one_by_table():
    wide = {"kind": "lognormal", "median": 3000, "sigma": 1.0, "max": 3_000_000}
    lengths = LENGTHS.build(wide)
    shares = np.array([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999999])
    quantiles = lengths.ppf(shares).astype(np.int64)
    assert np.all(lengths.cdf(quantiles) > shares)
    assert np.all(lengths.cdf(quantiles[1:] - 1) <= shares[1:])
    # rounding to a token and the truncated 1e-11 move the quantiles of scipy's by at most one
    exact = stats.lognorm(s=1.0, scale=3000).ppf(shares[1:])
    assert np.all(np.abs(quantiles[1:] - exact) <= 1)


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


@pytest.mark.parametrize(
    ("mean", "sd", "low", "high"), [(300, 80, 1, 2000), (30, 20, 1, 60), (10, 40, 5, 90)]
)
def test_normal_is_truncated_not_clamped(mean, sd, low, high):
    spec = {"kind": "normal", "mean": mean, "sd": sd, "min": low, "max": high}
    cells = stats.norm(mean, sd).cdf(np.arange(low, high + 2) - 0.5)
    probabilities = np.diff(cells) / (cells[-1] - cells[0])
    assert chi_square_p(draw(spec), low, probabilities) > 0.01
    # scipy's truncated normal, whose cells these are: rounding adds 1/12 to the variance, and to
    # the mean nothing but what the density's fall across the ends does
    oracle = stats.truncnorm((low - 0.5 - mean) / sd, (high + 0.5 - mean) / sd, mean, sd)
    lengths = LENGTHS.build(spec)
    assert lengths.mean == pytest.approx(oracle.mean(), rel=1e-3)
    assert lengths.sd**2 == pytest.approx(oracle.var() + 1 / 12, rel=1e-3)
    support = np.arange(low, high + 1)
    assert lengths.mean == pytest.approx(support @ probabilities, rel=1e-12)


@pytest.mark.parametrize(
    ("mean", "cv", "low", "high"), [(300, 0.5, 1, 4000), (100, 1.5, 20, 500), (8, 1.0, 1, 30)]
)
def test_gamma_is_truncated_not_clamped(mean, cv, low, high):
    spec = {"kind": "gamma", "mean": mean, "cv": cv, "min": low, "max": high}
    law = stats.gamma(1 / cv**2, scale=mean * cv**2)
    cells = law.cdf(np.arange(low, high + 2) - 0.5)
    probabilities = np.diff(cells) / (cells[-1] - cells[0])
    assert chi_square_p(draw(spec), low, probabilities) > 0.01
    support = np.arange(low, high + 1)
    assert LENGTHS.build(spec).mean == pytest.approx(support @ probabilities, rel=1e-9)


def test_a_mixture_has_each_component_as_often_as_its_weight_says():
    spec = {
        "kind": "mixture",
        "of": [
            {"weight": 3, "kind": "fixed", "tokens": 10},
            {"weight": 1, "kind": "uniform", "min": 9, "max": 12},
            {"weight": 4, "kind": "mixture", "of": [{"weight": 1, "kind": "fixed", "tokens": 2}]},
        ],
    }
    counts = np.bincount(draw(spec), minlength=13)
    expected = np.array([0, 0, 16, 0, 0, 0, 0, 0, 0, 1, 13, 1, 1]) / 32
    is_possible = expected > 0
    assert not counts[~is_possible].any()
    assert stats.chisquare(counts[is_possible], 200_000 * expected[is_possible]).pvalue > 0.01
    assert LENGTHS.build(spec).mean == pytest.approx((3 * 10 + 10.5 + 4 * 2) / 8)


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
        ({"kind": "normal", "mean": 50, "sd": 2, "max": 9}, r"less than 0\.1%.*move mean into"),
        ({"kind": "gamma", "mean": 9, "cv": 0.1, "min": 50, "max": 99}, r"less than 0\.1%"),
        ({"kind": "normal", "mean": 50, "sd": 2, "min": 9, "max": 3}, "min 9 is above max 3"),
        ({"kind": "gamma", "mean": 50, "cv": 2, "min": 9, "max": 3}, "min 9 is above max 3"),
        ({"kind": "mixture", "of": []}, "is empty; name at least one"),
        ({"kind": "mixture", "of": [64]}, r"expected \{weight: …, kind: …\}, got 64"),
        ({"kind": "mixture", "of": [{"kind": "fixed", "tokens": 1}]}, "Field required"),
        (
            {"kind": "mixture", "of": [{"weight": 1, "kind": "joint", "pairs": [[1, 2]]}]},
            "joint draws pairs",
        ),
        ({"kind": "empirical"}, "give either path"),
        ({"kind": "empirical", "values": [1], "path": "x"}, "give either path"),
        ({"kind": "empirical", "values": [1, 2], "weights": [1]}, "1 weights for 2 values"),
        ({"kind": "empirical", "values": [1, 2], "weights": [0, 0]}, "every weight is 0"),
        ({"kind": "empirical", "path": "x", "weights": [1]}, "weights go with values"),
        ({"kind": "empirical", "values": [0]}, "greater than or equal to 1"),
        ({"kind": "empirical", "path": "nowhere.csv"}, "nowhere.csv: cannot be read: No such"),
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


def test_a_mistake_inside_a_mixture_is_told_at_its_place():
    of = [{"weight": 1, "kind": "fixed", "tokens": 1}, {"weight": 1, "kind": "fixd", "tokens": 1}]
    with pytest.raises(ValidationError) as caught:
        LENGTHS.build({"kind": "mixture", "of": of})
    (error,) = caught.value.errors()
    assert error["loc"] == ("of", 1, "kind")
    assert "did you mean 'fixed'?" in error["msg"]


def test_a_mixture_is_written_as_it_is_read():
    class Asked(BaseModel):
        size: Annotated[Lengths, LENGTHS]

    size = {
        "kind": "mixture",
        "of": [
            {"weight": 0.9, "kind": "normal", "mean": 50.0, "sd": 9.0, "max": 100},
            {"weight": 0.1, "kind": "fixed", "tokens": 4000},
        ],
    }
    asked = Asked.model_validate({"size": size})
    assert asked.model_dump(mode="json", exclude_defaults=True) == {"size": size}


def test_the_first_draws_of_a_seed_are_what_they_have_always_been():
    # A change here changes what every seed means: see CHANGELOG, "Breaking".
    lognormal = {"kind": "lognormal", "median": 96, "sigma": 0.6, "max": 384}
    power_law = {"kind": "power_law", "alpha": 1.5, "min": 8, "max": 64}
    assert draw(lognormal, 6, 3).tolist() == [327, 21, 123, 68, 73, 84]
    assert draw(power_law, 6, 3).tolist() == [8, 11, 34, 20, 9, 15]
    assert draw({"kind": "uniform", "min": 1, "max": 99}, 6, 3).tolist() == [81, 9, 18, 24, 18, 80]


def test_a_share_at_a_step_of_a_wide_law_gives_the_length_above_it():
    """Half of 2²¹ equally likely lengths are at most 2²⁰: the quantile is the next, by bisection as
    in closed form."""
    law = Uniform(min=1, max=1 << 21)
    shares = np.array([0.0, 0.25, 0.5, 1 - 2.0**-21])
    expected = [1, (1 << 19) + 1, (1 << 20) + 1, 1 << 21]
    assert Lengths.ppf(law, shares).tolist() == expected
    assert law.ppf(shares).tolist() == expected
