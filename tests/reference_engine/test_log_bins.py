"""Bins and the survival function over them, against plain counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.predict.log_bins import (
    EDGES,
    LONGEST,
    N_BINS,
    UNLIMITED,
    Survival,
    bin_of,
)

LENGTHS = st.lists(st.integers(1, 15), min_size=1, max_size=30)


@given(st.integers(0, LONGEST - 1))
def test_a_count_is_in_its_bin_and_the_bin_is_narrow(n):
    i = bin_of(n)
    assert EDGES[i] <= n < EDGES[i + 1]
    assert EDGES[i + 1] - EDGES[i] <= max(1, n / 8)


def test_counts_beyond_the_bins_are_unlimited():
    assert bin_of(LONGEST) == bin_of(10**12) == UNLIMITED
    assert len(EDGES) == N_BINS


def survival_of(lengths, n_unlimited=0):
    shares = np.zeros(N_BINS)
    for n in lengths:
        shares[bin_of(n)] += 1
    shares[UNLIMITED] += n_unlimited
    return Survival(shares / shares.sum())


@given(LENGTHS, st.integers(0, 3), st.data())
def test_small_counts_are_exact(lengths, n_unlimited, data):
    """Below 16 tokens every count has its bin, so the figures are those of the plain list."""
    max_tokens = data.draw(st.integers(1, 15))
    n_output = data.draw(st.integers(0, max_tokens - 1))
    longer = [n for n in [*lengths, *[10**9] * n_unlimited] if n > n_output]
    left_dist = survival_of(lengths, n_unlimited).remaining(n_output, max_tokens)
    if not longer:
        assert left_dist == (max_tokens - n_output,) * 3
        return
    left = sorted(min(n, max_tokens) - n_output for n in longer)
    assert left_dist.mean == pytest.approx(sum(left) / len(left))
    # The inverted distribution function: the smallest value that at least p of them do not exceed.
    assert left_dist.q50 == left[-(-5 * len(left) // 10) - 1]
    assert left_dist.q90 == left[-(-9 * len(left) // 10) - 1]


def test_large_counts_are_spread_evenly_over_their_bin():
    # 16 … 17 is one bin: a mean of 16.5, and none above 17.
    even = survival_of([16])
    assert even.remaining(0, 1000) == (16.5, 16.0, 17.0)
    assert even.remaining(16, 1000) == (1.0, 1.0, 1.0)
    assert even.at_least(17) == 0.5


def test_unlimited_answers_count_up_to_max_tokens():
    # One answer of 4 tokens, one as long as allowed.
    both = survival_of([4], 1)
    assert both.remaining(0, 100) == (52.0, 4.0, 100.0)
    assert both.remaining(4, 100) == (96.0, 96.0, 96.0)
    assert both.remaining(0, LONGEST + 96).mean == pytest.approx((4 + LONGEST + 96) / 2)
