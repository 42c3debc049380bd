"""Columns of flat traces by the names that tools give them, read without naming them.

Sources: the trace and dataset formats of OpenAI (`usage`), Anthropic (`usage`), Azure's and
BurstGPT's published traces, Mooncake, vLLM's and SGLang's benchmarks, guidellm, aiperf, evalscope
and Vidur.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from loadgen.errors import TraceFileError

SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "time": {
        "timestamp": "Mooncake, BurstGPT, Azure, evalscope",
        "arrival_time": "SGLang",
        "arrived_at": "Vidur",
        "arrival_timestamp": "logs of gateways",
        "request_time": "logs of gateways",
        "start_time": "vLLM's result file",
        "time": "logs of gateways",
        "ts": "logs of gateways",
    },
    "input_tokens": {
        "prompt_tokens": "OpenAI usage, guidellm",
        "input_tokens": "Anthropic usage",
        "input_length": "Mooncake, aiperf",
        "input_len": "vLLM, SGLang",
        "prompt_len": "vLLM, SGLang",
        "prompt_length": "vLLM",
        "context_tokens": "Azure",
        "request_tokens": "BurstGPT",
        "num_prefill_tokens": "Vidur",
        "isl": "aiperf",
    },
    "output_tokens": {
        "completion_tokens": "OpenAI usage, evalscope",
        "output_tokens": "Anthropic usage, guidellm",
        "output_length": "Mooncake, aiperf",
        "output_len": "vLLM, SGLang",
        "generated_tokens": "Azure",
        "response_tokens": "BurstGPT",
        "num_decode_tokens": "Vidur",
        "osl": "aiperf",
    },
}
"""Key of the format `columns` → name of a column, in lower case with underscores → a tool that
writes it. A time may end in its unit: `timestamp_ms`."""
_UNIT = re.compile(r"(?P<name>.+)_(?P<unit>s|ms|us|ns)")


def recognized(
    fields: Sequence[str], first_row: Mapping[str, str], source: str
) -> dict[str, str] | None:
    """The keys of the format `columns` for a file with these columns; None if one is not found.
    Numbers of a time without a unit in its name are seconds.

    Raises TraceFileError where two columns could be the same quantity, and for numbers that cannot
    be seconds.
    """
    keys: dict[str, str] = {}
    for key, names in SYNONYMS.items():
        known = {name.replace("_", "") for name in names}
        found = [field for field in fields if _plain(field, key) in known]
        if len(found) > 1:
            raise TraceFileError(
                f"{source}:1: columns {found[0]!r} and {found[1]!r} could both be {key}; choose: "
                f"format: {{kind: columns, {key}: {found[0]}, …}}"
            )
        if not found:
            return None
        keys[key] = found[0]
    limits = {f"{m}_slo": f"{m}_slo_ms" for m in ("ttft", "tpot", "e2e")}
    keys |= {key: name for key, name in limits.items() if name in fields}
    if match := _UNIT.fullmatch(column_words(keys["time"])):
        return {**keys, "unit": match["unit"]}
    first = first_row.get(keys["time"], "")
    if re.fullmatch(r"\d{12,}(\.\d+)?", first):
        unit = next((unit for unit, n in (("ms", 14), ("us", 17)) if len(first) < n), "ns")
        listed = ", ".join(f"{key}: {name}" for key, name in keys.items())
        raise TraceFileError(
            f"{source}: {keys['time']} {first} are not seconds since 1970; name the unit, e.g. "
            f"format: {{kind: columns, {listed}, unit: {unit}}}"
        )
    return keys


def _plain(field: str, key: str) -> str:
    """A column's name without its spelling and, for a time, without its unit, joined."""
    name = column_words(field)
    match = _UNIT.fullmatch(name) if key == "time" else None
    return (match["name"] if match else name).replace("_", "")


def column_words(field: str) -> str:
    """A column's name in lower case with underscores: `ContextTokens`, `context-tokens` and
    `Context Tokens` are `context_tokens`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", field.strip())
    return re.sub(r"[ \-._]+", "_", words).lower()
