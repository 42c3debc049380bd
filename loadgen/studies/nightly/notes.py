"""The notes of a night's verdict: runs left out, changes too small to find, assumptions made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from loadgen.measure.measures import Measure
from loadgen.studies.compare.judgement import ComparedMeasure
from loadgen.studies.nightly.record import CellNight, RunNumbers
from loadgen.studies.nightly.statistics import NightNoise
from loadgen.studies.nightly.values import controls_of, values_of

_UNLUCKY = 0.75


def left_out(night: CellNight) -> list[str]:
    notes = [
        f"{run.name} is left out because the run is invalid: {' '.join(run.why_left_out)}"
        for run in night.runs
        if not run.is_trusted
    ]
    return [*notes, *(f"A repeat is missing: {reason}" for reason in night.failures)]


def without_number(tonight: Sequence[RunNumbers], measure: Measure) -> list[str]:
    """A note where the control of a run has no value of the measure to compare with."""
    of_controls = values_of(controls_of(tonight), measure)
    has_number = np.isfinite(of_controls) if measure.is_share else of_controls > 0
    names = [run.name for run, has in zip(tonight, has_number, strict=True) if not has]
    note = f"{measure.text}: the control run of {', '.join(names)} has no value to compare with."
    return [note] if names else []


def out_of_reach(rows: Sequence[ComparedMeasure], noise: Mapping[str, NightNoise]) -> list[str]:
    """A note on the deciding measures whose change no number of repeats would find."""
    changes, fewest_df = [], math.inf
    for row in rows:
        nights = noise.get(row.measure)
        is_planned = row.is_gated and not row.is_set_aside and math.isfinite(row.smallest_found)
        if nights is None or not is_planned or row.runs_needed is not None or not nights.night_sd:
            continue
        fewest_df = min(fewest_df, nights.night_df)
        unit = "points" if row.unit == "share" else "%"
        changes.append(
            f"{row.measure}, {100 * row.effect:.3g} {unit} (nights vary by "
            f"{100 * nights.night_sd:.2g} {unit} more than their runs; tonight's repeats find a "
            f"change of {100 * row.smallest_found:.3g} {unit})"
        )
    if not changes:
        return []
    return [
        "No number of repeats would find these changes in 9 of 10 nights: "
        f"{', '.join(changes)}. The variation between nights is estimated with only "
        f"{fewest_df:.0f} degrees of freedom and may be chance; a longer `window` of nights "
        "estimates it better."
    ]


def unlucky(
    planned: Sequence[tuple[ComparedMeasure, float]], noise: Mapping[str, NightNoise]
) -> list[str]:
    """A note on the deciding measures whose repeats are planned as if all nights were equal
    although they look different, with the power of that plan if they are different."""
    plans = [
        f"{row.measure}: {row.runs_needed} repeats (nights vary by {100 * nights.night_sd:.2g} "
        f"{'points' if row.unit == 'share' else '%'}; equal nights would in "
        f"{max(1, round(100 * nights.alike_p))} of 100 cases; if they do vary that much, the "
        f"repeats find the change in {10 * power:.0f} of 10 nights)"
        for row, power in planned
        if (nights := noise.get(row.measure)) is not None
        and row.is_gated
        and not row.is_set_aside
        and row.runs_needed is not None
        and nights.may_be_chance
        and power < _UNLUCKY
    ]
    if not plans:
        return []
    return [
        "The number of repeats that finds the change in 9 of 10 nights assumes equal nights, "
        f"although these nights look different. {'; '.join(plans)}."
    ]
