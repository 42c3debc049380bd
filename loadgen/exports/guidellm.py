"""Runs as the JSON report of guidellm, a benchmark for each, by that tool's definitions.

Latencies count from the send, over successful requests; TPOT counts the first token and is weighted
by the tokens; percentiles are nearest ranks. The requests due in the measured window are those of
the benchmark. Left out are the distributions of failed requests and those of rates over time, and
with them what guidellm needs to load the report again.

Source: guidellm 0.8.1, benchmark/schemas/metrics.py and report.py, schemas/base/statistics.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from loadgen.exports.due_requests import DueRequest, due_requests, duration_s, epoch_ns
from loadgen.manifest.sections import Manifest
from loadgen.measure.closed_loop import counting_start
from loadgen.records import Run, Status
from loadgen.units import parse_rate_per_s

_VERSION = 2
_QUANTILES = {
    "p001": 0.001,
    "p01": 0.01,
    "p05": 0.05,
    "p10": 0.1,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p999": 0.999,
}
_OF_A_SCHEDULE = ("request_scheduled_latency", "request_dispatch_delay")
_FORMS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_STATUSES = {True: "successful", False: "errored"}
Sample = tuple[float, int]
"""A value and its weight."""
_SAMPLES: Mapping[str, Callable[[DueRequest], Sample]] = {
    "request_latency": lambda r: (r.done_s - r.sent_s, 1),
    "request_scheduled_latency": lambda r: (r.done_s - r.scheduled_s, 1),
    "request_dispatch_delay": lambda r: (r.sent_s - r.scheduled_s, 1),
    "prompt_token_count": lambda r: (r.input_tokens, 1),
    "output_token_count": lambda r: (r.output_tokens, 1),
    "total_token_count": lambda r: (r.input_tokens + r.output_tokens, 1),
    "time_to_first_token_ms": lambda r: (1e3 * (r.first_token_s - r.sent_s), 1),
    "time_to_first_output_token_ms": lambda r: (1e3 * (r.first_answer_s - r.sent_s), 1),
    "time_per_output_token_ms": lambda r: (
        1e3 * (r.last_token_s - r.sent_s) / max(1, r.output_tokens),
        r.output_tokens,
    ),
    "inter_token_latency_ms": lambda r: (
        1e3 * (r.last_token_s - r.first_token_s) / max(1, r.output_tokens - 1),
        r.output_tokens - 1,
    ),
}
"""The sample of each metric that a successful request gives."""


def guidellm_report(runs: Sequence[Run]) -> dict[str, Any]:
    """The content of the file. `guidellm_version` names slobench."""
    return {
        "metadata": {
            "version": _VERSION,
            "guidellm_version": f"slobench {runs[0].manifest.slobench}",
            "python_version": runs[0].manifest.host.python,
            "platform": runs[0].manifest.host.platform,
        },
        "benchmarks": [_benchmark(counting_start(run)) for run in runs],
    }


def _benchmark(run: Run) -> dict[str, Any]:
    requests, zero_s = due_requests(run), epoch_ns(run.manifest) / 1e9
    strategy = _strategy(run.manifest)
    has_schedule = "streams" not in strategy
    seconds = duration_s(run, requests)
    by_status: dict[str, list[DueRequest]] = {"successful": [], "errored": [], "incomplete": []}
    for request in requests:
        by_status[_status(request)].append(request)
    totals = {status: len(found) for status, found in by_status.items()}
    totals["total"] = len(requests)
    sent_s = [_sent_s(request) for request in requests]
    started_s = zero_s + min(sent_s, default=0.0)
    return {
        "type_": "generative_benchmark",
        "config": {
            "id_": run.manifest.run,
            "run_id": run.manifest.run,
            "strategy": strategy,
            "backend": _backend(run.manifest),
        },
        "scheduler_metrics": {"requests_made": totals, "measure_start_time": started_s},
        "metrics": {
            "request_totals": totals,
            **_metrics(by_status["successful"], seconds, has_schedule),
        },
        "requests": {
            status: [_request(request, status, zero_s) for request in found]
            for status, found in by_status.items()
        },
        "start_time": started_s,
        "end_time": started_s + seconds,
        "duration": seconds,
    }


def _status(request: DueRequest) -> str:
    if request.status == Status.cancelled:
        return "incomplete"
    return _STATUSES[request.is_ok]


def _sent_s(request: DueRequest) -> float:
    """The send, of a request that was never sent the time at which it was due."""
    return request.scheduled_s if math.isnan(request.sent_s) else request.sent_s


def _metrics(requests: Sequence[DueRequest], seconds: float, has_schedule: bool) -> dict[str, Any]:
    """The distributions of successful requests, and the means of the rates."""
    n_in = sum(request.input_tokens for request in requests)
    n_out = sum(request.output_tokens for request in requests)
    rates = {
        "requests_per_second": len(requests),
        "prompt_tokens_per_second": n_in,
        "output_tokens_per_second": n_out,
        "tokens_per_second": n_in + n_out,
    }
    return {
        **{
            name: {"successful": {"mean": n / seconds if seconds > 0 else 0.0, "count": n}}
            for name, n in rates.items()
        },
        **{
            name: {"successful": _distribution([sample(request) for request in requests])}
            for name, sample in _SAMPLES.items()
            if has_schedule or name not in _OF_A_SCHEDULE
        },
    }


def _distribution(samples: Sequence[Sample]) -> dict[str, Any]:
    """Statistics of weighted values, 0 without any, as in that tool. The standard deviation is that
    of the population, the mode the most frequent value, of equally frequent ones the least."""
    kept = np.array([s for s in samples if s[1] > 0 and math.isfinite(s[0])]).reshape(-1, 2)
    count = round(float(kept[:, 1].sum()))
    if not len(kept):
        kept = np.array([[0.0, 1.0]])
    values, index = np.unique(kept[:, 0], return_inverse=True)
    shares = np.bincount(index, weights=kept[:, 1]) / kept[:, 1].sum()
    below, mean = np.cumsum(shares), float(np.sum(values * shares))
    variance = float(np.sum((values - mean) ** 2 * shares))
    ranks = np.minimum(np.searchsorted(below, list(_QUANTILES.values())), len(values) - 1)
    percentiles = dict(zip(_QUANTILES, values[ranks].tolist(), strict=True))
    return {
        "mean": mean,
        "median": percentiles["p50"],
        "mode": float(values[np.argmax(shares)]),
        "variance": variance,
        "std_dev": math.sqrt(variance),
        "min": float(values[0]),
        "max": float(values[-1]),
        "count": count,
        "total_sum": mean * count,
        "percentiles": percentiles,
    }


def _request(request: DueRequest, status: str, zero_s: float) -> dict[str, Any]:
    def at(time_s: float) -> float | None:
        return None if math.isnan(time_s) else zero_s + time_s

    sent_s = _sent_s(request)
    done_s = sent_s if math.isnan(request.done_s) else request.done_s
    return {
        "type_": "generative_request_stats",
        "request_id": str(request.request_id),
        "info": {
            "request_id": str(request.request_id),
            "status": "completed" if status == "successful" else status,
            "timings": {
                "targeted_start": at(request.scheduled_s),
                "request_start": at(sent_s),
                "first_token_iteration": at(request.first_token_s),
                "first_output_token_iteration": at(request.first_answer_s),
                "last_token_iteration": at(request.last_token_s),
                "request_end": at(done_s),
                "resolve_end": at(done_s),
            },
            "error": request.error or None,
        },
        "input_metrics": {
            "text_tokens": request.input_tokens,
            "cached_tokens": request.cached_tokens,
        },
        "output_metrics": {"text_tokens": request.output_tokens if request.is_ok else None},
    }


def _strategy(manifest: Manifest) -> dict[str, Any]:
    """The load, as far as that tool has a name for it; arrivals of other kinds by ours."""
    arrivals = manifest.scenario.arrivals
    if arrivals.get("users"):
        return {"type_": "concurrent", "streams": arrivals["users"]}
    rate = arrivals.get("rate")
    return {
        "type_": arrivals.get("kind", "throughput"),
        **({} if rate is None else {"rate": parse_rate_per_s(rate)}),
    }


def _backend(manifest: Manifest) -> dict[str, Any]:
    target = manifest.target
    return {
        "kind": "openai_http",
        "target": target.url,
        "model": target.model,
        "request_format": _FORMS.get(target.api or ""),
        "stream": target.stream,
    }
