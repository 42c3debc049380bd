"""The binomial distribution against scipy's, which is computed another way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as oracle

from loadgen.measure.statistics.proportions import (
    at_least,
    at_most,
    probabilities,
    share_where,
    tails,
    wilson,
)

counts = st.one_of(st.integers(1, 50), st.integers(1, 1_000_000))
shares = st.one_of(
    st.floats(1e-6, 1 - 1e-6), st.sampled_from([0.5, 0.9, 0.99, 0.999, 0.9999, 1e-9])
)


@given(n=counts, share=shares, where=st.floats(-6, 6))
def test_both_tails_agree_with_scipy(n: int, share: float, where: float) -> None:
    k = round(n * share + where * (n * share * (1 - share)) ** 0.5)
    expected = oracle.binom(n, share)
    assert at_most(k, n, share) == pytest.approx(expected.cdf(k), rel=1e-7, abs=1e-15)
    assert at_least(k, n, share) == pytest.approx(expected.sf(k - 1), rel=1e-7, abs=1e-15)


@given(n=counts, share=shares)
def test_nothing_that_matters_lies_outside_the_window(n: int, share: float) -> None:
    first, weights = probabilities(n, share)
    expected = oracle.binom(n, share)
    assert first >= 0
    assert first + len(weights) <= n + 1
    assert expected.cdf(first - 1) + expected.sf(first + len(weights) - 1) < 1e-15


@pytest.mark.parametrize(
    ("k", "n", "share", "probability"),
    [(-1, 5, 0.5, 0.0), (5, 5, 0.5, 1.0), (0, 1, 0.25, 0.75), (0, 5, 0.0, 1.0), (4, 5, 1.0, 0.0)],
)
def test_the_ends_are_exact(k: int, n: int, share: float, probability: float) -> None:
    assert at_most(k, n, share) == pytest.approx(probability, abs=1e-15)


def test_the_tails_of_a_fair_coin_thrown_ten_times() -> None:
    # P(B ≤ 1) = 11/1024, P(B ≤ 2) = 56/1024
    assert tails(10, 0.5, 0.025) == (2, 9)
    assert tails(10, 0.5, 0.06) == (3, 8)
    assert tails(10, 0.5, 0.0001) == (0, 11)


def test_a_turning_point_is_found_to_the_last_digits() -> None:
    assert share_where(lambda share: share > 0.3) == pytest.approx(0.3, abs=1e-15)


def test_each_bound_of_wilson_has_its_own_time():
    independent, quarter = wilson(80, 100, 0.95), wilson(20, 25, 0.95)
    found = wilson(80, 100, 0.95, (1.0, 4.0))
    assert found.low == independent.low
    assert found.high == pytest.approx(quarter.high)
    found = wilson(80, 100, 0.95, (4.0, 1.0))
    assert found.low == pytest.approx(quarter.low)
    assert found.high == independent.high
