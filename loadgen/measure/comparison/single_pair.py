"""Two single runs, judged by stretches of their own requests: all that can be had of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from loadgen.measure.comparison.contrast import Contrast
from loadgen.measure.comparison.judgement import (
    ComparedMeasure,
    Options,
    row_of,
    scaled,
    with_binomial_noise,
)
from loadgen.measure.comparison.measures import Measure, Measured
from loadgen.measure.comparison.resampling import draws_of, paired_draws, sign_flip_p, stretches
from loadgen.measure.statistics.stats import Values, nearest_rank

N_STRETCHES, N_DRAWS, SEED = 40, 1000, 20_250_101


def judge_alone(
    asked: Measure,
    a: Measured,
    b: Measured,
    values: tuple[Values, Values],
    n_due: tuple[int, int],
    options: Options,
) -> tuple[Contrast, ComparedMeasure]:
    """Two single runs by stretches of their requests, in pairs where the schedule is one."""
    rng = np.random.default_rng(SEED)
    rows = a.in_order(asked), b.in_order(asked)
    is_paired = (a.schedule_sha256 == b.schedule_sha256 and len(rows[0]) == len(rows[1])
                 and asked.metric.scope != "gap")  # fmt: skip
    if is_paired:
        both = ~(np.isnan(rows[0]) | np.isnan(rows[1]))
        rows = rows[0][both], rows[1][both]
    else:
        rows = rows[0][~np.isnan(rows[0])], rows[1][~np.isnan(rows[1])]
    difference = float(scaled(asked, values[1])[0] - scaled(asked, values[0])[0])
    n_blocks = len(stretches(min(map(len, rows)), N_STRETCHES))
    if n_blocks < 2:
        found = Contrast(difference, math.nan, 0.0, math.nan)
        return found, row_of(asked, found, values, n_due, options, "too few requests")

    def number(rows: Values) -> float:
        if asked.quantile is None:
            value = rows.mean()
        else:
            k = nearest_rank(len(rows), asked.quantile) - 1
            value = np.partition(rows, k)[k]
        return float(scaled(asked, np.array([value]))[0])

    if is_paired:
        draws = paired_draws(rows[0], rows[1], number, rng, n_blocks, N_DRAWS)
        how = "this one pair of runs alone, paired by request"
    else:
        draws = draws_of(rows[1], number, rng, n_blocks) - draws_of(rows[0], number, rng, n_blocks)
        how = "this one pair of runs alone"
    finite = draws[np.isfinite(draws)]
    error = float(finite.std(ddof=1)) if len(finite) > 1 else math.nan
    found = Contrast(difference, error, n_blocks - 1.0, error / math.sqrt(2))
    if asked.is_share:
        found = with_binomial_noise(found, values, n_due)
    row = row_of(asked, found, values, n_due, options, how)
    if is_paired and asked.quantile is None and not asked.is_share and len(rows[0]):
        p = sign_flip_p(rows[1] - rows[0], rng, n_blocks=n_blocks) / 2
        row = dataclasses.replace(row, p=p, how=how + "; paired permutation test")
    return found, row
