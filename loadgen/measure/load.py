"""How much was in the system, and whether that grew through the window: the mark of overload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.records import Run, Times

LEAST_DUE = 40
GROWTH_SHARE = 0.05  # of what arrived between the middles of the first and the last quarter
LEAST_GROWTH = 10.0
SLOWER_BY = 1.5
RAMP_BY = 1.25


@dataclass(frozen=True, slots=True)
class LoadByQuarter:
    """Means per quarter of the measured window: requests in flight, and their median TTFT."""

    in_flight: tuple[float, ...]
    ttft_s: tuple[float, ...]
    is_growing: bool


def mean_in_flight(run: Run, edges_s: Times) -> NDArray[np.float64]:
    """Mean number of requests released and not yet done, waits inside the client included.

    One value per bin between ascending edges, exact: with F(t) = Σ max(0, t − released) −
    Σ max(0, t − done) it is the rise of F over a bin divided by the bin's width.
    """
    return mean_over(run, edges_s[:-1], edges_s[1:])


def mean_over(run: Run, from_s: Times, to_s: Times) -> NDArray[np.float64]:
    """`mean_in_flight` over stretches of any kind, each from `from_s` to a later `to_s`."""
    rows = run.request_rows
    sent = np.isfinite(rows["sent_s"])
    released_s, done_s = rows["released_s"][sent], rows["done_s"][sent]
    ended_s = done_s[np.isfinite(done_s)]

    begun, ended = _TimeSince(released_s), _TimeSince(ended_s)

    def spent_s(at_s: Times) -> NDArray[np.float64]:
        return begun.at(at_s) - ended.at(at_s)

    mean: NDArray[np.float64] = (spent_s(to_s) - spent_s(from_s)) / (to_s - from_s)
    return np.maximum(mean, 0.0)  # rounding may leave a hair below none


class _TimeSince:
    """Σ max(0, at − start) over all starts, for any instants."""

    def __init__(self, starts_s: Times) -> None:
        self._ordered = np.sort(starts_s)
        self._total_s = np.r_[0.0, np.cumsum(self._ordered)]

    def at(self, at_s: Times) -> NDArray[np.float64]:
        n_begun = np.searchsorted(self._ordered, at_s)
        since_s: NDArray[np.float64] = n_begun * at_s - self._total_s[n_begun]
        return since_s


def load_through(
    run: Run, columns: PerRequest, due: Mask, window: MeasuredWindow
) -> LoadByQuarter | None:
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
    flight = mean_in_flight(run, edges)
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
    return LoadByQuarter(
        tuple(flight.tolist()), tuple(medians), bool(is_steady and grows and slows)
    )
