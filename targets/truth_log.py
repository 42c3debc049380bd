"""The log of a truth or mock server as arrays: a row per request, and the instant of every token.

The mock server's log has fewer columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

TRUTH = np.dtype(
    [
        ("seq", "i8"),  # the request's x-seq header, -1: no such header
        ("number", "u4"),
        ("connection", "u4"),
        ("api", "U12"),
        ("outcome", "U8"),  # ok, aborted (by the client), or a scripted failure's name
        ("asked_tokens", "i4"),
        ("sent_tokens", "i4"),
        ("prompt_tokens", "i4"),
        # CLOCK_MONOTONIC nanoseconds; 0: it did not happen
        ("arrived_ns", "u8"),  # the first byte of the request was read
        ("read_ns", "u8"),  # its last byte was
        ("due_ns", "u8"),  # the first token was due
        ("first_ns", "u8"),  # just before the first token was written
        ("first_written_ns", "u8"),  # the kernel had its last byte
        ("last_ns", "u8"),
        ("last_written_ns", "u8"),
        ("done_ns", "u8"),
        ("late_max_ns", "u8"),  # the server's own lateness over the writes of this request
        ("late_sum_ns", "u8"),
        ("token_offset", "u8"),
        ("blocked", "i4"),  # writes that the socket did not accept at once
    ]
)
"""The columns of the log, in its order."""


@dataclass(frozen=True)
class TruthLog:
    """`rows` has dtype TRUTH, in order of arrival; `token_ns` is empty without a token log."""

    rows: NDArray[np.void]
    token_ns: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    def rows_of(self, seq: ArrayLike) -> NDArray[np.void]:
        """The rows of these requests, in this order; the last row of a request sent twice. Raises
        KeyError with the number of the first request without a row."""
        requests = np.asarray(seq, np.int64)
        order = np.argsort(self.rows["seq"], kind="stable")
        sorted_seq = self.rows["seq"][order]
        place = np.searchsorted(sorted_seq, requests, side="right") - 1
        is_logged = place >= 0
        is_logged[is_logged] = sorted_seq[place[is_logged]] == requests[is_logged]
        if not is_logged.all():
            missing = int(requests[~is_logged][0])
            raise KeyError(f"request {missing} is not in the truth server's log")
        rows: NDArray[np.void] = self.rows[order[place]]
        return rows

    def tokens_ns(self, row: np.void) -> NDArray[np.uint64]:
        """The instants at which the tokens of a row were written."""
        start = int(row["token_offset"])
        return self.token_ns[start : start + int(row["sent_tokens"])]


def read_truth_log(log: Path, token_log: Path | None = None) -> TruthLog:
    """The log of a server that has ended. Columns that the file lacks are zero; other columns of
    the file are left out. Raises ValueError for a file that is no such log.
    """
    with log.open() as lines:
        head = lines.readline().strip().split(",")
        rest = lines.readlines()
    if head[:1] != ["seq"]:
        raise ValueError(f"{log}: not the log of a truth or mock server")
    rows = np.zeros(len(rest), TRUTH)
    shared = [name for name in head if name in (TRUTH.names or ())]
    if rest:
        table = np.loadtxt(
            rest,
            dtype=np.dtype([(name, TRUTH[name]) for name in shared]),
            delimiter=",",
            ndmin=1,
            usecols=[head.index(name) for name in shared],
        )
        for name in shared:
            rows[name] = table[name]
    if token_log is None:
        return TruthLog(rows)
    return TruthLog(rows, np.fromfile(token_log, np.uint64))
