"""A cell of a comparison: a mode, rate and seed, with the numbers of that run as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from loadgen.measure.statistics.intervals import BoundedSection
from loadgen.measure.summary import ClassSummary, Distribution, Summary
from loadgen.records import Run
from loadgen.studies.modes.result import CellNumbers, ModeCell

_PERCENTILES = tuple(
    (f"{name.removesuffix('_s')}_{key}", name, key)
    for name in ("ttft_s", "tpot_s", "itl_s", "max_stall_s", "e2e_s")
    for key in ("p50", "p99")
)
"""Quantity → metric of the summary, and its percentile."""
_SERIES = re.compile(r'wait_s\{reason="(?P<reason>[^"]+)"\}')


def cell_of(
    run: Run, summary: Summary, mode: str, rate_per_s: float | None, waits_s: Mapping[str, Any]
) -> ModeCell:
    """The numbers of a finished run. `waits_s`: seconds of waiting by class and reason. Missing
    values are None."""
    return ModeCell(
        mode=mode,
        rate_per_s=rate_per_s,
        seed=run.manifest.seed,
        schedule_sha256=run.manifest.schedule_sha256,
        ended=run.manifest.ended,
        verdict=summary.verdict,
        is_trusted=summary.validity.trusted,
        reasons=list(summary.reasons),
        **_numbers(summary),
        classes={name: CellNumbers(**_numbers(part)) for name, part in summary.classes.items()},
        waits_s={name: dict(by_reason) for name, by_reason in waits_s.items()},
    )


def _numbers(summary: Summary | ClassSummary) -> dict[str, Any]:
    """The fields of CellNumbers."""
    goodput = summary.goodput.requests_per_s
    share = summary.attainment
    return {
        "n_due": summary.counts["due"],
        "n_ok": summary.counts["ok"],
        "offered_rate_per_s": summary.offered_rate_per_s,
        "goodput": BoundedSection(value=goodput.value, low=goodput.low, high=goodput.high),
        "attainment": BoundedSection(value=_finite(share.value), low=share.low, high=share.high),
        "output_tokens_per_s": BoundedSection(value=summary.throughput.output_tokens_per_s),
        **{
            quantity: _percentile(summary.metrics[name], key)
            for quantity, name, key in _PERCENTILES
        },
    }


def _percentile(distribution: Distribution, key: str) -> BoundedSection:
    """A percentile with failures as +inf, which is None here."""
    found = (distribution.with_failures or distribution.percentiles)[key]
    return BoundedSection(
        value=_finite(found.value), low=_finite(found.low), high=_finite(found.high)
    )


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
