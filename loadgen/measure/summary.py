"""The summary of a run: the numbers that the CLI prints, summary.json holds and the report
shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.drivers import Drivers
from loadgen.measure.fairness import Fairness
from loadgen.measure.load import Throughput
from loadgen.measure.server_load import Backend, ServerSummary
from loadgen.measure.stalls import Stalls
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.measure.stimulus import Stimulus
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
    """A metric over the due requests: over the successful requests, and with failures as +inf.

    For gap metrics n counts gaps, and a failure adds a gap that never ended. Metrics of the load
    generator's own delays include every request that has a value, and have no `with_failures`.
    """

    n: int
    mean: float
    min: float
    max: float
    percentiles: Mapping[str, Percentile]
    with_failures: Mapping[str, Percentile]


@dataclass(frozen=True, slots=True)
class Attainment:
    """The share of due requests that met every per-request SLO, with Wilson's interval."""

    value: float
    low: float | None
    high: float | None
    met: int
    due: int


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met their SLOs, and their tokens, per second of the measured window."""

    requests_per_s: Interval
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ValidityCheck:
    """A check of the validity table. `ok` None: not recorded. A failed `is_gate` makes the run
    invalid."""

    name: str
    ok: bool | None
    detail: str
    is_gate: bool = False


def gate(name: str, ok: bool | None, detail: str) -> ValidityCheck:
    """A check that makes the run invalid if it fails."""
    return ValidityCheck(name, ok, detail, is_gate=True)


@dataclass(frozen=True, slots=True)
class Validity:
    """Whether the numbers are valid, and every check behind that. `stalls` None: the load generator
    did not look for its own stalls."""

    trusted: bool
    checks: tuple[ValidityCheck, ...]
    stalls: Stalls | None = None


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """The summary of a class of traffic: its rows alone, judged by its own SLOs. `attainment` and
    `goodput` also count the SLOs of all traffic."""

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
    """Everything that the CLI prints, summary.json holds and the report shows. Seconds throughout.

    `counts`: scheduled = warmup + due + withdrawn + not_due; each status counts due rows.
    `confidence` is the level of every interval and proof; the verdict follows the point estimate
    unless a confidence was requested. `classes` is empty where all traffic is of a single class;
    the verdict is met only if the SLOs of every class are. `fairness` is None where all traffic
    belongs to a single tenant, `server` where the server's metrics were not read. `backends` are
    the addresses that requests went to, busiest first; `stimulus` compares the traffic sent with
    the schedule; `drivers` are the factors that latency correlates with; `marks` state by metric
    why its values are doubtful, `http_statuses` counts the due HTTP errors by status.
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
    marks: Mapping[str, str] = field(default_factory=dict)
    http_statuses: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The content of summary.json; NaN, +inf and open bounds are null."""
        content: dict[str, Any] = plain_json(dataclasses.asdict(self))
        content["window"]["length_s"] = self.window.length_s
        return {"schema": SCHEMA, **content}


def plain_json(value: Any) -> Any:
    """Nested dataclass dicts as JSON: tuples as lists, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
