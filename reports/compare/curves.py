"""Two sides as the tables their figures need: the change at every percentile, and the ECDFs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from loadgen.measure.catalog import METRICS
from loadgen.measure.comparison.judgement import Options, judge
from loadgen.measure.comparison.measures import Measure, Measured
from reports.run.frames import Record, tail_position

COMPARED_METRICS = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
N_QUANTILES, N_POINTS = 25, 300


def shifts(
    name: str, a: Sequence[Measured], b: Sequence[Measured], options: Options
) -> list[Record]:
    """B / A − 1 at each percentile with the interval over runs; up to where each run has ten
    samples beyond. Flat records: tail, quantile, change, low, high (None without an interval)."""
    metric = METRICS[name]
    n = min((len(m.ordered(metric)) for m in (*a, *b)), default=0)
    if n < 20:
        return []
    last = tail_position(1 - 10 / n)
    records = []
    for tail in np.linspace(0.0, last, N_QUANTILES).tolist():
        quantile = max(1 - 10**-tail, 0.01)
        asked = Measure(f"p{100 * quantile:g}({metric.slo})", metric, "p", quantile)
        values = tuple(np.array([m.value(asked) for m in side]) for side in (a, b))
        _, row = judge(asked, (values[0], values[1]), None, replace(options, noise={}))
        records.append(
            {"tail": tail, "quantile": quantile, "change": row.change,
             "low": row.low, "high": row.high}
        )  # fmt: skip
    return records


def ecdf(name: str, a: Sequence[Measured], b: Sequence[Measured]) -> list[Record]:
    """Value and the share of samples at or below it, of each side's runs together."""
    records: list[Record] = []
    for side, runs in (("A", a), ("B", b)):
        pooled = np.sort(np.concatenate([m.ordered(METRICS[name]) for m in runs]))
        if not len(pooled):
            return []
        ranks = np.unique(np.linspace(1, len(pooled), N_POINTS).round().astype(int))
        records += [
            {"side": side, "value": float(pooled[k - 1]), "share": k / len(pooled)}
            for k in ranks.tolist()
        ]
    return records
