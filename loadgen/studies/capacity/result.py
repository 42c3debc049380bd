"""The result of a capacity search, as it is stored, printed and returned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loadgen.manifest.json_section import JsonSection
from loadgen.measure.statistics.proportions import wilson
from loadgen.studies.capacity.dispersion import USUAL
from loadgen.studies.capacity.limited import rate_limit_of
from loadgen.studies.capacity.next_probe import Method, Question, SearchState, judge
from loadgen.studies.capacity.probe import Probe
from loadgen.workload.scaling import LoadUnit

Counted = Literal["requests", "trees"]
SCHEMA = 1


@dataclass(frozen=True)
class Capacity:
    """The highest load whose attainment is at least `attainment`, with its confidence interval.

    `outcome` found: as precise as requested. unsettled: the best estimate so far (`value` is None
    where the search has not seen both sides of the target). misses: even the lowest load tried
    misses the SLO. at_least: the highest load tried meets it, and the true value is at least `low`.
    rate_limited: a rate limit, not latency, ended it; `value` is the rate that got through (None if
    unknown), `low` the highest load below it that met the SLO, `cause` the sentence.
    `client_limit` is the lowest load that the load generator could not send properly, None if it
    could send all. `design_effect` is the number of requests that carry as much information as a
    single independent request. `slope` is the drop in attainment, in log-odds, per e-fold load.
    contradictory: proven probes contradict each other or every estimate; `low` and `high` are the
    two loads. `method` and `why` are those of `SearchState`; with a `client_limit`, `why` is the
    reason for it. `attainment` is a share of the `counted` requests, or trees of agents.
    """

    outcome: str
    unit: LoadUnit
    value: float | None
    low: float | None
    high: float | None
    confidence: float
    attainment: float
    precision: float
    spent_s: float
    probes: tuple[Probe, ...]
    client_limit: float | None
    design_effect: float | None
    slope: float | None
    is_interrupted: bool = False
    method: Method = "curve"
    why: str = ""
    cause: str = ""
    counted: Counted = "requests"

    @property
    def exit_code(self) -> int:
        """0 found (with any interval), 1 even the lowest load misses the SLO, 3 no result, 130
        interrupted."""
        if self.is_interrupted:
            return 130
        if self.outcome == "misses":
            return 1
        return 3 if self.value is None else 0

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval, relative to the value."""
        if self.value is None or self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2 / self.value

    def sentence(self) -> str:
        """The result as a single line."""
        return "; ".join(filter(None, self._result_and_ending()))

    def result(self) -> str:
        """The sentence without the end of the search: `between 40 and 66 req/s; promise 40`, or a
        bound."""
        return self._result_and_ending()[0]

    def value_text(self) -> str:
        """`12.3 req/s`, with the digits that the interval allows; "" without an interval."""
        if self.value is None or self.half_width is None:
            return ""
        return f"{_rounded(self.value, _digits(self.half_width))} {self.unit}"

    def interval_text(self) -> str:
        """`[11.9, 12.7], 95 %`; "" without an interval."""
        if self.low is None or self.high is None or self.half_width is None:
            return ""
        low, high = (_rounded(end, _digits(self.half_width)) for end in (self.low, self.high))
        return f"[{low}, {high}], {100 * self.confidence:g} %"

    def _result_and_ending(self) -> tuple[str, str]:
        """The result, and how a search ended that found no more than a bound, else ""."""
        if self.value is not None and self.low is not None and self.high is not None:
            return range_text(self.low, self.high, self.unit), ""
        if self.outcome == "rate_limited":
            return self._up_to_limit(), "a rate limit, not latency, ended the search"
        if self.outcome == "contradictory":
            return f"contradictory probes: {self.why} (in {self.unit})", ""
        if self.outcome == "misses":
            lowest = _rounded(self.high or 0.0, 3)
            return f"below {lowest} {self.unit}: the SLO is missed even there", ""
        if self.low is not None:
            text = f"at least {_rounded(self.low, 3)} {self.unit}"
            if self.client_limit is not None:
                return text, "the load generator could not send more"
            is_open = self.outcome == "unsettled"
            return text, f"{self._stopped()} before any load missed the SLO" if is_open else ""
        if self.high is not None:
            text = f"below {_rounded(self.high, 3)} {self.unit}: every load tried misses the SLO"
            return text, "" if self.client_limit is not None else self._stopped()
        limit = "" if self.client_limit is None else "the load generator was the limit"
        return "unknown", limit

    def _up_to_limit(self) -> str:
        met = "" if self.low is None else f"the SLO is met at {_rounded(self.low, 3)} {self.unit}"
        if self.value is None:
            return met or "unknown"
        return f"about {_rounded(self.value, 3)} {self.unit}{f' ({met})' if met else ''}"

    def _stopped(self) -> str:
        return "interrupted" if self.is_interrupted else "the search stopped"

    def sureness(self) -> str:
        """The estimate, its precision and its cost, for the second line."""
        n = len(self.probes)
        spent = f"{n} {'probe' if n == 1 else 'probes'}, {_minutes(self.spent_s)}"
        if self.half_width is None:
            return self._doubt() + spent
        text = f"best estimate {self.value_text()}"
        if self.half_width <= _MOST_REACH:  # else the bounds on the line before state it
            shown = f"{100 * self.half_width:.2g}"
            if self.half_width > self.precision >= float(shown) / 100:  # 15.04 % is not 15 %
                shown = f"{math.ceil(100 * self.half_width)}"
            text += f" ± {shown} %"
        text += f" ({100 * self.confidence:g} %)"
        if self.outcome == "found":
            return f"{text}; {spent}"
        if self.half_width <= self.precision:
            confirmed = "a second probe near it" if self.method == "schedule" else "long probes"
            return f"{text}; not confirmed by {confirmed}; {spent}"
        return f"{text}; ± {100 * self.precision:g} % takes more time; {spent}"

    def method_lines(self) -> list[str]:
        """How the value was estimated, where it is not by the schedule that was sent, or why the
        load generator ended the search."""
        if self.client_limit is not None:
            return [f"at {self.client_limit:.4g} {self.unit}: {self.why}"] if self.why else []
        if self.value is None or self.method == "schedule" or not self.why:
            return []
        return [f"by the attainment of each load alone: {self.why}"]

    def _doubt(self) -> str:
        """A warning where a bound rests on too few requests, else ""."""
        level = self.high if self.low is None else self.low
        shares = [p for p in self.probes if p.level == level and p.is_usable and p.n_due]
        effect = self.design_effect or USUAL
        for probe in shares:
            share = wilson(probe.n_met, probe.n_due, self.confidence, (effect, effect))
            if share.low is not None and share.low < self.attainment <= (share.high or 0.0):
                return (
                    f"not certain at {100 * self.confidence:g} %: only {probe.n_due} "
                    f"{self.counted} were sent at {level:.4g} {self.unit}, of which {probe.n_met} "
                    "met the SLO; "
                )
        return ""

    def to_json(self) -> dict[str, Any]:
        """The `answer` block of capacity.json; the probes are stored next to it."""
        return answer_of(self).to_json()


class Answer(JsonSection, frozen=True, kw_only=True):
    """A capacity as capacity.json stores it: the fields of `Capacity` without the probes, and the
    values that readers would otherwise compute."""

    outcome: str
    unit: LoadUnit
    value: float | None
    low: float | None
    high: float | None
    confidence: float
    attainment: float
    precision: float
    spent_s: float
    client_limit: float | None
    design_effect: float | None
    slope: float | None
    is_interrupted: bool
    method: Method = "curve"
    why: str = ""
    cause: str = ""
    counted: Counted = "requests"
    half_width: float | None
    exit_code: int
    sentence: str
    result: str
    value_text: str | None
    interval_text: str | None


def answer_of(capacity: Capacity) -> Answer:
    """The stored form of a capacity."""
    names = {field.name for field in dataclasses.fields(Capacity)} - {"probes"}
    return Answer(
        **{name: getattr(capacity, name) for name in names},
        half_width=capacity.half_width,
        exit_code=capacity.exit_code,
        sentence=capacity.sentence(),
        result=capacity.result(),
        value_text=capacity.value_text() or None,
        interval_text=capacity.interval_text() or None,
    )


class Definition(JsonSection, frozen=True, kw_only=True):
    """The part of a search that `--resume` must not change; budget and precision may change."""

    scenario: dict[str, Any]
    target: str
    engine: str
    model: str
    over: str
    attainment: float
    between: list[float] | None


class CapacityFile(JsonSection, frozen=True, kw_only=True):
    """The content of capacity.json."""

    schema: int = SCHEMA
    kind: str = "capacity"
    command: list[str]
    definition: Definition
    answer: Answer
    probes: list[Probe]

    def capacity(self) -> Capacity:
        """The result with its probes."""
        names = {field.name for field in dataclasses.fields(Capacity)} - {"probes"}
        values = {name: getattr(self.answer, name) for name in names}
        return Capacity(**values, probes=tuple(self.probes))


def conclude(
    question: Question,
    probes: Sequence[Probe],
    unit: LoadUnit,
    is_interrupted: bool = False,
    counted: Counted = "requests",
) -> Capacity:
    """The result that a search's probes give."""
    state = judge(question, probes)
    untrusted = [probe for probe in probes if probe.grade == "untrusted"]
    client_limit = _client_limit(state, [probe.level for probe in untrusted])
    posterior = state.posterior
    outcome, value, low, high = str(state.outcome), state.value, state.low, state.high
    limit = rate_limit_of(probes)
    if limit is not None and (value is None or (limit.per_s is not None and value > limit.per_s)):
        outcome, low, high = "rate_limited", low if value is None else None, None
        value = limit.per_s if unit == "req/s" else None
    else:
        limit = None
    return Capacity(
        outcome=outcome,
        unit=unit,
        value=value,
        low=low,
        high=high,
        confidence=question.confidence,
        attainment=question.target,
        precision=question.precision,
        spent_s=math.fsum(probe.spent_s for probe in probes),
        probes=tuple(probes),
        client_limit=client_limit,
        design_effect=None if posterior is None else posterior.dispersion.effect,
        slope=None if posterior is None else posterior.slope,
        is_interrupted=is_interrupted,
        method=state.method,
        why=state.why if client_limit is None else untrusted[-1].why,
        cause="" if limit is None else limit.sentence,
        counted=counted,
    )


def _client_limit(state: SearchState, untrusted_levels: Sequence[float]) -> float | None:
    return min(untrusted_levels) if untrusted_levels and state.value is None else None


_MOST_REACH = 0.5


def range_text(low: float, high: float, unit: LoadUnit) -> str:
    """`between 40 and 66 req/s; promise 40`: both bounds rounded outwards."""
    if high <= low:
        return f"{_rounded(low, 3)} {unit}"
    step = _rounding(low, high)
    most = math.ceil(high / step - 1e-9) * step
    if (least := promise_text(low, high)) is None:
        return f"up to {most:.6g} {unit}; no load can be promised yet"
    return f"between {least} and {most:.6g} {unit}; promise {least}"


def promise_text(low: float, high: float) -> str | None:
    """The lower bound rounded down, `40`; None where that is 0."""
    if high <= low:
        return _rounded(low, 3)
    step = _rounding(low, high)
    least = math.floor(low / step + 1e-9) * step
    return f"{least:.6g}" if least > 0 else None


def _rounding(low: float, high: float) -> float:
    """A unit of at most half of the distance between the middle and a bound."""
    return 10.0 ** math.floor(math.log10((high - low) / 4))


def _digits(half_width: float) -> int:
    """Significant digits for an interval of this relative half-width."""
    return 3 if half_width < 0.1 else 2


def _rounded(value: float, digits: int) -> str:
    return f"{float(f'{value:.{digits}g}'):g}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
