"""Each promise held against the run: kept or missed by the estimate, and whether that is proven."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.measure.catalog import METRICS
from loadgen.measure.slo import Slo, parse_slo
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.population import Population
from loadgen.measure.statistics.proportions import exact_bounds, needed_n, wilson
from loadgen.measure.wording import format_count, format_value

IMPLIED_ATTAINMENT = "attainment >= 99%"
DEFAULT_CONFIDENCE = 0.95
Verdict = Literal["met", "missed", "no_verdict"]


@dataclass(frozen=True, slots=True)
class SloResult:
    """One promise and what became of it.

    `scope` run: `value` of the metric, and `low` and `high`, each a one-sided bound at the
    summary's confidence (None: open, or none exists). A promise kept is `proven` when the bound on
    its side keeps it too; else `n_needed` samples would tell, if nothing else changes.
    `scope` request: `value` is the *share* of due requests that kept it, with Wilson's interval;
    such promises are judged together through attainment, so `met` and `proven` are None.
    `is_implied`: nobody wrote it; see `slo_results`. `n_own` of the `n` requests had a limit of
    their own.
    """

    text: str
    scope: Literal["request", "run"]
    metric: str
    limit: float
    value: float
    low: float | None
    high: float | None
    n: int
    met: bool | None
    proven: bool | None
    n_needed: int | None
    is_implied: bool = False
    n_own: int = 0

    @property
    def shown(self) -> str:
        """The promise, and how many requests it was not asked of because they brought their own."""
        if not self.n_own:
            return self.text
        return (
            f"{self.text} ({format_count(self.n_own)} of {format_count(self.n)} by their own limit)"
        )

    @property
    def unit(self) -> Literal["s", "per_s", "share"]:
        """The unit of value, low and high."""
        return "share" if self.scope == "request" else METRICS[self.metric].unit


@dataclass(frozen=True, slots=True)
class Shares:
    """What shares and rates are made of: due requests, those that met all, those that were ok."""

    due: int
    met: int
    ok: int
    length_s: float


def slo_results(slos: Sequence[Slo]) -> list[tuple[Slo, bool]]:
    """The SLOs with whether each is implied.

    Promises asked of each request need a share of requests that must keep them. Where neither
    attainment nor goodput states it, attainment >= 99 % is implied, and shown as such.
    """
    stated = [(slo, False) for slo in slos]
    asks_each = any(slo.scope == "request" for slo in slos)
    states_share = any(slo.metric in ("attainment", "goodput") for slo in slos)
    return stated + [(parse_slo(IMPLIED_ATTAINMENT), True)] * (asks_each and not states_share)


def request_slo_result(
    slo: Slo, n_kept: int, due: int, confidence: float, n_own: int = 0
) -> SloResult:
    """How many of the due requests kept a per-request promise; `n_own` by their own limit."""
    share = wilson(n_kept, due, confidence)
    return SloResult(
        slo.text, "request", slo.metric, slo.limit, share.value, share.low, share.high, due,
        met=None, proven=None, n_needed=None, n_own=n_own,
    )  # fmt: skip


def percentile_result(slo: Slo, population: Population, confidence: float) -> SloResult:
    """A percentile promise, failures counted as +inf; bounds are exact order statistics."""
    assert slo.quantile is not None, f"{slo.text} is no percentile"
    bounds = population.percentile_bounds(slo.quantile, confidence)
    n_misses, n = population.n_beyond(slo.limit), population.n
    worth = population.n_effective(slo.quantile)
    needed = needed_n(n_misses, n, slo.quantile, confidence)
    if needed is not None and worth > 0:
        needed = math.ceil(needed * n / worth)
    return _result(slo, bounds, n, needed)


def mean_result(slo: Slo, population: Population, confidence: float) -> SloResult:
    """A promise about the mean of what succeeded; bounds by Student's t."""
    mean = population.mean(confidence)
    n, needed = len(population.ordered), None
    if mean.high is not None and mean.value != slo.limit:
        needed = math.ceil(n * ((mean.high - mean.value) / (slo.limit - mean.value)) ** 2)
    return _result(slo, mean, n, needed)


def max_result(slo: Slo, population: Population) -> SloResult:
    """A promise about every request of the run; it can be broken for certain, never proven kept."""
    largest = population.largest()
    low = None if math.isnan(largest) else largest
    return _result(slo, Interval(largest, low, None), population.n, None)


def run_metric_result(
    slo: Slo, shares: Shares, throughput: Callable[[str], float], confidence: float
) -> SloResult:
    """A promise about one number of the run; shares get exact bounds, throughputs none."""
    due, length_s = shares.due, shares.length_s
    if slo.metric == "attainment":
        needed = needed_n(due - shares.met, due, slo.limit, confidence)
        return _result(slo, exact_bounds(shares.met, due, confidence), due, needed)
    if slo.metric == "error_rate":
        needed = needed_n(due - shares.ok, due, 1 - slo.limit, confidence)
        return _result(slo, exact_bounds(due - shares.ok, due, confidence), due, needed)
    if slo.metric == "goodput":
        if length_s <= 0:
            return _result(slo, Interval(math.nan), due, None)
        rate = due / length_s
        asked = slo.limit / rate if rate else math.inf
        needed = needed_n(due - shares.met, due, asked, confidence) if asked < 1 else None
        share = exact_bounds(shares.met, due, confidence)
        return _result(slo, _scaled(share, rate), due, needed)
    return _result(slo, Interval(throughput(slo.metric)), due, None)


def _scaled(share: Interval, factor: float) -> Interval:
    low, high = (None if end is None else end * factor for end in (share.low, share.high))
    return Interval(share.value * factor, low, high)


def _result(slo: Slo, found: Interval, n: int, n_needed: int | None) -> SloResult:
    met = None if math.isnan(found.value) else slo.holds(found.value)
    worst = found.high if slo.operator == "<=" else found.low
    best = found.low if slo.operator == "<=" else found.high
    proven = None
    if met is not None and (found.low is not None or found.high is not None):
        decisive = worst if met else best
        proven = decisive is not None and slo.holds(decisive) is met
    return SloResult(
        slo.text, "run", slo.metric, slo.limit, found.value, found.low, found.high, n,
        met, proven, n_needed=None if proven in (True, None) else n_needed,
    )  # fmt: skip


def sentence(result: SloResult, confidence: float) -> str:
    """What became of a promise, for the reasons of a verdict: the value, and proven or not."""
    word = {True: "kept", False: "missed", None: "has no value"}[result.met]
    text = f"{result.text}: {word}"
    if result.met is None:
        return f"{text} (no sample)"
    if math.isinf(result.value):
        text += f" because too many requests failed, n = {format_count(result.n)}"
    else:
        text += f" at {format_value(result.value, result.unit)}, n = {format_count(result.n)}"
    if result.proven is None:
        return text
    level = f"{100 * confidence:g} %"
    if result.proven:
        return f"{text}, proven at {level}"
    if result.n_needed is None:
        return f"{text}, not proven at {level}"
    return f"{text}, not proven at {level} (needs n ≈ {format_count(result.n_needed)})"


def decide(
    results: Sequence[SloResult],
    doubts: Sequence[str],
    overload: str,
    confidence: float,
    is_strict: bool,
    n_ok: int,
) -> tuple[Verdict, int, tuple[str, ...]]:
    """The verdict, its exit code and the reasons for it.

    `doubts` (an instrument not trusted, a run cut short) allow no verdict; else a promise missed or
    an `overload` makes it missed; else all are met. `is_strict`: only what is proven counts, and an
    open promise gives no verdict. Without any promise there is none either, and that is a failure
    only where none of the due requests ended well (`n_ok`).
    """
    asked = [result for result in results if result.scope == "run"]
    if doubts:
        return "no_verdict", 3, tuple(doubts)
    if not asked and not n_ok:
        return "no_verdict", 3, ("No request ended well.",)
    if not asked:
        return "no_verdict", 0, ("No SLO was given, so there is nothing to keep or miss.",)
    is_open = [r.met is None or (is_strict and r.proven is False) for r in asked]
    missed = [
        r for r, unknown in zip(asked, is_open, strict=True) if r.met is False and not unknown
    ]
    if missed or overload:
        told = [f"{sentence(result, confidence)}." for result in missed]
        return "missed", 1, (*told, *([overload] if overload else []))
    if any(is_open):
        unsettled = [r for r, unknown in zip(asked, is_open, strict=True) if unknown]
        return "no_verdict", 3, tuple(f"{sentence(r, confidence)}." for r in unsettled)
    return "met", 0, tuple(f"{sentence(result, confidence)}." for result in asked)
