"""A run as a benchmark report of llm-d-benchmark, version 0.2.1.

The report has no definitions of its own: the numbers are slobench's (docs/metrics.md), of the
successful requests due in the measured window, with percentiles by nearest rank.

Source: llm-d-benchmark, benchmark-report/llmd_benchmark_report/schema_v0_2.py.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.exports.due_requests import due_requests, epoch_ns
from loadgen.manifest.sections import Manifest
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import measured_window
from loadgen.measure.closed_loop import with_start_left_out
from loadgen.measure.definitions import DEFINITIONS, answers, nearest
from loadgen.measure.statistics.intervals import Values
from loadgen.measure.summary import Summary
from loadgen.records import Run, Status
from loadgen.units import parse_rate_per_s

VERSION = "0.2.1"
_UNKNOWN = "unknown"
_PERCENTILES = {
    "p0p1": 0.001,
    "p1": 0.01,
    "p5": 0.05,
    "p10": 0.1,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p99p9": 0.999,
}
_LATENCIES = {
    "time_to_first_token": ("ttft_s", "s"),
    "time_per_output_token": ("tpot_s", "s/token"),
    "inter_token_latency": ("itl_s", "s/token"),
    "request_latency": ("e2e_s", "s"),
}


def llm_d_report(run: Run) -> dict[str, Any]:
    """The content of the file. Versions and models that the target does not state are
    "unknown"."""
    run, summary = with_start_left_out(run), summarize(run)
    manifest = run.manifest
    return {
        "version": VERSION,
        "run": {
            "uid": str(uuid.uuid5(uuid.NAMESPACE_URL, manifest.run + manifest.started_utc)),
            "eid": str(uuid.uuid5(uuid.NAMESPACE_URL, manifest.scenario.sha256)),
            "time": _time(run),
            "description": manifest.run,
        },
        "scenario": {"stack": [_server(manifest)], "load": _load(run)},
        "results": {"request_performance": {"aggregate": _aggregate(run, summary)}},
    }


def _time(run: Run) -> dict[str, str]:
    """The measured window."""
    window = measured_window(run)
    zero = datetime.fromtimestamp(epoch_ns(run.manifest) / 1e9, UTC)
    return {
        "start": (zero + timedelta(seconds=window.start_s)).isoformat(),
        "end": (zero + timedelta(seconds=window.end_s)).isoformat(),
        "duration": f"PT{window.length_s:.6f}S",
    }


def _server(manifest: Manifest) -> dict[str, Any]:
    """The server, as its labels state it."""
    target, labels = manifest.target, manifest.target.labels
    content = {
        "model": {"name": target.model},
        **(
            {}
            if labels.gpu is None
            else {"accelerator": {"model": labels.gpu, "count": labels.gpus}}
        ),
    }
    config = f"{target.url} {labels.to_json()}"
    return {
        "metadata": {
            "label": labels.engine or target.kind,
            "cfg_id": hashlib.sha256(config.encode()).hexdigest(),
        },
        "standardized": {
            "kind": "generic",
            "tool": labels.engine or _UNKNOWN,
            "tool_version": labels.version or _UNKNOWN,
            **content,
        },
        "native": {"args": {"flags": labels.flags} if labels.flags else None},
    }


def _load(run: Run) -> dict[str, Any]:
    manifest, schedule = run.manifest, run.schedule_rows
    arrivals = manifest.scenario.arrivals
    rate, users = arrivals.get("rate"), arrivals.get("users")
    outputs = {"output_seq_len": _lengths(schedule["output_tokens"])}
    return {
        "metadata": {
            "cfg_id": manifest.scenario.sha256,
            "description": manifest.scenario.name,
        },
        "standardized": {
            "tool": "slobench",
            "tool_version": manifest.slobench,
            "source": _UNKNOWN if manifest.imported else _source(manifest),
            "input_seq_len": _lengths(schedule["input_tokens"]),
            **(outputs if schedule["output_tokens"].any() else {}),
            **({} if rate is None else {"rate_qps": parse_rate_per_s(rate)}),
            **({} if users is None else {"concurrency": users}),
        },
        "native": {"config": manifest.scenario.resolved},
    }


def _source(manifest: Manifest) -> str:
    """Recorded prompts are sampled from data; others consist of drawn words."""
    return "random" if manifest.target.recorded_prompts is None else "sampled"


def _lengths(tokens: NDArray[np.integer[Any]]) -> dict[str, Any]:
    """The lengths that were drawn."""
    if not len(tokens):
        return {"distribution": "other", "value": 0}
    low, high = int(tokens.min()), int(tokens.max())
    if low == high:
        return {"distribution": "fixed", "value": low}
    return {
        "distribution": "other",
        "value": float(tokens.mean()),
        "std_dev": float(tokens.std()),
        "min": low,
        "max": high,
    }


def _aggregate(run: Run, summary: Summary) -> dict[str, Any]:
    requests, rates = due_requests(run), summary.throughput
    ok = [request for request in requests if request.is_ok]
    n_unfinished = sum(request.status == Status.cancelled for request in requests)
    inputs = answers(run)
    own = DEFINITIONS["slobench"]
    samples = {name: getattr(own, metric)(inputs) for name, (metric, _) in _LATENCIES.items()}
    latency = {name: _statistics(values, _LATENCIES[name][1]) for name, values in samples.items()}
    total = rates.input_tokens_per_s + rates.output_tokens_per_s
    return {
        "requests": _without_none(
            {
                "total": len(requests),
                "failures": len(requests) - len(ok) - n_unfinished,
                "incomplete": n_unfinished,
                "input_length": _statistics(np.array([r.input_tokens for r in ok]), "count"),
                "output_length": _statistics(np.array([r.output_tokens for r in ok]), "count"),
            }
        ),
        "latency": _without_none(latency),
        "throughput": {
            "input_token_rate": {"units": "tokens/s", "mean": rates.input_tokens_per_s},
            "output_token_rate": {"units": "tokens/s", "mean": rates.output_tokens_per_s},
            "total_token_rate": {"units": "tokens/s", "mean": total},
            "request_rate": {"units": "queries/s", "mean": rates.requests_per_s},
        },
    }


def _without_none(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value is not None}


def _statistics(values: Values, units: str) -> dict[str, Any] | None:
    """Statistics of the finite values; None without any."""
    ordered = np.sort(values[np.isfinite(values)].astype(np.float64))
    if not len(ordered):
        return None
    return {
        "units": units,
        "mean": float(ordered.mean()),
        "stddev": float(ordered.std()),
        "min": float(ordered[0]),
        **{name: nearest(ordered, q) for name, q in _PERCENTILES.items()},
        "max": float(ordered[-1]),
    }
