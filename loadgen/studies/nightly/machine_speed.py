"""A check of the machine's own speed, which can withdraw a night's verdict.

For cells without a control. The reference is a fixed calculation, timed before and after every run.
The effect of a slower machine on a server is only estimated from it (`TWICE`), so the check can
only turn a verdict into inconclusive.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.manifest.json_section import NumberOrNull
from loadgen.measure.measures import measure
from loadgen.studies.compare.contrast import contrast
from loadgen.studies.compare.judgement import ComparedMeasure
from loadgen.studies.nightly.record import CellNight, RunNumbers

TWICE = 2.0
"""A server's slowdown may be up to this many times that of the calculation (in logarithms)."""


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """The change in the machine's time for a fixed calculation, tonight against the nights before,
    as a share. `low` and `high` are its bounds, each at the comparison's confidence; None where
    there is a single run. The interval is about these runs only, not about other nights."""

    change: NumberOrNull
    low: float | None
    high: float | None


def machine_speed(
    level: Sequence[CellNight], tonight: Sequence[RunNumbers], confidence: float
) -> MachineSpeed | None:
    """None where the calculation was not timed tonight or in any earlier night."""
    before = _log_times_s([run for night in level for run in night.trusted])
    now = _log_times_s(tonight)
    if not len(before) or not len(now):
        return None
    found = contrast(before, now)
    ends = found.interval(2 * confidence - 1)
    low, high = (None if end is None else math.expm1(end) for end in (ends.low, ends.high))
    return MachineSpeed(math.expm1(found.difference), low, high)


def without_machine_effects(
    rows: Sequence[ComparedMeasure], speed: MachineSpeed | None
) -> tuple[list[ComparedMeasure], list[str]]:
    """The rows, with worse and better changed to inconclusive where the machine's speed changed by
    more than the margin in the direction that explains them; and a note about those rows."""
    if speed is None or speed.low is None or speed.high is None:
        return list(rows), []
    checked = [
        dataclasses.replace(row, verdict="inconclusive") if _is_explained(row, speed) else row
        for row in rows
    ]
    withdrawn = [
        row.measure
        for row, before in zip(checked, rows, strict=True)
        if row.is_gated and row.verdict != before.verdict
    ]
    if not withdrawn:
        return checked, []
    direction = "slower" if speed.change > 0 else "faster"
    return checked, [
        f"The machine was {direction} tonight: the time of a fixed calculation changed by "
        f"{100 * speed.change:+.2g} % [{100 * speed.low:+.2g}, {100 * speed.high:+.2g}] from the "
        f"nights before. This may explain the change of {', '.join(withdrawn)}, so the verdict is "
        "inconclusive. Add `control:` to the file to separate the machine from the server."
    ]


def _is_explained(row: ComparedMeasure, speed: MachineSpeed) -> bool:
    """Whether the change may be due to the machine: a slower machine explains slower answers and
    what follows from them, a faster machine the opposite. Errors do not depend on the machine's
    speed, and a change that is surely more than `TWICE` as large has another cause."""
    assert speed.low is not None
    assert speed.high is not None
    is_slower, is_faster = speed.low > row.margin, speed.high < -row.margin
    if row.measure == "error_rate" or row.verdict not in ("worse", "better"):
        return False
    if not (is_slower if row.verdict == "worse" else is_faster):
        return False
    if measure(row.measure).is_share:
        return True
    nearest = min(abs(_log(row.low)), abs(_log(row.high)))
    return nearest <= TWICE * max(abs(_log(speed.low)), abs(_log(speed.high)))


def _log(change: float | None) -> float:
    return 0.0 if change is None else math.log1p(max(change, -0.999999))


def _log_times_s(runs: Sequence[RunNumbers]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.log([run.pace_s for run in runs if run.pace_s is not None], dtype=np.float64)
