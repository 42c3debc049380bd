"""The due requests of a run, one by one, for files of other tools that list requests."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from loadgen.manifest.sections import Manifest
from loadgen.measure.attainment import due_rows
from loadgen.measure.per_request import event_gaps, per_request
from loadgen.records import Run, Status, TokenSource


class DueRequest(NamedTuple):
    """A request that was due in the measured window; seconds since the run's epoch, NaN where it
    never came so far.

    `scheduled_s` is the release, of an unreleased request the planned time. `gaps_s` are the gaps
    between its chunks with tokens. `input_tokens` are the server's count, or the planned length
    where it stated none; `requested_tokens` is 0 without a requested length. `is_counted`: the
    server counted `output_tokens`. `error` is "" for a successful request, which has a token.
    """

    request_id: int
    scheduled_s: float
    sent_s: float
    first_token_s: float
    first_answer_s: float
    last_token_s: float
    done_s: float
    gaps_s: list[float]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    requested_tokens: int
    first_chunk_tokens: int
    is_counted: bool
    status: Status
    http_status: int
    error: str

    @property
    def is_ok(self) -> bool:
        return not self.error


def due_requests(run: Run) -> list[DueRequest]:
    """The due requests in order of their ids."""
    columns, due = per_request(run), due_rows(run)
    rows, schedule = run.request_rows[due], run.schedule_rows[due]
    released_s = rows["released_s"]
    scheduled_s = np.where(np.isnan(released_s), schedule["scheduled_s"], released_s)
    planned = schedule["input_tokens"]
    input_tokens = np.where(rows["input_tokens"] > 0, rows["input_tokens"], planned)
    gaps, numbers = event_gaps(run), np.flatnonzero(due)
    begins = np.searchsorted(gaps.row, numbers)
    ends = np.searchsorted(gaps.row, numbers, side="right")
    is_ok = (columns.is_ok & columns.has_token)[due]
    return [
        DueRequest(
            request_id=int(row["request_id"]),
            scheduled_s=float(scheduled_s[k]),
            sent_s=float(row["sent_s"]),
            first_token_s=float(row["first_token_s"]),
            first_answer_s=float(row["first_answer_s"]),
            last_token_s=float(row["last_token_s"]),
            done_s=float(row["done_s"]),
            gaps_s=gaps.icl_s[begins[k] : ends[k]].tolist(),
            input_tokens=int(input_tokens[k]),
            cached_tokens=int(row["cached_tokens"]),
            output_tokens=int(columns.output_tokens[due][k]),
            requested_tokens=int(schedule["output_tokens"][k]),
            first_chunk_tokens=max(1, int(row["first_chunk_tokens"])),
            is_counted=bool(row["token_source"] == TokenSource.usage),
            status=Status(int(row["status"])),
            http_status=int(row["http_status"]),
            error="" if is_ok[k] else run.names.errors[row["error_id"]] or "no token received",
        )
        for k, row in enumerate(rows)
    ]


def epoch_ns(manifest: Manifest) -> int:
    """The wall-clock time of the run's epoch, ns since 1970."""
    moment = datetime.fromisoformat(manifest.epoch_utc or manifest.started_utc)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1e6) * 1000


def duration_s(run: Run, requests: list[DueRequest]) -> float:
    """From the first send to the last end of a successful request; of an imported run as its file
    states it. 0 without a successful request."""
    origin = run.manifest.imported
    if origin is not None and origin.duration_s is not None:
        return origin.duration_s
    sent_s = [r.sent_s for r in requests if r.is_ok]
    done_s = [r.done_s for r in requests if r.is_ok and math.isfinite(r.done_s)]
    return max(done_s) - min(sent_s) if sent_s and done_s else 0.0
