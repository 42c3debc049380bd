"""The verdict of a night per cell and measure, against the nights before, with Holm's correction
over the whole night."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from loadgen.manifest.json_section import JsonSection, NumberOrNull
from loadgen.measure.measures import Measure, measure
from loadgen.studies.compare.comparable import ConfigDifference, differences
from loadgen.studies.compare.contrast import Contrast
from loadgen.studies.compare.judgement import (
    POWER,
    ComparedMeasure,
    Options,
    Scale,
    decide,
    level_of,
    overall,
    row_of,
    scale_of,
    scale_of_plans,
    set_aside,
    timed,
    undecidable_note,
)
from loadgen.studies.compare.numbers import GATED, SLO_METRICS, shown
from loadgen.studies.nightly.machine_speed import (
    MachineSpeed,
    machine_speed,
    without_machine_effects,
)
from loadgen.studies.nightly.notes import left_out, out_of_reach, unlucky, without_number
from loadgen.studies.nightly.record import CellNight, RunNumbers
from loadgen.studies.nightly.statistics import (
    ALONE,
    WITH_CONTROLS,
    NightNoise,
    NightSample,
    contrast_of_nights,
    night_power,
    repeats_needed,
    smallest_found,
)
from loadgen.studies.nightly.values import (
    controls_of,
    has_controls,
    relative_values,
    scale_of_nights,
    values_of,
)

NightWord = Literal["better", "same", "worse", "inconclusive", "invalid", "baseline"]
JOINING = ("baseline", "same", "inconclusive")
"""Verdicts of nights that join the baseline; a better or worse night waits until it is accepted."""


@dataclass(frozen=True, slots=True)
class History:
    """The nights that tonight is compared with: `levels` of earlier nights, the last level the
    baseline. Earlier levels, which an accepted change ended, only contribute to the noise."""

    levels: tuple[tuple[CellNight, ...], ...] = ()

    @property
    def baseline(self) -> tuple[CellNight, ...]:
        return self.levels[-1] if self.levels else ()


@dataclass(frozen=True, slots=True)
class ControlMoved:
    """The control's value in the nights before and tonight, in the unit of the measure, and its
    relative change (of shares: the difference). The control is unchanged, so this is the machine's
    change."""

    before: NumberOrNull
    tonight: NumberOrNull
    change: NumberOrNull


class CellVerdict(JsonSection, frozen=True):
    """The verdict of a cell tonight. `baseline`: there was no earlier night to compare with;
    tonight becomes the first. `noise` by measure text; `ComparedMeasure.runs_needed` counts repeats
    a night. `controls` by measure text, where the cell has a control: every `change` is then
    relative to it, while `a` and `b` are the cell's own values. `pace` is the machine's speed, if
    there is no control and it was measured. `not_excluded` names other causes of a change."""

    cell: str
    verdict: NightWord
    measures: tuple[ComparedMeasure, ...]
    noise: dict[str, NightNoise]
    n_nights: int
    changes: tuple[ConfigDifference, ...]
    notes: tuple[str, ...]
    pace: MachineSpeed | None = None
    controls: dict[str, ControlMoved] = msgspec.field(default_factory=dict)
    not_excluded: str = ""


def judge_night(
    tonight: Sequence[CellNight],
    histories: Mapping[str, History],
    options: Options,
    plans: bool = True,
) -> list[CellVerdict]:
    """A verdict for each cell, in their order. Holm's correction covers the deciding measures of
    all cells together, so the chance of any false "worse" is that of a single test, not of a test
    per cell. Without `plans` the repeats needed are left out; they take most of the time."""
    drafts = [_Draft(night, histories.get(night.cell, History()), options) for night in tonight]
    rows = [row for draft in drafts for row in draft.rows]
    settled = decide(set_aside([row for _, row, _ in rows], options), options.confidence)
    level = level_of(settled, options.confidence)
    planned = iter(
        [
            (row, math.nan)
            if noise is None or not plans
            else _planned(row, noise, earlier, level, options)
            for row, (noise, _, earlier) in zip(settled, rows, strict=True)
        ]
    )
    return [draft.verdict([next(planned) for _ in draft.rows]) for draft in drafts]


def night_word(verdicts: Sequence[CellVerdict]) -> NightWord:
    """The verdict of the whole night: the first of worse, invalid, inconclusive, better, same that
    any cell has; baseline where no cell could be compared yet."""
    words = {verdict.verdict for verdict in verdicts}
    order: tuple[NightWord, ...] = ("worse", "invalid", "inconclusive", "better", "same")
    return next((word for word in order if word in words), "baseline")


class _Draft:
    """A cell before Holm's correction: a row per measure with its noise and the numbers of runs
    of the earlier nights."""

    def __init__(self, tonight: CellNight, history: History, options: Options) -> None:
        self.night, self._history = tonight, history
        self.rows: list[tuple[NightNoise | None, ComparedMeasure, list[int]]] = []
        self._controls: dict[str, ControlMoved] = {}
        self._pace = machine_speed(history.baseline, tonight.trusted, options.confidence)
        self._notes = left_out(tonight)
        if not tonight.trusted or not history.baseline:
            return
        gated = _gated(tonight, options)
        has_reasoning = any(run.has_reasoning for run in tonight.trusted)
        is_of_agents = all(run.n_trees for run in tonight.trusted)
        others = shown(has_reasoning=has_reasoning, is_of_agents=is_of_agents)
        for text in dict.fromkeys([*gated, *others]):
            compared = measure(text)
            levels = [self._usable(level, compared) for level in history.levels]
            if levels[-1]:
                noise, row = _judge(compared, levels, tonight.trusted, options)
                if has_controls(tonight.trusted):
                    self._controls[text] = _control_moved(levels[-1], tonight.trusted, compared)
                    self._notes += (
                        without_number(tonight.trusted, compared) if text in gated else []
                    )
                row = dataclasses.replace(row, is_gated=text in gated)
                self.rows.append((noise, row, [len(night.trusted) for night in levels[-1]]))
            elif text in gated:
                self._notes.append(
                    f"{text}: no earlier night has this measure, so it does not count yet."
                )
        n_nights = len(history.baseline)
        assumed = max((n.assumed_df for n, _, _ in self.rows if n and n.run_sd), default=0.0)
        if assumed:
            means = (
                "the means of their runs" if has_controls(tonight.trusted) else "runs of one night"
            )
            nights = "night" if n_nights == 1 else "nights"
            self._notes.append(
                f"Only {n_nights} earlier {nights}: the variation between nights is partly assumed "
                f"to equal that of {means}."
            )

    def verdict(self, planned: Sequence[tuple[ComparedMeasure, float]]) -> CellVerdict:
        """The verdict. `planned` are the rows, each with the power of its repeats if the nights
        differ as much as they seem to."""
        timed_rows = [timed(row, self._minutes_a_repeat()) for row, _ in planned]
        rows, machine_notes = without_machine_effects(timed_rows, self._pace)
        word: NightWord = "invalid"
        if self.night.trusted:
            word = overall(rows) if self._history.baseline else "baseline"
        noise = {row.measure: n for (n, row, _) in self.rows if n is not None}
        baseline = self._history.baseline
        before = baseline[-1].factor if baseline else self.night.factor
        return CellVerdict(
            cell=self.night.cell,
            verdict=word,
            measures=tuple(rows),
            noise=noise,
            n_nights=len(baseline),
            changes=tuple(differences(before, self.night.factor)),
            notes=(
                *self._notes,
                *machine_notes,
                *undecidable_note(rows, "tonight", "repeats"),
                *out_of_reach(rows, noise),
                *unlucky(planned, noise),
            ),
            pace=self._pace,
            controls=self._controls,
        )

    def _minutes_a_repeat(self) -> float:
        """The mean time of a repeat with its control, 0 where it was not recorded."""
        runs = [*self.night.trusted, *controls_of(self.night.trusted)]
        n_repeats = max(1, len(self.night.trusted))
        return sum(run.planned_s or 0.0 for run in runs) / n_repeats / 60

    def _usable(self, level: Sequence[CellNight], measure: Measure) -> list[CellNight]:
        """The nights that have this measure, made under the same SLOs."""
        depends_on_slos = measure.metric.name in SLO_METRICS
        return [
            night
            for night in level
            if night.trusted
            and bool(np.isfinite(relative_values(night.trusted, measure)).all())
            and not (depends_on_slos and night.slos != self.night.slos)
        ]


def _gated(night: CellNight, options: Options) -> list[str]:
    if options.metrics:
        return [measure(text).text for text in options.metrics]
    return [*GATED, *(["output_tokens_per_s"] if night.is_closed_loop else [])]


def _judge(
    measure: Measure,
    levels: Sequence[Sequence[CellNight]],
    tonight: Sequence[RunNumbers],
    options: Options,
) -> tuple[NightNoise | None, ComparedMeasure]:
    runs = [[night.trusted for night in level] for level in levels]
    scale = scale_of_nights([*(night for level in runs for night in level), tonight], measure)
    contrast, noise = contrast_of_nights(
        [[_night(of_night, measure, scale) for of_night in level] for level in runs],
        _night(tonight, measure, scale),
        WITH_CONTROLS if has_controls(tonight) else ALONE,
        is_robust=not measure.is_share,
    )
    earlier = [run for of_night in runs[-1] for run in of_night]
    if measure.is_share:
        contrast = _at_least_binomial(contrast, measure, earlier, tonight)
    n = len(runs[-1])
    how = f"Student's t, tonight against {n} {'night' if n == 1 else 'nights'}"
    how += ", each run relative to its control" if has_controls(tonight) else ""
    values = values_of(earlier, measure), values_of(tonight, measure)
    n_due = _n_due(earlier, tonight, measure)
    return noise, row_of(measure, contrast, scale, values, n_due, options, how)


def _at_least_binomial(
    contrast: Contrast,
    measure: Measure,
    earlier: Sequence[RunNumbers],
    tonight: Sequence[RunNumbers],
) -> Contrast:
    """The contrast with at least the chance error of so many requests, those of the controls
    included: few failures so far prove little."""
    n_due = _n_due(earlier, tonight, measure)
    if not contrast.is_judged or not all(n_due):
        return contrast
    variance = _binomial(earlier, tonight, measure)
    if has_controls(tonight):
        variance += _binomial(controls_of(earlier), controls_of(tonight), measure)
    if math.sqrt(variance) <= contrast.error:
        return contrast
    return dataclasses.replace(contrast, error=math.sqrt(variance), df=float(sum(n_due)))


def _binomial(
    earlier: Sequence[RunNumbers], tonight: Sequence[RunNumbers], measure: Measure
) -> float:
    """The variance of the difference of two shares, if the true shares are equal."""
    n_due = _n_due(earlier, tonight, measure)
    means = (values_of(side, measure).mean() for side in (earlier, tonight))
    hits = sum(float(mean) * due for mean, due in zip(means, n_due, strict=True))
    share = (hits + 1) / (sum(n_due) + 2)
    return share * (1 - share) * (1 / n_due[0] + 1 / n_due[1])


def _n_due(
    earlier: Sequence[RunNumbers], tonight: Sequence[RunNumbers], measure: Measure
) -> tuple[int, int]:
    return sum(run.n_of(measure) for run in earlier), sum(run.n_of(measure) for run in tonight)


def _control_moved(
    level: Sequence[CellNight], tonight: Sequence[RunNumbers], measure: Measure
) -> ControlMoved:
    """The change of the control. Each night has equal weight, as in the verdict of the cell."""
    nights = [values_of(controls_of(night.trusted), measure) for night in level]
    now = values_of(controls_of(tonight), measure)
    before = np.concatenate(nights)
    scale = scale_of(measure, before, now)
    levels = [float(scale.of(values).mean()) for values in nights]
    moved = float(scale.of(now).mean()) - sum(levels) / len(levels)
    return ControlMoved(scale.typical(before), scale.typical(now), scale.off(moved))


def _planned(
    row: ComparedMeasure, noise: NightNoise, earlier: Sequence[int], level: float, options: Options
) -> tuple[ComparedMeasure, float]:
    """The row with the repeats that a night would need and the smallest change that tonight would
    find; and the power of those repeats against these nights, if they differ as much as they seem
    to."""
    scale = scale_of_plans(row)
    level = level if row.is_gated else 2 * (1 - options.confidence)
    effect = scale.on(row.effect)
    reach = smallest_found(noise, row.n_runs[1], earlier, level, POWER)
    needed = repeats_needed(noise, earlier, effect, level)
    planned = dataclasses.replace(
        row,
        runs_needed=needed,
        smallest_found=scale.off(reach) if reach < 50 else math.inf,
    )
    if needed is None:
        return planned, math.nan
    return planned, night_power(noise, needed, earlier, effect, level)


def _night(runs: Sequence[RunNumbers], measure: Measure, scale: Scale) -> NightSample:
    return NightSample(
        scale.of(relative_values(runs, measure)), tuple(run.schedule_sha256 for run in runs)
    )
