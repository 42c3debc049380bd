"""Result files of other load generators, made by hand in their formats."""

from __future__ import annotations

import json
from typing import Any

TTFTS_S = (0.1, 0.2, 0.3, 0.5)
ITLS_S = ((0.01, 0.03), (0.02, 0.02), (0.04, 0.02), (0.05, 0.05))


def vllm(**changes: Any) -> dict[str, Any]:
    """Four requests a second apart, of `vllm bench serve --save-result --save-detailed`; the last
    waited half a second for `--max-concurrency`."""
    return {
        "date": "20260105-100000",
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": None,
        "model_id": "tiny-llama",
        "tokenizer_id": "tiny-llama",
        "num_prompts": 4,
        "request_rate": 1.0,
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": 3.7,
        "completed": 4,
        "failed": 0,
        "input_lens": [64, 65, 66, 67],
        "output_lens": [3, 3, 5, 3],
        "ttfts": list(TTFTS_S),
        "itls": [list(gaps) for gaps in ITLS_S],
        "latencies": [0.14, 0.24, 0.36, 0.6],
        "start_times": [5000.0, 5001.0, 5002.0, 5003.5],
        "queue_times": [0.0, 0.0, 0.0, 0.5],
        "generated_texts": ["a", "b", "c", "d"],
        "errors": ["", "", "", ""],
        **changes,
    }


REFUSED = 'HTTP 503 Service Unavailable: {"error": {"message": "overloaded", "code": null}}'


def vllm_rs(**changes: Any) -> dict[str, Any]:
    """The same requests, of `vllm-rs bench serve --save-result --save-detailed` 0.33.0, where the
    server refused the last."""
    shared = vllm(
        date="2026-01-05T10:00:00Z",
        max_model_len=None,
        completed=3,
        failed=1,
        output_lens=[3, 3, 5, 0],
        ttfts=[*TTFTS_S[:3], 0.0],
        itls=[*(list(gaps) for gaps in ITLS_S[:3]), []],
        latencies=[0.14, 0.24, 0.36, 0.0],
        start_times=[0.0, 1.0, 2.0, 3.5],
        errors=["", "", "", REFUSED],
        failed_requests=[{"index": 3, "error": REFUSED, "start_time": 3.5}],
        steady_state=None,
    )
    del shared["queue_times"]
    return shared | changes


def sglang(**changes: Any) -> dict[str, Any]:
    """The same requests, of `sglang.bench_serving --output-details`."""
    return {
        "tag": None,
        "backend": "sglang-oai-chat",
        "dataset_name": "random-ids",
        "request_rate": 2.0,
        "max_concurrency": None,
        "random_range_ratio": 1.0,
        "server_info": {"model_path": "tiny-llama"},
        "duration": 3.7,
        "completed": 4,
        "total_input_tokens": 262,
        "input_lens": [64, 65, 66, 67],
        "output_lens": [3, 3, 5, 3],
        "ttfts": list(TTFTS_S),
        "itls": [list(gaps) for gaps in ITLS_S],
        "generated_texts": ["a", "b", "c", "d"],
        "errors": ["", "", "", ""],
        **changes,
    }


STARTED_NS = 1_767_607_200_000_000_000


def aiperf_record(k: int, **metrics: Any) -> dict[str, Any]:
    """Request k of the same, of `profile_export.jsonl`: a second after the one before, and sent
    2 ms after its credit."""
    latency_s = TTFTS_S[k] + sum(ITLS_S[k])
    start_ns = STARTED_NS + k * 10**9
    values = {
        "request_latency": (1e3 * latency_s, "ms"),
        "time_to_first_token": (1e3 * TTFTS_S[k], "ms"),
        "time_to_first_output_token": (1e3 * TTFTS_S[k], "ms"),
        "inter_chunk_latency": ([1e3 * gap for gap in ITLS_S[k]], "ms"),
        "inter_token_latency": (1e3 * sum(ITLS_S[k]) / 2, "ms"),
        "output_sequence_length": (3, "tokens"),
        "usage_completion_tokens": (3, "tokens"),
        "usage_prompt_tokens": (64, "tokens"),
        "input_sequence_length": (60, "tokens"),
        "osl_mismatch_diff_pct": (-25.0, "%"),
        **metrics,
    }
    return {
        "metadata": {
            "session_num": k,
            "credit_issued_ns": start_ns - 2_000_000,
            "request_start_ns": start_ns,
            "request_end_ns": start_ns + round(1e9 * latency_s),
            "benchmark_phase": "profiling",
            "was_cancelled": False,
        },
        "metrics": {name: {"value": value, "unit": unit} for name, (value, unit) in values.items()},
    }


def failed_aiperf_record(k: int, **error: Any) -> dict[str, Any]:
    """A record without metrics."""
    return {**aiperf_record(k), "metrics": {}, "error": {"message": "overloaded", **error}}


def aiperf_summary(**phase: Any) -> dict[str, Any]:
    """The summary next to it."""
    stated = {"name": "profiling", "kind": "profiling", "type": "poisson", "rate": 1.0} | phase
    return {
        "aiperf_version": "0.13.0",
        "start_time": "2026-01-05T10:00:00.500000",
        "benchmark_duration": {"unit": "sec", "avg": 3.7},
        "input_config": {
            "models": {"items": [{"name": "tiny-llama"}]},
            "endpoint": {"urls": ["http://127.0.0.1:8000"], "type": "chat", "streaming": True},
            "phases": [{"name": "w", "kind": "warmup", "type": "concurrency"}, stated],
        },
    }


def lines(*records: Any) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def guidellm_request(k: int, status: str = "completed", **timings: float | None) -> dict[str, Any]:
    """Request k of the same, of a guidellm report; due 2 ms before it was sent."""
    sent_s = STARTED_NS / 1e9 + k
    n_tokens = (3, 3, 5, 3)[k]
    found = {
        "targeted_start": sent_s - 0.002,
        "request_start": sent_s,
        "first_token_iteration": sent_s + TTFTS_S[k],
        "first_output_token_iteration": sent_s + TTFTS_S[k],
        "last_token_iteration": sent_s + TTFTS_S[k] + sum(ITLS_S[k]),
        "request_end": sent_s + TTFTS_S[k] + sum(ITLS_S[k]) + 0.01,
        "resolve_end": sent_s + 1.0,
        **timings,
    }
    return {
        "type_": "generative_request_stats",
        "info": {"status": status, "timings": found, "error": None},
        "input_metrics": {"text_tokens": 64, "cached_tokens": 16},
        "output_metrics": {"text_tokens": n_tokens},
    }


def guidellm_report(*requests: dict[str, Any], **strategy: Any) -> dict[str, Any]:
    """A report with one benchmark, of guidellm 0.8.1."""
    by_status: dict[str, list[dict[str, Any]]] = {"successful": [], "errored": [], "incomplete": []}
    words = {"completed": "successful", "errored": "errored", "cancelled": "incomplete"}
    for request in requests:
        by_status[words[request["info"]["status"]]].append(request)
    made = {status: len(found) for status, found in by_status.items()}
    benchmark = {
        "config": {
            "strategy": {"type_": "poisson", "rate": 1.0, "max_concurrency": 10240} | strategy,
            "backend": {
                "target": "http://127.0.0.1:8000",
                "model": "tiny-llama",
                "request_format": "/v1/chat/completions",
                "stream": True,
            },
        },
        "scheduler_metrics": {"requests_made": made, "measure_start_time": STARTED_NS / 1e9},
        "requests": by_status,
        "duration": 3.7,
    }
    return {"metadata": {"version": 2, "guidellm_version": "0.8.1"}, "benchmarks": [benchmark]}


def endpoints_event(kind: str, at_s: float, uuid: str = "", data: Any = None) -> dict[str, Any]:
    """A line of `events.jsonl` of MLPerf Endpoints."""
    event = {"event_type": kind, "timestamp_ns": round(5e12 + 1e9 * at_s), "sample_uuid": uuid,
             "conversation_id": "", "turn": None}  # fmt: skip
    return event if data is None else {**event, "data": data}


def endpoints_request(k: int, *, has_all_chunks: bool = True) -> list[dict[str, Any]]:
    """The events of request k of the same, of a streamed answer of three chunks."""
    uuid, at_s = f"r{k}", k + TTFTS_S[k]
    events = [
        endpoints_event("sample.issued", k, uuid, ["PromptData", None, [1] * 64]),
        endpoints_event("sample.recv_first", at_s, uuid, ["TextModelOutput", ["a"]]),
    ]
    for gap_s in ITLS_S[k]:
        at_s += gap_s
        if has_all_chunks:
            events.append(endpoints_event("sample.recv_non_first", at_s, uuid))
    answer = ["TextModelOutput", ["a", "b", "c"]]
    return [*events, endpoints_event("sample.complete", at_s + 0.001, uuid, answer)]


def endpoints_session(*requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a session that tracks the performance of these requests."""
    events = sorted((e for request in requests for e in request), key=lambda e: e["timestamp_ns"])
    return [
        endpoints_event("session.started", -1),
        endpoints_event("session.start_performance_tracking", -0.5),
        *events,
        endpoints_event("session.stop_performance_tracking", 10),
        endpoints_event("session.ended", 11),
    ]


def inference_perf_request(k: int, **changes: Any) -> dict[str, Any]:
    """Request k of the same, of `per_request_lifecycle_metrics.json` of inference-perf 0.7.0."""
    at_s = [5000.0 + k + TTFTS_S[k]]
    for gap_s in ITLS_S[k]:
        at_s.append(at_s[-1] + gap_s)
    usage = {"prompt_tokens": 64, "completion_tokens": 3, "total_tokens": 67,
             "prompt_tokens_details": {"cached_tokens": 16}}  # fmt: skip
    return {
        "start_time": 5000.0 + k,
        "end_time": at_s[-1] + 0.01,
        "info": {
            "request_metrics": {"text": {"input_tokens": 64}, "image": None},
            "response_metrics": {"output_tokens": 4, "server_usage": usage, "chunk_times": at_s,
                                 "output_token_times": at_s},
            "lora_adapter": None,
            "input_tokens": 64,
        },
        "error": None,
        **changes,
    }  # fmt: skip
