"""Runs as flat tables: a row per run and class, and a row per request."""

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
    """A run in one row (`class` is "all"), and a row for each class where there are several.

    Columns end in their unit; a share has none. A percentile stands between the ends of its
    interval: `ttft_p99_low_s`, `ttft_p99_s`, `ttft_p99_high_s`. What does not exist is None.
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
    return [_plain({**head, **_numbers(name, part)}) for name, part in parts.items()]


def _numbers(name: str, part: Summary | ClassSummary) -> Row:
    row: Row = {
        "class": name,
        "verdict": part.verdict,
        "slo": "; ".join(promise.text for promise in part.slo),
        "slo_missed": "; ".join(promise.text for promise in part.slo if promise.met is False),
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
    for metric, found in part.metrics.items():
        row |= _of_metric(metric.removesuffix("_s"), found)
    return row


def _of_metric(stem: str, found: Distribution) -> Row:
    row: Row = {
        f"{stem}_n": found.n,
        f"{stem}_mean_s": found.mean,
        f"{stem}_min_s": found.min,
        f"{stem}_max_s": found.max,
    }
    for name, percentile in found.percentiles.items():
        row |= {
            f"{stem}_{name}_low_s": percentile.low,
            f"{stem}_{name}_s": percentile.value,
            f"{stem}_{name}_high_s": percentile.high,
        }
    return row


def _plain(row: Row) -> Row:
    found: Row = plain_json(row)
    return found


def request_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Every scheduled request of the runs, warm-up included: what was planned, every instant, every
    per-request metric, `is_due` (it counts) and `slo_met` (it kept every promise)."""
    import pandas as pd

    return pd.concat([_requests(run) for run in runs], ignore_index=True)


def _or_nan(limits_s: Any) -> Any:
    """A request's own limits, NaN where it brought none."""
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
    for place, (name, values) in enumerate(planned.items(), 2):
        frame.insert(place, name, np.asarray(values))
    for word in frame.select_dtypes("category"):
        frame[word] = frame[word].astype(str)
    return frame.assign(**metrics, slo_met=derived(run)["slo_met"])
