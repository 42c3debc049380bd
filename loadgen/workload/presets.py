"""SLOs that others have written down, by name: `slo: [{preset: llama3.1-8b-interactive}]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, ConfigDict

from loadgen.errors import nearest
from loadgen.measure.slo import parse_slo
from loadgen.registry import Block

PRESETS: Mapping[str, tuple[str, ...]] = {
    # MLPerf Inference v6, loadgen/mlperf.conf, llama3_1-8b-interactive.Server
    "llama3.1-8b-interactive": ("p99(ttft) <= 500ms", "p99(tpot) <= 30ms"),
}


def _known(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"unknown SLO preset '{name}'; {nearest(name, PRESETS)}")
    return name


class SloPreset(Block):
    """An entry of `slo` that stands for the promises of a preset."""

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
