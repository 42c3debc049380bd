"""A cell of a comparison: a mode, rate and seed, with the numbers of that run as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from loadgen.measure.summary import ClassSummary, Distribution, Summary
from loadgen.records import Run

METRICS = ("ttft_s", "tpot_s", "itl_s", "max_stall_s", "e2e_s")
PERCENTILES = ("p50", "p99")

Cell = dict[str, Any]
_SERIES = re.compile(r'wait_s\{reason="(?P<reason>[^"]+)"\}')


def cell_of(
    run: Run, summary: Summary, mode: str, rate_per_s: float | None, waits_s: Mapping[str, Any]
) -> Cell:
    """The numbers of a finished run. `waits_s`: seconds of waiting by class and reason. Missing
    values are None."""
    return {
        "mode": mode,
        "rate_per_s": rate_per_s,
        "seed": run.manifest.seed,
        "schedule_sha256": run.manifest.schedule_sha256,
        "ended": run.manifest.ended,
        "verdict": summary.verdict,
        "is_trusted": summary.validity.trusted,
        "reasons": list(summary.reasons),
        **_numbers(summary),
        "classes": {name: _numbers(part) for name, part in summary.classes.items()},
        "waits_s": {name: dict(by_reason) for name, by_reason in waits_s.items()},
    }


def _numbers(summary: Summary | ClassSummary) -> dict[str, Any]:
    """The numbers that the whole run and each class have in common; intervals are those of the
    run."""
    goodput = summary.goodput.requests_per_s
    share = summary.attainment
    return {
        "n_due": summary.counts["due"],
        "n_ok": summary.counts["ok"],
        "offered_rate_per_s": summary.offered_rate_per_s,
        "goodput": {"value": goodput.value, "low": goodput.low, "high": goodput.high},
        "attainment": {"value": _finite(share.value), "low": share.low, "high": share.high},
        "output_tokens_per_s": {"value": summary.throughput.output_tokens_per_s},
        **{
            f"{name.removesuffix('_s')}_{key}": _percentile(summary.metrics[name], key)
            for name in METRICS
            for key in PERCENTILES
        },
    }


def _percentile(distribution: Distribution, key: str) -> dict[str, float | None]:
    """A percentile with failures as +inf, which is None here: a mode must not look fast because its
    requests fail."""
    percentiles = distribution.with_failures or distribution.percentiles
    return {name: _finite(getattr(percentiles[key], name)) for name in ("value", "low", "high")}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def read_waits(run: Run) -> dict[str, dict[str, float]]:
    """Seconds of waiting by reason since the end of warm-up, from the server's /metrics. The
    counters do not separate classes: the only key is "" (all). Empty if the server exported no such
    series."""
    rows, start_s = run.server_rows, run.manifest.window.warmup_s
    waits: dict[str, float] = {}
    for series_id, name in enumerate(run.names.series):
        match = _SERIES.fullmatch(name)
        samples = rows[rows["series_id"] == series_id]
        if match is None or not len(samples):
            continue
        earlier = samples["value"][samples["t_s"] <= start_s]
        first = float(earlier[-1]) if len(earlier) else 0.0
        waits[match["reason"]] = float(np.max(samples["value"])) - first
    return {"": waits} if waits else {}
