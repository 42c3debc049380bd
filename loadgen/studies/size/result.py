"""The result of a sizing, as it is stored, and as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadgen.manifest.json_section import JsonSection
from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.studies.size.configurations import Configuration
from loadgen.studies.size.demand import Costs, Demand, Interval, Variant

SCHEMA = 1
_SHOWN = 3  # configurations in the lines of text


@dataclass(frozen=True)
class Trial:
    """`n_replicas` simulated at the design load: the share of requests that met the SLO under each
    schedule, and whether every schedule reached the target."""

    router: str
    n_replicas: int
    attainments: tuple[float, ...]
    is_met: bool


class Size(JsonSection, frozen=True, kw_only=True):
    """Replicas and GPUs for a demand; the content of size.json.

    `n_divided` by division, `n_serving` with bursts and routing, `n_replicas` with those that may
    fail. `simulated_per_s` is the load of the simulations: the design load, times the simulated
    capacity of a replica over the lower end of `capacity`. `trials` is empty where nothing was
    simulated. `configurations` are those of a search, the best first, whose replica was sized. None
    as `n_serving`: no number tried meets the SLO. `exit_code`: 1 then, else 0.
    """

    schema: int = SCHEMA
    kind: str = "size"
    demand: Demand
    capacity: Interval
    target: float
    router: str
    n_divided: int
    n_serving: int | None
    n_replicas: int | None
    n_gpus: int | None
    simulated_per_s: float | None
    trials: tuple[Trial, ...]
    sensitivity: tuple[Variant, ...]
    costs: Costs | None
    notes: tuple[str, ...]
    exit_code: int
    configurations: tuple[Configuration, ...] = ()


def sentences(size: Size) -> Iterator[str]:
    """The result, the step from capacity to replicas, the sensitivity and the costs."""
    demand, low = size.demand, size.capacity.low
    if size.n_replicas is None:
        yield f"no answer: up to {max(t.n_replicas for t in size.trials)} replicas miss the SLO"
    else:
        yield f"{size.n_gpus} GPUs: {size.n_replicas} replicas of {demand.gpus_per_replica}"
    yield from _search(size.configurations)
    yield f"  capacity of a replica  {interval_text(size.capacity)}; its lower end counts"
    yield (
        f"  division               {demand.peak_per_s:.4g} req/s + {100 * demand.headroom:g} % = "
        f"{demand.design_per_s:.4g} req/s; / {low:.4g} req/s = {size.n_divided} replicas"
    )
    for trial in size.trials:
        if trial.router == size.router:
            yield f"  simulated              {_trial(trial, size.target)}"
    yield f"  failures               + {demand.survive}: the others still serve the peak"
    if size.sensitivity:
        yield "with another assumption:"
        for variant in size.sensitivity:
            yield f"  {variant.gpus:5} GPUs  {variant.replicas:4} replicas  {variant.assumption}"
    if size.costs is not None:
        yield from _costs(size.costs)
    for note in size.notes:
        yield f"note: {note}"


def margin_text(order: Sequence[Configuration]) -> str:
    """`12 % more per GPU than the next [9 %, 15 %]`."""
    second = order[1].best_over if len(order) > 1 else None
    if second is None or second.value is None:
        return "no other meets the SLO"
    text = f"{100 * (second.value - 1):.0f} % more per GPU than the next"
    if second.low is None or second.high is None:
        return text
    return f"{text} [{100 * (second.low - 1):.0f} %, {100 * (second.high - 1):.0f} %]"


def configuration_text(each: Configuration) -> str:
    """The goodput per GPU of a configuration and its GPUs at the peak, or the reason for none."""
    if each.goodput_per_gpu is None:
        return f"{each.settings}: {each.reason}"
    return (
        f"{each.settings}: {goodput_text(each.goodput_per_gpu)} per GPU, "
        f"{each.gpus_at_peak} GPUs at the peak"
    )


def goodput_text(goodput: EstimateSection) -> str:
    """`7.41 req/s [7.2, 7.6]`."""
    ends = "" if goodput.low is None else f" [{goodput.low:.3g}, {goodput.high:.3g}]"
    return f"{goodput.value:.3g} req/s{ends}"


def _search(order: Sequence[Configuration]) -> Iterator[str]:
    """The best configuration with its margin, and the next."""
    if not order:
        return
    yield f"best of {len(order)} configurations: {order[0].settings}; {margin_text(order)}"
    for each in order[:_SHOWN]:
        yield f"  {configuration_text(each)}"
    if len(order) > _SHOWN:
        yield f"  {len(order) - _SHOWN} more in size.json and on the page"


def interval_text(capacity: Interval) -> str:
    """`7.4 req/s [7.1, 7.7], 95 %`, or the lower bound alone."""
    if capacity.value is None or capacity.high is None:
        return f"at least {capacity.low:.4g} req/s"
    return (
        f"{capacity.value:.4g} req/s [{capacity.low:.4g}, {capacity.high:.4g}], "
        f"{100 * capacity.confidence:g} %"
    )


def _trial(trial: Trial, target: float) -> str:
    word = "met" if trial.is_met else "missed"
    shares = ", ".join(f"{100 * share:.2f} %" for share in trial.attainments)
    return (
        f"{trial.n_replicas} replicas behind {trial.router} {word} the SLO: {shares} of the "
        f"requests by schedule, target {100 * target:g} %"
    )


def _costs(costs: Costs) -> Iterator[str]:
    yield (
        f"at the peak: {costs.goodput_per_gpu_per_s:.3g} req/s per GPU, "
        f"{costs.input_tokens_per_s:.4g} input and {costs.output_tokens_per_s:.4g} output tokens/s"
    )
    if costs.price_per_million is not None:
        yield (
            f"price: {costs.price_per_hour:.4g} per hour, {costs.price_per_million:.3g} per "
            "million output tokens"
        )
    if costs.energy_kwh_per_million is not None:
        yield f"energy: {costs.energy_kwh_per_million:.3g} kWh per million output tokens (GPUs)"
