"""Runs as rows of InferenceX (before: InferenceMAX), a row each, from vLLM's numbers.

Latencies are in seconds, interactivity (`intvty`) in tokens per second and user; throughput is per
GPU. Precision, image and parallelism are not known to a client and stay null.

Source: InferenceX, utils/process_result.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from loadgen.exports.vllm_bench import vllm_bench
from loadgen.records import Run


def inferencex_row(run: Run) -> dict[str, Any]:
    """The row of a run. The throughputs per GPU are null where the target's labels state no
    number of GPUs."""
    result, labels = vllm_bench(run), run.manifest.target.labels
    schedule, n_gpus = run.schedule_rows, labels.gpus
    n_in = result["total_input_tokens"] / result["duration"] if result["duration"] > 0 else 0.0
    row: dict[str, Any] = {
        "hw": labels.gpu,
        "conc": result["max_concurrency"],
        "image": None,
        "model": result["model_id"],
        "infmax_model_prefix": None,
        "framework": labels.engine,
        "benchmark_client": "slobench",
        "precision": None,
        "spec_decoding": None,
        "disagg": None,
        "isl": _length(schedule["input_tokens"]),
        "osl": _length(schedule["output_tokens"]),
        "is_multinode": None,
        "tp": None,
        "ep": None,
        "dp_attention": None,
        "tput_per_gpu": _per_gpu(result["total_token_throughput"], n_gpus),
        "output_tput_per_gpu": _per_gpu(result["output_throughput"], n_gpus),
        "input_tput_per_gpu": _per_gpu(n_in, n_gpus),
    }
    for key, value in result.items():
        if key.endswith("_ms"):
            row[key.removesuffix("_ms")] = value / 1e3
        if "tpot" in key:
            name = key.removesuffix("_ms").replace("tpot", "intvty")
            row[name] = 1e3 / value if value > 0 else None
    return row


def _per_gpu(tokens_per_s: float, n_gpus: int | None) -> float | None:
    return tokens_per_s / n_gpus if n_gpus else None


def _length(tokens: Any) -> int | None:
    """The mean length; None of no request."""
    return round(float(np.mean(tokens))) if len(tokens) else None
