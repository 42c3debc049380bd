"""Closed loops: the start of their users, which is no part of the measured figures, and the rate of
what follows.

Definition and reasons: docs/metrics.md, "Closed loops".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from loadgen.measure.attainment import MeasuredWindow, came_due, measured_window
from loadgen.measure.per_request import Mask
from loadgen.measure.statistics.event_rate import coherence, event_rate, product, wider
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.measure.wording import format_count, format_value
from loadgen.records import Run, Status
from loadgen.units import parse_duration_s

STARTED = 0.95
"""The share of the users whose first answer ends the start."""
REQUESTS_PER_USER = 20
"""Enough for intervals, as a rule; at least half of them after the start."""
_FIXED_WINDOW = frozenset({"ramp", "steps", "curve", "diurnal", "flash_crowd", "trace", "sum"})
"""Arrivals whose rate changes on purpose: a class of them keeps the window of the whole run."""
_LEAST_CYCLES = 4.0  # after the start, that show whether the users send together
_LOCK_STEP = 0.25  # coherence, as of users that all send within three fifths of a cycle


@dataclass(frozen=True, slots=True)
class Start:
    """The requests of the start: all that were released, and those that failed; p90 of the TTFT
    (E2E without a stream; failures as +inf) of each user's first request; the seconds in which the
    users joined."""

    requests: int
    failed: int
    first_p90_s: float
    joined_s: float


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """The users of a run, and the start of their closed loop.

    `started_s` is the time, since the run's epoch, at which 95 % of the users had had their first
    answer or failure; None: they never had. `is_left_out`: the window begins there. `is_start_up`:
    fewer requests than users followed, so that all count and the run shows its start. `rate` is the
    rate of releases in the window with its interval, which needs about `requests_needed` requests
    where it is open (None: it is not). `coherence` (NaN: too few cycles) is 0 for users that send
    independently and 1 where all send at once. `is_all_traffic`: no class is an open loop.
    """

    users: int
    started_s: float | None
    is_left_out: bool
    is_start_up: bool
    start: Start
    rate: Interval
    requests_needed: int | None
    coherence: float
    is_streamed: bool = True
    is_all_traffic: bool = True

    @property
    def is_in_lock_step(self) -> bool:
        return self.coherence > _LOCK_STEP

    @property
    def text(self) -> str:
        """`64 users at once: p90 TTFT 2.04 s; …`, and what became of their first requests."""
        joined = "at once"
        if self.start.joined_s >= 1e-3:
            joined = f"within {format_value(self.start.joined_s, 's')}"
        metric = "TTFT" if self.is_streamed else "E2E"
        value = format_value(self.start.first_p90_s, "s")
        text = f"{format_count(self.users)} users {joined}: p90 {metric} {value}"
        if self.start.failed:
            failed, sent = format_count(self.start.failed), format_count(self.start.requests)
            text += f", {failed} of {sent} requests failed"
        if self.is_left_out:
            until = format_value(self.started_s or 0.0, "s")
            requests = format_count(self.start.requests)
            return f"{text}; {requests} requests to {until} are left out of the figures"
        return text

    @property
    def needs_text(self) -> str:
        """`a closed loop of 64 users needs about 1 280 requests`."""
        needed = format_count(self.requests_needed or REQUESTS_PER_USER * self.users)
        return f"a closed loop of {format_count(self.users)} users needs about {needed} requests"

    @property
    def start_up_text(self) -> str:
        return (
            "mostly start-up: too few requests followed the first answers of the users, and "
            f"{self.needs_text}"
        )


def with_start_left_out(run: Run) -> Run:
    """The run whose measured window begins where the start of its closed loop ends.

    Unchanged without a closed loop, with a single user (who has no others to fall into step with),
    beside classes whose rate changes on purpose, where the warm-up is longer than the start, and
    where fewer requests than users would remain.
    """
    whole = counting_start(run)
    users = _users(whole)
    if users is None or users.n == 1:
        return whole
    ended_s = users.started_s(_timeout_s(whole))
    if not whole.manifest.window.warmup_s < ended_s < measured_window(whole).end_s:
        return whole
    cut = _with_start(whole, ended_s)
    return cut if np.count_nonzero(came_due(cut) & users.rows) >= users.n else whole


def counting_start(run: Run) -> Run:
    """The run whose measured window includes the start of its closed loop."""
    return run if run.manifest.window.started_s is None else _with_start(run, None)


def is_closed(run: Run) -> bool:
    """Whether all traffic is a closed loop, so that the server's speed sets the rate."""
    classes = run.manifest.classes.values()
    return bool(classes) and all(own.is_closed_loop for own in classes)


def is_start_up(run: Run) -> bool:
    """Whether a run is mostly the start of its closed loop: all of it counts, because fewer
    requests than users followed."""
    users = _users(run)
    return users is not None and _is_start_up(run, users)


def _is_start_up(run: Run, users: _Users) -> bool:
    if users.n == 1 or run.manifest.window.started_s is not None:
        return False
    followed = came_due(run) & users.rows
    followed &= run.request_rows["released_s"] >= users.started_s(_timeout_s(run))
    return int(np.count_nonzero(followed)) < users.n


def closed_loop(
    run: Run, waits_s: NDArray[np.float64], is_streamed: bool, confidence: float
) -> ClosedLoop | None:
    """The closed loop of a run as its window counts it; None without users that send again and
    again. `waits_s` is the TTFT, or the E2E without a stream, by row."""
    users = _users(run)
    if users is None:
        return None
    window, rows = measured_window(run), run.request_rows
    ended_s = users.started_s(_timeout_s(run))
    has_started = ended_s < window.end_s
    before = users.rows & (rows["released_s"] < min(ended_s, window.end_s))
    is_left_out = run.manifest.window.started_s is not None
    counted = came_due(run) & users.rows
    is_open = _is_start_up(run, users)
    firsts = users.first_rows()
    firsts_s = np.sort(np.where(rows["status"][firsts] == Status.ok, waits_s[firsts], np.inf))
    rate = Interval(math.nan)
    if counted.any():
        rate = closed_rate(run, counted, window, confidence, is_open)
    sent_s = rows["released_s"][counted]
    cycle_s = users.n / rate.value if rate.value > 0 else math.nan
    n_before = int(np.count_nonzero(before))
    has_cycles = not is_open and window.length_s >= _LEAST_CYCLES * cycle_s
    return ClosedLoop(
        users=users.n,
        started_s=ended_s if has_started else None,
        is_left_out=is_left_out,
        is_start_up=is_open,
        start=Start(
            requests=n_before,
            failed=int(np.count_nonzero(before & _is_failed(run))),
            first_p90_s=float(firsts_s[nearest_rank(len(firsts_s), 0.9) - 1])
            if len(firsts_s)
            else math.nan,
            joined_s=users.joined_within_s(),
        ),
        rate=rate,
        requests_needed=None
        if rate.low is not None
        else max(REQUESTS_PER_USER * users.n, n_before + REQUESTS_PER_USER // 2 * users.n),
        coherence=coherence(sent_s, window.start_s, window.end_s, cycle_s)
        if has_cycles and users.n > 1
        else math.nan,
        is_streamed=is_streamed,
        is_all_traffic=is_closed(run),
    )


def closed_rate(
    run: Run,
    counted: Mask,
    window: MeasuredWindow,
    confidence: float,
    is_start_up: bool,
    met: Mask | None = None,
) -> Interval:
    """The rate of the releases of `counted` rows (of those of them in `met`), with a two-sided
    interval; open where the run is mostly start-up. A cycle of a user is a unit: a request, or a
    whole session or chain."""
    sent_s = run.request_rows["released_s"][counted if met is None else counted & met]
    sent_s = sent_s[np.isfinite(sent_s)]
    n_users, each = _cycles(run, counted)
    cycle_s = window.length_s / each if each and not is_start_up else math.nan
    return event_rate(sent_s, window.start_s, window.end_s, cycle_s, confidence, n_users)


def cycles(run: Run, counted: Mask) -> float:
    """The mean number of cycles of a user in the `counted` rows; 0 with a single user, beside an
    open loop, and where the start of the users counts."""
    if not is_closed(run) or run.manifest.window.started_s is None:
        return 0.0
    n_users, each = _cycles(run, counted)
    return each if n_users > 1 else 0.0


def _cycles(run: Run, counted: Mask) -> tuple[int, float]:
    """The number of users in the `counted` rows, and the mean number of their cycles."""
    schedule = run.schedule_rows[counted]
    n_units = int(np.count_nonzero(schedule["after_failure"] | (schedule["n_parents"] == 0)))
    n_users = len(np.unique(schedule["session_id"]))
    return n_users, n_units / n_users if n_users else 0.0


def closed_goodput(
    run: Run,
    counted: Mask,
    met: Mask,
    window: MeasuredWindow,
    confidence: float,
    is_start_up: bool,
    share: Interval,
) -> Interval:
    """The rate of the `counted` releases times the `share` of them that met their SLOs, in `met`.
    At least as wide as the interval of the rate of these releases alone: where requests are short,
    more come and more are in time, so that the errors of rate and share add up."""
    rate = closed_rate(run, counted, window, confidence, is_start_up)
    of_met = closed_rate(run, counted, window, confidence, is_start_up, met)
    return wider(product(rate, share), of_met)


@dataclass(frozen=True, slots=True)
class _Users:
    """The users of the closed-loop classes of a run: the rows of all, the user of each of these
    rows (0, 1, …), and when each row was released and had ended (+inf: not)."""

    n: int
    rows: Mask
    user: NDArray[np.intp]
    released_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]

    def started_s(self, timeout_s: float) -> float:
        """When 95 % of the users had had their first answer or failure, at most a time-out after
        as many had joined; +inf: never."""
        rank = nearest_rank(self.n, STARTED) - 1
        first_s, joined_s = self._earliest(self.ended_s), self._earliest(self.released_s)
        return min(float(np.sort(first_s)[rank]), float(np.sort(joined_s)[rank]) + timeout_s)

    def first_rows(self) -> NDArray[np.intp]:
        """The number of the first released row of each user that has any."""
        order = np.lexsort((self.released_s, self.user))
        order = order[np.isfinite(self.released_s[order])]
        _, at = np.unique(self.user[order], return_index=True)
        numbers: NDArray[np.intp] = np.flatnonzero(self.rows)[order[at]]
        return numbers

    def joined_within_s(self) -> float:
        joined_s = self._earliest(self.released_s)
        joined_s = joined_s[np.isfinite(joined_s)]
        return float(np.ptp(joined_s)) if len(joined_s) else 0.0

    def _earliest(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        earliest = np.full(self.n, np.inf)
        np.minimum.at(earliest, self.user, times_s)
        return earliest


def _users(run: Run) -> _Users | None:
    """None without a closed loop, or beside a class whose window is fixed."""
    classes = run.manifest.classes
    of_loop = [name in classes and classes[name].is_closed_loop for name in run.names.classes]
    rows: Mask = np.isin(run.schedule_rows["class_id"], np.flatnonzero(of_loop))
    if not rows.any() or _FIXED_WINDOW & _arrival_kinds(run):
        return None
    sessions, user = np.unique(run.schedule_rows["session_id"][rows], return_inverse=True)
    recorded = run.request_rows[rows]
    released_s = np.where(np.isnan(recorded["released_s"]), np.inf, recorded["released_s"])
    ended_s = np.where(np.isnan(recorded["done_s"]), released_s, recorded["done_s"])
    unfinished = np.isin(recorded["status"], (Status.cancelled, Status.lost))
    ended_s = np.where(unfinished | np.isinf(released_s), np.inf, ended_s)
    return _Users(len(sessions), rows, user, released_s, ended_s)


def _arrival_kinds(run: Run) -> set[str]:
    resolved = run.manifest.scenario.resolved
    classes = resolved.get("classes")
    stated = [resolved.get("arrivals")]
    if isinstance(classes, dict):
        stated += [own.get("arrivals") for own in classes.values() if isinstance(own, dict)]
    return {str(found.get("kind")) for found in stated if isinstance(found, dict)}


def _timeout_s(run: Run) -> float:
    limits = run.manifest.scenario.resolved.get("limits")
    stated = limits.get("timeout") if isinstance(limits, dict) else None
    return parse_duration_s(str(stated)) if stated is not None else math.inf


def _is_failed(run: Run) -> Mask:
    failed: Mask = ~np.isin(run.request_rows["status"], (Status.ok, Status.cancelled))
    return failed


def _with_start(run: Run, ended_s: float | None) -> Run:
    window = structs.replace(run.manifest.window, started_s=ended_s)
    return replace(run, manifest=structs.replace(run.manifest, window=window))
