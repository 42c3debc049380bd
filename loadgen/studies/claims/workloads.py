"""The traffic under which claims are measured, as values of scenarios."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from loadgen.workload.scaling import scaled, with_window
from loadgen.workload.scenario import Scenario, load_scenario

_SHORT: Mapping[str, Any] = {
    "input_tokens": {"kind": "lognormal", "median": 200, "sigma": 0.6, "max": 1000},
    "output_tokens": {"kind": "lognormal", "median": 120, "sigma": 0.6, "max": 400},
}
_CHAT: Mapping[str, Any] = {
    "input_tokens": {"kind": "lognormal", "median": 220, "sigma": 0.9, "max": 4096},
    "output_tokens": {"kind": "lognormal", "median": 180, "sigma": 0.8, "max": 1024},
}
_UNEVEN: Mapping[str, Any] = {
    "input_tokens": 256,
    "output_tokens": {"kind": "uniform", "min": 50, "max": 1000},
}
_HEAVY: Mapping[str, Any] = {
    "input_tokens": 256,
    "output_tokens": {"kind": "lognormal", "median": 120, "sigma": 1.2, "max": 4000},
}
_INTERACTIVE = ("ttft <= 500ms", "tpot <= 50ms")


def _poisson(
    rate_per_s: float,
    requests: Mapping[str, Any] | None = None,
    *,
    warmup_s: float = 10,
    measure_s: float = 60,
    drain_s: float = 60,
    slo: tuple[str, ...] = (),
    classes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "arrivals": {"kind": "poisson", "rate": f"{rate_per_s:g}/s"},
        "phases": {
            "warmup": f"{warmup_s:g}s",
            "measure": f"{measure_s:g}s",
            "drain": f"{drain_s:g}s",
        },
        "limits": {"timeout": "10m", "max_concurrency": 200_000},
        "stop_when": "never",
        "slo": list(slo),
    }
    return values | ({"requests": dict(requests)} if requests else {"classes": dict(classes or {})})


def _overload(
    rate_per_s: float, requests: Mapping[str, Any], warmup_s: float = 10, measure_s: float = 60
) -> dict[str, Any]:
    """More requests than the engine serves: its throughput is its capacity."""
    return _poisson(rate_per_s, requests, warmup_s=warmup_s, measure_s=measure_s, drain_s=0)


def _classes(**parts: tuple[float, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: {"weight": weight, "requests": dict(requests)}
        for name, (weight, requests) in parts.items()
    }


_LONG_16K: Mapping[str, Any] = {"input_tokens": 16_000, "output_tokens": 64}
_DOCUMENT: Mapping[str, Any] = {"input_tokens": 8_000, "output_tokens": 64}
_BIMODAL: Mapping[str, Any] = {
    "short": (
        0.9,
        {
            "input_tokens": {"kind": "uniform", "min": 64, "max": 256},
            "output_tokens": {"kind": "uniform", "min": 32, "max": 200},
        },
    ),
    "long": (
        0.1,
        {
            "input_tokens": {"kind": "uniform", "min": 4_000, "max": 16_000},
            "output_tokens": {"kind": "uniform", "min": 32, "max": 200},
        },
    ),
}
WORKLOADS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "exponential answers": _overload(
            120,
            {
                "input_tokens": 512,
                "output_tokens": {"kind": "gamma", "mean": 128, "cv": 1, "max": 512},
            },
        ),
        "uneven answers": _overload(80, _UNEVEN, warmup_s=20),
        "similar answers": _overload(
            120,
            {
                "input_tokens": 256,
                "output_tokens": {"kind": "gamma", "mean": 300, "cv": 0.2, "max": 700},
            },
        ),
        "uneven answers, long": _overload(40, _UNEVEN, warmup_s=120, measure_s=240),
        "uneven answers, slow": _poisson(1, _UNEVEN, measure_s=200, warmup_s=50),
        "uneven answers, calm": _poisson(3.5, _UNEVEN, measure_s=120, warmup_s=20),
        "short and 5 % of 16 000": _poisson(
            20, classes=_classes(short=(0.95, _SHORT), long=(0.05, _LONG_16K)), measure_s=300
        ),
        "short alone": _poisson(19, classes=_classes(short=(1, _SHORT)), measure_s=300),
        "questions and documents": _poisson(
            20, classes=_classes(short=(0.85, _SHORT), long=(0.15, _DOCUMENT)), measure_s=40
        ),
        "two lengths": _poisson(12, classes=_classes(**_BIMODAL), measure_s=60, slo=_INTERACTIVE),
        "chat": _poisson(8, _CHAT, slo=_INTERACTIVE),
        "heavy tail": _poisson(22, _HEAVY, measure_s=120),
        "heavy tail, decode replicas": _poisson(
            27,
            {
                "input_tokens": {"kind": "lognormal", "median": 220, "sigma": 0.9, "max": 4096},
                "output_tokens": {"kind": "lognormal", "median": 250, "sigma": 1.5, "max": 8000},
            },
            warmup_s=10,
            measure_s=40,
            drain_s=120,
        ),
        "two kinds of answers": _poisson(
            22,
            classes={
                name: {
                    "weight": weight,
                    "tenant": name,
                    "requests": {
                        "input_tokens": 256,
                        "output_tokens": {"kind": "gamma", "mean": mean, "cv": 0.5, "max": 4000},
                    },
                }
                for name, weight, mean in (("short", 0.8, 60), ("long", 0.2, 1200))
            },
            warmup_s=5,
            measure_s=30,
        ),
        "uneven answers, pipeline": _overload(12, _UNEVEN, warmup_s=20, measure_s=20),
        "documents, few": _poisson(
            12, classes=_classes(short=(0.85, _SHORT), long=(0.15, _DOCUMENT)), measure_s=40
        ),
        "two tenants": _poisson(
            12,
            classes={
                "light": {"weight": 0.5, "tenant": "light", "requests": dict(_SHORT)},
                "heavy": {"weight": 0.5, "tenant": "heavy", "requests": dict(_DOCUMENT)},
            },
            measure_s=40,
        ),
        "70B, outputs": _overload(40, _UNEVEN, warmup_s=30, measure_s=90),
        "70B, outputs, calm": _poisson(1.5, _UNEVEN, warmup_s=30, measure_s=200, drain_s=120),
        "70B, prompts": _overload(
            120,
            {
                "input_tokens": {"kind": "uniform", "min": 50, "max": 1000},
                "output_tokens": {"kind": "gamma", "mean": 35, "cv": 0.5, "max": 100},
            },
        ),
    }
)


_SHIPPED: Mapping[str, tuple[str, float, float, float]] = MappingProxyType(
    {
        "chat preset": ("chat_poisson", 8, 10, 60),
        "code preset, overload": ("code_generation", 40, 20, 120),
        "writing preset, overload": ("long_writing", 60, 30, 60),
        "retrieval preset": ("rag_shared_prefix", 8, 15, 30),
        "classes preset": ("mixed_classes", 25, 5, 20),
    }
)
"""Workload → a shipped scenario, its rate per second, warm-up and window (s) here."""


def scenario_of(name: str, seed: int) -> Scenario:
    """A workload with a seed; "batch preset" is the shipped `offline_batch` as it is."""
    if name in _SHIPPED:
        preset, rate_per_s, warmup_s, measure_s = _SHIPPED[name]
        loaded = scaled(load_scenario(preset), rate_per_s, "rate")
        return with_window(loaded, warmup_s, measure_s, seed)
    if name == "batch preset":
        batch = load_scenario("offline_batch")
        return batch.with_values(batch.resolved() | {"seed": seed})
    head = {"schema": 1, "name": "claim", "seed": seed}
    return Scenario.model_validate({**head, **WORKLOADS[name]})
