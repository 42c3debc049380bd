"""The same scenario with more or less of it: every rate by one factor, or another number of users.

What is scaled is how much arrives, never its shape: gaps keep their cv, states their stays, classes
their shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isclose
from typing import Any, Literal

from loadgen.errors import UsageError
from loadgen.units import parse_level_per_s, write_level
from loadgen.workload.arrivals import Arrivals
from loadgen.workload.closed_loop import Users
from loadgen.workload.groups import Burst
from loadgen.workload.scenario import Scenario
from loadgen.workload.superposition import Sum
from loadgen.workload.trace_arrivals import TraceArrivals

Over = Literal["rate", "concurrency"]
_SINGLE_RATE = ("constant", "poisson", "gamma", "weibull", "on_off", "mmpp", "hawkes", "batch")
_RATE_KEYS = {"ramp": ("from", "to"), "flash_crowd": ("rate", "peak")}
_LISTED_RATES = {"steps": "levels", "curve": "points"}
_SEEDS = 2**63


@dataclass(frozen=True)
class Amount:
    """How much a scenario asks for: arrivals per second, or users. `is_steady`: its rate does not
    vary by design, so a part of its window is like any other."""

    level: float
    is_steady: bool


def amount(scenario: Scenario, over: Over) -> Amount:
    """What there is to scale. Raises UsageError for a scenario that cannot be scaled so."""
    streams = dict(_streams(scenario))
    if over == "concurrency":
        return Amount(float(sum(_users(scenario, name, a) for name, a in streams.items())), True)
    total = sum(_rate(scenario, name, arrivals) for name, arrivals in streams.items())
    return Amount(total, all(_is_steady(arrivals) for arrivals in streams.values()))


def scaled(scenario: Scenario, level: float, over: Over) -> Scenario:
    """The scenario at another mean rate (per second), or with another number of users in all.

    A trace is played faster or slower, over and over if it is shorter than the window; classes that
    have arrivals of their own are scaled together. Raises UsageError as `amount` does.
    """
    factor = level / amount(scenario, over).level
    values = scenario.resolved()
    change = _with_more_users if over == "concurrency" else _times
    owners = [values, *values.get("classes", {}).values()]
    for owner in owners:
        if owner.get("arrivals"):
            owner["arrivals"] = change(owner["arrivals"], factor)
    changed = scenario.with_values(values)
    if over == "rate":
        _check(changed, level)
    return changed


def probed(scenario: Scenario, warmup_s: float, measure_s: float, seed: int) -> Scenario:
    """The scenario over another window and with another seed."""
    values = scenario.resolved() | {"seed": seed % _SEEDS}
    values["phases"] |= {"warmup": f"{warmup_s:.3f}s", "measure": f"{measure_s:.3f}s"}
    return scenario.with_values(values)


def _streams(scenario: Scenario) -> Iterator[tuple[str, Arrivals]]:
    """Every arrival process with the key it stands under."""
    if scenario.arrivals is not None:
        yield "arrivals", scenario.arrivals
    for name, asked in scenario.classes.items():
        if asked.arrivals is not None:
            yield f"classes.{name}.arrivals", asked.arrivals


def _rate(scenario: Scenario, key: str, arrivals: Arrivals) -> float:
    if isinstance(arrivals, Users):
        raise UsageError(
            f"{scenario.name}: {key}: users have no rate to search; ask for --over concurrency"
        )
    rate = arrivals.mean_rate_per_s(scenario.horizon_s)
    if isinstance(arrivals, Burst) or rate is None or rate <= 0:
        raise UsageError(
            f"{scenario.name}: {key}: kind {arrivals.kind} has no mean rate that could be scaled; "
            "use e.g. --set arrivals.kind=poisson with a rate"
        )
    return rate


def _users(scenario: Scenario, key: str, arrivals: Arrivals) -> int:
    if not isinstance(arrivals, Users):
        raise UsageError(
            f"{scenario.name}: {key}: kind {arrivals.kind} is an open loop; --over concurrency "
            "searches users, e.g. arrivals: {kind: users, users: 8, think: 0s}. For a rate: "
            "--over rate"
        )
    return arrivals.users


def _is_steady(arrivals: Arrivals) -> bool:
    if isinstance(arrivals, Sum):
        return all(_is_steady(part) for part in arrivals.of)
    return arrivals.kind in _SINGLE_RATE


def _times(arrivals: dict[str, Any], factor: float) -> dict[str, Any]:
    kind = arrivals["kind"]

    def more(text: object) -> str:
        return write_level(float(parse_level_per_s(text) * factor))

    if kind == TraceArrivals.kind:
        return _faster(arrivals, factor, more)
    if kind == Sum.kind:
        return {**arrivals, "of": [_times(part, factor) for part in arrivals["of"]]}
    if kind in _LISTED_RATES:
        key = _LISTED_RATES[kind]
        return {**arrivals, key: [{**one, "rate": more(one["rate"])} for one in arrivals[key]]}
    keys = [key for key in _RATE_KEYS.get(kind, ("rate",)) if key in arrivals]
    return {**arrivals, **{key: more(arrivals[key]) for key in keys}}


def _faster(
    arrivals: dict[str, Any], factor: float, more: Callable[[object], str]
) -> dict[str, Any]:
    changed = {**arrivals, "loop": True}
    if arrivals.get("rate"):
        return {**changed, "rate": more(arrivals["rate"])}
    return {**changed, "time_scale": (arrivals.get("time_scale") or 1.0) / factor}


def _with_more_users(arrivals: dict[str, Any], factor: float) -> dict[str, Any]:
    return {**arrivals, "users": max(1, round(arrivals["users"] * factor))}


def _check(changed: Scenario, level: float) -> None:
    """Raises UsageError where the asked rate did not come about: a kind of a plug-in whose rates
    have other names, or a part of a trace that is not like the whole."""
    streams = list(_streams(changed))
    if any(isinstance(arrivals, TraceArrivals) for _, arrivals in streams):
        return  # the mean over the window depends on which part of the trace is in it
    total = sum(_rate(changed, key, arrivals) for key, arrivals in streams)
    if not isclose(total, level, rel_tol=1e-6):
        kinds = ", ".join(sorted({arrivals.kind for _, arrivals in streams}))
        raise UsageError(
            f"{changed.name}: arrivals of kind {kinds} cannot be scaled to {level:g}/s"
        )
