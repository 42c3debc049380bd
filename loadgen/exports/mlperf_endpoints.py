"""A run as `result_summary.json` of MLPerf Endpoints: the performance of a single point.

Times are integers in ns and count from the send, over successful requests; percentiles are nearest
ranks. It is a summary to look at and to compare: a submission needs the files of MLPerf's own
client.

Source: mlcommons/endpoints, metrics/report.py (`Report`) and metrics_aggregator/metrics_table.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.exports.due_requests import DueRequest, due_requests, duration_s
from loadgen.measure.closed_loop import counting_start
from loadgen.measure.definitions import nearest
from loadgen.records import Run

PERCENTILES = (1, 5, 10, 25, 50, 75, 80, 90, 95, 97, 99, 99.9)


def result_summary(run: Run) -> dict[str, Any]:
    """The content of the file. `version` names slobench."""
    run = counting_start(run)
    manifest, requests = run.manifest, due_requests(run)
    ok = [request for request in requests if request.is_ok]
    seconds, n_out = duration_s(run, requests), sum(request.output_tokens for request in ok)
    users = manifest.scenario.arrivals.get("users")
    pattern = (
        {"type": manifest.scenario.arrivals.get("kind")}
        if users is None
        else {"type": "concurrency", "target_concurrency": users}
    )
    return {
        "version": f"slobench {manifest.slobench}",
        "git_sha": None,
        "test_started_at": 0,
        "n_samples_issued": sum(not math.isnan(request.sent_s) for request in requests),
        "n_samples_completed": len(ok),
        "n_samples_failed": len(requests) - len(ok),
        "duration_ns": round(1e9 * seconds),
        "state": "interrupted" if manifest.ended == "interrupted" else "complete",
        "complete": manifest.ended == "completed",
        "ttft": _rollup([r.first_token_s - r.sent_s for r in ok], 1e9),
        "tpot": _rollup([_tpot_s(r) for r in ok], 1e9),
        "latency": _rollup([r.done_s - r.sent_s for r in ok], 1e9),
        "output_sequence_lengths": _rollup([r.output_tokens for r in ok], 1),
        "qps": len(ok) / seconds if seconds > 0 else None,
        "tps": n_out / seconds if seconds > 0 else None,
        "run_config": {"load_pattern": pattern},
    }


def _tpot_s(request: DueRequest) -> float:
    """From the first chunk to the end, per token after the first chunk; NaN without such."""
    n_later = request.output_tokens - request.first_chunk_tokens
    return (request.done_s - request.first_token_s) / n_later if n_later > 0 else math.nan


def _rollup(values: Sequence[float], scale: float) -> dict[str, Any]:
    """Statistics of the finite values, rounded to whole units; empty without any. The standard
    deviation is that of a sample."""
    finite = np.sort(np.array([value for value in values if math.isfinite(value)]) * scale)
    if not len(finite):
        return {}
    whole = np.round(finite)
    return {
        "total": int(whole.sum()),
        "min": int(whole[0]),
        "max": int(whole[-1]),
        "median": nearest(whole, 0.5),
        "avg": float(whole.mean()),
        "std_dev": float(whole.std(ddof=1)) if len(whole) > 1 else 0.0,
        "percentiles": {f"{p:g}": nearest(whole, p / 100) for p in PERCENTILES},
    }
