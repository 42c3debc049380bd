"""What went through the server inside the measured window, whatever phase it was due in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.statistics.groups import BLOCK
from loadgen.records import Run


@dataclass(frozen=True, slots=True)
class Throughput:
    """Completed good answers, and tokens of all answers, per second of the measured window."""

    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float


def throughput(run: Run, columns: PerRequest, window: MeasuredWindow) -> Throughput:
    """The rates of a run; NaN for an empty window."""
    rows = run.request_rows
    n_finished = np.count_nonzero(columns.is_ok & inside(rows["done_s"], window))
    begun = inside(rows["first_token_s"], window)
    counted, planned = rows["input_tokens"][begun], run.schedule_rows["input_tokens"][begun]
    return Throughput(
        requests_per_s=per_second(float(n_finished), window),
        output_tokens_per_s=per_second(tokens_received(run, columns, window), window),
        input_tokens_per_s=per_second(float(np.where(counted > 0, counted, planned).sum()), window),
    )


def inside(instants_s: NDArray[np.float64], window: MeasuredWindow) -> Mask:
    """Which instants fall into the window; NaN does not."""
    within: Mask = (instants_s >= window.start_s) & (instants_s < window.end_s)
    return within


def per_second(count: float, window: MeasuredWindow) -> float:
    return count / window.length_s if window.length_s > 0 else math.nan


def tokens_received(run: Run, columns: PerRequest, window: MeasuredWindow) -> float:
    """Tokens of the chunks received inside the window; n evenly over chunks without a count."""
    chunks, rows = run.chunk_rows, run.request_rows
    starts = columns.chunk_starts
    if not len(starts):
        return 0.0
    received_s, tokens = chunks["received_s"], chunks["tokens"]
    if tokens.all():
        blocks = [slice(at, at + BLOCK) for at in range(0, len(chunks), BLOCK)]
        each = (tokens[block][inside(received_s[block], window)] for block in blocks)
        return float(sum(int(counts.sum(dtype=np.int64)) for counts in each))
    row = np.searchsorted(rows["request_id"], chunks["request_id"][starts])
    n_chunks = np.diff(starts, append=len(chunks))
    n_within = _chunks_inside(received_s, starts, n_chunks, window)
    return float(np.dot(n_within / n_chunks, columns.output_tokens[row]))


def _chunks_inside(
    received_s: NDArray[np.float64],
    starts: NDArray[np.intp],
    n_chunks: NDArray[np.intp],
    window: MeasuredWindow,
) -> NDArray[np.intp]:
    """How many chunks of each request came inside the window. They are in order of arrival, so only
    requests that reach over an end of it are looked at one by one."""
    first_s, last_s = received_s[starts], received_s[starts + n_chunks - 1]
    n_within = np.where(inside(first_s, window) & inside(last_s, window), n_chunks, 0)
    reaches = (first_s < window.end_s) & (last_s >= window.start_s) & (n_within == 0)
    for group in np.flatnonzero(reaches).tolist():
        own_s = received_s[starts[group] : starts[group] + n_chunks[group]]
        n_within[group] = np.count_nonzero(inside(own_s, window))
    return n_within
