"""SLOs of a run under way: the value of each so far, next to its limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from loadgen.live.live_histogram import LiveCounts
from loadgen.measure.catalog import METRICS, PASSES_UNDEFINED, Unit
from loadgen.measure.slo import IMPLIED_ATTAINMENT, Slo, parse_slo, with_implied
from loadgen.measure.unanswered import MOST_SHARE
from loadgen.measure.wording import format_value


@dataclass
class Tally:
    """Counts of ended requests, and the latencies of the successful requests by metric (seconds).
    `n_failed` includes dropped requests; `n_met` counts requests that met every limit of theirs.
    `measured_s` is the time since the end of the warm-up."""

    n_ok: int = 0
    n_failed: int = 0
    n_met: int = 0
    n_events: int = 0
    measured_s: float = 0.0
    latencies: Mapping[str, LiveCounts] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.n_ok + self.n_failed


@dataclass(frozen=True, slots=True)
class SloSoFar:
    """An SLO with its value so far, in the unit of its metric; None where the value is not known
    before the report. `is_met` None: not known, or the mean of too few of the requests. A
    per-request limit shows the percentile that the attainment requires: `aggregate` p99 for
    99 %."""

    text: str
    class_name: str
    metric: str
    aggregate: str
    unit: Unit
    operator: Literal["<=", ">="]
    limit: float
    value: float | None
    is_met: bool | None

    @property
    def share_of_limit(self) -> float | None:
        """The value divided by the limit; infinity for a value without an end."""
        if self.value is None or not self.limit:
            return None
        return self.value / self.limit

    @property
    def shown(self) -> str:
        return f"{self.aggregate} {format_value(self.value, self.unit)}".strip()


def slos_so_far(slos: Sequence[Slo], tally: Tally, class_name: str = "") -> list[SloSoFar]:
    """The SLOs of all traffic or of a class, the implied attainment included. Failed requests are
    misses, and infinitely slow in percentiles."""
    stated = [slo for slo, _ in with_implied(slos) if not slo.is_about_trees]
    target = next((slo.limit for slo in stated if slo.metric == "attainment"), None)
    share = parse_slo(IMPLIED_ATTAINMENT).limit if target is None else target
    return [_so_far(slo, tally, class_name, share) for slo in stated]


def _so_far(slo: Slo, tally: Tally, class_name: str, share: float) -> SloSoFar:
    aggregate, quantile = slo.aggregate or "", slo.quantile
    if slo.scope == "request":
        aggregate, quantile = f"p{100 * share:.10g}", share
    elif slo.aggregate == "max":
        quantile = 1.0
    if slo.scope == "request" or slo.aggregate is not None:
        value = _latency(slo, tally, quantile)
    else:
        value = _of_run(slo.metric, tally)
    is_met = None if value is None else slo.holds(value)
    if is_met and slo.aggregate == "mean" and tally.n_failed > MOST_SHARE * tally.n:
        is_met = None  # by the others alone
    return SloSoFar(
        text=slo.text,
        class_name=class_name,
        metric=slo.metric,
        aggregate=aggregate,
        unit=METRICS[slo.metric].unit,
        operator=slo.operator,
        limit=slo.limit,
        value=value,
        is_met=is_met,
    )


def _latency(slo: Slo, tally: Tally, quantile: float | None) -> float | None:
    """A percentile (nearest rank) or the mean of a latency, None without values."""
    counts = tally.latencies.get(slo.metric)
    n_ok = 0 if counts is None else counts.n
    n_failed = 0 if slo.aggregate == "mean" else tally.n_failed
    if counts is None or not n_ok + n_failed:
        return None
    if quantile is None:
        seconds = counts.seconds()
        return sum(seconds) / len(seconds) if seconds else None
    n_undefined = (
        0
        if slo.metric not in PASSES_UNDEFINED or slo.scope != "request"
        else (max(0, tally.n_ok - n_ok))
    )  # answers too short to have the metric meet the limit
    rank = math.ceil(quantile * (n_ok + n_failed + n_undefined)) - n_undefined
    if rank > n_ok:
        return math.inf
    return counts.quantile(max(1, rank) / n_ok)


def _of_run(metric: str, tally: Tally) -> float | None:
    if metric in ("attainment", "error_rate"):
        counted = tally.n_met if metric == "attainment" else tally.n_failed
        return counted / tally.n if tally.n else None
    counted = {"goodput": tally.n_met, "requests_per_s": tally.n_ok}.get(metric, -1)
    if metric == "output_tokens_per_s":
        counted = tally.n_events
    return None if counted < 0 or tally.measured_s <= 0 else counted / tally.measured_s
