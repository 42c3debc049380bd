"""Ranks and their correlation, compared with scipy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr

from loadgen.measure.statistics.ranks import mean_ranks, rank_correlation

small = st.integers(0, 6).map(float)  # many ties


@given(st.lists(small, max_size=40))
def test_ties_have_their_mean_rank(values):
    assert mean_ranks(np.array(values)).tolist() == rankdata(values).tolist()


@given(st.lists(st.sampled_from([0.0, 1.0]), max_size=200), st.lists(small, max_size=3))
def test_hits_and_misses_have_the_ranks_of_any_other_values(hits, others):
    values = [*hits, *others]  # a third value after many of two
    assert mean_ranks(np.array(values)).tolist() == rankdata(values).tolist()


@given(st.lists(st.tuples(small, small), min_size=3, max_size=40))
def test_the_rank_correlation_is_scipys(pairs):
    x, y = np.array(pairs).T
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert rank_correlation(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    else:
        assert math.isnan(rank_correlation(x, y))
