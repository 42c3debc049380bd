"""How much was in the system, and whether that grew through the window: the mark of overload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import Window
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.records import Run, Times

LEAST_DUE = 40
GROWTH_SHARE = 0.05  # of what arrived between the middles of the first and the last quarter
LEAST_GROWTH = 10.0
SLOWER_BY = 1.5
RAMP_BY = 1.25


@dataclass(frozen=True, slots=True)
class Load:
    """Means per quarter of the measured window: requests in flight, and their median TTFT."""

    in_flight: tuple[float, ...]
    ttft_s: tuple[float, ...]
    is_growing: bool


def in_flight(run: Run, at_s: Times) -> NDArray[np.int64]:
    """Requests released and not yet done at each instant, waits inside the client included."""
    rows = run.request_rows
    started = np.isfinite(rows["sent_s"])
    released_s = np.sort(rows["released_s"][started])
    done_s = np.sort(np.nan_to_num(rows["done_s"][started], nan=np.inf))
    count: NDArray[np.int64] = np.searchsorted(released_s, at_s, side="right") - np.searchsorted(
        done_s, at_s, side="right"
    )
    return count


def load_through(run: Run, columns: PerRequest, due: Mask, window: Window) -> Load | None:
    """The load by quarters, or None where there is too little of it to say.

    Growing means all of: arrivals do not (a ramp is meant to), requests in flight rise from quarter
    to quarter, by at least 5 % of what arrived meanwhile and by 10, and the median TTFT of the last
    quarter (a failure counts as +inf) is at least 1.5 times that of the first. A start-up transient
    raises the first two but not the third; noise below capacity seldom raises all.
    """
    due = due & np.isfinite(run.request_rows["released_s"])
    if int(due.sum()) < LEAST_DUE or window.length_s <= 0:
        return None
    edges = np.linspace(window.start_s, window.end_s, 5)
    instants = np.linspace(window.start_s, window.end_s, 100, endpoint=False)
    flight = in_flight(run, instants).reshape(4, 25).mean(axis=1)
    released_s = run.request_rows["released_s"][due]
    quarter = np.clip(np.searchsorted(edges, released_s, side="right") - 1, 0, 3)
    arrived = np.bincount(quarter, minlength=4)
    if arrived.min() == 0:
        return None
    answered = columns.is_ok & columns.has_token
    ttft_s = np.where(answered, columns.ttft_s, np.inf)[due]
    medians = [float(np.quantile(ttft_s[quarter == k], 0.5, method="higher")) for k in range(4)]
    is_steady = arrived[3] <= RAMP_BY * arrived[0] + 3 * np.sqrt(arrived[0])
    least = max(LEAST_GROWTH, GROWTH_SHARE * 0.75 * len(released_s))
    grows = bool(np.all(np.diff(flight) > 0)) and flight[3] - flight[0] >= least
    slows = medians[3] >= SLOWER_BY * medians[0]
    return Load(tuple(flight.tolist()), tuple(medians), bool(is_steady and grows and slows))
