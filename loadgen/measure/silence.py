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
    rows = run.request_rows
    is_waiting = _is_waiting(run)
    ended_s = rows["done_s"][is_waiting & np.isfinite(rows["done_s"])]
    if not len(ended_s):
        return None
    heard_s = _heard_s(run, is_waiting)
    if not len(heard_s):
        return None
    last_s = float(heard_s.max())
    length_s = float(ended_s.max()) - last_s
    is_long = length_s > _LEAST_AT_END_S
    if not is_long or np.count_nonzero(rows["sent_s"] > last_s) < _LEAST_SENT:
        return None
    longest_gap_s = float(np.max(np.diff(np.sort(heard_s)), initial=0.0))
    return last_s if length_s > _GAPS * longest_gap_s else None


def _is_waiting(run: Run) -> NDArray[np.bool_]:
    """The rows that still waited for their answer when they were ended."""
    return np.isin(run.request_rows["status"], (Status.timeout, Status.cancelled, Status.lost))


def _heard_s(run: Run, is_waiting: NDArray[np.bool_]) -> NDArray[np.float64]:
    """When bytes came, in s since the start."""
    rows = run.request_rows
    heard_s: NDArray[np.float64] = np.concatenate(
        [rows["headers_s"], run.chunk_rows["received_s"], rows["done_s"][~is_waiting]]
    )
    return heard_s[np.isfinite(heard_s)]


def last_heard(run: Run, until_s: float) -> tuple[float, int]:
    """When the last byte of a server came that fell silent (s since the start), and how many
    requests were sent and waited after it. `until_s`: it was silent from then on, as seen during
    the run. A run without a byte is silent from its first request on."""
    rows, is_waiting = run.request_rows, _is_waiting(run)
    heard_s, sent_s = _heard_s(run, is_waiting), rows["sent_s"]
    heard_s = heard_s[heard_s <= until_s]
    last_s = float(heard_s.max()) if len(heard_s) else float(np.nanmin(sent_s))
    is_waiting &= np.isfinite(sent_s) & (rows["done_s"] > last_s)
    return last_s, int(np.count_nonzero(is_waiting))
