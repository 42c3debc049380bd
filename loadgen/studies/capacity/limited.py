"""Search below a rate limit: requests above it say nothing about the server's latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadgen.studies.capacity.next_probe import NextProbe, Question
from loadgen.studies.capacity.probe import Probe

_BELOW, _CLOSE = 0.9, 0.8  # of the limit: a last probe is sent there, unless one was
_UNKNOWN = 0.6  # of a level that was limited, where the rate that got through is not known
_MOST_LIMITED = 6  # probes


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A rate limit that ended a search: requests per second that got through, None if unknown, and
    its sentence."""

    per_s: float | None
    sentence: str


def limited_at(probe: Probe, unit: str) -> float:
    """The level at which the rate limit begins, by a probe that met it."""
    if unit != "req/s" or probe.passed_per_s is None:
        return probe.level * _UNKNOWN / _BELOW
    return min(probe.level, probe.passed_per_s)


def below_limit(
    question: Question, probes: Sequence[Probe], planned: NextProbe | None, limit: float
) -> NextProbe | None:
    """The next probe under a rate limit: as `planned`, or closely below the limit in place of a
    level above it; None once the load closely below the limit is measured."""
    if planned is None or planned.level < limit * _BELOW:
        return planned
    is_measured = any(p.is_usable and p.level >= limit * _CLOSE for p in probes)
    n_limited = sum(probe.grade == "limited" for probe in probes)
    level = limit * _BELOW
    if question.is_integer:
        level = float(int(level))
    if is_measured or n_limited >= _MOST_LIMITED or level < (question.low or 0.0) or not level:
        return None
    return replace(planned, level=level)


def rate_limit_of(probes: Sequence[Probe]) -> RateLimit | None:
    """The rate limit that ended a search; None where none did: requests were missed for their
    latency below it."""
    limited = [probe for probe in probes if probe.grade == "limited"]
    if not limited:
        return None
    known = [probe for probe in limited if probe.passed_per_s is not None]
    if not known:
        return RateLimit(None, limited[-1].why)
    most = max(known, key=lambda probe: probe.passed_per_s or 0.0)  # others offered little more
    return RateLimit(most.passed_per_s, most.why)
