"""One measure on two sides: what changed, how sure that is, and the verdict that follows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from loadgen.measure.comparison.contrast import (
    Contrast,
    Noise,
    contrast,
    holm,
    runs_needed,
    smallest_effect,
)
from loadgen.measure.comparison.measures import Measure, measure
from loadgen.measure.statistics.intervals import Values

Verdict = Literal["better", "same", "worse", "inconclusive"]
Overall = Literal["better", "same", "worse", "inconclusive", "invalid"]
Judged = tuple[Contrast, "ComparedMeasure"]
POWER = 0.92
"""What runs are planned for; a little over the 9 of 10 that are promised, as noise is estimated."""
BETTER = 0.2
"""Of the chance that equal sides are told apart, what "better" may use: a false "worse" costs
somebody a morning, a false "better" is published."""
FAIL_ON: Mapping[str, tuple[Overall, ...]] = {
    "worse": (),
    "inconclusive": ("inconclusive", "invalid"),
    "invalid": ("invalid",),
}
"""What else than worse makes a comparison fail, by what was asked for."""


@dataclass(frozen=True, slots=True)
class ComparedMeasure:
    """One measure on both sides.

    `change` is B / A − 1 (for shares, B − A) with an interval whose ends are each good at the
    comparison's confidence; `margin` is what counts as the same. `p` is one-sided, of no difference
    in the direction seen, `p_adjusted` after Holm over the gated measures, `p_same` of the
    equivalence test. `noise` is what equal runs differ by (standard deviation of the logarithm, so
    about relative; of shares: in points), `effect_size` the difference over it. `runs_needed` runs
    a side find a change as large as `effect` in 9 of 10 cases; `smallest_found` is what these sides
    find as often.
    """

    measure: str
    unit: Literal["s", "per_s", "share"]
    is_gated: bool
    verdict: Verdict
    a: float
    b: float
    change: float
    low: float | None
    high: float | None
    margin: float
    p: float
    p_adjusted: float
    p_same: float
    noise: float
    df: float
    effect_size: float
    n_runs: tuple[int, int]
    n_due: tuple[int, int]
    effect: float
    runs_needed: int | None
    smallest_found: float
    how: str


@dataclass(frozen=True)
class Options:
    """How to compare. `margins` by measure text, "" for all; as shares (0.05 is 5 % or points).
    `noise` by measure text, from `measure_noise`; `vary` names keys that may differ."""

    metrics: Sequence[str] = ()
    margins: Mapping[str, float] = field(default_factory=dict)
    confidence: float = 0.95
    effect: float | None = None
    noise: Mapping[str, Noise] = field(default_factory=dict)
    vary: Sequence[str] = ()
    within_run: bool = False


def overall(found: Sequence[ComparedMeasure]) -> Overall:
    """The verdict over the gated measures; invalid without any."""
    verdicts = {one.verdict for one in found if one.is_gated}
    order: tuple[Verdict, ...] = ("worse", "inconclusive", "better", "same")
    return next((word for word in order if word in verdicts), "invalid")


def exit_code(verdict: Overall, fail_on: str) -> int:
    """1 for worse; 3 for what else `fail_on` asks to fail on: `inconclusive` includes invalid,
    `invalid` does not include inconclusive."""
    if verdict == "worse":
        return 1
    return 3 if verdict in FAIL_ON[fail_on] else 0


def judge(
    asked: Measure,
    values: tuple[Values, Values],
    blocks: tuple[Sequence[str], Sequence[str]] | None,
    options: Options,
    n_due: tuple[int, int] = (0, 0),
) -> tuple[Contrast, ComparedMeasure]:
    """One measure from one number per run, before Holm and without a verdict."""
    both = scaled(asked, values[0]), scaled(asked, values[1])
    known = options.noise.get(asked.text)
    found = contrast(*both, blocks, known)
    if asked.is_share:
        found = with_binomial_noise(found, values, n_due)
    how = "Student's t over runs" + (", within equal schedules" if blocks else "")
    how += ", with the noise known before" if known else ""
    return found, row_of(asked, found, values, n_due, options, how)


def settle(
    rows: Sequence[tuple[Contrast, ComparedMeasure]], confidence: float, plans: bool = True
) -> list[ComparedMeasure]:
    """Holm over the gated rows, then a verdict for every row; rows not gated stand alone. Without
    `plans` the runs needed are left out, which take most of the time."""
    settled = decide([row for _, row in rows], confidence)
    if not plans:
        return settled
    level = level_of(settled, confidence)
    return [
        _planned(found, row, level if row.is_gated else 2 * (1 - confidence))
        for (found, _), row in zip(rows, settled, strict=True)
    ]


def decide(rows: Sequence[ComparedMeasure], confidence: float) -> list[ComparedMeasure]:
    """A verdict for every row: Holm over all that are gated, of whatever cells they are."""
    adjusted = [row.p for row in rows]
    for worse in (True, False):
        for k, p in _adjusted(rows, worse).items():
            adjusted[k] = p
    return [
        dataclasses.replace(row, p_adjusted=p, verdict=_verdict(row, p, 1 - confidence))
        for row, p in zip(rows, adjusted, strict=True)
    ]


def level_of(rows: Sequence[ComparedMeasure], confidence: float) -> float:
    """The significance of a two-sided test that plans for a gated row being worse, the first that
    Holm looks at."""
    return 2 * (1 - confidence) / max(1, sum(row.is_gated and row.change != 0 for row in rows))


def margin_of(asked: Measure, margins: Mapping[str, float]) -> float:
    """What difference is none: as asked, or one point of a share, 10 % of a P90 and beyond, 5 % of
    any other TTFT, 3 % of the rest."""
    if asked.text in margins or "" in margins:
        return margins.get(asked.text, margins.get("", 0.0))
    if asked.is_share:
        return 0.01
    if asked.quantile is not None and asked.quantile >= 0.9:
        return 0.1
    return 0.05 if asked.metric.name.startswith("ttf") else 0.03


def row_of(
    asked: Measure,
    found: Contrast,
    values: tuple[Values, Values],
    n_due: tuple[int, int],
    options: Options,
    how: str,
) -> ComparedMeasure:
    ends = found.interval(2 * options.confidence - 1)
    margin = margin_of(asked, options.margins)
    low, high = on_scale(asked, -margin), on_scale(asked, margin)
    return ComparedMeasure(
        measure=asked.text,
        unit=asked.metric.unit,
        is_gated=False,
        verdict="inconclusive",
        a=typical(asked, values[0]),
        b=typical(asked, values[1]),
        change=off_scale(asked, found.difference),
        low=None if ends.low is None else off_scale(asked, ends.low),
        high=None if ends.high is None else off_scale(asked, ends.high),
        margin=margin,
        p=found.p_value() / 2,
        p_adjusted=math.nan,
        p_same=found.equivalence_p(low, high),
        noise=found.noise,
        df=found.df,
        effect_size=found.difference / found.noise if found.noise > 0 else math.nan,
        n_runs=(len(values[0]), len(values[1])),
        n_due=n_due,
        effect=margin if options.effect is None else options.effect,
        runs_needed=None,
        smallest_found=math.inf,
        how=how,
    )


def _adjusted(rows: Sequence[ComparedMeasure], worse: bool) -> dict[int, float]:
    """Holm's p-values of one direction, getting worse or getting better, for the gated rows that
    went that way, by their place. One that did not move at all takes no part."""
    p_values = {
        str(k): 1.0 if row.change == 0 else row.p if is_worse(row) is worse else 1 - row.p
        for k, row in enumerate(rows)
        if row.is_gated
    }
    return {int(k): p for k, p in holm(p_values).items() if is_worse(rows[int(k)]) is worse}


def is_worse(row: ComparedMeasure) -> bool:
    """Whether B is on the worse side of A, by chance or not."""
    return (row.change > 0) is (measure(row.measure).metric.direction == "lower")


def _planned(found: Contrast, row: ComparedMeasure, level: float) -> ComparedMeasure:
    """With the runs needed at a significance of `level`, and what these sides would find."""
    if not found.is_judged:
        return row
    asked, noise = measure(row.measure), Noise(found.noise, found.df)
    smallest = math.inf
    if min(row.n_runs) > 1:
        reach = smallest_effect(noise, min(row.n_runs), level, POWER)
        smallest = off_scale(asked, reach) if reach < 50 else math.inf
    needed = runs_needed(noise, on_scale(asked, row.effect), level, POWER)
    return dataclasses.replace(row, runs_needed=needed, smallest_found=smallest)


def _verdict(row: ComparedMeasure, p_adjusted: float, alpha: float) -> Verdict:
    """Same where the difference is surely inside the margin, though it may be real; else better or
    worse where it is surely none by chance; else inconclusive. NaN is never sure."""
    if row.p_same <= alpha:
        return "same"
    if is_worse(row):
        return "worse" if p_adjusted <= alpha else "inconclusive"
    return "better" if p_adjusted <= BETTER * alpha else "inconclusive"


def with_binomial_noise(
    found: Contrast, values: tuple[Values, Values], n_due: tuple[int, int]
) -> Contrast:
    """At least the noise that so many requests have by chance: equal shares of few runs, often 0,
    may not vary at all and yet would have."""
    if not found.is_judged or not all(n_due):
        return found
    n_runs, n = sum(map(len, values)), sum(n_due)
    hits = sum(float(side.mean()) * due for side, due in zip(values, n_due, strict=True))
    noise = binomial_sd(hits, n, n / n_runs)
    if noise <= found.noise:
        return found
    error = noise * math.sqrt(sum(1 / len(side) for side in values))
    return dataclasses.replace(found, error=error, df=float(n), noise=noise)


def binomial_sd(hits: float, n: float, n_per_run: float) -> float:
    """The standard deviation of the share among `n_per_run` requests, from `hits` of `n`, one more
    of two more taken for granted so that a share of 0 is not sure to stay 0."""
    share = (hits + 1) / (n + 2)
    return math.sqrt(share * (1 - share) / n_per_run)


def scaled(asked: Measure, values: Values) -> Values:
    """Latencies and rates as logarithms: their noise and their changes are relative."""
    if asked.is_share:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)


def on_scale(asked: Measure, change: float) -> float:
    return change if asked.is_share else math.log1p(max(change, -0.999999))


def off_scale(asked: Measure, difference: float) -> float:
    return difference if asked.is_share else math.expm1(min(difference, 50.0))


def typical(asked: Measure, values: Values) -> float:
    """Mean over runs; geometric where changes are relative."""
    if not len(values):
        return math.nan
    mean = float(scaled(asked, values).mean())
    return mean if asked.is_share else math.exp(mean)


def plain(value: Any) -> Any:
    """JSON from nested dataclass dicts; what JSON cannot say is null."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
