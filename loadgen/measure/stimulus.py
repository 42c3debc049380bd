"""What was really sent, beside what was scheduled: the arrivals and the lengths.

That the arrival processes are what they say is proved where they are drawn; here one run is held
against its own schedule. It describes, and does not judge: the gates are in `validity`.
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
from loadgen.measure.wording import format_number
from loadgen.records import Run, Times

_CHANCE = math.sqrt(-math.log(0.05 / 2) / 2)  # of the two-sample KS distance, at 5 %


@dataclass(frozen=True, slots=True)
class ArrivalStats:
    """Instants of one kind in the measured window: how many, per second, and their second-order
    statistics (`describe_arrivals`; None where there are too few)."""

    n: int
    rate_per_s: float
    gap_cv: float | None
    gap_lag1: float | None
    dispersion: float | None


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Tokens asked and got, of the answers where the server counted them: means, how many differ,
    and by how much at most."""

    n: int
    asked_mean: float
    got_mean: float
    differ: int
    most_off: int


@dataclass(frozen=True, slots=True)
class Stimulus:
    """Requests with an instant of their own (none that wait for another's answer).

    `ks` is the Kolmogorov-Smirnov distance between the gaps scheduled and the gaps sent; above
    `ks_chance` two independent samples of one process differ in one case of twenty. `late_s` are
    the p50, the p99 and the maximum of sent − scheduled.
    """

    scheduled: ArrivalStats
    sent: ArrivalStats
    ks: float | None
    ks_chance: float | None
    late_s: tuple[float, float, float] | None
    input_tokens: LengthStats | None
    output_tokens: LengthStats | None


def stimulus(run: Run, columns: PerRequest, window: MeasuredWindow) -> Stimulus:
    """The stimulus of the measured window, requests that were cancelled on purpose included."""
    rows, schedule = run.request_rows, run.schedule_rows
    asked = came_due(run)
    roots = asked & (schedule["n_parents"] == 0)
    sent = roots & np.isfinite(rows["sent_s"])
    planned_s, sent_s = np.sort(schedule["scheduled_s"][roots]), np.sort(rows["sent_s"][sent])
    late_s = np.sort((rows["sent_s"] - schedule["scheduled_s"])[sent])
    ks, chance = ks_distance(np.diff(planned_s), np.diff(sent_s))
    counted = asked & (rows["input_tokens"] > 0)
    answered = asked & columns.is_ok & columns.has_token
    return Stimulus(
        scheduled=_arrivals(planned_s, window),
        sent=_arrivals(sent_s, window),
        ks=ks,
        ks_chance=chance,
        late_s=_ends(late_s) if len(late_s) else None,
        input_tokens=_lengths(schedule["input_tokens"], rows["input_tokens"], counted),
        output_tokens=_lengths(schedule["output_tokens"], columns.output_tokens, answered),
    )


def altered_arrivals(found: Stimulus) -> str:
    """A sentence where what was sent does not look like what was scheduled, else none."""
    if found.ks is None or found.ks_chance is None or found.ks <= found.ks_chance:
        return ""
    cvs = " and ".join(
        "–" if cv is None else format_number(cv)
        for cv in (found.scheduled.gap_cv, found.sent.gap_cv)
    )
    return (
        "The gaps between requests as sent differ from those scheduled (KS distance"
        f" {found.ks:.2f}, {found.ks_chance:.2f} by chance; gap cv {cvs}): the server saw other"
        " arrivals than the scenario asks for."
    )


def ks_distance(
    one: NDArray[np.float64], other: NDArray[np.float64]
) -> tuple[float | None, float | None]:
    """The largest distance between two empirical distribution functions, and the one that chance
    exceeds in 5 % of cases, √(−ln(0.025)/2 · (n + m)/(n·m)); None for fewer than two values.

    Source: N. Smirnov, Table for estimating the goodness of fit of empirical distributions (1948).
    """
    n, m = len(one), len(other)
    if min(n, m) < 2:
        return None, None
    ordered = np.sort(one), np.sort(other)
    at = np.sort(np.concatenate(ordered))  # in order, each search is near the one before
    below = [np.searchsorted(v, at, side="right") / len(v) for v in ordered]
    return float(np.abs(below[0] - below[1]).max()), _CHANCE * math.sqrt((n + m) / (n * m))


def _arrivals(times: Times, window: MeasuredWindow) -> ArrivalStats:
    rate_per_s = len(times) / window.length_s if window.length_s > 0 else math.nan
    if not len(times) or window.length_s <= 0:
        return ArrivalStats(len(times), rate_per_s, None, None, None)
    found = describe_arrivals(times - window.start_s, window.length_s)
    return ArrivalStats(
        len(times), rate_per_s, found["gap_cv"], found["gap_lag1"], found["dispersion"]
    )


def _ends(ordered_s: Times) -> tuple[float, float, float]:
    p50, p99 = (float(ordered_s[nearest_rank(len(ordered_s), q) - 1]) for q in (0.5, 0.99))
    return p50, p99, float(ordered_s[-1])


def _lengths(asked: NDArray[np.integer], got: NDArray[np.integer], of: Mask) -> LengthStats | None:
    if not of.any():
        return None
    wanted, counted = asked[of].astype(np.int64), got[of].astype(np.int64)
    off = np.abs(counted - wanted)
    return LengthStats(
        n=len(wanted),
        asked_mean=float(wanted.mean()),
        got_mean=float(counted.mean()),
        differ=int(np.count_nonzero(off)),
        most_off=int(off.max()),
    )
