"""SLOs that others have written down, by name: `slo: [{preset: llama3.1-8b-interactive}]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, ConfigDict

from loadgen.errors import nearest
from loadgen.measure.slo import parse_slo
from loadgen.registry import Block


@dataclass(frozen=True, slots=True)
class PublishedSlo:
    """Promises that somebody published: the expressions, why such limits make sense (in our words)
    and where the numbers stand."""

    slos: tuple[str, ...]
    why: str
    source: str


def _mlperf(ttft: str, tpot: str, key: str) -> PublishedSlo:
    """MLPerf's server scenarios bound the 99th percentile of each metric."""
    is_interactive = "interactive" in key
    why = (
        "A person reads along while the answer is written."
        if is_interactive
        else "A busy server: the first word within seconds, then faster than most people read."
    )
    slos = (f"p99(ttft) <= {ttft}", f"p99(tpot) <= {tpot}")
    return PublishedSlo(slos, why, f"MLPerf Inference v6.1, mlperf.conf, {key}.Server")


def _mlperf_whole(e2e: str, key: str) -> PublishedSlo:
    why = "The answer is used when it is complete, so only its end is bounded."
    return PublishedSlo(
        (f"p99(e2e) <= {e2e}",), why, f"MLPerf Inference v6.1, mlperf.conf, {key}.Server"
    )


_CATALOG = "inference-perf workload-catalog, config.json, key slos"
_GUIDE = "guidellm SLO guide"

CATALOGUE: Mapping[str, PublishedSlo] = {
    "llama2-70b": _mlperf("2s", "200ms", "llama2-70b"),
    "llama2-70b-interactive": _mlperf("450ms", "40ms", "llama2-70b-interactive"),
    "mixtral-8x7b": _mlperf("2s", "200ms", "mixtral-8x7b"),
    "llama3.1-405b": _mlperf("6s", "175ms", "llama3_1-405b"),
    "llama3.1-405b-interactive": _mlperf("4500ms", "80ms", "llama3_1-405b-interactive"),
    "llama3.1-8b": _mlperf("2s", "100ms", "llama3_1-8b"),
    "llama3.1-8b-interactive": _mlperf("500ms", "30ms", "llama3_1-8b-interactive"),
    "deepseek-r1": _mlperf("2s", "80ms", "deepseek-r1"),
    "deepseek-r1-interactive": _mlperf("1500ms", "15ms", "deepseek-r1-interactive"),
    "gpt-oss-120b": _mlperf("3s", "80ms", "gpt-oss-120b"),
    "gpt-oss-120b-interactive": _mlperf("2s", "15ms", "gpt-oss-120b-interactive"),
    "gptj": _mlperf_whole("20s", "gptj"),
    "qwen3-vl-235b": _mlperf_whole("12s", "qwen3-vl-235b-a22b"),
    "chat": PublishedSlo(
        ("p99(ttft) <= 200ms", "p99(itl) <= 50ms"),
        "In a chat the first word must feel immediate, and 20 tokens a second outrun a reader.",
        f"{_GUIDE}, chat applications",
    ),
    "rag": PublishedSlo(
        ("p99(ttft) <= 300ms", "p99(itl) <= 100ms", "p99(e2e) <= 3s"),
        "A result is waited for as a whole; retrieval has used part of the patience already.",
        f"{_GUIDE}, retrieval-augmented generation",
    ),
    "agent": PublishedSlo(
        ("p99(e2e) <= 5s",),
        "Nobody reads an agent's steps; the next one starts when this one is complete.",
        f"{_GUIDE}, agentic applications",
    ),
    "content": PublishedSlo(
        ("p99(ttft) <= 600ms", "p99(itl) <= 200ms"),
        "Long texts are read later or skimmed: a steady flow matters more than a quick start.",
        f"{_GUIDE}, content generation",
    ),
    "code": PublishedSlo(
        ("p99(ttft) <= 500ms", "p99(itl) <= 150ms"),
        "A developer waits in the editor, and reads code more slowly than prose.",
        f"{_GUIDE}, code generation",
    ),
    "code-completion": PublishedSlo(
        ("p99(e2e) <= 2s",),
        "A completion that comes after the developer has typed on is worth nothing.",
        f"{_GUIDE}, code completion",
    ),
    "interactive-chat": PublishedSlo(
        ("p99(ttft) <= 1s", "p99(itl) <= 50ms"),
        "A second is the limit at which a train of thought stays unbroken; then reading speed.",
        f"{_CATALOG}, interactive-chat",
    ),
    "reasoning": PublishedSlo(
        ("p99(ttft) <= 2s", "p99(itl) <= 100ms"),
        "Whoever asks for reasoning expects to wait; the long chain of thought must still flow.",
        f"{_CATALOG}, reasoning",
    ),
    "code-generation": PublishedSlo(
        ("p95(ttft) <= 30s", "p99(itl) <= 100ms"),
        "Prompts hold whole repositories: the prefill is long, and a late start is accepted.",
        f"{_CATALOG}, code-generation",
    ),
    "deep-research": PublishedSlo(
        ("p90(ttft) <= 10s", "p99(itl) <= 100ms"),
        "Hours of human work are saved; contexts are very long and starts may be late.",
        f"{_CATALOG}, deep-research",
    ),
    "batch-summarization-rag": PublishedSlo(
        ("p90(ttft) <= 15s", "p95(itl) <= 150ms", "p99(e2e) <= 630s"),
        "A batch with a deadline: throughput first, bounded so that one document blocks nobody.",
        f"{_CATALOG}, batch-summarization-rag",
    ),
    "batch-synthetic-data": PublishedSlo(
        ("p99(e2e) <= 2080s",),
        "Data made overnight: only a request that never ends is a failure.",
        f"{_CATALOG}, batch-synthetic-data",
    ),
}
"""By name. The limits of MLPerf are those of its server scenario; each promise names its own
percentile. Whatever a preset slos is overridden by an expression after it."""

PRESETS: Mapping[str, tuple[str, ...]] = {n: p.slos for n, p in CATALOGUE.items()}


def _known(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"unknown SLO preset '{name}'; {nearest(name, PRESETS)}")
    return name


class SloPreset(Block):
    """An entry of `slo` that stands for the slos of a preset."""

    model_config = ConfigDict(strict=True)
    preset: Annotated[str, AfterValidator(_known)]


def expanded(entries: Sequence[str | SloPreset]) -> tuple[str, ...]:
    """The expressions of an `slo` list, presets written out in their place; an expression replaces
    those of a preset before it that promise the same of the same metric (`p99(ttft) <= 400ms`
    after a preset with another limit)."""
    texts: list[str] = []
    from_preset: list[bool] = []
    for entry in entries:
        if isinstance(entry, SloPreset):
            texts += PRESETS[entry.preset]
            from_preset += [True] * len(PRESETS[entry.preset])
            continue
        asked = _subject(entry)
        keep = [
            not (is_preset and _subject(text) == asked)
            for text, is_preset in zip(texts, from_preset, strict=True)
        ]
        texts = [text for text, kept in zip(texts, keep, strict=True) if kept]
        from_preset = [is_preset for is_preset, kept in zip(from_preset, keep, strict=True) if kept]
        texts.append(entry)
        from_preset.append(False)
    return tuple(texts)


def _subject(text: str) -> tuple[str, str | None]:
    slo = parse_slo(text)
    return slo.metric, slo.aggregate
