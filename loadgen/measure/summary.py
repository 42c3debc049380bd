"""The shape of a run's numbers: what the CLI prints, summary.json holds and the report shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.backends import Backend
from loadgen.measure.drivers import Drivers
from loadgen.measure.fairness import Fairness
from loadgen.measure.load import Throughput
from loadgen.measure.server_load import ServerSummary
from loadgen.measure.stalls import Stalls
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.measure.stimulus import Stimulus
from loadgen.measure.validity.check import ValidityCheck
from loadgen.measure.verdict import SloResult, Verdict

SCHEMA = 1
PERCENTILES: Mapping[str, float] = {
    "p50": 0.5,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p99.9": 0.999,
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """One metric over the due requests: of those that ended well, and with failures as +inf.

    For gap metrics n counts gaps, and a failure adds one gap that never ended. Metrics of the
    client's own delays take every request they exist for and have no `with_failures`.
    """

    n: int
    mean: float
    min: float
    max: float
    percentiles: Mapping[str, Percentile]
    with_failures: Mapping[str, Percentile]


@dataclass(frozen=True, slots=True)
class Attainment:
    """Requests that kept every per-request promise among those due, with Wilson's interval."""

    value: float
    low: float | None
    high: float | None
    met: int
    due: int


@dataclass(frozen=True, slots=True)
class Goodput:
    """What kept its promises, per second of the measured window."""

    requests_per_s: Interval
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Validity:
    """Whether the numbers may be believed, and every check that says so. `stalls` None: the client
    did not look for its own."""

    trusted: bool
    checks: tuple[ValidityCheck, ...]
    stalls: Stalls | None = None


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One class of traffic, in the same words as the whole: its rows alone, judged by the promises
    made to it. `attainment` and `goodput` ask for those made to all traffic as well."""

    tenant: str
    priority: int
    verdict: Verdict
    counts: Mapping[str, int]
    offered_rate_per_s: float
    achieved_rate_per_s: float
    throughput: Throughput
    metrics: Mapping[str, Distribution]
    slo: tuple[SloResult, ...]
    attainment: Attainment
    goodput: Goodput


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything the CLI prints, summary.json holds and the report shows. Seconds throughout.

    `counts`: scheduled = warmup + due + withdrawn + not_due; each status counts due rows.
    `confidence` is that of every interval and proof; the verdict is by the point estimate unless it
    was asked for. `classes` is empty where all traffic is of one class; the verdict is met only if
    the promises made to each of them are. `fairness` is None where all traffic is of one tenant.
    `server` is None where its metrics were not read.
    `backends` are the addresses that requests went to, busiest first; `stimulus` is what was really
    sent, beside what was scheduled; `drivers` what latency went with.
    """

    run: str
    verdict: Verdict
    exit_code: int
    reasons: tuple[str, ...]
    confidence: float
    window: MeasuredWindow
    counts: Mapping[str, int]
    offered_rate_per_s: float
    achieved_rate_per_s: float
    throughput: Throughput
    metrics: Mapping[str, Distribution]
    slo: tuple[SloResult, ...]
    attainment: Attainment
    goodput: Goodput
    validity: Validity
    findings: tuple[str, ...]
    classes: Mapping[str, ClassSummary] = field(default_factory=dict)
    fairness: Fairness | None = None
    drivers: Drivers | None = None
    server: ServerSummary | None = None
    backends: tuple[Backend, ...] = ()
    stimulus: Stimulus | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of summary.json; NaN, +inf and open ends are null."""
        content: dict[str, Any] = _plain(dataclasses.asdict(self))
        content["window"]["length_s"] = self.window.length_s
        return {"schema": SCHEMA, **content}


def _plain(value: Any) -> Any:
    """JSON from nested dataclass dicts: tuples as lists, what JSON cannot say as null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
