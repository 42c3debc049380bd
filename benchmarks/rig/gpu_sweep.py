"""Part `sweep`: attention with other sizes, and the entry of `tiles.TUNINGS` that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import prod
from typing import Any

from reference_engine.kernels.tiles import Tuning
from reference_engine.model.zoo import SHAPES
from reference_engine.state.model_config import KvDtype
from rig.gpu_kernels import KernelTiming, chunk_timings, decode_timings
from rig.gpu_session import Session

Changes = Mapping[str, int]
"""Differences from the default `Tuning`."""
Times = list[tuple[Changes, list[float]]]
"""Candidates with their seconds in each case, the default first."""

DECODES: Sequence[Changes] = (
    {},
    {"decode_programs": 3},
    {"decode_keys": 32, "decode_stages": 5, "decode_programs": 4},
    {"decode_stages": 4},
    {"decode_keys": 128, "decode_stages": 2, "decode_warps": 8},
    {"decode_keys": 32, "decode_stages": 4, "decode_warps": 2, "decode_programs": 4},
)
CHUNKS: Sequence[Changes] = (
    {},
    {"chunk_stages": 3},
    {"chunk_stages": 3, "chunk_warps": 8},
    {"chunk_keys": 128, "chunk_warps": 8},
    {"chunk_rows": 128, "chunk_warps": 8},
    {"chunk_rows": 128, "chunk_warps": 8, "chunk_stages": 3},
)
SCALINGS: Sequence[Changes] = ({}, {"dequantise": True})
_LEAST_GAIN = 1.02  # below it the default stays: repeated timings differ by as much


def sweep(session: Session) -> None:
    """Time the candidates; without goals."""
    groups: dict[str, Times] = {}
    for changes in DECODES:
        cases = [(32, 4096), (256, 1024)]
        _add(session, groups, "decode", changes, partial(_decodes, session, cases, "auto"))
    for changes in CHUNKS:
        _add(session, groups, "chunk", changes, partial(_chunks, session))
    for changes in SCALINGS:
        _add(session, groups, "8-bit KV", changes, partial(_decodes, session, [(32, 4096)], "fp8"))
    changes, gains = choose(groups)
    entry = table_entry(session.gpu_name, changes)
    session.results.add("tuning", {"entry": entry, "changes": changes, "gains": gains})
    print(f"proposed for tiles.TUNINGS: {entry}")


def _add(
    session: Session,
    groups: dict[str, Times],
    group: str,
    changes: Changes,
    measure: Callable[[Tuning], list[KernelTiming]],
) -> None:
    """Measure a candidate; one that fails is no candidate."""

    def work() -> None:
        timings = measure(tuning_with(changes))
        sizes = ", ".join(f"{name} {value}" for name, value in changes.items()) or "default"
        for timing in timings:
            row = asdict(timing) | {"case": f"{timing.case}; {sizes}"}
            session.results.add_row("sweep", row)
            print(f"{timing.kernel} {row['case']}: {timing.seconds * 1e6:.1f} µs")
        groups.setdefault(group, []).append((changes, [timing.seconds for timing in timings]))

    session.attempt(f"{group} {dict(changes)}", work)


def _decodes(
    session: Session, cases: Sequence[tuple[int, int]], kv_dtype: KvDtype, tuning: Tuning
) -> list[KernelTiming]:
    place, config = session.place, SHAPES[session.shape("8b")]
    return [
        timing
        for n_rows, context in cases
        for timing in decode_timings(
            session.ops(tuning),
            config,
            place,
            session.top,
            [context // place.scale] * place.rows(n_rows),
            f"batch {n_rows}, context {context}, KV {kv_dtype}",
            tuning,
            kv_dtype,
        )
    ]


def _chunks(session: Session, tuning: Tuning) -> list[KernelTiming]:
    """Our kernel alone: torch's FlashAttention has no such sizes."""
    place, config = session.place, SHAPES[session.shape("8b")]
    n_tokens = 2048 // place.scale
    return chunk_timings(session.ops(tuning), config, place, session.top, n_tokens, 0, tuning)[:1]


def tuning_with(changes: Changes) -> Tuning:
    values: dict[str, Any] = dict(changes)
    return Tuning(**values)


def choose(groups: Mapping[str, Times]) -> tuple[dict[str, int], dict[str, float]]:
    """The changes to the default that are fastest by the geometric mean over the cases, and how
    many times as fast as the default they are, by group. A group whose default failed, or in which
    none is 2 % faster, changes nothing."""
    changes: dict[str, int] = {}
    gains: dict[str, float] = {}
    for group, times in groups.items():
        default = next((seconds for candidate, seconds in times if not candidate), None)
        if default is None:
            continue
        ratios = [
            prod(before / after for before, after in zip(default, seconds, strict=True))
            ** (1 / len(seconds))
            for _, seconds in times
        ]
        gain = max(ratios)
        if gain >= _LEAST_GAIN:
            changes |= times[ratios.index(gain)][0]
            gains[group] = gain
    return changes, gains


def table_entry(gpu_name: str, changes: Changes) -> str:
    """A line of `tiles.TUNINGS`: `"H100": Tuning(decode_keys=32),`. The word for the GPU is the
    first of its name with a digit."""
    words = gpu_name.upper().split()
    word = next((word for word in words if any(map(str.isdigit, word))), gpu_name.upper())
    sizes = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    return f'"{word}": Tuning({sizes}),'
