"""Tonight against the nights before: a verdict per cell and measure, Holm over the whole night."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from loadgen.measure.comparison.comparable import ConfigDifference, differences
from loadgen.measure.comparison.compare import GATED, OF_PROMISES, SHOWN
from loadgen.measure.comparison.contrast import Contrast
from loadgen.measure.comparison.judgement import (
    POWER,
    ComparedMeasure,
    Options,
    decide,
    level_of,
    off_scale,
    on_scale,
    overall,
    row_of,
    scaled,
    typical,
)
from loadgen.measure.comparison.measures import Measure, measure
from loadgen.measure.nights.machine_speed import (
    MachineSpeed,
    machine_speed,
    without_machine_effects,
)
from loadgen.measure.nights.night_notes import left_out, out_of_reach, unlucky, without_number
from loadgen.measure.nights.night_record import CellNight, RunNumbers
from loadgen.measure.nights.night_statistics import (
    ALONE,
    WITH_CONTROLS,
    NightNoise,
    NightSample,
    contrast_of_nights,
    night_power,
    repeats_needed,
    smallest_found,
)
from loadgen.measure.nights.night_values import (
    controls_of,
    has_controls,
    on_scale_of_nights,
    values_of,
)

NightWord = Literal["better", "same", "worse", "inconclusive", "invalid", "baseline"]
JOINING = ("baseline", "same", "inconclusive")
"""Nights that become part of the baseline; a better or worse one waits until it is accepted."""


@dataclass(frozen=True, slots=True)
class History:
    """What tonight is held against: `levels` of earlier nights, the last one the baseline; nights
    of the levels before it, which an accepted change ended, tell the noise only."""

    levels: tuple[tuple[CellNight, ...], ...] = ()

    @property
    def baseline(self) -> tuple[CellNight, ...]:
        return self.levels[-1] if self.levels else ()


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """One cell tonight. `baseline`: there was nothing to compare with, and now there is. `noise` by
    measure text; `ComparedMeasure.runs_needed` counts repeats a night. `controls` by measure
    text, where the cell has a control: every `change` is then relative to it, while `a` and `b`
    are what the cell itself did. `pace` is what the machine did, where there is no control and it
    is known."""

    cell: str
    verdict: NightWord
    measures: tuple[ComparedMeasure, ...]
    noise: Mapping[str, NightNoise]
    n_nights: int
    changes: tuple[ConfigDifference, ...]
    notes: tuple[str, ...]
    pace: MachineSpeed | None = None
    controls: Mapping[str, ControlMoved] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ControlMoved:
    """What a control did in the nights before and tonight, in the unit of the measure, and what it
    changed by (of shares: the difference): the machine, as far as anyone can tell."""

    before: float
    tonight: float
    change: float


def judge_night(
    tonight: Sequence[CellNight],
    histories: Mapping[str, History],
    options: Options,
    plans: bool = True,
) -> list[CellVerdict]:
    """A verdict for each cell, in their order. Holm's correction is over the deciding measures of
    all cells together: that anything at all is called worse has one chance, not one per cell.
    Without `plans` the repeats needed are left out, which take most of the time."""
    drafts = [_Draft(night, histories.get(night.cell, History()), options) for night in tonight]
    rows = [row for draft in drafts for row in draft.rows]
    settled = decide([row for _, row, _ in rows], options.confidence)
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
    """The night as a whole: the first of worse, inconclusive, invalid, better, same that any cell
    is; baseline where nothing could be compared yet."""
    words = {one.verdict for one in verdicts}
    order: tuple[NightWord, ...] = ("worse", "invalid", "inconclusive", "better", "same")
    return next((word for word in order if word in words), "baseline")


class _Draft:
    """One cell before Holm: a row per measure with its noise and the runs of the earlier nights."""

    def __init__(self, tonight: CellNight, history: History, options: Options) -> None:
        self.night, self._history = tonight, history
        self.rows: list[tuple[NightNoise | None, ComparedMeasure, list[int]]] = []
        self._controls: dict[str, ControlMoved] = {}
        self._pace = machine_speed(history.baseline, tonight.trusted, options.confidence)
        self._notes = left_out(tonight)
        if not tonight.trusted or not history.baseline:
            return
        gated = _gated(tonight, options)
        for text in dict.fromkeys([*gated, *SHOWN]):
            asked = measure(text)
            levels = [self._usable(level, asked) for level in history.levels]
            if levels[-1]:
                noise, row = _judge(asked, levels, tonight.trusted, options)
                if has_controls(tonight.trusted):
                    self._controls[text] = _control_moved(levels[-1], tonight.trusted, asked)
                    self._notes += without_number(tonight.trusted, asked) if text in gated else []
                row = dataclasses.replace(row, is_gated=text in gated)
                self.rows.append((noise, row, [len(night.trusted) for night in levels[-1]]))
            elif text in gated:
                self._notes.append(f"{text}: no earlier night has it, so it decides nothing yet.")
        n_nights = len(history.baseline)
        lent = max((n.assumed_df for n, _, _ in self.rows if n and n.run_sd), default=0.0)
        if lent:
            means = (
                "the means of their runs" if has_controls(tonight.trusted) else "runs of one night"
            )
            self._notes.append(
                f"Only {n_nights} earlier {'night' if n_nights == 1 else 'nights'}: how much equal "
                f"nights differ is partly assumed, as much as {means} do."
            )

    def verdict(self, planned: Sequence[tuple[ComparedMeasure, float]]) -> CellVerdict:
        """`planned` are the rows, each with what its repeats find of nights as different as these
        seem."""
        rows, opened = without_machine_effects([row for row, _ in planned], self._pace)
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
            notes=(*self._notes, *opened, *out_of_reach(rows, noise), *unlucky(planned, noise)),
            pace=self._pace,
            controls=self._controls,
        )

    def _usable(self, level: Sequence[CellNight], asked: Measure) -> list[CellNight]:
        """The nights that have this measure, made under promises that mean the same."""
        is_promised = asked.metric.name in OF_PROMISES
        return [
            night
            for night in level
            if night.trusted
            and bool(np.isfinite(_night(night.trusted, asked).values).all())
            and not (is_promised and night.promises != self.night.promises)
        ]


def _gated(night: CellNight, options: Options) -> list[str]:
    if options.metrics:
        return [measure(text).text for text in options.metrics]
    return [*GATED, *(["output_tokens_per_s"] if night.is_closed_loop else [])]


def _judge(
    asked: Measure,
    levels: Sequence[Sequence[CellNight]],
    tonight: Sequence[RunNumbers],
    options: Options,
) -> tuple[NightNoise | None, ComparedMeasure]:
    runs = [[night.trusted for night in level] for level in levels]
    found, noise = contrast_of_nights(
        [[_night(of_night, asked) for of_night in level] for level in runs],
        _night(tonight, asked),
        WITH_CONTROLS if has_controls(tonight) else ALONE,
    )
    earlier = [run for of_night in runs[-1] for run in of_night]
    if asked.is_share:
        found = _at_least_binomial(found, asked, earlier, tonight)
    n = len(runs[-1])
    how = f"Student's t, tonight against {n} {'night' if n == 1 else 'nights'}"
    how += ", each run relative to its control" if has_controls(tonight) else ""
    values = values_of(earlier, asked), values_of(tonight, asked)
    return noise, row_of(asked, found, values, _n_due(earlier, tonight), options, how)


def _at_least_binomial(
    found: Contrast, asked: Measure, earlier: Sequence[RunNumbers], tonight: Sequence[RunNumbers]
) -> Contrast:
    """At least the error that so many requests have by chance, those of the controls included: no
    failure so far proves little."""
    n_due = _n_due(earlier, tonight)
    if not found.is_judged or not all(n_due):
        return found
    variance = _binomial(earlier, tonight, asked)
    if has_controls(tonight):
        variance += _binomial(controls_of(earlier), controls_of(tonight), asked)
    if math.sqrt(variance) <= found.error:
        return found
    return dataclasses.replace(found, error=math.sqrt(variance), df=float(sum(n_due)))


def _binomial(
    earlier: Sequence[RunNumbers], tonight: Sequence[RunNumbers], asked: Measure
) -> float:
    """The variance of the difference of two shares, if they are one."""
    n_due = _n_due(earlier, tonight)
    means = (values_of(side, asked).mean() for side in (earlier, tonight))
    hits = sum(float(mean) * due for mean, due in zip(means, n_due, strict=True))
    share = (hits + 1) / (sum(n_due) + 2)
    return share * (1 - share) * (1 / n_due[0] + 1 / n_due[1])


def _n_due(earlier: Sequence[RunNumbers], tonight: Sequence[RunNumbers]) -> tuple[int, int]:
    return sum(run.n_due for run in earlier), sum(run.n_due for run in tonight)


def _control_moved(
    level: Sequence[CellNight], tonight: Sequence[RunNumbers], asked: Measure
) -> ControlMoved:
    """Each night weighs alike, as it does where the cell is judged."""
    nights = [values_of(controls_of(night.trusted), asked) for night in level]
    now = values_of(controls_of(tonight), asked)
    levels = [float(scaled(asked, values).mean()) for values in nights]
    moved = float(scaled(asked, now).mean()) - sum(levels) / len(levels)
    before = typical(asked, np.concatenate(nights))
    return ControlMoved(before, typical(asked, now), off_scale(asked, moved))


def _planned(
    row: ComparedMeasure, noise: NightNoise, earlier: Sequence[int], level: float, options: Options
) -> tuple[ComparedMeasure, float]:
    """With the repeats a night would need, and the smallest change that tonight would find; beside
    it what those repeats find against these nights, if they differ as they seem to."""
    asked = measure(row.measure)
    level = level if row.is_gated else 2 * (1 - options.confidence)
    effect = on_scale(asked, row.effect)
    reach = smallest_found(noise, row.n_runs[1], earlier, level, POWER)
    needed = repeats_needed(noise, earlier, effect, level)
    found = dataclasses.replace(
        row,
        runs_needed=needed,
        smallest_found=off_scale(asked, reach) if reach < 50 else math.inf,
    )
    if needed is None:
        return found, math.nan
    return found, night_power(noise, needed, earlier, effect, level)


def _night(runs: Sequence[RunNumbers], asked: Measure) -> NightSample:
    return NightSample(on_scale_of_nights(runs, asked), tuple(run.schedule_sha256 for run in runs))
