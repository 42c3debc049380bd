"""The measured window that a number of requests limits (`phases.requests`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import floor

import numpy as np

from loadgen.workload.arrivals import Arrivals, selected
from loadgen.workload.layout import ClassTraffic, Purpose, RandomStreams

MOST_REQUESTS = 10_000_000
CLOSED_LOOP_S = 600.0
"""The longest window of requests that wait for answers, where the scenario states none."""
_LONGEST_S = 30 * 86400.0
_FIRST_TRY_S = 1.0
_PAST_LAST_S = 2e-6  # the window is a whole number of microseconds that contains the last arrival
Process = tuple[Arrivals, RandomStreams]


def window_s(
    processes: Iterable[Process], warmup_s: float, n_requests: int, most_s: float | None
) -> float:
    """The length of a window that begins at `warmup_s` and ends with the `n_requests`-th arrival
    after it, at most 2 µs later; `most_s` if fewer arrive in that time.

    Raises ValueError if so many do not arrive within 30 days, or if they arrive at the begin of the
    window, so that it has no length.
    """
    processes = list(processes)
    end_s = warmup_s + (_LONGEST_S if most_s is None else most_s)
    horizon_s = min(end_s, warmup_s + _FIRST_TRY_S)
    while True:
        times_s = np.sort(
            np.concatenate(
                [
                    arrivals.times(streams.stream(Purpose.arrivals), horizon_s)
                    for arrivals, streams in processes
                ]
            )
        )
        first = int(np.searchsorted(times_s, warmup_s))
        if len(times_s) - first >= n_requests:
            break
        if horizon_s >= end_s:
            if most_s is not None:
                return most_s
            raise ValueError(
                f"{len(times_s) - first} of the {n_requests} requests arrive in the "
                f"{_LONGEST_S / 86400:g} days after the warm-up; lower phases.requests"
            )
        horizon_s = min(end_s, warmup_s + 2 * (horizon_s - warmup_s))
    length_s = float(times_s[first + n_requests - 1]) - warmup_s
    if length_s <= 0:
        raise ValueError(
            f"{n_requests} requests arrive at once, at {warmup_s:g}s, which makes no window; state "
            "phases.measure instead"
        )
    return floor(length_s * 1e6) * 1e-6 + _PAST_LAST_S


def first_requests(
    parts: Sequence[ClassTraffic], warmup_s: float, n_requests: int
) -> list[ClassTraffic]:
    """The parts without the arrivals after the `n_requests`-th of the window that begins at
    `warmup_s`. Of requests at the same instant those of the first class stay."""
    times_s = np.concatenate([part.arrivals.scheduled_s for part in parts])
    n_kept = int(np.count_nonzero(times_s < warmup_s)) + n_requests
    kept = np.zeros(len(times_s), bool)
    kept[np.argsort(times_s, kind="stable")[:n_kept]] = True
    of_part = np.split(kept, np.cumsum([len(part.arrivals) for part in parts])[:-1])
    return [
        part if mask.all() else replace(part, arrivals=selected(part.arrivals, mask))
        for part, mask in zip(parts, of_part, strict=True)
    ]
