"""Rules that end a run early, once it would only measure a failing or an overloaded server."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.silence import is_silence
from loadgen.measure.statistics.robust_line import median_slope
from loadgen.units import format_duration

_MIN_ENDED = 10  # requests in the window of ErrorRate
_POINTS = 21  # per window, for the slope
_SIGNIFICANT = 4.0  # standard deviations of the growth
_MIN_SHARE = 0.1  # of the requests released in the window must remain unfinished
_MIN_GROWTH = 10  # requests
_SLOWER_BY = 1.5
_MIN_SETTLED = 20  # finished requests, before a window can count as settled
_MAX_TTFTS = 32  # per step
_LONGEST_STEP_S = 1.0  # between two progress messages
_NOTABLE_S = 2.0
_BINS_S: NDArray[np.float64] = np.geomspace(1e-3, 1e4, 141)  # 12 % wide
_LONG = 0.95


@dataclass
class ErrorRate:
    """Stops a run when more than a share `limit` of the requests that ended in the last `over_s`
    failed. Applies once `over_s` has passed, if at least ten requests ended in it.
    """

    limit: float
    over_s: float
    _history: deque[tuple[float, int, int]] = field(default_factory=lambda: deque([(0.0, 0, 0)]))

    def reason(self, now_s: float, n_ended: int, n_failed: int) -> str | None:
        """The reason to stop now, or None. The counts are running totals over all shards."""
        self._history.append((now_s, n_ended, n_failed))
        while len(self._history) > 2 and self._history[1][0] <= now_s - self.over_s:
            self._history.popleft()
        start_s, ended_before, failed_before = self._history[0]
        n, failed = n_ended - ended_before, n_failed - failed_before
        if now_s - start_s < self.over_s or n < _MIN_ENDED or failed <= self.limit * n:
            return None
        return (
            f"{failed} of {n} requests failed in the last {self.over_s:g} s "
            f"(stop_when.error_rate {self.limit:.0%})"
        )


@dataclass
class Saturation:
    """Stops a run when unfinished requests pile up for `over_s` or longer.

    The backlog is the number of released requests without an end (dropped requests stay in it).
    For windows of `over_s` and its doublings up to the whole run, the Theil-Sen slope of the
    backlog over 21 points gives its growth. The growth must exceed a tenth of the requests released
    in the window, ten requests, and four standard deviations of √(released + ended) (Poisson), or
    of the growth between the points where arrivals are burstier than Poisson.

    A system that is still filling up grows as well. So, in addition, the median TTFT must have
    risen 1.5-fold from the first to the last third of the window, or the window must begin later
    than 95 % of the requests so far took.

    Sources: P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, JASA 63
    (1968); false alarms and delays on M/M/c queues: docs/decisions/0035-saturation.md.
    """

    over_s: float
    _times_s: list[float] = field(default_factory=lambda: [0.0])
    _released: list[int] = field(default_factory=lambda: [0])
    _ended: list[int] = field(default_factory=lambda: [0])
    _ttft_s: list[list[float]] = field(default_factory=lambda: [[]])  # of each step's responses
    _new_ttft_s: list[float] = field(default_factory=list)
    _n_took: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(_BINS_S) + 1, np.int64))

    def reason(
        self,
        now_s: float,
        n_released: int,
        n_ended: int,
        ttft_s: Sequence[float],
        e2e_s: Sequence[float],
    ) -> str | None:
        """The reason to stop now, or None. The counts are running totals over all shards; `ttft_s`
        and `e2e_s` count from the release, for the responses since the previous call."""
        self._new_ttft_s += ttft_s
        if e2e_s:
            np.add.at(self._n_took, np.searchsorted(_BINS_S, e2e_s), 1)
        if now_s < self._times_s[-1] + self.over_s / (_POINTS - 1):
            return None
        self._note(now_s, n_released, n_ended)
        length_s = self.over_s
        while length_s <= now_s:
            first = bisect_right(self._times_s, now_s - length_s) - 1
            if reason := self._overload(max(0, first)):
                return reason
            length_s *= 2
        return None

    def _note(self, now_s: float, n_released: int, n_ended: int) -> None:
        self._times_s.append(now_s)
        self._released.append(n_released)
        self._ended.append(n_ended)
        new = self._new_ttft_s
        self._ttft_s.append(new[:: -(-len(new) // _MAX_TTFTS)] if new else [])
        self._new_ttft_s = []

    def _overload(self, first: int) -> str | None:
        """The reason to stop if the window from step `first` to the last step shows overload."""
        released = self._released[-1] - self._released[first]
        ended = self._ended[-1] - self._ended[first]
        least = max(_MIN_GROWTH, _MIN_SHARE * released)
        if released - ended < least:
            return None
        chosen = np.linspace(first, len(self._times_s) - 1, _POINTS).round().astype(int)
        backlog = np.array([self._released[k] - self._ended[k] for k in chosen], np.float64)
        growth = median_slope(np.array([self._times_s[k] for k in chosen]), backlog)
        growth *= self._times_s[-1] - self._times_s[first]
        spread = np.sqrt(max(released + ended, (_POINTS - 1) * np.diff(backlog).var()))
        if growth < max(least, _SIGNIFICANT * spread):
            return None
        slower = self._slower(first)
        if not slower and not self._is_settled(first):
            return None
        length_s = self._times_s[-1] - self._times_s[first]
        return (
            f"{released} requests were released in the last {length_s:.3g} s and {ended} ended: "
            f"{backlog[-1]:.0f} are unfinished, {backlog[0]:.0f} were before{slower} "
            f"(stop_when.saturated {format_duration(self.over_s)})"
        )

    def _slower(self, first: int) -> str:
        start_s, end_s = self._times_s[first], self._times_s[-1]
        third_s = (end_s - start_s) / 3
        early = self._ttft_between(start_s, start_s + third_s)
        late = self._ttft_between(end_s - third_s, end_s)
        if min(len(early), len(late)) < 5 or np.median(late) < _SLOWER_BY * np.median(early):
            return ""
        before, now = (format_duration(float(np.median(part))) for part in (early, late))
        return f"; median TTFT {now}, {before} before"

    def _ttft_between(self, start_s: float, end_s: float) -> list[float]:
        steps = range(bisect_right(self._times_s, start_s), bisect_right(self._times_s, end_s))
        return [seconds for step in steps for seconds in self._ttft_s[step]]

    def _is_settled(self, first: int) -> bool:
        """Whether the window begins later than 95 % of the requests so far took."""
        n_took = int(self._n_took.sum())
        if n_took < _MIN_SETTLED:
            return False
        long = bisect_left(np.cumsum(self._n_took).tolist(), _LONG * n_took)
        return long < len(_BINS_S) and bool(self._times_s[first] >= _BINS_S[long])


@dataclass
class Silence:
    """Stops a run when its server stops answering (`measure.silence`): no byte comes from anybody
    while requests are in flight. `longest_gap_s` is the longest such time so far, with that of the
    preflight; a time within `limit_s`, the TTFT that the SLOs allow, is none.
    """

    longest_gap_s: float = 0.0
    limit_s: float = 0.0
    quiet_s: float = 0.0
    since_s: float = 0.0
    _now_s: float = 0.0
    _heard_s: float = 0.0

    def note(self, now_s: float, in_flight: int, heard_s: float | None) -> None:
        """Adds the state at `now_s`; `heard_s` is when the last byte came, None if unknown."""
        step_s, self._now_s = now_s - self._now_s, now_s
        is_heard = heard_s is not None and heard_s > self._heard_s
        if is_heard or heard_s is None or not in_flight:
            if is_heard:
                self.longest_gap_s = max(self.longest_gap_s, self.quiet_s)
            self.quiet_s, self.since_s = 0.0, now_s
            self._heard_s = self._heard_s if heard_s is None else heard_s
        else:  # a machine that slept hears nothing, either
            self.quiet_s += min(step_s, _LONGEST_STEP_S)

    @property
    def is_notable(self) -> bool:
        """Whether the present silence is longer than any before it, and than a few seconds."""
        return self.quiet_s > max(_NOTABLE_S, 2 * self.longest_gap_s)

    def reason(self, in_flight: int) -> str | None:
        """The reason to stop now, or None."""
        if self.quiet_s <= self.limit_s or not is_silence(self.quiet_s, self.longest_gap_s):
            return None
        return (
            f"the server stopped answering at second {self.since_s:.3g}: no byte came for "
            f"{self.quiet_s:.3g} s, with {in_flight} requests in flight"
        )


@dataclass
class StopRules:
    """The rules of a run; None for a rule that the scenario does not have."""

    error_rate: ErrorRate | None = None
    saturation: Saturation | None = None

    def reason(
        self,
        now_s: float,
        *,
        n_released: int,
        n_ended: int,
        n_failed: int,
        ttft_s: Sequence[float] = (),
        e2e_s: Sequence[float] = (),
    ) -> str | None:
        """The reason to stop now, or None. The counts are running totals; `ttft_s` and `e2e_s` are
        those of the responses since the previous call. Requests cancelled on purpose do not count
        as failed."""
        failing = overloaded = None
        if self.error_rate is not None:
            failing = self.error_rate.reason(now_s, n_ended, n_failed)
        if self.saturation is not None:
            overloaded = self.saturation.reason(now_s, n_released, n_ended, ttft_s, e2e_s)
        return failing or overloaded


def stop_rules(error_rate: float, over_s: float, saturated_s: float | None) -> StopRules:
    """The rules of a scenario's `stop_when`."""
    saturation = None if saturated_s is None else Saturation(saturated_s)
    return StopRules(ErrorRate(error_rate, over_s), saturation)
