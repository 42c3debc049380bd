"""Flat tables of runs: a row per run and class, or a row per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.measure.attainment import derived, due_rows
from loadgen.measure.catalog import METRICS
from loadgen.measure.per_request import per_request
from loadgen.measure.summary import ClassSummary, Distribution, Summary, plain_json
from loadgen.records import OWN_SLO, Phase, Run

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]


def summary_rows(run: Run, summary: Summary) -> list[Row]:
    """A run in one row (`class` is "all"), and a row per class if there are several.

    Columns end in their unit; a share has none. The bounds of a confidence interval surround its
    percentile: `ttft_p99_low_s`, `ttft_p99_s`, `ttft_p99_high_s`. Missing values are None.
    """
    manifest, target = run.manifest, run.manifest.target
    head: Row = {
        "run": summary.run,
        "scenario": manifest.scenario.name,
        "seed": manifest.seed,
        "schedule_sha256": manifest.schedule_sha256,
        "target": target.url or target.kind,
        "model": target.model,
        **{f"label_{name}": value for name, value in target.labels.to_json().items()},
        "started_utc": manifest.started_utc,
        "trusted": summary.validity.trusted,
        "confidence": summary.confidence,
        "window_s": summary.window.length_s,
    }
    parts: Mapping[str, Summary | ClassSummary] = {"all": summary, **summary.classes}
    return [plain_json({**head, **_numbers(name, part)}) for name, part in parts.items()]


def _numbers(name: str, part: Summary | ClassSummary) -> Row:
    row: Row = {
        "class": name,
        "verdict": part.verdict,
        "slo": "; ".join(slo.text for slo in part.slo),
        "slo_missed": "; ".join(slo.text for slo in part.slo if slo.met is False),
        "requested_rate_per_s": part.requested_rate_per_s,
        "offered_rate_per_s": part.offered_rate_per_s,
        "achieved_rate_per_s": part.achieved_rate_per_s,
        "requests_per_s": part.throughput.requests_per_s,
        "output_tokens_per_s": part.throughput.output_tokens_per_s,
        "input_tokens_per_s": part.throughput.input_tokens_per_s,
        "attainment": part.attainment.value,
        "attainment_low": part.attainment.low,
        "attainment_high": part.attainment.high,
        "goodput_per_s": part.goodput.requests_per_s.value,
        "goodput_low_per_s": part.goodput.requests_per_s.low,
        "goodput_high_per_s": part.goodput.requests_per_s.high,
        "goodput_output_tokens_per_s": part.goodput.output_tokens_per_s,
        **{f"n_{word}": count for word, count in part.counts.items()},
    }
    for metric, distribution in part.metrics.items():
        row |= _metric_columns(metric.removesuffix("_s"), distribution)
    return row


def _metric_columns(stem: str, distribution: Distribution) -> Row:
    row: Row = {
        f"{stem}_n": distribution.n,
        f"{stem}_mean_s": distribution.mean,
        f"{stem}_min_s": distribution.min,
        f"{stem}_max_s": distribution.max,
    }
    for name, percentile in distribution.percentiles.items():
        row |= {
            f"{stem}_{name}_low_s": percentile.low,
            f"{stem}_{name}_s": percentile.value,
            f"{stem}_{name}_high_s": percentile.high,
        }
    return row


def request_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Every scheduled request of the runs, warm-up included: its plan, every timestamp, every
    per-request metric, `is_due` (it counts) and `slo_met` (it met every SLO)."""
    import pandas as pd

    return pd.concat([_requests(run) for run in runs], ignore_index=True)


def _or_nan(limits_s: Any) -> Any:
    """A request's own limits, NaN if it has none."""
    return np.where(limits_s > 0, limits_s, np.nan)


def _requests(run: Run) -> pd.DataFrame:
    schedule, columns, due = run.schedule_rows, per_request(run), due_rows(run)
    frame = run.requests.rename(columns={"input_tokens": "server_input_tokens"})
    planned = {
        "class": run.schedule["class"].astype(str),
        "tenant": run.schedule["tenant"].astype(str),
        "session_id": schedule["session_id"],
        "scheduled_s": schedule["scheduled_s"],
        "is_warmup": schedule["phase"] == Phase.warmup,
        "is_due": due,
        "asked_input_tokens": schedule["input_tokens"],
        "asked_output_tokens": schedule["output_tokens"],
        **{name: _or_nan(schedule[name]) for name in OWN_SLO.values()},
    }
    metrics = {name: columns.column(name) for name, m in METRICS.items() if m.scope == "request"}
    frame.insert(0, "run", run.manifest.run)
    for position, (name, values) in enumerate(planned.items(), 2):
        frame.insert(position, name, np.asarray(values))
    for word in frame.select_dtypes("category"):
        frame[word] = frame[word].astype(str)
    return frame.assign(**metrics, slo_met=derived(run)["slo_met"])
