"""Result files of other load generators, made by hand in their formats."""

from __future__ import annotations

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
