"""One cell of a comparison: a mode, a rate and a seed, and the numbers of that run as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loadgen.measure.summary import ClassSummary, Distribution, Summary
from loadgen.records import Run

METRICS = ("ttft_s", "tpot_s", "itl_s", "max_stall_s", "e2e_s")
PERCENTILES = ("p50", "p99")

Cell = dict[str, Any]


def cell_of(
    run: Run, summary: Summary, mode: str, rate_per_s: float | None, waits_s: Mapping[str, Any]
) -> Cell:
    """The numbers of a finished run. `waits_s`: seconds that requests waited, by class and reason;
    values that do not exist are None."""
    return {
        "mode": mode,
        "rate_per_s": rate_per_s,
        "seed": run.manifest.seed,
        "schedule_sha256": run.manifest.schedule_sha256,
        "verdict": summary.verdict,
        "is_trusted": summary.validity.trusted,
        "reasons": list(summary.reasons),
        **_numbers(summary),
        "classes": {name: _numbers(found) for name, found in summary.classes.items()},
        "waits_s": {name: dict(by_reason) for name, by_reason in waits_s.items()},
    }


def _numbers(summary: Summary | ClassSummary) -> dict[str, Any]:
    """What is told alike of the whole and of each class; intervals are the run's own."""
    goodput = summary.goodput.requests_per_s
    share = summary.attainment
    return {
        "n_due": summary.counts["due"],
        "n_ok": summary.counts["ok"],
        "offered_rate_per_s": summary.offered_rate_per_s,
        "goodput": {"value": goodput.value, "low": goodput.low, "high": goodput.high},
        "attainment": {"value": _known(share.value), "low": share.low, "high": share.high},
        "output_tokens_per_s": {"value": summary.throughput.output_tokens_per_s},
        **{
            f"{name.removesuffix('_s')}_{key}": _percentile(summary.metrics[name], key)
            for name in METRICS
            for key in PERCENTILES
        },
    }


def _percentile(found: Distribution, key: str) -> dict[str, float | None]:
    """With failures as +inf, which are None here: a mode must not look fast because it fails."""
    percentiles = found.with_failures or found.percentiles
    at = percentiles[key]
    return {"value": _known(at.value), "low": _known(at.low), "high": _known(at.high)}


def _known(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
