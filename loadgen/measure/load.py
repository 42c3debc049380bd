"""The load of the measured window: throughput, requests in flight, and whether the queue grew
(overload)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.statistics.population import BLOCK
from loadgen.measure.statistics.trend import has_trend, has_wave
from loadgen.records import Requests, Run, Status, Times

LEAST_DUE = 40
LEAST_LATE = 3  # requests of the last quarter that the drain cut off
GROWTH_SHARE = 0.05  # of what arrived between the middles of the first and the last quarter
LEAST_GROWTH = 10.0
SLOWER_BY = 1.5
RAMP_BY = 1.25
FULL = 0.99  # of `limits.max_concurrency`


@dataclass(frozen=True, slots=True)
class LoadByQuarter:
    """Per quarter of the measured window: the mean number of requests in flight, and the median
    TTFT, without a stream the median E2E."""

    in_flight: tuple[float, ...]
    ttft_s: tuple[float, ...]
    is_growing: bool
    is_streamed: bool = True


def mean_in_flight(run: Run, edges_s: Times) -> NDArray[np.float64]:
    """The mean number of requests released and not yet done, waits inside the client included.

    A value per bin between ascending edges, exact: with F(t) = Σ max(0, t − released) − Σ max(0,
    t − done) it is the rise of F over a bin divided by the bin's width.
    """
    return mean_over(run, edges_s[:-1], edges_s[1:])


def mean_over(run: Run, from_s: Times, to_s: Times) -> NDArray[np.float64]:
    """`mean_in_flight` over arbitrary periods, each from `from_s` to a later `to_s`."""
    rows = run.request_rows
    sent = np.isfinite(rows["sent_s"])
    released_s, done_s = rows["released_s"][sent], rows["done_s"][sent]
    ended_s = done_s[np.isfinite(done_s)]

    def spent_s(at_s: Times) -> NDArray[np.float64]:
        return _time_since(released_s, at_s) - _time_since(ended_s, at_s)

    mean: NDArray[np.float64] = (spent_s(to_s) - spent_s(from_s)) / (to_s - from_s)
    return np.maximum(mean, 0.0)  # rounding may leave it slightly below 0


def _time_since(starts_s: Times, at_s: Times) -> NDArray[np.float64]:
    """Σ max(0, at − start) over all starts, for any times `at`."""
    ordered_s = np.sort(starts_s)
    n_begun = np.searchsorted(ordered_s, at_s)
    since_s: NDArray[np.float64] = n_begun * at_s - np.r_[0.0, np.cumsum(ordered_s)][n_begun]
    return since_s


def load_through(
    run: Run, columns: PerRequest, due: Mask, window: MeasuredWindow
) -> LoadByQuarter | None:
    """The load by quarters, or None with too few requests.

    Growing means all of the following: arrivals do not increase (a ramp increases on purpose);
    requests in flight rise from quarter to quarter, by at least 5 % of the arrivals in between and
    by at least 10, or stay at `limits.max_concurrency` after such a rise; the median TTFT (E2E
    without a stream) of the last quarter is at least 1.5 times that of the first. Failures count as
    +inf, answers that the drain cut off by their TTFT. A start-up transient meets the first two but
    not the third; noise below capacity seldom meets all.
    """
    due = due & np.isfinite(run.request_rows["released_s"])
    if int(due.sum()) < LEAST_DUE or window.length_s <= 0:
        return None
    edges = np.linspace(window.start_s, window.end_s, 5)
    flight = mean_in_flight(run, edges)
    released_s = run.request_rows["released_s"][due]
    quarter = np.clip(np.searchsorted(edges, released_s, side="right") - 1, 0, 3)
    arrived = np.bincount(quarter, minlength=4)
    if arrived.min() == 0:
        return None
    has_begun = columns.is_ok | (run.request_rows["status"] == Status.cancelled)
    waits_s = columns.ttft_s if columns.is_streamed else columns.e2e_s
    ttft_s = np.where(has_begun & columns.has_token, waits_s, np.inf)[due]
    medians = [float(np.quantile(ttft_s[quarter == k], 0.5, method="higher")) for k in range(4)]
    is_steady = arrived[3] <= RAMP_BY * arrived[0] + 3 * np.sqrt(arrived[0])
    least = max(LEAST_GROWTH, GROWTH_SHARE * 0.75 * len(released_s))
    cap = run.manifest.scenario.limits.max_concurrency or math.inf
    rises = (np.diff(flight) > 0) | (flight[1:] >= FULL * cap)
    grows = bool(np.all(rises)) and flight[3] - flight[0] >= least
    slows = medians[3] >= SLOWER_BY * medians[0]
    return LoadByQuarter(
        tuple(flight.tolist()),
        tuple(medians),
        bool(is_steady and grows and slows),
        columns.is_streamed,
    )


def falls_behind(run: Run, columns: PerRequest, due: Mask) -> bool:
    """Whether the end of the drain cut off requests because the server had become slower, also
    where `load_through` has too few requests or a ramp.

    The due requests that were answered or cut off are split into quarters by release. The first
    quarter gives the share of requests that last longer than the requests of the last quarter had
    time for. Clearly more requests of the last quarter (twice as many plus 3) must have been cut
    off, and their median TTFT must be at least 1.5 times that of the first quarter. So a drain that
    is merely shorter than the usual answer does not count.
    """
    rows = run.request_rows
    unfinished = rows["status"] == Status.cancelled
    counted = np.flatnonzero(due & (columns.is_ok | unfinished) & np.isfinite(rows["released_s"]))
    counted = counted[np.argsort(rows["released_s"][counted], kind="stable")]
    first, last = counted[: len(counted) // 4], counted[len(counted) - len(counted) // 4 :]
    n_late = int(np.count_nonzero(unfinished[last]))
    if n_late < LEAST_LATE:
        return False
    end_s = np.nanmax(np.where(unfinished, rows["done_s"], rows["released_s"]))
    done_s = np.where(unfinished, end_s, rows["done_s"])
    lasted_s = np.sort(done_s[first] - rows["released_s"][first])
    n_shorter = np.searchsorted(lasted_s, end_s - rows["released_s"][last], side="right")
    n_expected = float((1 - n_shorter / len(first)).sum())
    waits_s = columns.ttft_s if columns.is_streamed else columns.e2e_s
    ttft_s = np.where(columns.has_token, waits_s, np.inf)
    early_s, late_s = (
        float(np.quantile(ttft_s[part], 0.5, method="higher")) for part in (first, last)
    )
    return n_late >= 2 * n_expected + LEAST_LATE and late_s >= SLOWER_BY * early_s


def change_through(run: Run, columns: PerRequest, due: Mask, window: MeasuredWindow) -> str:
    """How the load changed through the window, so that a longer run would be another run, as a
    sentence; "" where nothing shows it, and with fewer than 40 requests."""
    rows = columns.release_order[due[columns.release_order]]
    released_s = run.request_rows["released_s"][rows]
    rows = rows[np.isfinite(released_s)]
    if len(rows) < LEAST_DUE or window.length_s <= 0:
        return ""
    if has_wave((run.request_rows["released_s"][rows] - window.start_s) / window.length_s):
        return "the rate of requests changed through the window"
    waits_s = (columns.ttft_s if columns.is_streamed else columns.e2e_s)[rows]
    return "latency changed through the window" if has_trend(waits_s[np.isfinite(waits_s)]) else ""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Successful requests completed, and tokens of all requests, per second of the measured
    window; `results_per_s`: vectors or scores of answers that have no tokens, 0 for others."""

    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    results_per_s: float = 0.0


def throughput(run: Run, columns: PerRequest, window: MeasuredWindow) -> Throughput:
    """The rates inside the measured window, of requests due in any phase; NaN for an empty
    window."""
    rows = run.request_rows
    finished = columns.is_ok & inside(rows["done_s"], window)
    begun = inside(np.fmin(rows["first_token_s"], rows["last_token_s"]), window)
    counted, planned = rows["input_tokens"][begun], run.schedule_rows["input_tokens"][begun]
    return Throughput(
        requests_per_s=per_second(float(np.count_nonzero(finished)), window),
        output_tokens_per_s=per_second(tokens_received(run, columns, window), window),
        input_tokens_per_s=per_second(float(np.where(counted > 0, counted, planned).sum()), window),
        results_per_s=per_second(float(rows["results"][finished].sum()), window),
    )


def inside(instants_s: NDArray[np.float64], window: MeasuredWindow) -> Mask:
    """The times that lie in the window; NaN does not."""
    within: Mask = (instants_s >= window.start_s) & (instants_s < window.end_s)
    return within


def per_second(count: float, window: MeasuredWindow) -> float:
    return count / window.length_s if window.length_s > 0 else math.nan


def tokens_received(run: Run, columns: PerRequest, window: MeasuredWindow) -> float:
    """Tokens of the chunks received inside the window; n is spread evenly over chunks without a
    count, and over the time from the first token to the last without chunks."""
    chunks, rows = run.chunk_rows, run.request_rows
    starts = columns.chunk_starts
    if not len(starts):
        return _tokens_without_chunks(rows, columns.streamed_tokens, window)
    received_s, tokens = chunks["received_s"], chunks["tokens"]
    if tokens.all():
        blocks = [slice(at, at + BLOCK) for at in range(0, len(chunks), BLOCK)]
        each = (tokens[block][inside(received_s[block], window)] for block in blocks)
        return float(sum(int(counts.sum(dtype=np.int64)) for counts in each))
    row = np.searchsorted(rows["request_id"], chunks["request_id"][starts])
    n_chunks = np.diff(starts, append=len(chunks))
    n_within = _chunks_inside(received_s, starts, n_chunks, window)
    return float(np.dot(n_within / n_chunks, columns.streamed_tokens[row]))


def _tokens_without_chunks(
    rows: Requests, tokens: NDArray[np.int64], window: MeasuredWindow
) -> float:
    """The tokens inside the window of a run whose chunks were not recorded, as by other tools."""
    last_s = rows["last_token_s"]
    first_s = np.fmin(rows["first_token_s"], last_s)
    span_s = last_s - first_s
    within_s = np.minimum(last_s, window.end_s) - np.maximum(first_s, window.start_s)
    share = np.where(inside(last_s, window), 1.0, 0.0)
    np.divide(np.maximum(within_s, 0.0), span_s, out=share, where=span_s > 0)
    return float(np.dot(share, tokens))


def _chunks_inside(
    received_s: NDArray[np.float64],
    starts: NDArray[np.intp],
    n_chunks: NDArray[np.intp],
    window: MeasuredWindow,
) -> NDArray[np.intp]:
    """The number of chunks of each request received inside the window. Chunks are in order of
    arrival, so only requests that extend over an edge of the window are counted chunk by chunk."""
    first_s, last_s = received_s[starts], received_s[starts + n_chunks - 1]
    n_within = np.where(inside(first_s, window) & inside(last_s, window), n_chunks, 0)
    reaches = (first_s < window.end_s) & (last_s >= window.start_s) & (n_within == 0)
    for group in np.flatnonzero(reaches).tolist():
        own_s = received_s[starts[group] : starts[group] + n_chunks[group]]
        n_within[group] = np.count_nonzero(inside(own_s, window))
    return n_within
