"""The mock script as people write it: `--ttft 50ms --fail 500:10%` on its command line,
`ttft=50ms,fail=cut` elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from loadgen.errors import UsageError, nearest
from loadgen.units import parse_duration_s, parse_rate_per_s, parse_share
from targets.mock_script import FAILURES, Failure, Script, Stall

Parse = Callable[[str], Any]

REJECTABLE = (
    "continuous_usage_stats",
    "ignore_eos",
    "max_completion_tokens",
    "max_tokens",
    "min_tokens",
    "stream_options",
    "temperature",
)


def apply_options(script: Script, options: Iterable[tuple[str, str]]) -> Script:
    """The script with options laid over it; repeatable ones (stall, fail, reject, model) add up
    among themselves.

    Raises UsageError naming the option, its value and what was expected.
    """
    changes: dict[str, Any] = {}
    for key, value in options:
        name = key.replace("-", "_")
        if name not in OPTIONS:
            raise UsageError(f"unknown mock option '{key}'; {nearest(name, OPTIONS)}")
        field, parse, _ = OPTIONS[name]
        try:
            parsed = parse(value)
        except ValueError as error:
            raise UsageError(f"mock option {key} {value!r}: {error}") from None
        changes[field] = changes.get(field, ()) + parsed if isinstance(parsed, tuple) else parsed
    return replace(script, **changes)


def split_options(text: str) -> list[tuple[str, str]]:
    """`key=value,key=value` as pairs. Raises UsageError for a part without `=`."""
    pairs = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, separator, value = part.partition("=")
        if not separator:
            raise UsageError(f"option {part!r}: expected key=value")
        pairs.append((key.strip(), value.strip()))
    return pairs


def _stall(text: str) -> tuple[Stall, ...]:
    length, separator, start = text.partition("@")
    if not separator:
        raise ValueError("expected LENGTH@START, e.g. 1.4s@5s")
    return (Stall(parse_duration_s(start), parse_duration_s(length)),)


def _failure(text: str) -> tuple[Failure, ...]:
    kind, separator, share = text.partition(":")
    if kind not in FAILURES and not (kind.isascii() and kind.isdigit() and 400 <= int(kind) < 600):
        raise ValueError(f"no such failure; {nearest(kind, [*FAILURES, 'a status 400 to 599'])}")
    return (Failure(kind, parse_share(share) if separator else 1.0),)


def _integer(least: int) -> Parse:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise ValueError(f"expected an integer, {least} or more")
        return int(text)

    return parse


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError("expected a positive number")
    return number


def _word(*known: str) -> Parse:
    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(nearest(text, known))
        return text

    return parse


def _one(parse: Parse) -> Parse:
    return lambda text: (parse(text),)


OPTIONS: dict[str, tuple[str, Parse, str]] = {
    "ttft": ("ttft_s", parse_duration_s, "time to first token, e.g. 50ms"),
    "itl": ("itl_s", parse_duration_s, "time between tokens, e.g. 10ms"),
    "speed": ("itl_s", lambda text: 1 / parse_rate_per_s(text), "tokens per second, e.g. 100/s"),
    "coalesce": ("coalesce", _integer(1), "tokens per event"),
    "tokens": ("tokens", _integer(1), "output tokens where a request does not say"),
    "eos_after": ("eos_after", _integer(1), "stop after so many tokens without ignore_eos"),
    "reasoning": ("reasoning", _integer(0), "leading reasoning tokens (chat)"),
    "role": ("role", _word("first", "early", "off"), "the role: with the first token, early, off"),
    "usage": ("usage", _word("on", "off"), "off: no usage even when asked for"),
    "done": ("done", _word("on", "off"), "off: no [DONE] at the end"),
    "chars_per_token": ("chars_per_token", _positive, "characters of a prompt token"),
    "overhead_tokens": ("overhead_tokens", _integer(0), "tokens of the chat template"),
    "cached_tokens": ("cached_tokens", _integer(0), "cached prompt tokens to report"),
    "stall": ("stalls", _stall, "freeze all replies, LENGTH@START, e.g. 1.4s@5s"),
    "fail": ("failures", _failure, f"KIND[:SHARE]; {', '.join(FAILURES)} or an HTTP status"),
    "reject": ("rejects", _one(_word(*REJECTABLE)), "answer 400 to requests with this field"),
    "max_model_len": ("max_model_len", _integer(1), "most tokens of prompt and output"),
    "api_key": ("api_key", str, "the only key accepted"),
    "model": ("models", _one(str), "a served model's name"),
    "seed": ("seed", _integer(0), "which requests fail"),
}
"""Option name → (field of Script, parser, help)."""
