"""The result file of `sglang.bench_serving --output-details`: a JSON line per run.

Source: SGLang, python/sglang/benchmark/serving.py (`benchmark`, `calculate_metrics`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from loadgen.errors import UsageError
from loadgen.foreign.foreign_run import (
    NO_CLIENT,
    NO_LENGTHS,
    NO_READS,
    NO_SCHEDULE,
    NO_SEND_TIMES,
    ForeignRun,
    JsonValue,
)
from loadgen.foreign.vllm import result_of

TOOL = "sglang.bench_serving"
_NO_ENDS = "no end of a request: E2E and TPOT end at the last chunk, not at the last line"
_MISSING = (NO_SEND_TIMES, NO_SCHEDULE, NO_CLIENT, _NO_ENDS, NO_READS, NO_LENGTHS)
_SETTINGS = ("dataset_name", "random_range_ratio")


def is_sglang(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object has the form of a line, with or without the details."""
    return {"backend", "dataset_name", "request_rate", "duration", "completed"} <= content.keys()


def read_sglang(values: Sequence[JsonValue], where: str) -> Iterator[ForeignRun]:
    """The results of a file, a line each."""
    for part, value in enumerate(values):
        yield _result(value.content, value.place(where), part)


def _result(content: Any, where: str, part: int) -> ForeignRun:
    if isinstance(content, dict) and content.get("request_rate") == "trace":
        raise UsageError(
            f"{where}: request_rate: trace: neither the file nor the load states when the requests "
            "were sent"
        )
    found = result_of(content, where, part, "--output-details")
    info = content.get("server_info")
    model = info.get("model_path") if isinstance(info, dict) else None
    return replace(
        found,
        tool=TOOL,
        missing=_MISSING,
        model=model if isinstance(model, str) else "",
        api=None if content["backend"] in ("sglang", "sglang-native") else found.api,
        settings={key: content[key] for key in _SETTINGS if content.get(key) is not None},
    )
