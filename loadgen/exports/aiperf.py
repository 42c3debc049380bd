"""A run as the files of `aiperf profile`: `profile_export.jsonl`, a line per request, and the
summary `profile_export_aiperf.json`, by that tool's definitions.

Latencies count from the send, over successful requests; ITL is a value per request; percentiles are
interpolated; rates cover the time from `start_time` to `end_time`, here from the first send to the
last end of a request. The requests due in the
measured window stand for its profiling phase.

Source: aiperf 0.13.0, common/models/record_models.py and export_models.py (schema 1.4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from loadgen.exports.due_requests import DueRequest, due_requests, duration_s, epoch_ns
from loadgen.manifest.sections import Manifest
from loadgen.measure.closed_loop import counting_start
from loadgen.records import Run, Status
from loadgen.units import parse_rate_per_s

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_SCHEMA = "1.4"
_ENDPOINTS = {
    "chat": "chat",
    "completions": "completions",
    "embeddings": "embeddings",
    "responses": "responses",
}
_UNITS = {
    "request_latency": "ms",
    "time_to_first_token": "ms",
    "time_to_second_token": "ms",
    "time_to_first_output_token": "ms",
    "inter_token_latency": "ms",
    "inter_chunk_latency": "ms",
    "output_token_throughput_per_user": "tokens/sec/user",
    "output_sequence_length": "tokens",
    "input_sequence_length": "tokens",
    "usage_prompt_tokens": "tokens",
    "usage_completion_tokens": "tokens",
    "usage_prompt_cache_read_tokens": "tokens",
    "osl_mismatch_diff_pct": "%",
}
"""The metrics of a record, with their units."""
Values = Mapping[str, float | Sequence[float]]


def aiperf_records(run: Run) -> list[dict[str, Any]]:
    """The lines of `profile_export.jsonl`. A request that was never sent is a failed request that
    began and ended when it was due."""
    run = counting_start(run)
    zero_ns = epoch_ns(run.manifest)
    return [_record(request, zero_ns) for request in due_requests(run)]


def aiperf_summary(run: Run) -> dict[str, Any]:
    """The content of `profile_export_aiperf.json`. `aiperf_version` names slobench."""
    run = counting_start(run)
    manifest, requests = run.manifest, due_requests(run)
    values = [_values(request) for request in requests if request.is_ok]
    n_ok, seconds = len(values), round(duration_s(run, requests), 6)  # times are in µs
    started = datetime.fromtimestamp(epoch_ns(manifest) / 1e9 + _first_sent_s(requests), UTC)
    n_in = sum(request.input_tokens for request in requests if request.is_ok)
    n_out = sum(request.output_tokens for request in requests if request.is_ok)
    totals = {
        "request_throughput": (_per(n_ok, seconds), "requests/sec"),
        "output_token_throughput": (_per(n_out, seconds), "tokens/sec"),
        "total_token_throughput": (_per(n_in + n_out, seconds), "tokens/sec"),
        "request_count": (float(n_ok), "requests"),
        "error_request_count": (float(len(requests) - n_ok), "requests"),
        "total_isl": (float(n_in), "tokens"),
        "total_osl": (float(n_out), "tokens"),
        "benchmark_duration": (_answered_s(requests), "sec"),
    }
    return {
        "schema_version": _SCHEMA,
        "aiperf_version": f"slobench {manifest.slobench}",
        "benchmark_id": manifest.run,
        **dict(_distributions(values)),
        **{name: {"unit": unit, "avg": value} for name, (value, unit) in totals.items()},
        "input_config": _config(manifest, requests),
        "was_cancelled": manifest.ended == "interrupted",
        "start_time": started.isoformat(),
        "end_time": (started + timedelta(seconds=seconds)).isoformat(),
    }


def _record(request: DueRequest, zero_ns: int) -> dict[str, Any]:
    sent_s = request.scheduled_s if math.isnan(request.sent_s) else request.sent_s
    done_s = sent_s if math.isnan(request.done_s) else request.done_s
    at_ns = [zero_ns + round(1e9 * s) for s in (request.scheduled_s, sent_s, done_s)]
    values = _values(request) if request.is_ok else {}
    record: dict[str, Any] = {
        "metadata": {
            "session_num": request.request_id,
            "credit_issued_ns": at_ns[0],
            "request_start_ns": at_ns[1],
            "request_end_ns": at_ns[2],
            "worker_id": "slobench",
            "record_processor_id": "slobench",
            "benchmark_phase": "profiling",
            "was_cancelled": request.status == Status.cancelled,
        },
        "metrics": {name: {"value": value, "unit": _UNITS[name]} for name, value in values.items()},
    }
    if not request.is_ok:
        record["error"] = {
            "code": request.http_status if request.status == Status.http_error else None,
            "type": "TimeoutError" if request.status == Status.timeout else None,
            "message": request.error,
        }
    return record


def _values(request: DueRequest) -> Values:
    """The metrics of a successful request, in their units."""
    sent_s, n = request.sent_s, request.output_tokens
    latency_ms = 1e3 * (request.last_token_s - sent_s)
    ttft_ms = 1e3 * (request.first_token_s - sent_s)
    gaps_ms = [1e3 * gap_s for gap_s in request.gaps_s]
    values: dict[str, float | Sequence[float]] = {
        "request_latency": latency_ms,
        "time_to_first_token": ttft_ms,
        "output_sequence_length": n,
        "input_sequence_length": request.input_tokens,
    }
    if not math.isnan(request.first_answer_s):
        values["time_to_first_output_token"] = 1e3 * (request.first_answer_s - sent_s)
    if gaps_ms:
        values |= {"time_to_second_token": gaps_ms[0], "inter_chunk_latency": gaps_ms}
    n_later = n - request.first_chunk_tokens
    if n_later > 0 and latency_ms > ttft_ms:
        itl_ms = (latency_ms - ttft_ms) / n_later
        values |= {"inter_token_latency": itl_ms, "output_token_throughput_per_user": 1e3 / itl_ms}
    if request.is_counted:
        values |= {
            "usage_prompt_tokens": request.input_tokens,
            "usage_completion_tokens": n,
            "usage_prompt_cache_read_tokens": request.cached_tokens,
        }
    if request.requested_tokens:
        values["osl_mismatch_diff_pct"] = 100 * (n / request.requested_tokens - 1)
    return values


def _distributions(values: Sequence[Values]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The statistics of each metric that a request has."""
    for name, unit in _UNITS.items():
        found = [value[name] for value in values if name in value]
        samples = np.concatenate([np.atleast_1d(value) for value in found] or [np.empty(0)])
        if len(samples):
            yield name, {"unit": unit, **_statistics(samples)}


def _statistics(samples: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float | int]:
    percentiles = np.percentile(samples, PERCENTILES)
    return {
        "avg": float(samples.mean()),
        **{f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)},
        "min": float(samples.min()),
        "max": float(samples.max()),
        "std": float(samples.std()),
        "count": len(samples),
        "sum": float(samples.sum()),
    }


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _first_sent_s(requests: Sequence[DueRequest]) -> float:
    return min((request.sent_s for request in requests if request.is_ok), default=0.0)


def _answered_s(requests: Sequence[DueRequest]) -> float:
    """From the first send to the last token of the successful requests."""
    last_s = max((request.last_token_s for request in requests if request.is_ok), default=0.0)
    return last_s - _first_sent_s(requests)


def _config(manifest: Manifest, requests: Sequence[DueRequest]) -> dict[str, Any]:
    """The settings of the load for which that tool has a key: of the lengths the means. Arrivals
    that it lacks are left out."""
    target, phase = manifest.target, _phase(manifest)
    lengths = {
        key: {"mean": float(np.mean(tokens))}
        for key, tokens in (
            ("isl", [request.input_tokens for request in requests]),
            ("osl", [request.requested_tokens for request in requests]),
        )
        if any(tokens)
    }
    return {
        "models": {"items": [{"name": target.model}]},
        "endpoint": {
            "urls": [target.url],
            "type": _ENDPOINTS.get(target.api or "", "chat"),
            "streaming": target.stream,
            "use_server_token_count": True,
        },
        "datasets": [{"name": "main", "type": "synthetic", "prompts": lengths}],
        **({} if phase is None else {"phases": [phase]}),
    }


def _phase(manifest: Manifest) -> dict[str, Any] | None:
    arrivals, limits = manifest.scenario.arrivals, manifest.scenario.limits
    phase = {"name": "profiling", "kind": "profiling", "requests": manifest.n_requests}
    if arrivals.get("users"):
        return {**phase, "type": "concurrency", "concurrency": arrivals["users"]}
    if arrivals.get("kind") not in ("constant", "poisson", "gamma") or "rate" not in arrivals:
        return None
    phase |= {"type": arrivals["kind"], "rate": parse_rate_per_s(arrivals["rate"])}
    if arrivals["kind"] == "gamma":
        phase["smoothness"] = 1 / float(arrivals["cv"]) ** 2
    if limits.max_concurrency is not None and limits.when_full == "wait":
        phase["concurrency"] = limits.max_concurrency
    return phase
