"""Ranks of values, and Spearman's correlation of them."""

from __future__ import annotations

import math

import numpy as np

from loadgen.measure.statistics.intervals import Values


def mean_ranks(values: Values) -> Values:
    """The ranks from 1, shape [n], ties by their mean, so that equal values add no order of their
    own."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Values = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def rank_correlation(x: Values, y: Values) -> float:
    """Spearman's ρ, ties at their mean rank; NaN where x or y never changes."""
    ranks = [mean_ranks(x), mean_ranks(y)]
    if any(r.min() == r.max() for r in ranks):
        return math.nan
    matrix: Values = np.atleast_2d(np.corrcoef(ranks))
    return float(matrix[0, 1])
