"""The results of the SLOs of a run: met or missed by the estimate, and whether that is proven."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from loadgen.measure.catalog import METRICS, Unit
from loadgen.measure.slo import Slo
from loadgen.measure.statistics.dependence import LEAST_TIMES, Dependence, of_share
from loadgen.measure.statistics.intervals import BoundTimes, Interval
from loadgen.measure.statistics.percentiles import fewest_samples
from loadgen.measure.statistics.population import Population
from loadgen.measure.statistics.proportions import exact_bounds, needed_n, proves, refutes
from loadgen.measure.trees import TreeOutcomes
from loadgen.measure.wording import format_count, format_value

NoteKind = Literal["too_few_samples", "above_offered_rate", "unanswered", "start_up", "open_trees"]
Certainty = Literal["proven", "clear", "in_run", "too_close"]
CERTAINTIES: tuple[Certainty, ...] = ("too_close", "in_run", "clear", "proven")
"""From weak to strong."""

MOST_SECONDS = 3600.0  # of a run that is recommended for a proof
_SHOWN_ERROR = 0.05
_WITHOUT_BOUNDS = (
    *("requests_per_s", "output_tokens_per_s", "input_tokens_per_s"),
    "goodput_output_tokens_per_s",
)


@dataclass(frozen=True, slots=True)
class Bound:
    """A one-sided confidence bound: the true value is `at_least` or `at_most` this `value`. None:
    open, because the samples cannot give it."""

    side: Literal["at_least", "at_most"]
    value: float | None

    def text(self, unit: Unit) -> str:
        """`at most 412 ms`; "open" for an open bound, "failures" where failures decide."""
        if self.value is None:
            return "open"
        if math.isinf(self.value):
            return "failures"
        return f"{self.side.replace('_', ' ')} {format_value(self.value, unit)}"

    def at_level(self, unit: Unit, confidence: float) -> str:
        """`at most 412 ms with 95 % confidence`, or the reason why there is no such bound."""
        level = f"{100 * confidence:g} % confidence"
        if self.value is None:
            return f"no bound at {level}: too few samples"
        return f"{self.text(unit)} with {level}"


@dataclass(frozen=True, slots=True)
class Margin:
    """The margin of a result. `ratio` is the largest (x − median) / (limit − median) of the
    requests (+inf: missed). `is_clear`: the result is clear of its limit, and `text` describes the
    margin; else `text` is why it is not, although the margin would be large enough ("": there are
    too few requests for this margin, of which about `n_clear` are enough)."""

    ratio: float
    is_clear: bool
    text: str
    n_clear: int | None = None


@dataclass(frozen=True, slots=True)
class SloResult:
    """The result of an `slo`.

    Its `scope` run: `value` of the metric, and `low` and `high`, each a one-sided bound at the
    summary's confidence (None: open, or none exists). A met SLO is `proven` when the bound on its
    side meets it too, a missed SLO when its bound misses it. Otherwise about `n_needed` samples
    would prove it, if nothing else changes. `scope` request: `value` is the *share* of due requests
    that met it, with the same kind of bounds. Such SLOs are judged together through attainment, so
    `met` and `proven` are None. `scope` tree: the same of the due trees (`measure.trees`).
    `is_implied`: not stated by the user; see `with_implied`. `n_own` of the `n` requests had a
    limit of their own. `note` is the reason, of `note_kind`, if no server could have met the SLO
    (`above_offered_rate`), or if there is no verdict on it (`met` is None): `too_few_samples`,
    where `n_needed` samples are enough for a verdict, `unanswered`, where it leaves too many
    requests out (`measure.unanswered`), and `open_trees`, where trees that had not ended decide.
    The n samples are worth `n_effective` independent samples (None: not estimated); `too_short`:
    the run is too short for any bound. `seconds_needed` is `n_needed` at the rate of the run.
    Neither exists where a longer run would not help, for the reason `no_length`.

    `error`: how far the load generator's own delays can have moved `value`, in its unit. `survives`
    is whether `met` is the same with that error added or subtracted (None: `met` is None), and
    `error_reaches_limit` whether the error alone is as large as the limit
    (`measure.validity.survival`). `margin` is the margin of a result that is clear of its limit, or
    that only a rule forbids to be called so (`measure.margins`).
    """

    slo: Slo
    value: float
    low: float | None
    high: float | None
    n: int
    met: bool | None
    proven: bool | None
    n_needed: int | None
    is_implied: bool = False
    n_own: int = 0
    n_effective: float | None = None
    too_short: bool = False
    seconds_needed: float | None = None
    note: str = ""
    note_kind: NoteKind | None = None
    error: float = 0.0
    error_reaches_limit: bool = False
    survives: bool | None = None
    margin: Margin | None = None
    no_length: str = ""

    @property
    def certainty(self) -> Certainty | None:
        """How certain the result is; None without a result, for an INVALID run and for a
        throughput."""
        if self.met is None or self.proven is None:
            return None
        if self.proven:
            return "proven"
        if self.margin is not None and self.margin.is_clear:
            return "clear"
        is_long = (self.seconds_of(self.n_wanted) or 0.0) > MOST_SECONDS
        return "too_close" if is_long else "in_run"

    @property
    def n_wanted(self) -> int | None:
        """The number of samples from which the result would be clear of its limit, or else proven;
        None where it is, and where no number is known."""
        if self.n_needed is None or self.margin is None or self.margin.n_clear is None:
            return self.n_needed
        return min(self.n_needed, self.margin.n_clear)

    def seconds_of(self, n: int | None) -> float | None:
        """The length of a run of n samples, at the rate of this run."""
        if not n or not self.n_needed or self.seconds_needed is None:
            return None
        return self.seconds_needed * n / self.n_needed

    @property
    def text(self) -> str:
        return self.slo.text

    @property
    def scope(self) -> Literal["request", "tree", "run"]:
        return self.slo.scope

    @property
    def metric(self) -> str:
        return self.slo.metric

    @property
    def limit(self) -> float:
        return self.slo.limit

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
        return METRICS[self.metric].unit if self.scope == "run" else "share"

    @property
    def bound(self) -> Bound | None:
        """The bound that the proof uses: the worst plausible value of an SLO that was met, the best
        plausible value of an SLO that was missed. None without a value, and for a throughput."""
        has_value = self.met is not None or (self.scope != "run" and self.n > 0)
        if not has_value or self.metric in _WITHOUT_BOUNDS:
            return None
        if self.scope != "run":
            return Bound("at_least", self.low)
        is_upper = (METRICS[self.metric].direction == "lower") is bool(self.met)
        return Bound("at_most", self.high) if is_upper else Bound("at_least", self.low)


@dataclass(frozen=True, slots=True)
class Misses:
    """The requests that did not meet the SLOs: without an answer, and with a late answer, each
    count with its own dependence between requests."""

    unanswered: int
    late: int
    answering: Dependence
    lateness: Dependence


@dataclass(frozen=True, slots=True)
class Shares:
    """The counts behind shares and rates: requests due, requests that met all SLOs, and the
    `failed` of the `counted` requests (None: of those due) in the error rate.

    `meeting` and `failing` are the dependence between requests in meeting the SLOs and in failing
    (None: independent); `requested_per_s` is the rate that the scenario states, if any. `misses`
    splits those that did not meet the SLOs (None: not known). `goodput` is the goodput of a closed
    loop for a share with these bounds (None: the schedule gives the rate).
    """

    due: int
    met: int
    failed: int
    length_s: float
    meeting: Dependence | None = None
    failing: Dependence | None = None
    requested_per_s: float | None = None
    misses: Misses | None = None
    counted: int | None = None
    goodput: Callable[[Interval], Interval] | None = None

    def met_bounds(self, confidence: float) -> Interval:
        """The share of requests that met the SLOs, with one-sided bounds.

        Failures often have a shorter memory than latencies, which wait in the same queue. Then the
        lower bound leaves each kind of miss half of the error: it is 1 less the upper bound of the
        failures, by their own autocorrelation time, and that of the late answers, by theirs.
        """
        meeting = self.meeting or Dependence(self.due)
        n_misses = self.due - self.met
        times = meeting.hit_times(confidence, n_misses)
        joint = exact_bounds(self.met, self.due, confidence, times)
        misses, half = self.misses, (1 + confidence) / 2
        if misses is None or not misses.unanswered:
            return joint
        if misses.answering.time_requests >= meeting.time_requests:
            return joint
        kinds = ((misses.unanswered, misses.answering), (misses.late, misses.lateness))
        highs = [exact_bounds(n, self.due, half, d.miss_times(half, n)).high for n, d in kinds]
        if highs[0] is None or highs[1] is None:
            return joint
        return replace(joint, low=max(0.0, 1 - highs[0] - highs[1]))


def request_slo_result(
    slo: Slo, n_met: int, due: int, confidence: float, dependence: Dependence, n_own: int = 0
) -> SloResult:
    """The share of the due requests that met a per-request SLO; `n_own` of them by their own
    limit."""
    times = dependence.hit_times(confidence, due - n_met)
    share = exact_bounds(n_met, due, confidence, times)
    return SloResult(
        slo,
        share.value,
        share.low,
        share.high,
        due,
        met=None,
        proven=None,
        n_needed=None,
        n_own=n_own,
        n_effective=dependence.n_effective,
        too_short=dependence.is_open,
    )


def tree_result(slo: Slo, found: TreeOutcomes, confidence: float) -> SloResult:
    """The share of the due trees that met a limit per tree (scope tree), or all of their limits.
    Its bounds hold however the trees end that have not; so does the verdict, or there is none."""
    n, n_met, n_open = found.n, found.n_met, found.n_open
    if not n:
        return SloResult(slo, math.nan, None, None, 0, met=None, proven=None, n_needed=None)
    dependence = of_share(found.hits)
    times = dependence.hit_times(confidence, found.n_missed)
    result = SloResult(
        slo,
        n_met / (n - n_open) if n > n_open else math.nan,
        exact_bounds(n_met, n, confidence, times).low,
        exact_bounds(n_met + n_open, n, confidence, times).high,
        n,
        met=None,
        proven=None,
        n_needed=None,
        n_effective=dependence.worth(n),
        too_short=dependence.is_open,
    )
    if slo.scope == "tree":
        return result
    is_met = slo.holds(n_met / n)
    if is_met is not slo.holds((n_met + n_open) / n):
        note = (
            f"{format_count(n_open)} of {format_count(n)} trees had not ended when the run did, and"
            " they decide: measure for longer"
        )
        return replace(result, note=note, note_kind="open_trees")
    decisive = result.low if is_met else result.high
    proven = decisive is not None and slo.holds(decisive) is is_met
    needed = None
    if not n_open and not proven:
        by_n = _times_by_n(dependence, n, confidence, found.n_missed)
        needed = needed_n(found.n_missed, n, slo.limit, confidence, by_n)
    n_needed = max(needed, n + 1) if needed else None
    return replace(result, met=is_met, proven=proven, n_needed=n_needed)


def _times_by_n(
    dependence: Dependence, n: int, confidence: float, n_misses: int
) -> Callable[[int], BoundTimes | None]:
    """The autocorrelation times of a run of m samples, of which this run had n."""

    def times(m: int) -> BoundTimes | None:
        return dependence.of_run(dependence.n_requests * m / n).miss_times(confidence, n_misses)

    return times


def percentile_result(slo: Slo, population: Population, confidence: float) -> SloResult:
    """A percentile SLO, with failures as +inf; its bounds are exact order statistics. Without a
    verdict if there are fewer than `fewest_samples`."""
    assert slo.quantile is not None, f"{slo.text} is not a percentile"
    least = fewest_samples(slo.quantile)
    if 0 < population.n < least:
        value = population.percentile(slo.quantile, confidence).value
        has = (
            f"{format_count(population.n)} {'sample has' if population.n == 1 else 'samples have'}"
        )
        note = f"{has} no P{100 * slo.quantile:g}, which needs at least {format_count(least)}"
        return SloResult(
            slo,
            value,
            None,
            None,
            population.n,
            met=None,
            proven=None,
            n_needed=least,
            note=note,
            note_kind="too_few_samples",
        )
    bounds = population.percentile_bounds(slo.quantile, confidence)
    n_misses, n = population.n_beyond(slo.limit), population.n
    found = population.dependence(slo.quantile, slo.limit)
    times = _times_by_n(found, n, confidence, n_misses)
    needed = needed_n(n_misses, n, slo.quantile, confidence, times) if n else None
    if population.series is not None and n:
        bounds = _at_the_limit(slo, bounds, n_misses, n, times(n), confidence)
    return _result(slo, bounds, n, needed, found)


def _at_the_limit(
    slo: Slo, bounds: Interval, n_misses: int, n: int, times: BoundTimes | None, confidence: float
) -> Interval:
    """The bounds of a percentile, in agreement with those of the share of samples within the limit,
    which decide whether the SLO is proven: where they would not agree, a bound is the limit, or
    open. The autocorrelation at the percentile of the run is that of another level, which may be
    short by luck.
    """
    assert slo.quantile is not None
    allowed, low, high = 1 - slo.quantile, bounds.low, bounds.high
    if bounds.value <= slo.limit:
        if times is not None and proves(n_misses, n, allowed, confidence, times[1]):
            high = slo.limit if high is None else min(high, slo.limit)
        elif high is not None and high <= slo.limit:
            high = None
    elif times is not None and refutes(n_misses, n, allowed, confidence, times[0]):
        above = math.nextafter(slo.limit, math.inf)
        low = above if low is None else max(low, above)
    elif low is not None and low > slo.limit:
        low = None
    return Interval(bounds.value, low, high)


def mean_result(slo: Slo, population: Population, confidence: float) -> SloResult:
    """An SLO on the mean of the successful requests; its bounds are by Student's t."""
    found = population.mean_dependence()
    mean = population.mean(confidence)
    n, needed = len(population.ordered), None
    if mean.high is not None and mean.value != slo.limit:
        needed = math.ceil(n * ((mean.high - mean.value) / (slo.limit - mean.value)) ** 2)
    elif found.is_open:
        needed = math.ceil(n * LEAST_TIMES / found.n_effective)
    return _result(slo, mean, n, needed, found)


def max_result(slo: Slo, population: Population) -> SloResult:
    """An SLO on every request of the run. A miss is certain; that it is met can never be proven."""
    largest = population.largest()
    low = None if math.isnan(largest) else largest
    return _result(slo, Interval(largest, low, None), population.n, None)


def share_result(slo: Slo, hits: int, n: int, confidence: float) -> SloResult:
    """An SLO on a share of n independent samples, with exact bounds."""
    bounds = exact_bounds(hits, n, confidence)
    needed = needed_n(n - hits, n, slo.limit, confidence) if n else None
    return _result(slo, bounds, n, needed, Dependence(n))


def run_metric_result(
    slo: Slo, shares: Shares, throughput: Callable[[str], float], confidence: float
) -> SloResult:
    """An SLO on a number of the run; shares get exact bounds, throughputs none."""
    due, length_s = shares.due, shares.length_s
    if slo.metric == "error_rate":
        n = due if shares.counted is None else shares.counted
        found = shares.failing or Dependence(n)
        bounds = exact_bounds(
            shares.failed, n, confidence, found.miss_times(confidence, shares.failed)
        )
        times = _times_by_n(found, n, confidence, shares.failed) if n else None
        needed = needed_n(shares.failed, n, 1 - slo.limit, confidence, times) if times else None
        return _result(slo, bounds, n, needed, found)
    if slo.metric not in ("attainment", "goodput"):
        return _result(slo, Interval(throughput(slo.metric)), due, None)
    rate = 1.0
    if slo.metric == "goodput":
        if length_s <= 0:
            return _result(slo, Interval(math.nan), due, None)
        rate = due / length_s
    found = shares.meeting or Dependence(due)
    least = slo.limit / rate if rate else math.inf
    needed = None
    if least < 1 or slo.metric == "attainment":
        times = _times_by_n(found, max(1, due), confidence, due - shares.met)
        needed = needed_n(due - shares.met, due, least, confidence, times)
    share = shares.met_bounds(confidence)
    if shares.goodput is not None and slo.metric == "goodput":
        goodput = replace(shares.goodput(share), value=shares.met / length_s)
        return _result(slo, goodput, due, needed, found)
    result = _result(slo, share.times(rate), due, needed, found)
    if least <= 1 or slo.metric != "goodput":
        return result
    if shares.requested_per_s is not None and shares.requested_per_s >= slo.limit:
        return replace(result, proven=False)  # a longer run offers the requested rate
    offered = format_value(rate, "per_s")
    note = f"cannot be kept at this rate: only {offered} was offered"
    return replace(result, note=note, note_kind="above_offered_rate")


def _result(
    slo: Slo,
    estimate: Interval,
    n: int,
    n_needed: int | None,
    dependence: Dependence | None = None,
) -> SloResult:
    value, low, high = estimate.value, estimate.low, estimate.high
    met = None if math.isnan(value) else slo.holds(value)
    worst, best = (high, low) if slo.operator == "<=" else (low, high)
    proven = None
    if met is not None and slo.metric not in _WITHOUT_BOUNDS:
        decisive = worst if met else best
        proven = decisive is not None and slo.holds(decisive) is met
    return SloResult(
        slo,
        value,
        low,
        high,
        n,
        met,
        proven,
        n_needed=None if proven or not n_needed else max(n_needed, n + 1),
        n_effective=None if dependence is None else dependence.worth(n),
        too_short=dependence is not None and dependence.is_open,
    )
