"""The number of requests in flight, and of users that think, over the measured window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.load import mean_in_flight
from loadgen.records import Run, Status


@dataclass(frozen=True, slots=True)
class InFlight:
    """The mean and the largest number of requests in flight, from release to end, waits inside the
    load generator included. `thinking` is the mean number of users (of a closed loop, or of
    sessions and chains) between an answer and their next request; None where no request waits for
    another."""

    mean: float
    max: int
    thinking: float | None


def in_flight(run: Run, window: MeasuredWindow) -> InFlight:
    """Over the measured window, NaN for an empty one."""
    if not window.length_s > 0:
        return InFlight(math.nan, 0, None)
    mean = float(mean_in_flight(run, np.array([window.start_s, window.end_s]))[0])
    return InFlight(mean, _largest(run, window), _thinking(run, window))


def _largest(run: Run, window: MeasuredWindow) -> int:
    begun_s, ended_s = _spans(run, np.isfinite(run.request_rows["sent_s"]))
    overlaps = (begun_s < window.end_s) & (ended_s > window.start_s)
    begun_s, ended_s = np.sort(begun_s[overlaps]), np.sort(ended_s[overlaps])
    if not len(begun_s):
        return 0
    n_ended = np.searchsorted(ended_s, begun_s, side="right")  # an answer, then the next request
    return int((np.arange(1, len(begun_s) + 1) - n_ended).max())


def _thinking(run: Run, window: MeasuredWindow) -> float | None:
    """The time that users had joined and had no request in flight, over the window's length.

    A user of a closed loop stays until the end of the window, any other until its last request has
    ended: the last that was planned, or the last before a failure.
    """
    schedule, rows = run.schedule_rows, run.request_rows
    if not (schedule["n_parents"] > 0).any():
        return None
    is_released = np.isfinite(rows["released_s"]) & (rows["status"] != Status.dropped)
    _, user = np.unique(schedule["session_id"], return_inverse=True)
    begun_s, ended_s = _spans(run, is_released)
    order = np.lexsort((begun_s, user[is_released]))
    user_of, begun_s, ended_s = user[is_released][order], begun_s[order], ended_s[order]
    if not len(user_of):
        return 0.0
    is_first = np.r_[True, np.diff(user_of) > 0]
    starts = np.flatnonzero(is_first)
    left_s = np.where(_stays(run, user)[user_of[starts]], np.inf, np.nan)
    last_s = np.maximum.reduceat(ended_s, starts)
    present = _time_in(window, begun_s[starts], np.where(np.isnan(left_s), last_s, left_s))
    # A user with several requests at once is busy once: each counts from the end of those before.
    span_s = float(max(window.end_s, ended_s[np.isfinite(ended_s)].max(initial=0.0))) + 1.0
    ended_s = np.minimum(ended_s, span_s)
    shifted_s = np.maximum.accumulate(ended_s + user_of * span_s) - user_of * span_s
    before_s = np.r_[-np.inf, shifted_s[:-1]]
    before_s[starts] = -np.inf
    busy = _time_in(window, np.maximum(begun_s, before_s), np.maximum(ended_s, before_s))
    return max(0.0, round((present - busy) / window.length_s, 9))  # rounding errors are no user


def _stays(run: Run, user: NDArray[np.intp]) -> NDArray[np.bool_]:
    """By user: whether it has further requests at the end of the run, which only the end kept from
    being released."""
    schedule, status = run.schedule_rows, run.request_rows["status"]
    classes = run.manifest.classes
    loops = [name in classes and classes[name].is_closed_loop for name in run.names.classes]
    in_loop = np.isin(schedule["class_id"], np.flatnonzero(loops))
    waits = (status == Status.not_released) | (status == Status.cancelled)
    failed = ~waits & (status != Status.ok)
    n = int(user.max()) + 1
    stays = np.bincount(user[waits], minlength=n) > 0
    stays &= np.bincount(user[failed & ~in_loop], minlength=n) == 0
    stays |= np.bincount(user[in_loop], minlength=n) > 0
    return stays


def _spans(run: Run, kept: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When each row was released and had ended (+inf: not in this run)."""
    rows = run.request_rows[kept]
    return rows["released_s"], np.where(np.isnan(rows["done_s"]), np.inf, rows["done_s"])


def _time_in(
    window: MeasuredWindow, from_s: NDArray[np.float64], to_s: NDArray[np.float64]
) -> float:
    within_s = np.minimum(to_s, window.end_s) - np.maximum(from_s, window.start_s)
    return float(np.maximum(within_s, 0.0).sum())
