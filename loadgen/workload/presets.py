"""Published SLOs by name: `slo: [{preset: llama3.1-8b-interactive}]`."""

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
    """Published SLO expressions, why such limits make sense (in our words), and their source."""

    slos: tuple[str, ...]
    why: str
    source: str


_INTERACTIVE = "A person reads along while the answer is written."
_BUSY = "A busy server: the first word within seconds, then faster than most people read."
_COMPLETE = "The answer is used when it is complete, so only its end is bounded."
_CATALOG = "inference-perf workload-catalog, config.json, key slos"
_GUIDE = "guidellm SLO guide"


def _mlperf(key: str, **limits: str) -> PublishedSlo:
    """MLPerf's server scenarios bound the 99th percentile of each metric."""
    slos = tuple(f"p99({metric}) <= {limit}" for metric, limit in limits.items())
    why = _COMPLETE if "e2e" in limits else _INTERACTIVE if "interactive" in key else _BUSY
    return PublishedSlo(slos, why, f"MLPerf Inference v6.1, mlperf.conf, {key}.Server")


CATALOGUE: Mapping[str, PublishedSlo] = {
    "llama2-70b": _mlperf("llama2-70b", ttft="2s", tpot="200ms"),
    "llama2-70b-interactive": _mlperf("llama2-70b-interactive", ttft="450ms", tpot="40ms"),
    "mixtral-8x7b": _mlperf("mixtral-8x7b", ttft="2s", tpot="200ms"),
    "llama3.1-405b": _mlperf("llama3_1-405b", ttft="6s", tpot="175ms"),
    "llama3.1-405b-interactive": _mlperf("llama3_1-405b-interactive", ttft="4500ms", tpot="80ms"),
    "llama3.1-8b": _mlperf("llama3_1-8b", ttft="2s", tpot="100ms"),
    "llama3.1-8b-interactive": _mlperf("llama3_1-8b-interactive", ttft="500ms", tpot="30ms"),
    "deepseek-r1": _mlperf("deepseek-r1", ttft="2s", tpot="80ms"),
    "deepseek-r1-interactive": _mlperf("deepseek-r1-interactive", ttft="1500ms", tpot="15ms"),
    "gpt-oss-120b": _mlperf("gpt-oss-120b", ttft="3s", tpot="80ms"),
    "gpt-oss-120b-interactive": _mlperf("gpt-oss-120b-interactive", ttft="2s", tpot="15ms"),
    "gptj": _mlperf("gptj", e2e="20s"),
    "qwen3-vl-235b": _mlperf("qwen3-vl-235b-a22b", e2e="12s"),
    "chat": PublishedSlo(
        ("p99(ttft) <= 200ms", "p99(itl) <= 50ms"),
        "In a chat the first word must feel immediate, and 20 tokens a second outrun a reader.",
        f"{_GUIDE}, chat applications",
    ),
    "rag": PublishedSlo(
        ("p99(ttft) <= 300ms", "p99(itl) <= 100ms", "p99(e2e) <= 3s"),
        "The user waits for the whole result; retrieval has already used part of the time.",
        f"{_GUIDE}, retrieval-augmented generation",
    ),
    "agent": PublishedSlo(
        ("p99(e2e) <= 5s",),
        "No person reads an agent's steps; each step starts when the step before is complete.",
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
        "Users of reasoning models expect to wait; the long chain of thought must still flow.",
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
        "A batch with a deadline: throughput first, bounded so that no document blocks the others.",
        f"{_CATALOG}, batch-summarization-rag",
    ),
    "batch-synthetic-data": PublishedSlo(
        ("p99(e2e) <= 2080s",),
        "Data made overnight: only a request that never ends is a failure.",
        f"{_CATALOG}, batch-synthetic-data",
    ),
}
"""The published SLOs by preset name. The limits of MLPerf are those of its server scenario; every
expression names its own percentile. An expression after a preset overrides the preset's."""

PRESETS: Mapping[str, tuple[str, ...]] = {n: p.slos for n, p in CATALOGUE.items()}


def _checked_name(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"unknown SLO preset '{name}'; {nearest(name, PRESETS)}")
    return name


class SloPreset(Block):
    """An entry of `slo` that stands for the expressions of a preset."""

    model_config = ConfigDict(strict=True)
    preset: Annotated[str, AfterValidator(_checked_name)]


def expanded(entries: Sequence[str | SloPreset]) -> tuple[str, ...]:
    """The expressions of an `slo` list, with presets replaced by their expressions.

    An expression replaces those of an earlier preset about the same aggregate of the same metric
    (`p99(ttft) <= 400ms` after a preset with another limit).
    """
    texts: list[tuple[str, bool]] = []  # (expression, whether it comes from a preset)
    for entry in entries:
        if isinstance(entry, SloPreset):
            texts += [(text, True) for text in PRESETS[entry.preset]]
        else:
            subject = _subject(entry)
            texts = [
                (t, is_preset) for t, is_preset in texts if not is_preset or _subject(t) != subject
            ]
            texts.append((entry, False))
    return tuple(text for text, _ in texts)


def _subject(text: str) -> tuple[str, str | None]:
    slo = parse_slo(text)
    return slo.metric, slo.aggregate
