"""The points behind the page's section on causes, thinned out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import due_rows
from loadgen.measure.drivers import tpot_points, ttft_points
from loadgen.measure.per_request import PerRequest
from loadgen.records import Run
from reports.run.frames import Record

MAX_POINTS = 2000
MAX_STREAMS = 2000  # requests whose gaps are looked at, evenly taken
LEAST_GAPS = 20


@dataclass(frozen=True, slots=True)
class WhyFrames:
    """`ttft`: x (prompt tokens), y (s). `tpot`: x (requests in flight), y (s). `itl`: per token
    position first, last (1 is the first gap of an answer) p50, p99 (s), n. Latencies in seconds."""

    ttft: Sequence[Record]
    tpot: Sequence[Record]
    itl: Sequence[Record]


def why_frames(run: Run, columns: PerRequest) -> WhyFrames:
    """Of the due requests that ended well with at least one token."""
    well = due_rows(run) & columns.is_ok & columns.has_token
    return WhyFrames(
        ttft=_points(*ttft_points(run, columns, well)),
        tpot=_points(*tpot_points(run, columns, well)),
        itl=_by_position(columns, np.flatnonzero(well)),
    )


def _points(x: NDArray[np.float64], y: NDArray[np.float64]) -> list[Record]:
    """Evenly taken, the slowest twentieth of the places kept for the largest y."""
    taken = np.arange(len(x))
    if len(x) > MAX_POINTS:
        largest = np.argsort(y, kind="stable")[-MAX_POINTS // 20 :]
        even = np.linspace(0, len(x) - 1, MAX_POINTS - len(largest)).astype(np.intp)
        taken = np.unique(np.r_[largest, even])
    return [
        {"x": float(at), "y": float(value)} for at, value in zip(x[taken], y[taken], strict=True)
    ]


def _by_position(columns: PerRequest, well: NDArray[np.intp]) -> list[Record]:
    """Percentiles of the gap before each chunk, by its place in the answer: 1, 2, 3–4, 5–8, …"""
    gaps = columns.gaps
    if len(well) > MAX_STREAMS:
        well = well[np.linspace(0, len(well) - 1, MAX_STREAMS).astype(np.intp)]
    chosen = np.zeros(len(columns.is_ok), bool)
    chosen[well] = True
    gap_s = gaps.icl_s[gaps.of(chosen)]
    if not len(gap_s):
        return []
    lengths = gaps.sizes[chosen[gaps.rows]]
    position = np.arange(len(gap_s)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
    bucket = np.ceil(np.log2(position)).astype(np.int64)
    records = []
    for number in range(int(bucket.max()) + 1):
        values = np.sort(gap_s[bucket == number])
        if len(values) >= LEAST_GAPS:
            records.append(
                {
                    "first": 1 if number == 0 else 2 ** (number - 1) + 1,
                    "last": 2**number,
                    "p50": float(np.quantile(values, 0.5, method="inverted_cdf")),
                    "p99": float(np.quantile(values, 0.99, method="inverted_cdf")),
                    "n": len(values),
                }
            )
    return records
