"""The traffic actually sent, compared with the schedule: arrival times and lengths.

The arrival processes themselves are verified in `loadgen.workload`; this module compares first run
with its own schedule. It only describes; the checks that can invalidate a run are in `validity`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import MeasuredWindow, came_due
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.measure.statistics.time_series import describe_arrivals
from loadgen.measure.wording import format_number, format_value
from loadgen.records import Run, Times

_PER_WINDOW = (2, 10)  # requests in a window of the comparison, on average
_LEAST_REQUESTS = 20
_SHORTEST_S = 0.1
_CLOCK_S = 0.005  # a send so late is punctual, as in the lateness check
_MOST_DISPLACED = 0.05
_CHANCE = math.sqrt(-math.log(0.05 / 2) / 2)  # of the two-sample KS distance, at 5 %


@dataclass(frozen=True, slots=True)
class ArrivalStats:
    """Arrival times in the measured window: their number, their rate, and their second-order
    statistics (`describe_arrivals`; None with too few)."""

    n: int
    rate_per_s: float
    gap_cv: float | None
    gap_lag1: float | None
    dispersion: float | None


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Tokens requested (`asked`) and counted by the server (`got`): means, the number of requests
    that differ, and the largest difference."""

    n: int
    asked_mean: float
    got_mean: float
    differ: int
    most_off: int


@dataclass(frozen=True, slots=True)
class Stimulus:
    """The requests with a scheduled send time (not those that wait for another answer).

    `displaced` is the share of requests that fell into other windows of `window_s` than scheduled,
    or were not sent (`displaced_share`). `ks` is the Kolmogorov-Smirnov distance between the
    scheduled and the actual gaps, which ties and equal gaps make large; two independent samples of
    the same process exceed `ks_chance` in one case of twenty. `late_s` is the p50, the p99 and the
    maximum of sent − scheduled. `streamed_tokens` are the output tokens without reasoning that was
    not streamed; None without such reasoning.
    """

    scheduled: ArrivalStats
    sent: ArrivalStats
    ks: float | None
    ks_chance: float | None
    late_s: tuple[float, float, float] | None
    input_tokens: LengthStats | None
    output_tokens: LengthStats | None
    displaced: float | None = None
    window_s: float | None = None
    streamed_tokens: LengthStats | None = None


def stimulus(run: Run, columns: PerRequest, window: MeasuredWindow) -> Stimulus:
    """The stimulus of the measured window, including requests that were cancelled on purpose."""
    rows, schedule = run.request_rows, run.schedule_rows
    due = came_due(run)
    roots = due & (schedule["n_parents"] == 0)
    sent = roots & np.isfinite(rows["sent_s"])
    planned_s, sent_s = np.sort(schedule["scheduled_s"][roots]), np.sort(rows["sent_s"][sent])
    late_s = np.sort((rows["sent_s"] - schedule["scheduled_s"])[sent])
    ks, chance = ks_distance(np.diff(planned_s), np.diff(sent_s))
    counted = due & (rows["input_tokens"] > 0)
    answered = due & columns.is_ok & columns.has_token & (rows["results"] == 0)
    displaced, window_s = displaced_share(planned_s, sent_s, late_s, window.length_s)
    return Stimulus(
        scheduled=_arrivals(planned_s, window),
        sent=_arrivals(sent_s, window),
        ks=ks,
        ks_chance=chance,
        late_s=_p50_p99_max(late_s) if len(late_s) else None,
        input_tokens=_lengths(schedule["input_tokens"], rows["input_tokens"], counted),
        output_tokens=_lengths(schedule["output_tokens"], columns.output_tokens, answered),
        displaced=displaced,
        window_s=window_s,
        streamed_tokens=_lengths(
            schedule["output_tokens"],
            columns.streamed_tokens,
            answered & rows["hidden_tokens"].any(),
        ),
    )


def altered_arrivals(stimulus: Stimulus) -> str:
    """A finding where the arrivals sent differ from those scheduled, else ""."""
    displaced, window_s = stimulus.displaced, stimulus.window_s
    if displaced is None or window_s is None or displaced <= _MOST_DISPLACED:
        return ""
    cvs = " and ".join(
        "–" if cv is None else format_number(cv)
        for cv in (stimulus.scheduled.gap_cv, stimulus.sent.gap_cv)
    )
    return (
        "The server received other arrivals than the scenario describes: "
        f"{format_value(displaced, 'share')} of the requests fell into other windows of "
        f"{format_value(window_s, 's')} than scheduled, or were not sent (gap cv {cvs})."
    )


def displaced_share(
    planned_s: Times, sent_s: Times, late_s: Times, length_s: float
) -> tuple[float | None, float | None]:
    """The share of requests that fell into other windows of time than scheduled, and the length of
    these windows: the larger share of windows with 2 and with 10 requests on average, at least
    0.1 s long. All arrays are sorted. None for fewer than 20 requests.

    A request counts as in its window if it is no later than 5 ms, or than the p99 lateness of the
    run (at most a tenth of the window), because requests scheduled for the same time are sent in
    sequence.
    """
    n = len(planned_s)
    if n < _LEAST_REQUESTS or length_s <= 0:
        return None, None
    found = []
    for per_window in _PER_WINDOW:
        window_s = max(_SHORTEST_S, length_s * per_window / n)
        late_p99_s = float(late_s[nearest_rank(len(late_s), 0.99) - 1]) if len(late_s) else 0.0
        slack_s = max(_CLOCK_S, min(late_p99_s, window_s / 10))
        begin_s = planned_s[0] - slack_s + window_s * np.arange(math.ceil(length_s / window_s) + 1)
        counts = _counts(sent_s, begin_s, begin_s + window_s)
        least = _counts(planned_s, begin_s + slack_s, begin_s + window_s - slack_s)
        most = _counts(planned_s, begin_s - slack_s, begin_s + window_s + slack_s)
        missing, extra = np.maximum(least - counts, 0).sum(), np.maximum(counts - most, 0).sum()
        found.append((max(int(missing), int(extra)) / n, window_s))
    return max(found)


def _counts(times_s: Times, begin_s: Times, end_s: Times) -> NDArray[np.int64]:
    """The number of times in each window, begin included, end not."""
    counts: NDArray[np.int64] = np.searchsorted(times_s, end_s) - np.searchsorted(times_s, begin_s)
    return counts


def ks_distance(
    first: NDArray[np.float64], second: NDArray[np.float64]
) -> tuple[float | None, float | None]:
    """The largest distance between two empirical distribution functions, and the distance that
    chance exceeds in 5 % of cases, √(−ln(0.025)/2 · (n + m)/(n·m)); None for fewer than two values.

    Source: N. Smirnov, Table for estimating the goodness of fit of empirical distributions (1948).
    """
    n, m = len(first), len(second)
    if min(n, m) < 2:
        return None, None
    ordered = np.sort(first), np.sort(second)
    at = np.sort(np.concatenate(ordered))  # in order, each search is near the first before
    below = [np.searchsorted(v, at, side="right") / len(v) for v in ordered]
    return float(np.abs(below[0] - below[1]).max()), _CHANCE * math.sqrt((n + m) / (n * m))


def _arrivals(times: Times, window: MeasuredWindow) -> ArrivalStats:
    rate_per_s = len(times) / window.length_s if window.length_s > 0 else math.nan
    if not len(times) or window.length_s <= 0:
        return ArrivalStats(len(times), rate_per_s, None, None, None)
    stats = describe_arrivals(times - window.start_s, window.length_s)
    return ArrivalStats(
        len(times), rate_per_s, stats["gap_cv"], stats["gap_lag1"], stats["dispersion"]
    )


def _p50_p99_max(ordered_s: Times) -> tuple[float, float, float]:
    p50, p99 = (float(ordered_s[nearest_rank(len(ordered_s), q) - 1]) for q in (0.5, 0.99))
    return p50, p99, float(ordered_s[-1])


def _lengths(asked: NDArray[np.integer], got: NDArray[np.integer], of: Mask) -> LengthStats | None:
    if not of.any():
        return None
    requested, counted = asked[of].astype(np.int64), got[of].astype(np.int64)
    off = np.abs(counted - requested)
    return LengthStats(
        n=len(requested),
        asked_mean=float(requested.mean()),
        got_mean=float(counted.mean()),
        differ=int(np.count_nonzero(off)),
        most_off=int(off.max()),
    )
