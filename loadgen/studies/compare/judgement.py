"""The comparison of a measure on two sides: the change, its significance and the verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from loadgen.manifest.json_section import NumberOrNull
from loadgen.measure.measures import Measure, measure
from loadgen.measure.statistics.intervals import Values
from loadgen.measure.statistics.student_t import student_t
from loadgen.studies.compare.contrast import (
    Contrast,
    Noise,
    contrast,
    holm,
    runs_needed,
    smallest_effect,
)

Verdict = Literal["better", "same", "worse", "inconclusive"]
Overall = Literal["better", "same", "worse", "inconclusive", "invalid"]

POWER = 0.92
"""The power that runs are planned for: a little over the stated 9 of 10, since the noise is
estimated."""
SAME_POWER, DECIDABLE, TIGHTEST = 0.95, 0.8, 0.2
"""The margin follows the noise floor: it is that within which equal sides are called the same with
`SAME_POWER`, at least `TIGHTEST` times and at most the whole useful margin. A measure is decidable
where equal sides are called the same within the useful margin with at least `DECIDABLE`."""
BETTER = 0.2
"""The share of the significance level that "better" may use: a false "worse" costs someone a
morning, a false "better" gets published."""
FAIL_ON = ("worse", "inconclusive")
"""The values of --fail-on. Worse and invalid fail with either."""


@dataclass(frozen=True, slots=True)
class ComparedMeasure:
    """A measure on both sides.

    `change` is B / A − 1 (for shares, B − A) with its interval, each bound at the comparison's
    confidence; differences within `margin` count as the same. `p` is the one-sided p-value of no
    difference, in the direction of the change, `p_adjusted` the same after Holm over the gated
    measures, `p_same` that of the equivalence test. `noise` is the variation between equal runs
    (standard deviation of the logarithm, so about relative; of shares: in points), `effect_size`
    the difference divided by it. `runs_needed` runs a side find a change as large as `effect` in 9
    of 10 cases; `smallest_found` is the change that these sides find as often. `smallest_same` is
    the margin within which these sides, if equal, are called the same in 19 of 20 cases, and
    `is_decidable` is whether they are in 4 of 5 within the useful margin. A measure that
    `is_set_aside` is not decidable and was not chosen by name: it does not hold back a verdict, but
    can be worse or better. `minutes_needed` is the measuring time of the runs needed.
    """

    measure: str
    unit: Literal["s", "per_s", "share"]
    is_gated: bool
    verdict: Verdict
    a: NumberOrNull
    b: NumberOrNull
    change: NumberOrNull
    low: float | None
    high: float | None
    margin: float
    p: NumberOrNull
    p_adjusted: NumberOrNull
    p_same: NumberOrNull
    noise: NumberOrNull
    df: NumberOrNull
    effect_size: NumberOrNull
    n_runs: tuple[int, int]
    n_due: tuple[int, int]
    effect: float
    runs_needed: int | None
    smallest_found: NumberOrNull
    how: str
    smallest_same: NumberOrNull = math.inf
    is_decidable: bool = False
    is_set_aside: bool = False
    minutes_needed: float | None = None


@dataclass(frozen=True)
class Options:
    """The options of a comparison. `margins` by measure text, "" for all; as shares (0.05 is 5 % or
    points). `noise` by measure text, from `measure_noise`; `vary` names keys that may differ."""

    metrics: Sequence[str] = ()
    margins: Mapping[str, float] = field(default_factory=dict)
    confidence: float = 0.95
    effect: float | None = None
    noise: Mapping[str, Noise] = field(default_factory=dict)
    vary: Sequence[str] = ()
    within_run: bool = False


def overall(rows: Sequence[ComparedMeasure]) -> Overall:
    """The verdict over the gated measures; invalid if there are none. Inconclusive measures that
    are set aside count only if no other decides, or shares alone (an error rate)."""
    gated = [row for row in rows if row.is_gated]
    deciding = [row for row in gated if not (row.is_set_aside and row.verdict == "inconclusive")]
    if all(row.unit == "share" for row in deciding):
        deciding = gated
    verdicts = {row.verdict for row in deciding}
    order: tuple[Verdict, ...] = ("worse", "inconclusive", "better", "same")
    return next((word for word in order if word in verdicts), "invalid")


def exit_code(verdict: Overall, fail_on: str) -> int:
    """1 for worse, 3 for invalid and, with `fail_on` inconclusive, for inconclusive; else 0."""
    if verdict == "worse":
        return 1
    return 3 if verdict in ("invalid", fail_on) else 0


def judge(
    measure: Measure,
    values: tuple[Values, Values],
    blocks: tuple[Sequence[str], Sequence[str]] | None,
    options: Options,
    n_due: tuple[int, int] = (0, 0),
) -> tuple[Contrast, ComparedMeasure]:
    """A measure from its number in each run, before Holm's correction and without a verdict."""
    scale = scale_of(measure, *values)
    known = options.noise.get(measure.text)
    contrasted = contrast(
        scale.of(values[0]), scale.of(values[1]), blocks, known, not measure.is_share
    )
    if measure.is_share:
        contrasted = with_binomial_noise(contrasted, values, n_due)
    how = "Student's t over runs" + (", within equal schedules" if blocks else "")
    how += ", with noise measured before" if known else ""
    return contrasted, row_of(measure, contrasted, scale, values, n_due, options, how)


def settle(
    rows: Sequence[tuple[Contrast, ComparedMeasure]], confidence: float, plans: bool = True
) -> list[ComparedMeasure]:
    """Holm's correction over the gated rows, then a verdict for every row; rows that are not gated
    stand alone. Without `plans` the runs needed are left out; they take most of the time."""
    settled = decide([row for _, row in rows], confidence)
    if not plans:
        return settled
    level = level_of(settled, confidence)
    return [
        _planned(contrasted, row, level if row.is_gated else 2 * (1 - confidence))
        for (contrasted, _), row in zip(rows, settled, strict=True)
    ]


def decide(rows: Sequence[ComparedMeasure], confidence: float) -> list[ComparedMeasure]:
    """A verdict for every row, with Holm's correction over all gated rows (of any cell)."""
    adjusted = [row.p for row in rows]
    for worse in (True, False):
        for k, p in _adjusted(rows, worse).items():
            adjusted[k] = p
    return [
        dataclasses.replace(row, p_adjusted=p, verdict=_verdict(row, p, 1 - confidence))
        for row, p in zip(rows, adjusted, strict=True)
    ]


def level_of(rows: Sequence[ComparedMeasure], confidence: float) -> float:
    """The significance level for planning: a two-sided test that a gated row is worse, at the first
    step of Holm's correction."""
    return 2 * (1 - confidence) / max(1, sum(row.is_gated and row.change != 0 for row in rows))


def margin_of(measure: Measure, margins: Mapping[str, float]) -> float:
    """The largest difference that may count as the same: the configured margin, else the useful
    margin, 2 points for the attainment and 1 for any other share, 10 % for any TTFT and for a P90
    and beyond, 5 % for the rest."""
    if measure.text in margins or "" in margins:
        return margins.get(measure.text, margins.get("", 0.0))
    if measure.is_share:
        return 0.02 if measure.metric.name == "attainment" else 0.01
    is_tail = measure.quantile is not None and measure.quantile >= 0.9
    return 0.1 if is_tail or measure.metric.name.startswith("ttf") else 0.05


def provable_margin(contrasted: Contrast, confidence: float, share: float) -> float:
    """The margin, on the scale of the contrast, within which equal sides are called the same in
    this share of cases: as far as the tests are from the margin, plus the difference from zero."""
    if not contrasted.is_judged:
        return math.inf
    df = contrasted.df
    times = student_t(confidence, df) + student_t((1 + share) / 2, df)
    return times * max(contrasted.errors)


def row_of(
    measure: Measure,
    contrasted: Contrast,
    scale: Scale,
    values: tuple[Values, Values],
    n_due: tuple[int, int],
    options: Options,
    how: str,
) -> ComparedMeasure:
    interval = contrasted.interval(2 * options.confidence - 1)
    useful = margin_of(measure, options.margins)
    reach, likely = (
        provable_margin(contrasted, options.confidence, share) for share in (SAME_POWER, DECIDABLE)
    )
    provable = scale.off(reach) if reach < 50 else math.inf
    margin = useful
    if measure.text not in options.margins and "" not in options.margins:
        margin = min(useful, max(TIGHTEST * useful, provable))
    low, high = scale.on(-margin), scale.on(margin)
    a, b = (scale.typical(side) for side in values)
    has_ratio = measure.is_share or a != 0 or b == 0
    return ComparedMeasure(
        measure=measure.text,
        unit=measure.metric.unit,
        is_gated=False,
        verdict="inconclusive",
        a=a,
        b=b,
        change=scale.off(contrasted.difference) if has_ratio else math.inf,
        low=scale.off(interval.low) if has_ratio and interval.low is not None else None,
        high=scale.off(interval.high) if has_ratio and interval.high is not None else None,
        margin=margin,
        p=contrasted.p_value() / 2,
        p_adjusted=math.nan,
        p_same=contrasted.equivalence_p(low, high),
        noise=contrasted.noise,
        df=contrasted.df,
        effect_size=contrasted.difference / contrasted.noise if contrasted.noise > 0 else math.nan,
        n_runs=(len(values[0]), len(values[1])),
        n_due=n_due,
        effect=useful if options.effect is None else options.effect,
        runs_needed=None,
        smallest_found=math.inf,
        how=how,
        smallest_same=provable,
        is_decidable=likely <= scale.on(useful),
    )


def _adjusted(rows: Sequence[ComparedMeasure], worse: bool) -> dict[int, float]:
    """Holm's p-values of the gated rows that got worse (or, without `worse`, better), by row
    number. A row that did not change at all takes no part."""
    p_values = {
        str(k): 1.0 if row.change == 0 else row.p if is_worse(row) is worse else 1 - row.p
        for k, row in enumerate(rows)
        if row.is_gated
    }
    return {int(k): p for k, p in holm(p_values).items() if is_worse(rows[int(k)]) is worse}


def set_aside(rows: Sequence[ComparedMeasure], options: Options) -> list[ComparedMeasure]:
    """The rows, with deciding measures that these runs cannot decide set aside, unless measures
    were chosen by name."""
    return [
        dataclasses.replace(
            row,
            is_set_aside=row.is_gated
            and not options.metrics
            and not row.is_decidable
            and math.isfinite(row.smallest_same),
        )
        for row in rows
    ]


def timed(row: ComparedMeasure, minutes_a_run: float) -> ComparedMeasure:
    """The row with the measuring time of the runs needed, if both are known."""
    if row.runs_needed is None or not minutes_a_run > 0:
        return row
    return dataclasses.replace(row, minutes_needed=row.runs_needed * minutes_a_run)


def undecidable_note(rows: Sequence[ComparedMeasure], when: str, runs: str) -> list[str]:
    """A note on the measures that are set aside without a verdict, with the runs and minutes that
    would decide them."""
    parts = []
    for row in rows:
        if not row.is_set_aside or row.verdict != "inconclusive":
            continue
        unit = "points" if row.unit == "share" else "%"
        facts = []
        if math.isfinite(row.smallest_same):
            facts.append(f"these runs can show ±{100 * row.smallest_same:.2g} {unit}")
        if row.runs_needed is not None:
            minutes = row.minutes_needed
            time = "" if minutes is None else f", {max(1, math.ceil(minutes))} min"
            facts.append(f"±{100 * row.effect:.2g} {unit} needs {row.runs_needed} {runs}{time}")
        parts.append(f"{row.measure} ({'; '.join(facts)})" if facts else row.measure)
    return [f"Not decidable {when}: {', '.join(parts)}."] if parts else []


def is_worse(row: ComparedMeasure) -> bool:
    """Whether B is on the worse side of A, by chance or not."""
    return (row.change > 0) is (measure(row.measure).metric.direction == "lower")


def _planned(contrasted: Contrast, row: ComparedMeasure, level: float) -> ComparedMeasure:
    """The row with the runs needed at a significance of `level`, and the smallest change that these
    sides would find."""
    if not contrasted.is_judged:
        return row
    scale = scale_of_plans(row)
    noise, smallest = Noise(contrasted.noise, contrasted.df), math.inf
    if min(row.n_runs) > 1:
        reach = smallest_effect(noise, min(row.n_runs), level, POWER)
        smallest = scale.off(reach) if reach < 50 else math.inf
    needed = runs_needed(noise, scale.on(row.effect), level, POWER)
    return dataclasses.replace(row, runs_needed=needed, smallest_found=smallest)


def _verdict(row: ComparedMeasure, p_adjusted: float, alpha: float) -> Verdict:
    """Same where the difference is surely inside the margin, even if it is real; else better or
    worse where it is significant; else inconclusive. NaN is never significant."""
    if row.p_same <= alpha:
        return "same"
    if is_worse(row):
        return "worse" if p_adjusted <= alpha else "inconclusive"
    return "better" if p_adjusted <= BETTER * alpha else "inconclusive"


def with_binomial_noise(
    contrasted: Contrast, values: tuple[Values, Values], n_due: tuple[int, int]
) -> Contrast:
    """The contrast with at least the chance variation of so many requests: equal shares of few
    runs, often 0, may not vary at all although another run would."""
    if not contrasted.is_judged or not all(n_due):
        return contrasted
    n_runs, n = sum(map(len, values)), sum(n_due)
    hits = sum(float(side.mean()) * due for side, due in zip(values, n_due, strict=True))
    noise = binomial_sd(hits, n, n / n_runs)
    if noise <= contrasted.noise:
        return contrasted
    error = noise * math.sqrt(sum(1 / len(side) for side in values))
    return dataclasses.replace(contrasted, error=error, df=float(n), noise=noise)


def binomial_sd(hits: float, n: float, n_per_run: float) -> float:
    """The standard deviation of the share among `n_per_run` requests, from `hits` of `n`. A hit and
    a miss are added, so that a share of 0 does not count as certain."""
    share = (hits + 1) / (n + 2)
    return math.sqrt(share * (1 - share) / n_per_run)


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale on which the values of a measure are compared: logarithms, since the noise and the
    changes of latencies and rates are relative; with a `unit`, multiples of it. Changes are at
    least −1 and at most `most`."""

    unit: float | None = None
    most: float = math.inf

    def of(self, values: Values) -> Values:
        """Not finite where a logarithm does not exist."""
        if self.unit is not None:
            return values / self.unit
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(values)

    def on(self, change: float) -> float:
        """The distance on this scale of a change."""
        return change if self.unit is not None else math.log1p(max(change, -0.999999))

    def off(self, difference: float) -> float:
        """The change that belongs to a distance on this scale; never an impossible one."""
        change = difference if self.unit is not None else math.expm1(min(difference, 50.0))
        return change if math.isnan(change) else min(self.most, max(-1.0, change))

    def typical(self, values: Values) -> float:
        """The mean over runs; geometric on a scale of logarithms."""
        if not len(values):
            return math.nan
        mean = float(self.of(values).mean())
        return math.exp(mean) if self.unit is None else mean * self.unit


POINTS = Scale(1.0, most=1.0)
"""The scale of shares."""


def scale_of_plans(row: ComparedMeasure) -> Scale:
    """The scale of the noise by which runs are planned: points for shares, else logarithms."""
    return POINTS if row.unit == "share" else Scale()


def scale_of(measure: Measure, a: Values, b: Values) -> Scale:
    """Points for shares, else logarithms; where a value is 0 and has no logarithm, multiples of the
    mean of A (of B, if A is 0)."""
    if measure.is_share:
        return POINTS
    if not ((a == 0).any() or (b == 0).any()):
        return Scale()
    means = [float(side.mean()) for side in (a, b) if len(side)]
    return Scale(next((mean for mean in means if mean > 0), 1.0))
