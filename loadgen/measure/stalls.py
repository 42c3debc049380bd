"""Requests that were sent, or got a token, while the load generator stalled, and their effect on
the percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.records import Run

MEASURED = ("sent_s", "first_token_s", "last_token_s")
"""The times that TTFT, TPOT and E2E are computed from; a stall between them affects none of the
three."""
COMPARED = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}
_QUANTILE = 0.99
_LEAST_CHANGE = 0.01  # of a percentile


@dataclass(frozen=True, slots=True)
class Stalls:
    """The stalls of all workers. `total_s` counts each from the last sign of life to the next;
    `longest_s` is the largest delay of a probe. `rows` are the due requests with a time in a stall.
    `p99_s` by metric: (of all successful requests, of those without such a time), NaN = none."""

    n: int
    total_s: float
    longest_s: float
    rows: int
    p99_s: Mapping[str, tuple[float, float]]


def stalls(run: Run, columns: PerRequest, due: Mask) -> Stalls | None:
    """None where the load generator did not record stalls."""
    recorded = [shard.stalls for shard in run.instrument.shards if shard.stalls is not None]
    if not recorded:
        return None
    spans = [span for one in recorded for span in one.spans_s]
    stalled = stalled_rows(run)
    answered = due & columns.is_ok
    return Stalls(
        n=len(spans),
        total_s=float(sum(until_s - from_s for from_s, until_s, _ in spans)),
        longest_s=max((float(lag_s) for _, _, lag_s in spans), default=0.0),
        rows=int(np.count_nonzero(due & stalled)),
        p99_s={
            metric: (
                _p99_s(columns.column(metric)[answered]),
                _p99_s(columns.column(metric)[answered & ~stalled]),
            )
            for metric in COMPARED
        },
    )


def stalled_rows(run: Run) -> Mask:
    """Rows that were sent, or whose first or last token was stamped, while their worker stalled."""
    rows = run.request_rows
    stalled = np.zeros(len(rows), bool)
    for shard in run.instrument.shards:
        spans = () if shard.stalls is None else shard.stalls.spans_s
        if not spans:
            continue
        from_s, until_s = np.array([span[:2] for span in spans], np.float64).T
        mine = np.flatnonzero(rows["shard"] == shard.shard)
        for name in MEASURED:
            at_s = rows[name][mine]
            span = np.searchsorted(from_s, at_s, side="right") - 1  # NaN: after all of them
            stalled[mine] |= (span >= 0) & (at_s <= until_s[span])
    return stalled


def changed(stalls: Stalls) -> list[tuple[str, float, float]]:
    """(metric, p99 of all, p99 without stalled requests) where leaving those requests out lowers
    it. A stall can only lengthen a latency; a higher p99 comes from the smaller number of samples.
    """
    return [
        (COMPARED[metric], all_s, without_s)
        for metric, (all_s, without_s) in stalls.p99_s.items()
        if math.isfinite(without_s) and all_s - without_s > _LEAST_CHANGE * all_s
    ]


def _p99_s(values_s: NDArray[np.float64]) -> float:
    known = np.sort(values_s[~np.isnan(values_s)])
    return float(known[nearest_rank(len(known), _QUANTILE) - 1]) if len(known) else math.nan
