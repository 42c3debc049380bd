"""What a night's verdict is told with: what was left out, what cannot be found, what is assumed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from loadgen.measure.comparison.judgement import ComparedMeasure, scaled
from loadgen.measure.comparison.measures import Measure
from loadgen.measure.nights.night_record import CellNight, RunNumbers
from loadgen.measure.nights.night_statistics import NightNoise
from loadgen.measure.nights.night_values import controls_of, values_of

_UNLUCKY = 0.75


def left_out(night: CellNight) -> list[str]:
    notes = [
        f"{run.name} is left out, it cannot be trusted: {' '.join(run.why_left_out)}"
        for run in night.runs
        if not run.is_trusted
    ]
    return [*notes, *(f"A repeat is missing: {reason}" for reason in night.failures)]


def without_number(tonight: Sequence[RunNumbers], asked: Measure) -> list[str]:
    """A control that has nothing to be held against leaves the measure open."""
    of_controls = scaled(asked, values_of(controls_of(tonight), asked))
    known = np.isfinite(of_controls).tolist()
    names = [run.name for run, is_known in zip(tonight, known, strict=True) if not is_known]
    told = f"{asked.text}: the control of {', '.join(names)} has no number to compare with."
    return [told] if names else []


def out_of_reach(rows: Sequence[ComparedMeasure], noise: Mapping[str, NightNoise]) -> list[str]:
    """The deciding measures for which no number of repeats will do, and what would."""
    told, fewest_df = [], math.inf
    for row in rows:
        found = noise.get(row.measure)
        is_planned = row.is_gated and math.isfinite(row.smallest_found)
        if found is None or not is_planned or row.runs_needed is not None or not found.night_sd:
            continue
        fewest_df = min(fewest_df, found.night_df)
        unit = "points" if row.unit == "share" else "%"
        told.append(
            f"{row.measure} at {100 * row.effect:.3g} {unit} (nights seem to differ by "
            f"{100 * found.night_sd:.2g} {unit} beyond what their runs explain; as many repeats as "
            f"tonight find {100 * row.smallest_found:.3g} {unit})"
        )
    if not told:
        return []
    return [
        f"No number of repeats finds in 9 of 10 nights: {', '.join(told)}. With "
        f"{fewest_df:.0f} degrees of freedom such a difference between nights may be chance: more "
        "nights (window) tell."
    ]


def unlucky(
    planned: Sequence[tuple[ComparedMeasure, float]], noise: Mapping[str, NightNoise]
) -> list[str]:
    """The deciding measures whose repeats are planned for nights that are alike, although these do
    not look it; and what becomes of the plan if they are not."""
    told = [
        f"{row.measure}: {row.runs_needed} ({100 * found.night_sd:.2g} "
        f"{'points' if row.unit == 'share' else '%'}, as nights that are alike do in "
        f"{max(1, round(100 * found.alike_p))} of 100 cases; if they do differ so, "
        f"{10 * share:.0f} of 10)"
        for row, share in planned
        if (found := noise.get(row.measure)) is not None
        and row.is_gated
        and row.runs_needed is not None
        and found.may_be_chance
        and share < _UNLUCKY
    ]
    if not told:
        return []
    return [
        "The repeats that find the change in 9 of 10 nights take nights for alike, although they "
        f"seem to differ. {'; '.join(told)}."
    ]
