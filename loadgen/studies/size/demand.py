"""Arithmetic of sizing: replicas by division, failures, sensitivity to assumptions, costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

_ROUNDING = 1e-9
_SECONDS_PER_HOUR = 3600.0
_JOULES_PER_KWH = 3.6e6
_MILLION = 1e6


@dataclass(frozen=True)
class Demand:
    """The load to serve: a peak (requests/s), spare capacity as a share of it, and the number of
    replicas that may fail at the peak. A replica has `gpus_per_replica`."""

    peak_per_s: float
    headroom: float
    survive: int
    gpus_per_replica: int

    @property
    def design_per_s(self) -> float:
        """The load that the replicas must serve: the peak with its headroom."""
        return self.peak_per_s * (1 + self.headroom)


@dataclass(frozen=True)
class Interval:
    """The capacity of a replica (requests/s) with its confidence interval. `value` and `high` are
    None where a search found a lower bound only."""

    low: float
    value: float | None
    high: float | None
    confidence: float


@dataclass(frozen=True)
class Variant:
    """The result under another assumption."""

    assumption: str
    replicas: int
    gpus: int


def by_division(load_per_s: float, capacity_per_s: float) -> int:
    """The least number of replicas whose capacities add up to a load."""
    return max(1, math.ceil(load_per_s / capacity_per_s - _ROUNDING))


def sensitivity(demand: Demand, capacity: Interval, n_added: int) -> Iterator[Variant]:
    """The result with one assumption changed at a time. `n_added` are the replicas that bursts and
    routing add to the division; they stay."""

    def variant(text: str, changed: Demand, per_replica: float) -> Variant:
        n = by_division(changed.design_per_s, per_replica) + n_added + changed.survive
        return Variant(text, n, n * changed.gpus_per_replica)

    low = capacity.low
    if capacity.value is not None:
        yield variant(
            f"capacity at its estimate, {capacity.value:.3g} req/s", demand, capacity.value
        )
    if capacity.high is not None:
        yield variant(
            f"capacity at its upper end, {capacity.high:.3g} req/s", demand, capacity.high
        )
    for factor in (0.9, 1.1, 1.25):
        peak = demand.peak_per_s * factor
        yield variant(f"peak {peak:.3g} req/s", replace(demand, peak_per_s=peak), low)
    for headroom in (0.0, demand.headroom + 0.2):
        if headroom != demand.headroom:
            yield variant(f"headroom {100 * headroom:g} %", replace(demand, headroom=headroom), low)
    for survive in (demand.survive - 1, demand.survive + 1):
        if survive >= 0:
            yield variant(f"{survive} replicas may fail", replace(demand, survive=survive), low)


@dataclass(frozen=True)
class Costs:
    """Costs at the peak, with all GPUs running. Per million output tokens: `price` in the unit of
    the price per GPU hour, `energy_kwh` of the GPUs alone; None without a price or a power."""

    goodput_per_gpu_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    price_per_hour: float | None
    price_per_million: float | None
    energy_kwh_per_million: float | None


def costs(
    demand: Demand,
    n_gpus: int,
    tokens_per_s: tuple[float, float],
    price_per_gpu_hour: float | None,
    watts_per_gpu: float | None,
) -> Costs:
    """Costs of `n_gpus` that serve the peak; `tokens_per_s` are input and output tokens then."""
    n_input, n_output = tokens_per_s
    price_per_hour = None if price_per_gpu_hour is None else n_gpus * price_per_gpu_hour
    energy = None
    if watts_per_gpu is not None:
        energy = n_gpus * watts_per_gpu / n_output * _MILLION / _JOULES_PER_KWH
    per_million = None
    if price_per_hour is not None:
        per_million = price_per_hour / _SECONDS_PER_HOUR / n_output * _MILLION
    return Costs(demand.peak_per_s / n_gpus, n_input, n_output, price_per_hour, per_million, energy)
