"""Resampling of dependent samples: intervals and tests that assume no shape and draw whole blocks.

Requests of a run share its queue, so neighbours are alike. Drawing stretches of neighbouring
requests together keeps that dependence in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.statistics.intervals import Values

Statistic = Callable[[Values], float]

N_DRAWS = 2000


def stretches(n: int, n_blocks: int) -> list[slice]:
    """`n` rows in order of time as at most `n_blocks` stretches of nearly equal length."""
    edges = np.unique(np.linspace(0, n, min(n, n_blocks) + 1).round().astype(int))
    return [slice(int(a), int(b)) for a, b in pairwise(edges)]


def paired_draws(
    a: Values,
    b: Values,
    statistic: Statistic,
    rng: np.random.Generator,
    n_blocks: int,
    n_draws: int = N_DRAWS,
) -> Values:
    """`statistic(b) − statistic(a)` of bootstrap draws that take the same stretches of time from
    both. Row k of `a` and row k of `b` belong together. Shape [n_draws]."""
    assert len(a) == len(b), f"pairs need equal lengths, not {len(a)} and {len(b)}"
    blocks = stretches(len(a), n_blocks)
    draws = np.empty(n_draws)
    for k in range(n_draws):
        rows = _drawn(blocks, rng)
        draws[k] = statistic(b[rows]) - statistic(a[rows])
    return draws


def _drawn(blocks: Sequence[slice], rng: np.random.Generator) -> NDArray[np.intp]:
    chosen = rng.integers(0, len(blocks), len(blocks))
    return np.concatenate([np.arange(blocks[k].start, blocks[k].stop) for k in chosen])


def sign_flip_p(
    differences: Values,
    rng: np.random.Generator,
    n_draws: int = 10_000,
    n_blocks: int | None = None,
) -> float:
    """Two-sided p-value of a paired permutation test. If A and B were alike, each difference b − a
    could as well have the other sign. The statistic is the mean.

    With `n_blocks`, neighbouring differences change sign together. Up to 2¹³ patterns are all
    tried; otherwise `n_draws` are drawn, and the observed pattern is counted in. 1.0 without
    differences.

    Source: Phipson & Smyth, Stat. Appl. Genet. Mol. Biol. 9(1), 2010 (the +1).
    """
    if not len(differences):
        return 1.0
    blocks = stretches(len(differences), n_blocks or len(differences))
    sums = np.array([float(differences[block].sum()) for block in blocks])
    observed = abs(sums.sum()) * (1 - 1e-12)
    if len(sums) <= 13:
        patterns = np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums)) & 1
        return float(np.mean(np.abs((1.0 - 2.0 * patterns) @ sums) >= observed))
    signs: NDArray[np.float64] = rng.choice([-1.0, 1.0], size=(n_draws, len(sums)))
    return float((np.count_nonzero(np.abs(signs @ sums) >= observed) + 1) / (n_draws + 1))
