"""The three tables (and their edges) that all parts of slobench exchange.

A run consists of a schedule (the planned requests), requests (a row for each, as recorded), chunks
(every received chunk) and a manifest (the circumstances). Times are float64 seconds since the run
epoch on the monotonic clock; NaN means "never happened". Small strings are ids into the `Names` of
the run, and dictionary columns on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loadgen.manifest.self_report import ClientReport

if TYPE_CHECKING:
    import pandas as pd

    from loadgen.manifest.sections import Manifest

SCHEMA = 1

SCHEDULE = np.dtype(
    [
        ("request_id", "u4"),
        ("session_id", "u4"),
        ("n_parents", "u2"),
        ("scheduled_s", "f8"),  # NaN for a row that waits for its parents
        ("think_s", "f4"),
        ("class_id", "u2"),
        ("input_tokens", "u4"),
        ("output_tokens", "u4"),
        ("prefix_id", "u4"),
        ("prefix_tokens", "u4"),
        ("prompt_seed", "u8"),
        ("tenant_id", "u2"),
        ("priority", "i2"),
        ("phase", "u1"),
        ("context", "u1"),  # what the prompt holds of its parent's conversation: dialogue.Context
        ("after_failure", "?"),  # released also when a parent failed: the next request of a user
        ("temperature", "f4"),
        ("cancel_after_s", "f4"),  # cancelled on purpose so long after it was sent; 0 = not
        ("ttft_slo_s", "f8"),  # SLO of this request; 0 = the SLO of its class
        ("tpot_slo_s", "f8"),
        ("e2e_slo_s", "f8"),
        ("chain", "u2"),  # number of a request's chain in its agent's tree, from 1; 0 = no agent
    ]
)
OWN_SLO = {"ttft_s": "ttft_slo_s", "tpot_s": "tpot_slo_s", "e2e_s": "e2e_slo_s"}
"""Metric → the column of the schedule that holds each request's own limit of it."""
LimitsS = tuple[float | None, ...]
"""What a request may take by the metrics of `OWN_SLO`, in their order; None: no limit."""
OPTIONAL = ("cancel_after_s", *OWN_SLO.values(), "chain")
"""Columns that most schedules do not use: out of the fingerprint where all of one are 0."""
EDGES = np.dtype(
    [
        ("request_id", "u4"),
        ("after", "u4"),
        ("delay_s", "f4"),  # from the end of `after` to the earliest release
    ]
)
PIECES = np.dtype([("after", "u4"), ("tokens", "u4")])
FIRST_PIECE = 1 << 31
"""Row k of a table of pieces is the text with the prefix_id `FIRST_PIECE + k`: `tokens` tokens
behind the text of piece `after` (0: at the start of a prompt). Other prefixes have smaller ids."""
REQUESTS = np.dtype(
    [
        ("request_id", "u4"),
        ("shard", "u2"),
        ("released_s", "f8"),
        ("sent_s", "f8"),
        ("connected_s", "f8"),
        ("headers_s", "f8"),
        ("first_chunk_s", "f8"),
        ("first_token_s", "f8"),
        ("first_answer_s", "f8"),  # first content token after any reasoning
        ("last_token_s", "f8"),
        ("done_s", "f8"),
        ("reused_connection", "?"),
        ("input_tokens", "u4"),  # as the server counted them; 0 = it did not say
        ("cached_tokens", "u4"),
        ("output_tokens", "u4"),
        # Tokens in the chunk that carried the first one, estimated where the server states only
        # their total (`decode`); 0 = unknown
        ("first_chunk_tokens", "u2"),
        ("token_source", "u1"),
        ("chunks", "u4"),  # chunks that carried at least one token
        ("bytes", "u8"),  # of response bodies
        ("status", "u1"),
        ("http_status", "u2"),
        ("finish_reason", "u1"),
        ("error_id", "u2"),  # into Names.errors; 0 = none
        ("remote_id", "u2"),  # into Names.remotes; 0 = never connected
        ("server_queue_s", "f8"),  # as the server reports them, else NaN
        ("server_ttft_s", "f8"),
        ("finish_s", "f8"),  # the finish reason in a chunk of its own; NaN = with a token, or none
        ("hidden_tokens", "u4"),  # of output_tokens: reasoning that was not streamed
        ("unknown_events", "u2"),  # events that are none of the API's, skipped
        ("retry_after_s", "f4"),  # the Retry-After of a failed answer; NaN = none
        ("answer_crc32", "u4"),  # of the first 128 bytes of the answer's text; 0 = unknown
        ("results", "u4"),  # vectors or scores of an answer without tokens
        ("reasoning_tokens", "u4"),  # of output_tokens, hidden or streamed
    ]
)
LATER_COLUMNS = {
    "hidden_tokens": 0,
    "unknown_events": 0,
    "retry_after_s": np.nan,
    "answer_crc32": 0,
    "results": 0,
    "reasoning_tokens": 0,
    "delay_s": 0,
    "chain": 0,
}
"""Columns that older tables lack, and their values there."""
CHUNKS = np.dtype(
    [("request_id", "u4"), ("received_s", "f8"), ("tokens", "u2")]
)  # tokens 0 = unknown

SERVER = np.dtype([("t_s", "f8"), ("series_id", "u2"), ("value", "f8")])

Schedule = NDArray[np.void]  # dtype SCHEDULE, sorted by request_id
Edges = NDArray[np.void]  # dtype EDGES
Pieces = NDArray[np.void]  # dtype PIECES; each stands behind the piece that it follows
Requests = NDArray[np.void]  # dtype REQUESTS, sorted by request_id, one row per scheduled id
Chunks = NDArray[np.void]  # dtype CHUNKS, grouped by request_id, in order of arrival within it
ServerRows = NDArray[np.void]  # dtype SERVER, in order of time: the server's own metrics
Times = NDArray[np.float64]  # seconds since the run epoch


ON_PURPOSE = "cancelled on purpose (requests.cancel)"
"""How the error of a request begins that was cancelled because the schedule said so."""


AFTER_DONE = "complete at [DONE]; then "
"""How the error of a successful request begins whose connection did not end properly."""


OTHER_MODEL = "answered by model "
"""How the note on a successful request begins whose answer states another model than requested; the
name follows."""


REASONING = "reasoning"
"""The role of a message with the reasoning of an answer; the assistant's answer follows it. No API
has this role: a codec puts the text where its API has it."""


IN_STREAM = "error in the stream: "
"""How the error of a request begins to which the server reported an error inside a 200."""


IN_ANSWER = "error in the answer: "
"""The same of an answer that was requested as a whole."""


IN_PLACE = "error in place of a stream: "
"""The same of an error in place of a stream."""


INSIDE = (IN_STREAM, IN_ANSWER, IN_PLACE)


class Phase(IntEnum):
    """Where in the run a row was due; only `measure` counts in metrics."""

    warmup = 0
    measure = 1


class Status(IntEnum):
    """How a request ended. If it was due in the window, everything but `ok` is a miss."""

    ok = 0
    http_error = 1
    timeout = 2
    stream_error = 3
    connect_error = 4
    cancelled = 5
    dropped = 6
    not_released = 7
    lost = 8
    truncated = 9  # a clean end, short of a length that the server had accepted as exact


class TokenSource(IntEnum):
    """Who counted the output tokens."""

    none = 0
    usage = 1
    chunks = 2
    tokenizer = 3
    distrusted = 4  # chunks, because the usage that the server stated cannot be true


class FinishReason(IntEnum):
    """The OpenAI `finish_reason`; `other` is a word we do not know, `none` that none came."""

    none = 0
    stop = 1
    length = 2
    tool_calls = 3
    content_filter = 4
    other = 5


CLIENT_LIMIT = " (the client's own limit)"
"""End of the reason of a `connect_error` if the client's machine had no port, file or memory left
for a connection; no server was involved."""


_LEAST_MISSING, _LEAST_SHARE = 2, 0.02


def is_short(requested: Any, received: Any) -> Any:
    """Whether an answer of so many tokens is truncated, where so many were requested as exact: more
    than 2 tokens and more than 2 % are missing. Numbers or arrays."""
    missing = requested - received
    return (missing > _LEAST_MISSING) & (missing > _LEAST_SHARE * requested)


NO_PIECES: Pieces = np.empty(0, PIECES)


def schedule_sha256(
    schedule: Schedule, edges: Edges | None = None, pieces: Pieces = NO_PIECES
) -> str:
    """The fingerprint (hex) of a plan: runs with equal fingerprints send the same requests.

    Optional columns (cancellation, limits of requests, chains, delays of edges) count only if they
    are used. To compare machine types, compare recorded files: the last bit of a logarithm may
    differ.
    """
    digest = hashlib.sha256(_used(schedule, OPTIONAL).tobytes())
    if edges is not None:
        digest.update(_used(edges, ("delay_s",)).tobytes())
    digest.update(np.ascontiguousarray(pieces).tobytes())
    return digest.hexdigest()


def _used(rows: NDArray[np.void], optional: Sequence[str]) -> NDArray[np.void]:
    """The rows without those optional columns that are 0 throughout."""
    unused = [name for name in optional if not rows[name].any()]
    if not unused:
        return np.ascontiguousarray(rows)
    names = [name for name in rows.dtype.names or () if name not in unused]
    return rows[names].astype([(name, rows.dtype[name]) for name in names])


def own_limits(schedule: Schedule) -> dict[int, tuple[float, ...]]:
    """Row number to limits (s, in the order of `OWN_SLO`, 0: no limit), for rows with SLOs of their
    own."""
    columns = np.column_stack([schedule[name] for name in OWN_SLO.values()])
    rows = np.flatnonzero(columns.any(axis=1))
    return {int(row): tuple(columns[row].tolist()) for row in rows}


@dataclass(frozen=True)
class Names:
    """What the ids in the tables mean. `errors[0]` and `remotes[0]` are "" (= none)."""

    classes: tuple[str, ...] = ("default",)
    tenants: tuple[str, ...] = ("default",)
    errors: tuple[str, ...] = ("",)
    remotes: tuple[str, ...] = ("",)
    series: tuple[str, ...] = ()

    @property
    def client_limits(self) -> list[int]:
        """The error_ids of connections that the client's own machine did not have to give."""
        return [k for k, text in enumerate(self.errors) if text.endswith(CLIENT_LIMIT)]

    @property
    def on_purpose(self) -> list[int]:
        """The error_ids of requests that were cancelled because the schedule said so."""
        return [k for k, text in enumerate(self.errors) if text.startswith(ON_PURPOSE)]


NAMED = {
    "class_id": ("class", "classes"),
    "tenant_id": ("tenant", "tenants"),
    "error_id": ("error", "errors"),
    "remote_id": ("remote_address", "remotes"),
    "series_id": ("series", "series"),
}
"""Id column → (what the column of strings is called, the field of Names that has them)."""


@dataclass(frozen=True)
class Run:
    """One recorded run, in memory. The arrays are the truth; the DataFrames are for notebooks and
    built on demand.

    `manifest` holds the circumstances, `instrument` the client's measurements of itself; both can
    be indexed like the JSON that they are written as (`run.manifest["seed"]`).
    """

    manifest: Manifest
    schedule_rows: Schedule
    request_rows: Requests
    chunk_rows: Chunks
    edge_rows: Edges = field(default_factory=lambda: np.empty(0, EDGES))
    names: Names = field(default_factory=Names)
    instrument: ClientReport = field(default_factory=ClientReport)
    server_rows: ServerRows = field(default_factory=lambda: np.empty(0, SERVER))
    piece_rows: Pieces = field(default_factory=lambda: np.empty(0, PIECES))

    @cached_property
    def schedule(self) -> pd.DataFrame:
        return _frame(self.schedule_rows, self.names)

    @cached_property
    def requests(self) -> pd.DataFrame:
        frame = _frame(self.request_rows, self.names)
        for column, enum in (
            ("status", Status),
            ("token_source", TokenSource),
            ("finish_reason", FinishReason),
        ):
            frame[column] = _categorical(self.request_rows[column], tuple(e.name for e in enum))
        return frame

    @cached_property
    def chunks(self) -> pd.DataFrame:
        return _frame(self.chunk_rows, self.names)

    @cached_property
    def server(self) -> pd.DataFrame:
        """The server's own metrics: `t_s`, `series`, `value`, a row per scrape and series."""
        return _frame(self.server_rows, self.names)


def empty_requests(schedule: Schedule) -> Requests:
    """One row per scheduled id in the state "nothing happened": times NaN, status
    `not_released`."""
    rows = np.zeros(len(schedule), REQUESTS)
    rows["request_id"] = schedule["request_id"]
    for name in REQUESTS.names or ():
        if REQUESTS[name].kind == "f":
            rows[name] = np.nan
    rows["status"] = Status.not_released
    return rows


def _frame(rows: NDArray[np.void], names: Names) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame({name: rows[name] for name in rows.dtype.names or ()})
    for column, (word, texts) in NAMED.items():
        if column in frame:
            frame[word] = _categorical(rows[column], getattr(names, texts))
            del frame[column]
    return frame


def _categorical(codes: NDArray[Any], categories: tuple[str, ...]) -> pd.Categorical[Any]:
    import pandas as pd

    words: list[Any] = list(categories)
    return pd.Categorical.from_codes(codes.astype(np.int64).tolist(), categories=pd.Index(words))
