"""The factors that latency correlates with: prompt length, requests in flight, traffic of other
classes; and the parts of the time that requests took."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import due_rows
from loadgen.measure.load import mean_over
from loadgen.measure.per_request import Mask, PerRequest, Seconds
from loadgen.measure.statistics.intervals import Values
from loadgen.measure.statistics.ranks import rank_correlation
from loadgen.measure.statistics.robust_line import FittedLine, robust_line
from loadgen.records import Run

SLOWEST = {"all": 1.0, "slowest 10 %": 0.1, "slowest 1 %": 0.01}
LEAST_OF_A_GROUP = 5


@dataclass(frozen=True, slots=True)
class Split:
    """The parts of the time of `n` requests. Each number is a mean in seconds per request; together
    they are the mean E2E, from the scheduled send time to the last token. `server_queue_s` is None
    where the server does not report it; it is then part of `prefill_s`, which ends with the first
    token."""

    n: int
    client_queue_s: float
    connect_s: float
    server_queue_s: float | None
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Drivers:
    """`ttft_by_input`: seconds of TTFT per prompt token. `tpot_by_in_flight`: seconds of TPOT per
    request in flight, averaged over the request's own decoding. `split`: by E2E, of all successful
    due requests and of the slowest. A line is None where there are too few points."""

    ttft_by_input: FittedLine | None
    tpot_by_in_flight: FittedLine | None
    split: Mapping[str, Split]


def drivers(run: Run, columns: PerRequest, due: Mask, confidence: float) -> Drivers | None:
    """The drivers of the successful due requests that received a token; None for answers that are
    not streamed, whose time has no parts."""
    if not columns.is_streamed:
        return None
    successful = due & columns.is_ok & columns.has_token
    inputs, ttft_s = ttft_points(run, columns, successful)
    in_flight, tpot_s = tpot_points(run, columns, successful)
    return Drivers(
        ttft_by_input=robust_line(inputs, ttft_s, confidence, is_series=True),
        tpot_by_in_flight=robust_line(in_flight, tpot_s, confidence, is_series=True),
        split=_splits(run, columns, np.flatnonzero(successful)),
    )


def ttft_points(run: Run, columns: PerRequest, successful: Mask) -> tuple[Values, Seconds]:
    """Prompt tokens (as the server counted them, else as planned) and TTFT from send."""
    counted, planned = run.request_rows["input_tokens"], run.schedule_rows["input_tokens"]
    tokens = np.where(counted > 0, counted, planned)[successful].astype(np.float64)
    return tokens, columns.ttft_from_send_s[successful]


def tpot_points(run: Run, columns: PerRequest, successful: Mask) -> tuple[Values, Seconds]:
    """The mean number of requests in flight while each request was decoding, itself included, and
    its TPOT."""
    rows = run.request_rows
    decoded = (
        successful & np.isfinite(columns.tpot_s) & (rows["last_token_s"] > rows["first_token_s"])
    )
    return (
        mean_over(run, rows["first_token_s"][decoded], rows["last_token_s"][decoded]),
        columns.tpot_s[decoded],
    )


def _splits(run: Run, columns: PerRequest, rows_of: np.ndarray) -> dict[str, Split]:
    rows = {  # contiguous copies of the columns
        name: np.ascontiguousarray(run.request_rows[name])
        for name in ("server_queue_s", "first_token_s", "last_token_s", "sent_s")
    }
    by_e2e = rows_of[np.argsort(-columns.e2e_s[rows_of], kind="stable")]
    sizes = {name: math.ceil(share * len(by_e2e)) for name, share in SLOWEST.items()}
    return {
        name: _split(rows, columns, by_e2e[:size])
        for name, size in sizes.items()
        if size >= LEAST_OF_A_GROUP
    }


def _split(whole: Mapping[str, Seconds], columns: PerRequest, indices: np.ndarray) -> Split:
    rows = {name: column[indices] for name, column in whole.items()}
    client_s = columns.queue_client_s[indices]
    connect_s = np.nan_to_num(columns.connect_s[indices], nan=0.0)
    waited_s = rows["server_queue_s"]
    first_s = rows["first_token_s"] - rows["sent_s"] - connect_s
    is_reported = bool(np.isfinite(waited_s).all())
    return Split(
        n=len(indices),
        client_queue_s=float(client_s.mean()),
        connect_s=float(connect_s.mean()),
        server_queue_s=float(waited_s.mean()) if is_reported else None,
        prefill_s=float((first_s - waited_s if is_reported else first_s).mean()),
        decode_s=float((rows["last_token_s"] - rows["first_token_s"]).mean()),
    )


LEAST_REQUESTS = 30

_RANKED = 20_000  # requests of a class that are ranked, evenly spaced


def interference(run: Run, columns: PerRequest) -> Mapping[tuple[str, str], float | None]:
    """(class, other class) → Spearman's rank correlation, over the successful due requests of the
    class, between TTFT from send and the other class's requests in flight when the request was
    sent.

    None with fewer than `LEAST_REQUESTS` requests, or where either number never changes. This shows
    correlation, not cause; a third factor may drive both. Empty for a run with a single class.
    """
    names, class_id = run.names.classes, run.schedule_rows["class_id"]
    if len(names) < 2:
        return {}
    rows, successful = run.request_rows, due_rows(run) & columns.is_ok & columns.has_token
    correlations: dict[tuple[str, str], float | None] = {}
    in_flight = [
        _in_flight(rows["sent_s"][class_id == k], rows["done_s"][class_id == k])
        for k in range(len(names))
    ]
    for victim, name in enumerate(names):
        mine = np.flatnonzero(successful & (class_id == victim))
        if len(mine) > _RANKED:
            mine = mine[np.linspace(0, len(mine) - 1, _RANKED).astype(np.intp)]
        sent_s, ttft_s = rows["sent_s"][mine], columns.ttft_from_send_s[mine]
        for number, other in enumerate(names):
            begun_s, ended_s = in_flight[number]
            n_in_flight = np.searchsorted(begun_s, sent_s) - np.searchsorted(ended_s, sent_s)
            if len(mine) < LEAST_REQUESTS or np.ptp(n_in_flight) == 0 or np.ptp(ttft_s) == 0:
                correlations[name, other] = None
            else:
                correlations[name, other] = rank_correlation(n_in_flight.astype(np.float64), ttft_s)
    return correlations


def _in_flight(
    sent_s: NDArray[np.float64], done_s: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sorted times at which requests were sent and ended. Before t the requests in flight are those
    sent minus those ended."""
    was_sent = np.isfinite(sent_s)
    return np.sort(sent_s[was_sent]), np.sort(done_s[was_sent & np.isfinite(done_s)])
