"""Scaling of a scenario's load: all rates by the same factor, or another number of users or agents.

The shape of the traffic stays the same: the cv of gaps, the durations of states, the shares of
classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isclose
from typing import Literal

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonObject
from loadgen.units import parse_level_per_s, write_level
from loadgen.workload.arrivals import Arrivals, StationaryArrivals, Sum, Users
from loadgen.workload.clusters import Burst
from loadgen.workload.scenario import Scenario
from loadgen.workload.trace_arrivals import TraceArrivals

Over = Literal["rate", "concurrency", "agents"]
LoadUnit = Literal["req/s", "users", "agents", "agents/min"]
_RATE_KEYS = {"ramp": ("from", "to"), "flash_crowd": ("rate", "peak")}
_LISTED_RATES = {"steps": "levels", "curve": "points"}
_SEEDS = 2**63
MINUTE_S = 60.0


@dataclass(frozen=True)
class OfferedLoad:
    """The load of a scenario in its unit: arrivals per second, users, or agents that are live or
    arrive per minute. `is_steady`: the rate is constant by design, so all parts of the window are
    alike."""

    level: float
    is_steady: bool
    unit: LoadUnit

    @property
    def is_integer(self) -> bool:
        return self.unit in ("users", "agents")


def offered_load(scenario: Scenario, over: Over) -> OfferedLoad:
    """The load to scale. Raises UsageError for a scenario that cannot be scaled."""
    streams = dict(_streams(scenario))
    unit = _unit(scenario, over, streams.values())
    if unit in ("users", "agents"):
        n_users = sum(_users(scenario, key, arrivals) for key, arrivals in streams.items())
        return OfferedLoad(float(n_users), is_steady=True, unit=unit)
    per_s = sum(_rate(scenario, key, arrivals) for key, arrivals in streams.items())
    is_steady = all(_is_steady(arrivals) for arrivals in streams.values())
    return OfferedLoad(per_s * (MINUTE_S if unit == "agents/min" else 1.0), is_steady, unit)


def scaled(scenario: Scenario, level: float, over: Over) -> Scenario:
    """The scenario at another load, in the unit of `offered_load`.

    A trace is played faster or slower, and repeated if it is shorter than the window. Classes with
    arrivals of their own are scaled together. Raises UsageError like `offered_load`.
    """
    load = offered_load(scenario, over)
    factor = level / load.level
    values = scenario.resolved()
    change = _with_users if load.is_integer else _with_rates
    for block in (values, *values.get("classes", {}).values()):
        if block.get("arrivals"):
            block["arrivals"] = change(block["arrivals"], factor)
    changed = scenario.with_values(values)
    if not load.is_integer:
        _check_rate(changed, level / (MINUTE_S if load.unit == "agents/min" else 1.0))
    return changed


def with_window(scenario: Scenario, warmup_s: float, measure_s: float, seed: int) -> Scenario:
    """The scenario with another window and another seed."""
    values = scenario.resolved() | {"seed": seed % _SEEDS}
    window = {"warmup": f"{warmup_s:.3f}s", "measure": f"{measure_s:.3f}s"}
    values["phases"] |= {**window, "requests": None, "at_most": None}
    return scenario.with_values(values)


def _unit(scenario: Scenario, over: Over, streams: Iterable[Arrivals]) -> LoadUnit:
    """Agents that are live in a closed loop, else agents that arrive."""
    if over != "agents":
        return "users" if over == "concurrency" else "req/s"
    others = [name for name, own in scenario.traffic().items() if own.agents is None]
    if others:
        raise UsageError(
            f"{scenario.name}: --over agents counts agents, and {others[0]} has requests of "
            "another kind; use --over rate or --over concurrency"
        )
    return "agents" if all(isinstance(own, Users) for own in streams) else "agents/min"


def _streams(scenario: Scenario) -> Iterator[tuple[str, Arrivals]]:
    """(key, arrival process) of each arrival process."""
    if scenario.arrivals is not None:
        yield "arrivals", scenario.arrivals
    for name, own in scenario.classes.items():
        if own.arrivals is not None:
            yield f"classes.{name}.arrivals", own.arrivals


def _rate(scenario: Scenario, key: str, arrivals: Arrivals) -> float:
    if isinstance(arrivals, Users):
        raise UsageError(
            f"{scenario.name}: {key}: users have no rate to scale; use --over concurrency"
        )
    rate = arrivals.mean_rate_per_s(scenario.horizon_s)
    if isinstance(arrivals, Burst) or rate is None or rate <= 0:
        raise UsageError(
            f"{scenario.name}: {key}: kind {arrivals.kind} has no mean rate to scale; "
            "use e.g. --set arrivals.kind=poisson with a rate"
        )
    return rate


def _users(scenario: Scenario, key: str, arrivals: Arrivals) -> int:
    if not isinstance(arrivals, Users):
        raise UsageError(
            f"{scenario.name}: {key}: kind {arrivals.kind} is an open loop; --over concurrency "
            "needs users: add --concurrency 8, or write arrivals: {kind: users, users: 8, think: "
            "0s}. For a rate use --over rate"
        )
    return arrivals.users


def _is_steady(arrivals: Arrivals) -> bool:
    if isinstance(arrivals, Sum):
        return all(_is_steady(part) for part in arrivals.of)
    return isinstance(arrivals, StationaryArrivals)


def _with_rates(arrivals: JsonObject, factor: float) -> JsonObject:
    """The resolved arrivals with every rate times `factor`."""

    def more(text: object) -> str:
        return write_level(float(parse_level_per_s(text) * factor))

    kind = arrivals["kind"]
    if kind == TraceArrivals.kind:
        looped = {**arrivals, "loop": True}
        if arrivals.get("rate"):
            return {**looped, "rate": more(arrivals["rate"])}
        return {**looped, "time_scale": (arrivals.get("time_scale") or 1.0) / factor}
    if kind == Sum.kind:
        return {**arrivals, "of": [_with_rates(part, factor) for part in arrivals["of"]]}
    if kind in _LISTED_RATES:
        key = _LISTED_RATES[kind]
        return {**arrivals, key: [{**item, "rate": more(item["rate"])} for item in arrivals[key]]}
    keys = [key for key in _RATE_KEYS.get(kind, ("rate",)) if key in arrivals]
    return {**arrivals, **{key: more(arrivals[key]) for key in keys}}


def _with_users(arrivals: JsonObject, factor: float) -> JsonObject:
    return {**arrivals, "users": max(1, round(arrivals["users"] * factor))}


def _check_rate(changed: Scenario, level: float) -> None:
    """Raise UsageError if the new rate differs from the requested rate, as for a plug-in kind with
    other keys for its rates."""
    streams = list(_streams(changed))
    if any(isinstance(arrivals, TraceArrivals) for _, arrivals in streams):
        return  # the mean over the window depends on which part of the trace is in it
    total = sum(_rate(changed, key, arrivals) for key, arrivals in streams)
    if not isclose(total, level, rel_tol=1e-6):
        kinds = ", ".join(sorted({arrivals.kind for _, arrivals in streams}))
        raise UsageError(
            f"{changed.name}: arrivals of kind {kinds} cannot be scaled to {level:g}/s"
        )
