"""What each request went through, as columns: latencies from both clocks, gaps between chunks.

One entry per row of `run.request_rows`, failed and warm-up rows included; who counts is decided in
`attainment` and `aggregate`. NaN means that the metric does not exist for the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import RunInvalid
from loadgen.records import Chunks, Requests, Run, Schedule, Status, TokenSource

Seconds = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Every gap between consecutive chunks of one request, in the order of `run.chunk_rows`.

    `row` is the gap's index into the request rows (equal values are neighbours), `tokens` what the
    chunk that ends it carried (at least 1). `is_counted` says that the server stated them all; a
    chunk without a count is taken for one token, and its ITL is its ICL.
    """

    row: NDArray[np.intp]
    icl_s: Seconds
    tokens: NDArray[np.int64]
    is_counted: bool

    @property
    def itl_s(self) -> Seconds:
        """Seconds per token, one value per gap; stands for `tokens` equal values."""
        return self.icl_s / self.tokens if self.tokens.max(initial=1) > 1 else self.icl_s


@dataclass(frozen=True, slots=True)
class PerRequest:
    """Columns of shape [n_requests], float64 seconds, named and defined as in the catalogue.

    `output_tokens` is n: as counted by whoever `token_source` names, else one per chunk.
    """

    is_ok: Mask
    has_token: Mask
    output_tokens: NDArray[np.int64]
    ttft_s: Seconds
    ttft_from_send_s: Seconds
    ttfat_s: Seconds
    tpot_s: Seconds
    e2e_s: Seconds
    e2e_from_send_s: Seconds
    close_s: Seconds
    e2e_per_token_s: Seconds
    max_itl_s: Seconds
    max_stall_s: Seconds
    queue_client_s: Seconds
    connect_s: Seconds
    lateness_s: Seconds
    gaps: Gaps

    def column(self, metric: str) -> Seconds:
        """A per-request metric by its catalogue name."""
        values: Seconds = getattr(self, metric)
        return values


def per_request(run: Run) -> PerRequest:
    """All columns of a run. Raises RunInvalid when its tables do not name the same requests."""
    rows, schedule = run.request_rows, run.schedule_rows
    if not np.array_equal(rows["request_id"], schedule["request_id"]):
        raise RunInvalid(
            f"the run records {len(rows)} requests and {len(schedule)} scheduled ones,"
            " and their request_ids differ; each must appear once in both, in order"
        )
    released_s, sent_s = _column(rows, "released_s"), _column(rows, "sent_s")
    first_s, last_s = _column(rows, "first_token_s"), _column(rows, "last_token_s")
    output_tokens = _output_tokens(rows)
    gaps = _gaps(run.chunk_rows, rows)
    max_stall_s = _greatest(gaps.icl_s, gaps.row, len(rows))
    itl_s = gaps.itl_s
    opened = ~rows["reused_connection"]
    return PerRequest(
        is_ok=rows["status"] == Status.ok,
        has_token=np.isfinite(first_s),
        output_tokens=output_tokens,
        ttft_s=first_s - released_s,
        ttft_from_send_s=first_s - sent_s,
        ttfat_s=_column(rows, "first_answer_s") - released_s,
        tpot_s=_tpot_s(rows, output_tokens, last_s - first_s),
        e2e_s=last_s - released_s,
        e2e_from_send_s=last_s - sent_s,
        close_s=_column(rows, "done_s") - released_s,
        e2e_per_token_s=_divide(last_s - released_s, output_tokens),
        max_itl_s=max_stall_s if itl_s is gaps.icl_s else _greatest(itl_s, gaps.row, len(rows)),
        max_stall_s=max_stall_s,
        queue_client_s=sent_s - released_s,
        connect_s=np.where(opened, _column(rows, "connected_s") - sent_s, np.nan),
        lateness_s=_lateness_s(schedule, sent_s - released_s),
        gaps=gaps,
    )


def _column(rows: Requests, name: str) -> Seconds:
    return np.ascontiguousarray(rows[name])


def _output_tokens(rows: Requests) -> NDArray[np.int64]:
    uncounted = rows["token_source"] == TokenSource.none
    return np.where(uncounted, rows["chunks"], rows["output_tokens"]).astype(np.int64)


def _tpot_s(rows: Requests, output_tokens: NDArray[np.int64], decode_s: Seconds) -> Seconds:
    """(last − first) / (n − n_first_chunk); the first chunk of unknown size counts as one token."""
    in_first_chunk = np.maximum(rows["first_chunk_tokens"].astype(np.int64), 1)
    return _divide(decode_s, output_tokens - in_first_chunk)


def _divide(seconds: Seconds, counts: NDArray[np.int64]) -> Seconds:
    """NaN where the count is not positive."""
    quotient = np.full(len(seconds), np.nan)
    np.divide(seconds, counts, out=quotient, where=counts > 0)
    return quotient


def _lateness_s(schedule: Schedule, queue_client_s: Seconds) -> Seconds:
    return np.where(schedule["n_parents"] == 0, queue_client_s, np.nan)


def _gaps(chunks: Chunks, rows: Requests) -> Gaps:
    ids = np.ascontiguousarray(chunks["request_id"])
    received_s = np.ascontiguousarray(chunks["received_s"])
    continues = ids[1:] == ids[:-1]  # the chunk and the one before it belong to one request
    starts = np.r_[0, np.flatnonzero(~continues) + 1] if len(ids) else np.empty(0, np.intp)
    n_gaps = np.diff(starts, append=len(ids)) - 1
    stated = chunks["tokens"][1:][continues]
    return Gaps(
        row=np.repeat(_row_of(ids[starts], rows["request_id"]), n_gaps),
        icl_s=np.diff(received_s)[continues],
        tokens=np.maximum(stated, 1).astype(np.int64),
        is_counted=bool(len(stated)) and bool(stated.all()),
    )


def _row_of(ids: NDArray[np.uint32], known: NDArray[np.uint32]) -> NDArray[np.intp]:
    """The position of each id in `known` (ascending). Raises RunInvalid for an id not in it."""
    row = np.searchsorted(known, ids)
    is_known = row < len(known)
    if not is_known.all() or not np.array_equal(known[row], ids):
        raise RunInvalid("the run holds chunks of a request that was never scheduled")
    return row


def _greatest(values: Seconds, row: NDArray[np.intp], n_rows: int) -> Seconds:
    """The greatest value of each row, NaN for rows without any; equal rows must be neighbours."""
    greatest = np.full(n_rows, np.nan)
    if len(values):
        starts = np.flatnonzero(np.r_[True, row[1:] != row[:-1]])
        greatest[row[starts]] = np.maximum.reduceat(values, starts)
    return greatest
