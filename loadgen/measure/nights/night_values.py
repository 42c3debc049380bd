"""The numbers of a night's runs on the scale they are compared on: as they are, or relative to the
control that ran beside each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadgen.measure.comparison.judgement import scaled
from loadgen.measure.comparison.measures import Measure
from loadgen.measure.nights.night_record import RunNumbers
from loadgen.measure.statistics.stats import Values


def on_scale_of_nights(runs: Sequence[RunNumbers], asked: Measure) -> Values:
    """One number per run: its logarithm (shares as they are), less that of its control where it
    has one, so that what both ran on is in neither. Not finite where one of the two has none."""
    own = scaled(asked, values_of(runs, asked))
    if not has_controls(runs):
        return own
    with np.errstate(invalid="ignore"):  # both 0: no ratio
        return np.asarray(own - scaled(asked, values_of(controls_of(runs), asked)))


def values_of(runs: Sequence[RunNumbers], asked: Measure) -> Values:
    return np.array([run.values.get(asked.text, math.nan) for run in runs], dtype=np.float64)


def controls_of(runs: Sequence[RunNumbers]) -> list[RunNumbers]:
    """The runs that were made beside these."""
    return [run.control for run in runs if run.control is not None]


def has_controls(runs: Sequence[RunNumbers]) -> bool:
    """Whether these are runs of a cell with a control: then each has one."""
    found = controls_of(runs)
    assert len(found) in (0, len(runs)), f"{len(found)} of {len(runs)} runs have a control"
    return bool(found)
