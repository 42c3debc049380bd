"""Whether the machine itself was slower or faster tonight, and so no verdict is due.

For cells without a control. A fixed calculation is no server, and what a slower machine does to one
is only guessed (`TWICE`): it can take a verdict back, and never makes one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.measure.comparison.contrast import contrast
from loadgen.measure.comparison.judgement import ComparedMeasure
from loadgen.measure.comparison.measures import measure
from loadgen.measure.nights.night_record import CellNight, RunNumbers

TWICE = 2.0
"""A server may suffer so many times as much from its machine as a calculation does (logarithms)."""


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """How much longer the machine took tonight for a fixed calculation than in the nights before, a
    share; `low` and `high` are each good at the comparison's confidence, None where one run is no
    judge. It is about those very runs: what other nights may bring is no part of it."""

    change: float
    low: float | None
    high: float | None


def machine_speed(
    level: Sequence[CellNight], tonight: Sequence[RunNumbers], confidence: float
) -> MachineSpeed | None:
    """None where the pace is not known of tonight or of no earlier night."""
    before = _log_paces([run for night in level for run in night.trusted])
    now = _log_paces(tonight)
    if not len(before) or not len(now):
        return None
    found = contrast(before, now)
    ends = found.interval(2 * confidence - 1)
    low, high = (None if end is None else math.expm1(end) for end in (ends.low, ends.high))
    return MachineSpeed(math.expm1(found.difference), low, high)


def left_open(
    rows: Sequence[ComparedMeasure], pace: MachineSpeed | None
) -> tuple[list[ComparedMeasure], list[str]]:
    """The rows, with worse and better made inconclusive where the machine surely differed by more
    than the margin in the direction that explains it; and a sentence about those."""
    if pace is None or pace.low is None or pace.high is None:
        return list(rows), []
    found = [
        dataclasses.replace(row, verdict="inconclusive") if _is_explained(row, pace) else row
        for row in rows
    ]
    opened = [
        row.measure
        for row, was in zip(found, rows, strict=True)
        if row.is_gated and row.verdict != was.verdict
    ]
    if not opened:
        return found, []
    how = "longer" if pace.change > 0 else "shorter"
    return found, [
        f"The machine itself took {100 * abs(pace.change):.2g} % {how} than in the nights before "
        f"[{100 * pace.low:+.2g}, {100 * pace.high:+.2g}] for a fixed calculation before and after "
        f"every run, so {', '.join(opened)} may be its doing and is left open. `control:` in the "
        "file tells the two apart."
    ]


def _is_explained(row: ComparedMeasure, pace: MachineSpeed) -> bool:
    """A slower machine explains what is slow and what a slow server breaks, a faster one the
    opposite; errors are no matter of pace, nor is a change that is surely twice as large."""
    assert pace.low is not None
    assert pace.high is not None
    is_slower, is_faster = pace.low > row.margin, pace.high < -row.margin
    if row.measure == "error_rate" or row.verdict not in ("worse", "better"):
        return False
    if not (is_slower if row.verdict == "worse" else is_faster):
        return False
    if measure(row.measure).is_share:
        return True
    nearest = min(abs(_log(row.low)), abs(_log(row.high)))
    return nearest <= TWICE * max(abs(_log(pace.low)), abs(_log(pace.high)))


def _log(change: float | None) -> float:
    return 0.0 if change is None else math.log1p(max(change, -0.999999))


def _log_paces(runs: Sequence[RunNumbers]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.log([run.pace_s for run in runs if run.pace_s is not None], dtype=np.float64)
