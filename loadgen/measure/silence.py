"""Silence of a server: no byte from anybody while requests are in flight."""

from __future__ import annotations

import numpy as np

from loadgen.records import Run, Status

_LEAST_S, _GAPS = 10.0, 5.0


def is_silence(length_s: float, longest_gap_s: float) -> bool:
    """Whether a time without a byte is longer than a slow server explains: than 10 s, and than 5
    times the longest such time before."""
    return length_s > max(_LEAST_S, _GAPS * longest_gap_s)


def last_heard(run: Run, until_s: float) -> tuple[float, int]:
    """When the last byte of a server came that fell silent (s since the start), and how many
    requests were sent and waited after it. `until_s`: it was silent from then on, as seen during
    the run. A run without a byte is silent from its first request on."""
    rows = run.request_rows
    is_waiting = np.isin(rows["status"], (Status.timeout, Status.cancelled, Status.lost))
    heard_s = np.concatenate(
        [rows["headers_s"], run.chunk_rows["received_s"], rows["done_s"][~is_waiting]]
    )
    heard_s = heard_s[heard_s <= until_s]
    sent_s = rows["sent_s"]
    last_s = float(heard_s.max()) if len(heard_s) else float(np.nanmin(sent_s))
    is_waiting &= np.isfinite(sent_s) & (rows["done_s"] > last_s)
    return last_s, int(np.count_nonzero(is_waiting))
