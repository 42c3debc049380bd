"""The comparison of two single runs by their own requests.

Requests wait in the same queue, so neighbours are alike. Two runs with the same schedule are
compared request by request, in blocks that are longer than the memory of the differences; other
runs by their intervals, each of which takes the memory of its own queue into account. A run that is
too short to show this memory is not judged.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from loadgen.measure.measures import Measure, Measured
from loadgen.measure.statistics.dependence import SHORT_RUN_BIAS, Series, of_values
from loadgen.measure.statistics.intervals import Interval, Values
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.measure.statistics.student_t import student_t
from loadgen.studies.compare.contrast import Contrast
from loadgen.studies.compare.judgement import (
    ComparedMeasure,
    Options,
    row_of,
    scale_of,
    with_binomial_noise,
)
from loadgen.studies.compare.resampling import paired_draws, sign_flip_p

TOO_SHORT = "too few requests for the memory of the queue"
"""The `how` of a measure that is not judged."""

_MOST_BLOCKS, _LEAST_BLOCKS = 40, 8
_BLOCK_TIMES = 5  # a block, in autocorrelation times
_LEAST_BEYOND = 10  # requests beyond a percentile, in each run
_N_DRAWS, _SEED = 1000, 20_250_101
_TAIL_DF = 12.0  # at stricter levels than theirs, intervals grow as Student's t, not as the normal


def judge_pair(
    asked: Measure, a: Measured, b: Measured, options: Options
) -> tuple[Contrast, ComparedMeasure]:
    """The comparison of a measure in two single runs, before Holm's correction and without a
    verdict."""
    values = np.array([a.value(asked)]), np.array([b.value(asked)])
    n_due = a.n_of(asked), b.n_of(asked)
    rows = _pairs(asked, a, b)
    p = None
    if rows is not None:
        found, p = paired_contrast(asked, *rows)
        found = with_binomial_noise(found, values, n_due) if asked.is_share else found
        how = "only this pair of runs, paired by request"
        how += "; paired permutation test" if p is not None else ""
    else:
        level = 2 * options.confidence - 1
        of_a, of_b = (run.estimate(asked, level, with_failures=False) for run in (a, b))
        found, how = contrast_of_intervals(asked, of_a, of_b, level), "only this pair of runs"
    scale = scale_of(asked, *values)
    how = how if found.is_judged else TOO_SHORT
    row = row_of(asked, found, scale, values, n_due, options, how)
    return found, row if p is None else dataclasses.replace(row, p=p)


def _pairs(asked: Measure, a: Measured, b: Measured) -> tuple[Values, Values] | None:
    """A value per request that has one in both runs, in the order of the schedule; None where
    requests do not belong together."""
    if asked.metric.scope == "gap" or asked.metric.unit == "per_s":
        return None
    if a.schedule_sha256 != b.schedule_sha256:
        return None
    rows = a.in_order(asked), b.in_order(asked)
    if len(rows[0]) != len(rows[1]):
        return None
    both = ~(np.isnan(rows[0]) | np.isnan(rows[1]))
    return rows[0][both], rows[1][both]


def paired_contrast(asked: Measure, a: Values, b: Values) -> tuple[Contrast, float | None]:
    """The contrast B − A of a measure of paired requests in order of time, and the one-sided p of a
    permutation test where the measure is a mean.

    The error is that of a bootstrap over blocks of five autocorrelation times of the differences.
    With fewer than eight such blocks the difference is not judged.
    """
    scale, rng = scale_of(asked, a, b), np.random.default_rng(_SEED)
    if not len(a):
        return Contrast(math.nan, math.nan, 0.0, math.nan), None

    def number(rows: Values) -> float:
        value = rows.mean()
        if asked.quantile is not None:
            rank = nearest_rank(len(rows), asked.quantile) - 1
            value = np.partition(rows, rank)[rank]
        return float(scale.of(np.array([value]))[0])

    difference = number(b) - number(a)
    if np.array_equal(a, b):
        return Contrast(0.0, 0.0, len(a), 0.0), None
    n_effective = _n_effective(asked, a, b)
    n_blocks = min(_MOST_BLOCKS, int(n_effective / _BLOCK_TIMES))
    if n_blocks < _LEAST_BLOCKS:
        return Contrast(difference, math.nan, 0.0, math.nan), None
    draws = paired_draws(a, b, number, rng, n_blocks, _N_DRAWS)
    inflation = n_blocks / (n_blocks - 1)  # a resample of n blocks varies with (n − 1) / n
    if n_effective < len(a):
        inflation *= 1 + SHORT_RUN_BIAS / n_effective
    error = float(draws.std(ddof=1)) * math.sqrt(inflation)
    found = Contrast(difference, error, n_blocks - 1.0, error / math.sqrt(2))
    if asked.quantile is not None or asked.is_share:
        return found, None
    return found, sign_flip_p(b - a, rng, n_blocks=n_blocks) / 2


def _n_effective(asked: Measure, a: Values, b: Values) -> float:
    """The number of independent pairs that carry as much information, by the longest memory of the
    differences and of either side; 0 where a percentile has fewer than ten requests beyond it."""
    if asked.quantile is None:
        return min(of_values(rows).n_effective for rows in (b - a, a, b))
    if len(a) * min(asked.quantile, 1 - asked.quantile) < _LEAST_BEYOND:
        return 0.0
    hits = [_at_most(asked.quantile, rows) for rows in (a, b)]
    dependences = (
        of_values(hits[0] - hits[1]),
        *(Series(side).at(asked.quantile) for side in (a, b)),
    )
    return min(dependence.n_effective for dependence in dependences)


def _at_most(quantile: float, rows: Values) -> Values:
    """1.0 for each row at or below the percentile, 0.0 for the others."""
    rank = nearest_rank(len(rows), quantile) - 1
    hits: Values = (rows <= np.partition(rows, rank)[rank]).astype(np.float64)
    return hits


def contrast_of_intervals(asked: Measure, a: Interval, b: Interval, confidence: float) -> Contrast:
    """The contrast B − A of two independent estimates from their two-sided intervals; not judged
    where an interval is open.

    Source: MOVER, Donner & Zou, Stat. Methods Med. Res. 21(4), 2012; of shares with Wilson's
    intervals, Newcombe's method 10, Stat. Med. 17, 1998.
    """
    scale = scale_of(asked, np.array([a.value]), np.array([b.value]))
    on_scale = [
        scale.of(np.array([math.nan if end is None else end for end in (i.value, i.low, i.high)]))
        for i in (a, b)
    ]
    (mid_a, low_a, high_a), (mid_b, low_b, high_b) = (ends.tolist() for ends in on_scale)
    low_a, low_b = max(low_a, mid_a - 50), max(low_b, mid_b - 50)  # the logarithm of a bound of 0
    times = student_t((1 + confidence) / 2, _TAIL_DF)
    below = math.hypot(mid_b - low_b, high_a - mid_a) / times
    above = math.hypot(high_b - mid_b, mid_a - low_a) / times
    difference = mid_b - mid_a
    if not math.isfinite(below + above + difference):
        return Contrast(difference, math.nan, 0.0, math.nan)
    return Contrast(difference, below, _TAIL_DF, (below + above) / 2 / math.sqrt(2), above)
