"""The summary of a run: the numbers that the CLI prints, summary.json holds and the report
shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.measure.agents import AgentNumbers
from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.cause import Cause
from loadgen.measure.closed_loop import ClosedLoop
from loadgen.measure.drivers import Drivers
from loadgen.measure.fairness import Fairness
from loadgen.measure.in_flight import InFlight
from loadgen.measure.load import Throughput
from loadgen.measure.reasoning import Reasoning
from loadgen.measure.server_load import Backend, ServerSummary
from loadgen.measure.slo_result import Bound, Certainty, SloResult
from loadgen.measure.stalls import Stalls
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.measure.stimulus import Stimulus
from loadgen.measure.verdict import ReasonKind, Verdict

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


NO_LIMIT = "no per-request limit"


@dataclass(frozen=True, slots=True)
class Attainment:
    """The share of due requests that met every per-request SLO, with Wilson's interval over
    `n_effective`, the number of independent requests that the due requests are worth.

    `bound` is the one-sided bound that an SLO on the share is judged by. `reason` is why there is
    no such share, "" where there is: then `value` is NaN, the bounds are open, and without any
    per-request limit (`NO_LIMIT`) `met` is None.
    """

    value: float
    low: float | None
    high: float | None
    met: int | None
    due: int
    reason: str = ""
    bound: Bound | None = None
    n_effective: float | None = None


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met their SLOs, and their tokens, per second of the measured window."""

    requests_per_s: Interval
    output_tokens_per_s: float


ERROR_GATE = "instrument error"
"""The gate that fails where the load generator's own delays leave the verdict open."""


@dataclass(frozen=True, slots=True)
class ValidityCheck:
    """A check of the validity table. `ok` None: not recorded. A failed `is_gate` makes the run
    invalid; a failed `is_timing` shows that the load generator was late, and the gate "instrument
    error" decides whether that matters. `remedy` is the remedy of a failure, "" if `detail` has
    it."""

    name: str
    ok: bool | None
    detail: str
    is_gate: bool = False
    is_timing: bool = False
    remedy: str = ""


def gate(name: str, ok: bool | None, detail: str, remedy: str = "") -> ValidityCheck:
    """A check that makes the run invalid if it fails."""
    return ValidityCheck(name, ok, detail, is_gate=True, remedy=remedy)


def timing(name: str, ok: bool | None, detail: str) -> ValidityCheck:
    """A check of the load generator's own delays."""
    return ValidityCheck(name, ok, detail, is_timing=True)


@dataclass(frozen=True, slots=True)
class Validity:
    """Whether the run is valid, and every check behind that. `stalls` None: the load generator did
    not look for its own stalls. `imprecise`: the percentiles that its own delays can move too far
    for a comparison with another run. `other_prompts`: the sentence on prompts that the server did
    not count as they were sent, "" for none."""

    trusted: bool
    checks: tuple[ValidityCheck, ...]
    stalls: Stalls | None = None
    imprecise: tuple[str, ...] = ()
    other_prompts: str = ""

    @property
    def why_not_comparable(self) -> tuple[str, ...]:
        """The reasons why the numbers cannot be compared with those of another run; empty if they
        can. The verdict on this run's own SLOs does not matter here."""
        broken = [c for c in self.checks if c.is_gate and c.ok is False and c.name != ERROR_GATE]
        reasons = (*(f"{check.name}: {check.detail}." for check in broken), *self.imprecise)
        return (*reasons, self.other_prompts) if self.other_prompts else reasons


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """The summary of a class of traffic: its rows alone, judged by its own SLOs. `attainment` and
    `goodput` also count the SLOs of all traffic."""

    tenant: str
    priority: int
    verdict: Verdict
    counts: Mapping[str, int]
    requested_rate_per_s: float | None
    offered_rate_per_s: float | None
    achieved_rate_per_s: float
    rate_note: str
    throughput: Throughput
    metrics: Mapping[str, Distribution]
    slo: tuple[SloResult, ...]
    attainment: Attainment
    goodput: Goodput


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that the CLI prints, summary.json holds and the report shows. Seconds throughout.

    `reason_kinds` has the kind of each of the `reasons` (`verdict.Reason`).
    `counts`: scheduled = warmup + start (of a closed loop) + due + withdrawn + not_due; each status
    counts due rows;
    `unfinished` were cancelled at the end of the drain, `failed` ended without success before.
    Requests per second of the measured window: `requested_rate_per_s` by the scenario's arrivals,
    `offered_rate_per_s` by the schedule drawn from them, `achieved_rate_per_s` as sent; `rate_note`
    is why a rate is None, or what else it counts. `confidence` is the level of every interval and
    proof; the verdict follows the point estimate unless a confidence was requested. `classes` is
    empty where all traffic is of a single class; the verdict is met only if the SLOs of every class
    are. `fairness` is None where all traffic belongs to a single tenant, `server` where the
    server's metrics were not read. `backends` are the addresses that requests went to, busiest
    first; `stimulus` compares the traffic sent with the schedule; `drivers` are the factors that
    latency correlates with. `capacity_command` searches the highest load that meets the SLOs (""
    where the run does not give one). `measured_by` is the other tool of an imported run, "" for
    slobench; `is_simulated`: its server was a model in virtual time. With fewer successful requests
    than `min_requests` there is no verdict. `made_under` are the SLOs that the run was made under,
    `judged_by` the SLOs that judge it here; an SLO of a class begins with the name of the class.
    `marks` has, by metric, the reason why its values are doubtful; `http_statuses` counts the HTTP
    errors of due requests by status. `is_overloaded`: the run was missed because the server fell
    behind (reason `overloaded`). `certainty` is that of the verdict (`verdict.certainty_of`).
    `cause` is the cause of most misses, None where the latencies are all there is to say; its
    sentence is the first of the `reasons` (of the `findings` of a run that met its SLOs).
    `closed_loop` has the users, their start and the rate with its interval (None without a closed
    loop), `in_flight` the requests in flight and the users that think. `agents` has the trees of
    recorded agents. `results`: what answers hold in place of tokens (`vectors`, `scores`), "" for
    tokens. `reasoning` is None where no answer has any. `canaries` counts their answers, "" without
    any.
    """

    run: str
    verdict: Verdict
    exit_code: int
    reasons: tuple[str, ...]
    reason_kinds: tuple[ReasonKind, ...]
    confidence: float
    window: MeasuredWindow
    counts: Mapping[str, int]
    requested_rate_per_s: float | None
    offered_rate_per_s: float | None
    achieved_rate_per_s: float
    rate_note: str
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
    capacity_command: str = ""
    measured_by: str = ""
    is_simulated: bool = False
    min_requests: int = 0
    made_under: tuple[str, ...] = ()
    judged_by: tuple[str, ...] = ()
    marks: Mapping[str, str] = field(default_factory=dict)
    http_statuses: Mapping[str, int] = field(default_factory=dict)
    is_overloaded: bool = False
    certainty: Certainty | None = None
    cause: Cause | None = None
    closed_loop: ClosedLoop | None = None
    in_flight: InFlight | None = None
    agents: AgentNumbers | None = None
    results: str = ""
    reasoning: Reasoning | None = None
    canaries: str = ""

    @property
    def has_other_slos(self) -> bool:
        """Whether the run is judged by other SLOs than those that it was made under."""
        return set(self.judged_by) != set(self.made_under)

    def to_json(self) -> dict[str, Any]:
        """The content of summary.json; NaN, +inf and open bounds are null. Without agents there is
        no key `agents`."""
        content: dict[str, Any] = plain_json(dataclasses.asdict(self))
        if self.agents is None:
            del content["agents"]
        content["window"]["length_s"] = self.window.length_s
        content["slo"] = _slo_json(self.slo)
        for name, of_class in self.classes.items():
            content["classes"][name]["slo"] = _slo_json(of_class.slo)
        return {"schema": SCHEMA, **content}


def _slo_json(results: Sequence[SloResult]) -> list[dict[str, Any]]:
    """Each result as a flat object: the parts of its SLO, its own fields, and the bound and the
    certainty, which are computed from them."""
    objects = []
    for result in results:
        own = dataclasses.asdict(result)
        parts = own.pop("slo")
        del parts["comparison"]  # `text` has it
        bound = None if result.bound is None else dataclasses.asdict(result.bound)
        found = {**parts, **own, "bound": bound, "certainty": result.certainty}
        objects.append(plain_json(found))
    return objects


def plain_json(value: Any) -> Any:
    """Nested dataclass dicts as JSON: tuples as lists, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
