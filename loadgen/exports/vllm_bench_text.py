"""The block that `vllm bench serve` prints at its end, for scripts that parse it with regular
expressions.

Source: vLLM 0.33.0, vllm/benchmarks/serve.py (`benchmark`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loadgen.exports.vllm_bench import PERCENTILES, vllm_bench
from loadgen.records import Run

_WIDTH = 50
_METRICS = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)


def vllm_bench_text(run: Run) -> str:
    """The block with all four metrics and the percentiles of `PERCENTILES`, as with
    `--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,95,99`."""
    return "\n".join(_lines(vllm_bench(run))) + "\n"


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _count("Successful requests:", result["completed"])
    yield _count("Failed requests:", result["failed"])
    if result["max_concurrency"] is not None:
        yield _count("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        yield _number("Request rate configured (RPS):", result["request_rate"])
    yield _number("Benchmark duration (s):", result["duration"])
    yield _count("Total input tokens:", result["total_input_tokens"])
    yield _count("Total generated tokens:", result["total_output_tokens"])
    yield _number("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _number("Request goodput (req/s):", result["request_goodput"])
    yield _number("Output token throughput (tok/s):", result["output_throughput"])
    yield _number("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _number("Peak concurrent requests:", result["max_concurrent_requests"])
    yield _number("Total token throughput (tok/s):", result["total_token_throughput"])
    for word, title, header in _METRICS:
        yield f"{header:-^{_WIDTH}}"
        yield _number(f"Mean {title} (ms):", result[f"mean_{word}_ms"])
        yield _number(f"Median {title} (ms):", result[f"median_{word}_ms"])
        for p in PERCENTILES:
            yield _number(f"P{p} {title} (ms):", result[f"p{p}_{word}_ms"])
    yield "=" * _WIDTH


def _count(label: str, value: int) -> str:
    return f"{label:<40} {value:<10}"


def _number(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}"
