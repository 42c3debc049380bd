"""The variables of a comparison of modes: the modes with their parameters, the rates and the
seeds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.errors import UsageError
from loadgen.workload.scenario import Scenario
from reference_engine.policies.base import POLICIES

_MOST_RATES = 200


@dataclass(frozen=True, slots=True)
class Mode:
    """A batching mode with parameters of its own; `label` is its name in tables and figures."""

    kind: str
    parameters: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return " ".join([self.kind, *(f"{key}={value}" for key, value in self.parameters.items())])


def read_modes(text: str) -> list[Mode]:
    """Modes from `static,chunked:token_budget=512:max_num_seqs=64`, each at most once. Raises
    UsageError."""
    modes = [_mode(part) for part in filter(None, (part.strip() for part in text.split(",")))]
    if not modes:
        raise UsageError("--modes: name at least one, e.g. static,continuous,chunked")
    for k, mode in enumerate(modes):
        if mode in modes[:k]:
            raise UsageError(f"--modes: '{mode.label}' appears twice")
    return modes


def read_rates(text: str) -> list[float]:
    """Requests per second from `2:20:2` (from, to, step; both ends included) or `2,4.5,9`."""
    match = re.fullmatch(r"([\d.]+):([\d.]+):([\d.]+)", text.replace(" ", ""))
    try:
        if match is None:
            rates = [float(part) for part in text.split(",")]
        else:
            first, last, step = (float(part) for part in match.groups())
            n = int((last - first) / step + 1e-9) + 1 if step > 0 else 0
            rates = [round(first + k * step, 9) for k in range(min(n, _MOST_RATES + 1))]
    except ValueError:
        rates = []
    if not rates or min(rates) <= 0 or len(set(rates)) < len(rates) or len(rates) > _MOST_RATES:
        raise UsageError(
            f"--rates {text}: expected requests per second as from:to:step, e.g. 2:20:2, or as a "
            f"list, e.g. 2,4,8; at most {_MOST_RATES} of them"
        )
    return sorted(rates)


def variant(scenario: Scenario, rate_per_s: float | None, seed: int) -> Scenario:
    """The same scenario at another rate and with another seed. Raises UsageError if it has no
    single rate to change."""
    values = scenario.resolved() | {"seed": seed}
    if rate_per_s is not None:
        arrivals = values.get("arrivals") or {}
        if "rate" not in arrivals:
            raise UsageError(
                f"--rates: scenario '{scenario.name}' has no arrivals.rate to change "
                f"(its arrivals: {arrivals.get('kind', 'in each class')}); leave --rates out"
            )
        values["arrivals"] = {**arrivals, "rate": f"{rate_per_s:.12g}/s"}
    return scenario.with_values(values)


def seeds_from(scenario: Scenario, n: int) -> Sequence[int]:
    """The scenario's own seed and the following seeds."""
    return range(scenario.seed, scenario.seed + n)


def read_values(text: str) -> tuple[str, list[str]] | None:
    """Name and values of `token-budget=256,512`, the name with underscores; None for another
    form."""
    key, equals, listed = text.partition("=")
    name, values = key.strip().replace("-", "_"), [value.strip() for value in listed.split(",")]
    return (name, values) if equals and name and all(values) else None


def _mode(text: str) -> Mode:
    kind, *parts = text.split(":")
    parameters: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise UsageError(
                f"--modes {text}: expected key=value after ':', got '{part}', "
                "e.g. chunked:token_budget=512"
            )
        parameters[key.strip().replace("-", "_")] = value.strip()
    POLICIES.get(kind)  # raises UnknownKind with the nearest name
    return Mode(kind, parameters)
