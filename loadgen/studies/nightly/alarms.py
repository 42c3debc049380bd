"""The alarms of a nightly pipeline that compares two medians, and the changes behind them.

Such a pipeline raises an alarm where the median of a night's few runs is worse than that of the
night before by more than a threshold. Equal nights differ, too, and by more than their runs do: an
alarm stands where tonight is also worse than all nights before, with their variation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from loadgen.foreign.vllm_nights import VllmNight, VllmRuns
from loadgen.measure.statistics.intervals import Values
from loadgen.measure.wording import format_count
from loadgen.studies.compare.contrast import Contrast, contrast, holm
from loadgen.studies.nightly.statistics import NightSample, contrast_of_nights

METRICS = ("mean_ttft_ms", "mean_tpot_ms", "output_throughput")
_HIGHER_IS_BETTER = ("throughput", "goodput")
_LEAST_NIGHTS = 2  # before tonight, of a single number each
Word = Literal["stands", "noise", "missed", "quiet", "unknown"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """A metric of a configuration tonight, against the nights before it.

    `before` and `tonight` are medians in the unit of the file, and `change` is their relative
    change; `is_alarm` where it is worse by more than the threshold. `shift` is the change against
    all nights before, with its interval at 95 % (None: open). `p` is that of no worse change, after
    Holm over all metrics of the night. The word: an alarm that `stands` or is `noise`, a worse
    change that was `missed`, `quiet` for neither, and `unknown` where equal nights cannot be told
    apart from others yet.
    """

    configuration: str
    metric: str
    before: float | None
    tonight: float | None
    change: float | None
    is_alarm: bool
    shift: float | None
    low: float | None
    high: float | None
    p: float | None
    n_nights: int
    n_runs: int
    word: Word
    detail: str


@dataclass(frozen=True, slots=True)
class JudgedAlarms:
    """The result: the names of the nights, tonight last, the threshold as a share, a row for each
    metric, and a sentence for each run that was left out."""

    nights: tuple[str, ...]
    threshold: float
    alarms: tuple[Alarm, ...]
    left_out: tuple[str, ...]
    schema: int = 1
    kind: str = "alarms"


def judge_alarms(
    nights: Sequence[VllmNight], metrics: Sequence[str], threshold: float, alpha: float = 0.05
) -> list[Alarm]:
    """A row for each metric of each configuration of the last night, with Holm's correction over
    all of them."""
    *earlier, tonight = nights
    drafts = [
        _draft(name, metric, [night.runs.get(name) for night in earlier], runs, threshold)
        for name, runs in tonight.runs.items()
        for metric in metrics
    ]
    adjusted = holm({str(k): d.p for k, d in enumerate(drafts) if d.p is not None})
    return [_settled(draft, adjusted.get(str(k)), alpha) for k, draft in enumerate(drafts)]


def _draft(
    name: str,
    metric: str,
    history: Sequence[VllmRuns | None],
    tonight: VllmRuns,
    threshold: float,
) -> Alarm:
    """The row before Holm's correction."""
    found = [runs for runs in history if runs is not None]
    equal = [runs for runs in found if runs.load == tonight.load]
    before = [_finite(runs.numbers[metric]) for runs in equal]
    before, now = [values for values in before if len(values)], _finite(tonight.numbers[metric])
    row = Alarm(
        name,
        metric,
        None,
        None,
        None,
        False,
        None,
        None,
        None,
        None,
        len(before),
        len(now),
        "unknown",
        "no earlier night",
    )
    if len(found) > len(equal):
        row = replace(row, detail="the load differs from that of the nights before")
    if not before or not len(now):
        return row
    old, new = float(np.median(before[-1])), float(np.median(now))
    sign = -1 if any(word in metric for word in _HIGHER_IS_BETTER) else 1
    change = new / old - 1
    contrasted = _contrast(before, now)
    row = replace(
        row,
        before=old,
        tonight=new,
        change=change,
        is_alarm=sign * change > threshold,
        detail="too few nights to know how much equal nights differ",
    )
    if not contrasted.is_judged:
        return row
    interval, p = contrasted.interval(0.95), contrasted.p_value() / 2
    return replace(
        row,
        shift=math.expm1(contrasted.difference),
        low=None if interval.low is None else math.expm1(interval.low),
        high=None if interval.high is None else math.expm1(interval.high),
        p=p if sign * contrasted.difference > 0 else 1 - p,
        detail="",
    )


def _contrast(before: Sequence[Values], now: Values) -> Contrast:
    """Tonight minus the nights before, as logarithms: from the runs of each night, or from a number
    a night where one has no repetition."""
    logs = [np.log(values) for values in before]
    if min(len(now), *map(len, before)) >= 2:
        samples = [NightSample(values, ("",) * len(values)) for values in logs]
        return contrast_of_nights(
            [samples], NightSample(np.log(now), ("",) * len(now)), is_robust=False
        )[0]
    if len(before) < _LEAST_NIGHTS:
        return Contrast(math.nan, math.nan, 0.0, math.nan)
    medians = np.array([np.median(values) for values in logs])
    return contrast(medians, np.array([np.median(np.log(now))]))


def _settled(row: Alarm, p: float | None, alpha: float) -> Alarm:
    """The row with its adjusted p and its word."""
    if p is None:
        return row
    is_worse = p < alpha
    words: dict[tuple[bool, bool], Word] = {
        (True, True): "stands",
        (True, False): "noise",
        (False, True): "missed",
        (False, False): "quiet",
    }
    word = words[row.is_alarm, is_worse]
    nights = "night" if row.n_nights == 1 else "nights"
    against = f"against {format_count(row.n_nights)} {nights}"
    interval = f"{_signed(row.shift)} ({_signed(row.low)} to {_signed(row.high)})"
    return replace(row, p=p, word=word, detail=f"{interval} {against}, p = {p:.2g}")


def _finite(values: Sequence[float]) -> Values:
    array = np.asarray(values, np.float64)
    return array[np.isfinite(array)]


def _signed(share: float | None) -> str:
    """`+3.1 %`, `open` for no bound."""
    return "open" if share is None else f"{100 * share:+.3g} %"


def lines(rows: Sequence[Alarm]) -> list[str]:
    """A line for each alarm, missed change and unknown row, and a count of the others."""
    order: tuple[Word, ...] = ("stands", "missed", "noise", "unknown")
    titles = {
        "stands": "ALARM STANDS",
        "missed": "NO ALARM, BUT WORSE",
        "noise": "alarm is noise",
        "unknown": "not known",
    }
    shown = []
    for word in order:
        for row in rows:
            if row.word == word:
                change = "" if row.change is None else f" {_signed(row.change)}"
                shown.append(
                    f"{titles[word]}: {row.configuration}: {row.metric}{change}: {row.detail}"
                )
    n_quiet = sum(row.word == "quiet" for row in rows)
    return [*shown, f"no alarm: {format_count(n_quiet)} of {format_count(len(rows))}"]


def exit_code(rows: Sequence[Alarm]) -> int:
    """1 for an alarm that stands or a change that was missed, 3 where nothing is known, else 0."""
    words = {row.word for row in rows}
    if words & {"stands", "missed"}:
        return 1
    return 3 if words <= {"unknown"} else 0
