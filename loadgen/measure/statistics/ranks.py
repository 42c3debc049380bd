"""Ranks of values, and Spearman's correlation of them."""

from __future__ import annotations

import math

import numpy as np

from loadgen.measure.statistics.intervals import Values

_GLANCE = 64  # values, which show most series of more than two different values


def mean_ranks(values: Values) -> Values:
    """The ranks from 1, shape [n], ties by their mean, so that equal values add no order of their
    own."""
    if len(values) and (found := _two_ranks(values)) is not None:
        return found
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Values = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def _two_ranks(values: Values) -> Values | None:
    """`mean_ranks` of at most two different values, such as hits and misses; None for others. 0.2
    ms for 10⁵ values, whose sort takes 16 ms."""
    for part in (values[:_GLANCE], values):
        low, high = part.min(), part.max()
        is_low = part == low
        if not (is_low | (part == high)).all():
            return None
    n_low = int(np.count_nonzero(is_low))
    ranks: Values = np.where(is_low, (n_low + 1) / 2, n_low + (len(values) - n_low + 1) / 2)
    return ranks


def rank_correlation(x: Values, y: Values) -> float:
    """Spearman's ρ, ties at their mean rank; NaN where x or y never changes."""
    ranks = [mean_ranks(x), mean_ranks(y)]
    if any(r.min() == r.max() for r in ranks):
        return math.nan
    matrix: Values = np.atleast_2d(np.corrcoef(ranks))
    return float(matrix[0, 1])
