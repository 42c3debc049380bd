"""Configurations of a simulated replica: the combinations of a search, and their order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonSection
from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.studies.modes.seed_capacity import compare_capacities
from loadgen.studies.modes.spec import read_values
from loadgen.studies.size.demand import Demand, by_division

TENSOR_PARALLEL = "tensor_parallel"
_SEVERAL = re.compile(r"\s*[1-9]\d*x")
_MOST = 200

Axes = Mapping[str, tuple[str, ...]]


class Configuration(JsonSection, frozen=True, kw_only=True):
    """Settings of a replica on `gpus` GPUs. `goodput_per_gpu` is its capacity per GPU (requests/s
    that meet the SLO), the geometric mean over the draws of traffic; None with the `reason`. Per
    draw, the best has `best_over` times as much. `gpus_at_peak` are those of the replicas, by
    division of the peak, with the replicas that may fail."""

    settings: str
    gpus: int
    goodput_per_gpu: EstimateSection | None = None
    best_over: EstimateSection | None = None
    gpus_at_peak: int | None = None
    reason: str = ""


def read_axes(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`tensor_parallel=1,2,4` and so on as keys with values. Raises UsageError for another form, a
    key that is given twice, and more than 200 combinations."""
    axes: dict[str, tuple[str, ...]] = {}
    n = 1
    for text in texts:
        if (found := read_values(text)) is None:
            raise UsageError(f"--search {text}: expected KEY=VALUE,VALUE, e.g. tensor_parallel=1,2")
        name, values = found[0], tuple(dict.fromkeys(found[1]))
        if name in axes:
            raise UsageError(f"--search {name}: is given twice")
        if name in ("replicas", "hardware"):
            instead = "the peak decides" if name == "replicas" else "search tensor_parallel"
            raise UsageError(f"--search {name}: is no axis; {instead}")
        if name == TENSOR_PARALLEL and not all(
            value.isdecimal() and int(value) for value in values
        ):
            raise UsageError(f"--search {text}: expected numbers of GPUs, e.g. 1,2,4")
        axes[name], n = values, n * len(values)
    if n > _MOST:
        raise UsageError(f"--search: {n} combinations are more than {_MOST}")
    return axes


def combinations(engine: Mapping[str, str], axes: Axes) -> Iterator[tuple[str, dict[str, str]]]:
    """Each combination of values, as text, with the settings of the engine for it. Tensor parallel
    by n is `n` times the hardware. Raises UsageError for hardware that is already several."""
    hardware = engine.get("hardware", "")
    if TENSOR_PARALLEL in axes and _SEVERAL.match(hardware):
        raise UsageError(
            f"--search {TENSOR_PARALLEL}: --hardware {hardware} is already several; name one"
        )
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        text = " ".join(f"{key}={value}" for key, value in chosen.items())
        n_devices = chosen.pop(TENSOR_PARALLEL, None)
        if n_devices is not None:
            chosen["hardware"] = hardware if int(n_devices) == 1 else f"{int(n_devices)}x{hardware}"
        yield text, {**engine, **chosen}


def ranked(
    gpus: Mapping[str, int],
    capacities: Mapping[str, Mapping[int, float]],
    reasons: Mapping[str, str],
    demand: Demand,
    confidence: float,
) -> list[Configuration]:
    """The configurations, the highest goodput per GPU first, those without a capacity last. For
    each, `gpus` of a replica, and its capacities (requests/s) by draw or the reason for none. The
    intervals of the ratios hold together (`compare_capacities`)."""
    per_gpu = {
        settings: {draw: value / gpus[settings] for draw, value in draws.items()}
        for settings, draws in capacities.items()
    }
    compared = compare_capacities(per_gpu, confidence)
    ratios = {ratio.mode: ratio for ratio in compared.ratios}
    order = []
    for row in compared.modes:
        n, ratio = gpus[row.mode], ratios.get(row.mode)
        assert row.value is not None, f"{row.mode}: a capacity without a draw"
        replicas = by_division(demand.design_per_s, row.value * n) + demand.survive
        order.append(
            Configuration(
                settings=row.mode,
                gpus=n,
                goodput_per_gpu=_plain(row),
                best_over=None if ratio is None else _plain(ratio),
                gpus_at_peak=replicas * n,
            )
        )
    return order + [
        Configuration(settings=settings, gpus=gpus[settings], reason=reason)
        for settings, reason in reasons.items()
    ]


def _plain(row: EstimateSection) -> EstimateSection:
    return EstimateSection(value=row.value, low=row.low, high=row.high, n=row.n)


def fewest(order: Sequence[Configuration]) -> Configuration:
    """The configuration that needs the fewest GPUs at the peak; of several, the first."""
    return min(order, key=lambda each: each.gpus_at_peak or math.inf)
