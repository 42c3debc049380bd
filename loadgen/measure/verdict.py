"""The results of the SLOs of a run: met or missed by the estimate, and whether that is proven."""

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

_SHOWN_ERROR = 0.05
IMPLIED_ATTAINMENT = "attainment >= 99%"
DEFAULT_CONFIDENCE = 0.95
Verdict = Literal["met", "missed", "no_verdict"]


@dataclass(frozen=True, slots=True)
class SloResult:
    """The result of an SLO.

    `scope` run: `value` of the metric, and `low` and `high`, each a one-sided bound at the
    summary's confidence (None: open, or none exists). A met SLO is `proven` when the bound on its
    side meets it too, a missed SLO when its bound misses it. Otherwise about `n_needed` samples
    would prove it, if nothing else changes. `scope` request: `value` is the *share* of due requests
    that met it, with Wilson's interval. Such SLOs are judged together through attainment, so `met`
    and `proven` are None. `is_implied`: not stated by the user; see `slo_results`. `n_own` of the
    `n` requests had a limit of their own.

    `error`: how far the load generator's own delays can have moved `value`, in its unit. `survives`
    is whether `met` is the same with that error added or subtracted, and `error_reaches_limit`
    whether the error alone is as large as the limit (`measure.validity.survival`). None: no result.
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
    error: float = 0.0
    error_reaches_limit: bool = False
    survives: bool | None = None

    @property
    def shown(self) -> str:
        """The SLO, and the number of requests that were judged by a limit of their own instead."""
        if not self.n_own:
            return self.text
        return (
            f"{self.text} ({format_count(self.n_own)} of {format_count(self.n)} by their own limit)"
        )

    @property
    def has_shown_error(self) -> bool:
        """Whether the instrument error is at least a twentieth of the limit, of the value or of the
        distance between them."""
        scale = min(self.limit, abs(self.value), abs(self.limit - self.value))
        return self.error > 0 and self.error >= _SHOWN_ERROR * scale

    @property
    def unit(self) -> Literal["s", "per_s", "share"]:
        """The unit of value, low and high."""
        return "share" if self.scope == "request" else METRICS[self.metric].unit


@dataclass(frozen=True, slots=True)
class Shares:
    """The counts behind shares and rates: requests due, requests that met all SLOs, successful
    requests."""

    due: int
    met: int
    ok: int
    length_s: float


def slo_results(slos: Sequence[Slo]) -> list[tuple[Slo, bool]]:
    """The SLOs, each with whether it is implied.

    Per-request SLOs need a share of requests that must meet them. If no SLO states it (attainment
    or goodput), attainment >= 99 % is implied, and shown as such.
    """
    stated = [(slo, False) for slo in slos]
    has_per_request = any(slo.scope == "request" for slo in slos)
    states_share = any(slo.metric in ("attainment", "goodput") for slo in slos)
    return stated + [(parse_slo(IMPLIED_ATTAINMENT), True)] * (has_per_request and not states_share)


def request_slo_result(
    slo: Slo, n_met: int, due: int, confidence: float, n_own: int = 0
) -> SloResult:
    """The share of the due requests that met a per-request SLO; `n_own` of them by their own
    limit."""
    share = wilson(n_met, due, confidence)
    return SloResult(
        slo.text, "request", slo.metric, slo.limit, share.value, share.low, share.high, due,
        met=None, proven=None, n_needed=None, n_own=n_own,
    )  # fmt: skip


def percentile_result(slo: Slo, population: Population, confidence: float) -> SloResult:
    """A percentile SLO, with failures as +inf; its bounds are exact order statistics."""
    assert slo.quantile is not None, f"{slo.text} is not a percentile"
    bounds = population.percentile_bounds(slo.quantile, confidence)
    n_misses, n = population.n_beyond(slo.limit), population.n
    worth = population.n_effective(slo.quantile)
    needed = needed_n(n_misses, n, slo.quantile, confidence)
    if needed is not None and worth > 0:
        needed = math.ceil(needed * n / worth)
    return _result(slo, bounds, n, needed)


def mean_result(slo: Slo, population: Population, confidence: float) -> SloResult:
    """An SLO on the mean of the successful requests; its bounds are by Student's t."""
    mean = population.mean(confidence)
    n, needed = len(population.ordered), None
    if mean.high is not None and mean.value != slo.limit:
        needed = math.ceil(n * ((mean.high - mean.value) / (slo.limit - mean.value)) ** 2)
    return _result(slo, mean, n, needed)


def max_result(slo: Slo, population: Population) -> SloResult:
    """An SLO on every request of the run. A miss is certain; that it is met can never be proven."""
    largest = population.largest()
    low = None if math.isnan(largest) else largest
    return _result(slo, Interval(largest, low, None), population.n, None)


def run_metric_result(
    slo: Slo, shares: Shares, throughput: Callable[[str], float], confidence: float
) -> SloResult:
    """An SLO on a number of the run; shares get exact bounds, throughputs none."""
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
        needed_share = slo.limit / rate if rate else math.inf
        needed = None
        if needed_share < 1:
            needed = needed_n(due - shares.met, due, needed_share, confidence)
        share = exact_bounds(shares.met, due, confidence)
        return _result(slo, share.times(rate), due, needed)
    return _result(slo, Interval(throughput(slo.metric)), due, None)


def _result(slo: Slo, estimate: Interval, n: int, n_needed: int | None) -> SloResult:
    value, low, high = estimate.value, estimate.low, estimate.high
    met = None if math.isnan(value) else slo.holds(value)
    worst, best = (high, low) if slo.operator == "<=" else (low, high)
    proven = None
    if met is not None and (low is not None or high is not None):
        decisive = worst if met else best
        proven = decisive is not None and slo.holds(decisive) is met
    return SloResult(
        slo.text, "run", slo.metric, slo.limit, value, low, high, n,
        met, proven, n_needed=None if proven in (True, None) else n_needed,
    )  # fmt: skip


def sentence(result: SloResult, confidence: float) -> str:
    """The result of an SLO as a sentence, for the reasons of a verdict: the value, and whether it
    is proven."""
    if result.met is None:
        return f"{result.text}: no value, because there are no samples"
    text = f"{result.text}: {'met' if result.met else 'missed'}"
    if math.isinf(result.value):
        text += f" because too many requests failed, n = {format_count(result.n)}"
    else:
        error = f" {error_note(result)}" if result.has_shown_error else ""
        text += f" at {format_value(result.value, result.unit)}{error}"
        text += f", n = {format_count(result.n)}"
    if result.proven is None:
        return text
    level = f"{100 * confidence:g} % confidence"
    if result.proven:
        return f"{text}, with {level}"
    if result.n_needed is None:
        return f"{text}, without {level}"
    return f"{text}; {level} needs about {format_count(result.n_needed)} samples"


def error_note(result: SloResult) -> str:
    """`+ up to 19 ms instrument error`, with the sign of the direction that could change the
    result."""
    is_upper = (METRICS[result.metric].direction == "lower") is (result.met is not False)
    if math.isinf(result.error):
        return "with an unbounded instrument error"
    sign = "+" if is_upper else "−"
    return f"{sign} up to {format_value(result.error, result.unit)} instrument error"


def decide(
    results: Sequence[SloResult],
    doubts: Sequence[str],
    overload: str,
    confidence: float,
    is_strict: bool,
    n_ok: int,
) -> tuple[Verdict, int, tuple[str, ...]]:
    """The verdict, its exit code and the reasons for it.

    `doubts` (an invalid measurement, a run cut short) allow no verdict. Otherwise a missed SLO or
    an `overload` makes the run missed; otherwise all SLOs are met. `is_strict`: only proven results
    count, and an open SLO gives no verdict. A run without any SLO has no verdict either, which is a
    failure only if none of its due requests was successful (`n_ok`).
    """
    judged = [result for result in results if result.scope == "run"]
    if doubts:
        return "no_verdict", 3, tuple(doubts)
    if not judged and not n_ok:
        return "no_verdict", 3, ("No request was successful.",)
    if not judged:
        return "no_verdict", 0, ("No SLO was given, so there is nothing to meet or miss.",)
    is_open = [r.met is None or (is_strict and r.proven is False) for r in judged]
    missed = [
        r for r, unknown in zip(judged, is_open, strict=True) if r.met is False and not unknown
    ]
    if missed or overload:
        reasons = [f"{sentence(result, confidence)}." for result in missed]
        return "missed", 1, (*reasons, *([overload] if overload else []))
    if any(is_open):
        unsettled = [r for r, unknown in zip(judged, is_open, strict=True) if unknown]
        return "no_verdict", 3, tuple(f"{sentence(r, confidence)}." for r in unsettled)
    return "met", 0, tuple(f"{sentence(result, confidence)}." for result in judged)
