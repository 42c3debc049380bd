"""Silence of a server: no byte from anybody while requests are in flight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loadgen.records import Run, Status

_LEAST_S, _GAPS = 10.0, 5.0
_LEAST_AT_END_S = 3.0  # of a run that ended in silence
_LEAST_SENT = 3  # requests into the silence


def is_silence(length_s: float, longest_gap_s: float) -> bool:
    """Whether a time without a byte is longer than a slow server explains: than 10 s, and than 5
    times the longest such time before."""
    return length_s > max(_LEAST_S, _GAPS * longest_gap_s)


def silent_at_end(run: Run) -> float | None:
    """When the silence began in which a run ended, in s since the start; None if it did not.

    Of three requests or more that were sent into it none got a byte, and it lasted longer than 3 s
    and than 5 times the longest time without a byte before. The run went on until its end, because
    that came within the 10 s after which a silence ends a run (`is_silence`).
    """
    heard_s, is_waiting = _heard_s(run)
    rows = run.request_rows
    if not len(heard_s) or not is_waiting.any():
        return None
    heard_s = np.sort(heard_s)
    last_s, gaps_s = float(heard_s[-1]), np.diff(heard_s)
    length_s = float(np.nanmax(rows["done_s"][is_waiting])) - last_s
    longest_gap_s = float(gaps_s.max()) if len(gaps_s) else 0.0
    if length_s <= max(_LEAST_AT_END_S, _GAPS * longest_gap_s):
        return None
    return last_s if np.count_nonzero(rows["sent_s"] > last_s) >= _LEAST_SENT else None


def _heard_s(run: Run) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """When bytes came (s since the start), and the rows that still waited when they were ended."""
    rows = run.request_rows
    is_waiting = np.isin(rows["status"], (Status.timeout, Status.cancelled, Status.lost))
    heard_s = np.concatenate(
        [rows["headers_s"], run.chunk_rows["received_s"], rows["done_s"][~is_waiting]]
    )
    return heard_s[np.isfinite(heard_s)], is_waiting


def last_heard(run: Run, until_s: float) -> tuple[float, int]:
    """When the last byte of a server came that fell silent (s since the start), and how many
    requests were sent and waited after it. `until_s`: it was silent from then on, as seen during
    the run. A run without a byte is silent from its first request on."""
    heard_s, is_waiting = _heard_s(run)
    heard_s, rows = heard_s[heard_s <= until_s], run.request_rows
    sent_s = rows["sent_s"]
    last_s = float(heard_s.max()) if len(heard_s) else float(np.nanmin(sent_s))
    is_waiting &= np.isfinite(sent_s) & (rows["done_s"] > last_s)
    return last_s, int(np.count_nonzero(is_waiting))
