"""The answer of a capacity search, as it is kept, printed and returned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loadgen.measure.capacity.capacity_probe import Probe
from loadgen.measure.capacity.next_probe import Question, SearchState, judge
from loadgen.measure.statistics.proportions import wilson

Unit = Literal["req/s", "users"]
SCHEMA = 1


@dataclass(frozen=True)
class Capacity:
    """The highest load whose attainment is at least `attainment`, with its interval.

    `outcome` found: as narrow as asked; unsettled: the best answer so far (`value` is None where it
    is not even known from both sides); misses: even the lowest load tried misses; at_least: the
    highest one is fine, the true value is at least `low`. `client_limit` is the lowest load that
    the client could not send properly, None if there was none. `design_effect` says how many
    requests are worth one independent one, `slope` by how many log-odds attainment falls per e-fold
    load.
    """

    outcome: str
    unit: Unit
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

    @property
    def exit_code(self) -> int:
        """0 found (with whatever interval), 1 even the lowest load misses, 3 no answer, 130."""
        if self.is_interrupted:
            return 130
        if self.outcome == "misses":
            return 1
        return 3 if self.value is None else 0

    @property
    def half_width(self) -> float | None:
        """Half the interval over the value."""
        if self.value is None or self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2 / self.value

    def sentence(self) -> str:
        """The answer in one line."""
        if self.value is not None and self.low is not None and self.high is not None:
            digits = _digits(self.half_width or 0.0)
            low, value, high = (_say(v, digits) for v in (self.low, self.value, self.high))
            return f"{value} {self.unit} [{low}, {high}], {100 * self.confidence:g} %"
        if self.outcome == "misses":
            return f"below {_say(self.high or 0.0, 3)} {self.unit}: even that misses the promise"
        if self.low is not None:
            text = f"at least {_say(self.low, 3)} {self.unit}"
            if self.client_limit is not None:
                text += "; the client could not send more"
            elif self.outcome == "unsettled":
                text += f"; {self._stopped()} before one missed"
            return text
        if self.high is not None:
            text = f"below {_say(self.high, 3)} {self.unit}: every load tried misses"
            return text if self.client_limit is not None else f"{text}; {self._stopped()}"
        return "unknown"

    def _stopped(self) -> str:
        return "interrupted" if self.is_interrupted else "the search ended"

    def sureness(self) -> str:
        """What the interval is worth, for the line below."""
        n = len(self.probes)
        spent = f"{n} {'probe' if n == 1 else 'probes'}, {_minutes(self.spent_s)}"
        if self.half_width is None:
            return self._doubt() + spent
        reach = f"± {100 * self.half_width:.2g} %"
        if self.outcome == "found":
            return f"{reach} in {spent}"
        if self.half_width <= self.precision:
            return f"{reach}, not yet confirmed by long probes; {spent}"
        return (
            f"{reach}, asked for ± {100 * self.precision:g} %: more time would narrow it; {spent}"
        )

    def _doubt(self) -> str:
        """That a bound rests on a share of too few requests, where it does."""
        level = self.high if self.low is None else self.low
        shares = [p for p in self.probes if p.level == level and p.is_usable and p.n_due]
        for probe in shares:
            seen = wilson(probe.n_met, probe.n_due, self.confidence)
            if seen.low is not None and seen.low < self.attainment <= (seen.high or 0.0):
                return (
                    f"not proven at {100 * self.confidence:g} %: {probe.n_met} of {probe.n_due} "
                    f"kept at {level:.4g} {self.unit} is too few to tell; "
                )
        return ""

    def to_json(self) -> dict[str, Any]:
        """The content of the answer in capacity.json; the probes stand beside it."""
        content = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "probes"
        }
        said = {"half_width": self.half_width, "exit_code": self.exit_code}
        return {**content, **said, "sentence": self.sentence()}


def conclude(
    question: Question, probes: Sequence[Probe], unit: Unit, is_interrupted: bool = False
) -> Capacity:
    """What a search's probes answer."""
    state = judge(question, probes)
    doubted = [probe.level for probe in probes if probe.grade == "untrusted"]
    found = state.posterior
    return Capacity(
        outcome=state.outcome,
        unit=unit,
        value=state.value,
        low=state.low,
        high=state.high,
        confidence=question.confidence,
        attainment=question.target,
        precision=question.precision,
        spent_s=math.fsum(probe.spent_s for probe in probes),
        probes=tuple(probes),
        client_limit=_client_limit(state, doubted),
        design_effect=None if found is None else found.dispersion.effect,
        slope=None if found is None else found.slope,
        is_interrupted=is_interrupted,
    )


def probe_json(probe: Probe) -> dict[str, Any]:
    """One probe as capacity.json holds it."""
    return dataclasses.asdict(probe)


def read_probe(content: dict[str, Any]) -> Probe:
    """The probe that `probe_json` wrote. Raises KeyError or TypeError for anything else."""
    counts = {key: tuple(int(n) for n in content[key]) for key in ("due", "met")}
    return Probe(**{**content, **counts})


def read_answer(content: Mapping[str, Any]) -> Capacity:
    """The answer in capacity.json, with its probes. Raises KeyError or TypeError for another."""
    said = content["answer"]
    names = [field.name for field in dataclasses.fields(Capacity) if field.name != "probes"]
    probes = tuple(read_probe(one) for one in content["probes"])
    return Capacity(**{name: said[name] for name in names}, probes=probes)


def _client_limit(state: SearchState, doubted: Sequence[float]) -> float | None:
    return min(doubted) if doubted and state.value is None else None


def _digits(half_width: float) -> int:
    """Significant digits that an interval this narrow deserves."""
    return 3 if half_width < 0.1 else 2


def _say(value: float, digits: int) -> str:
    return f"{float(f'{value:.{digits}g}'):g}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
