"""What a night keeps of one cell's runs while it goes on: their numbers, not their requests."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.cells.runner import CellFailure, CellRun
from loadgen.measure.comparison.comparable import factor
from loadgen.measure.comparison.measures import Measured
from loadgen.measure.nights.night_record import RunNumbers, numbers_of


@dataclass
class CellProgress:
    """One cell so far: by repeat its numbers, or why there are none; `manifest` is that of the
    first run."""

    numbers: dict[int, RunNumbers] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)

    def add(self, found: CellRun | CellFailure, directory: Path, asked: Sequence[str]) -> None:
        if isinstance(found, CellFailure):
            self.missing[found.repeat] = found.reason
            return
        self.manifest = self.manifest or dict(found.run.manifest)
        where = found.directory.relative_to(directory)
        measured = Measured(found.run, f"{found.cell.name}/r{found.repeat}")
        numbers = numbers_of(measured, asked, str(where))
        pace_s = math.prod(found.paces) ** (1 / len(found.paces)) if found.paces else None
        self.numbers[found.repeat] = replace(numbers, pace_s=pace_s)

    @property
    def runs(self) -> tuple[RunNumbers, ...]:
        return tuple(self.numbers.values())

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(f"repeat {repeat}: {reason}" for repeat, reason in self.missing.items())

    def beside(self, control: CellProgress) -> tuple[RunNumbers, ...]:
        """The runs, each with the control that ran beside it; one whose control could not be
        measured says so and cannot be trusted."""
        return tuple(
            replace(run, control=control.numbers[repeat])
            if repeat in control.numbers
            else replace(run, reasons=(*run.reasons, _alone(control.missing.get(repeat, ""))))
            for repeat, run in self.numbers.items()
        )

    def factor(self) -> dict[str, Any]:
        """What may differ between nights, flat; empty without a run."""
        if not self.manifest:
            return {}
        target = self.manifest.get("target") or {}
        return {
            **factor(self.manifest),
            "target.model": target.get("model"),
            "target.api": target.get("api"),
        }

    def factor_of_control(self) -> dict[str, Any]:
        """What a control said of itself; client and machine are the cell's own."""
        said = self.factor()
        return {f"control.{key}": said[key] for key in said if key.startswith("target.")}


def _alone(reason: str) -> str:
    return f"its control could not be measured: {reason}"


_CHUNKS = 20
_STEPS, _PRODUCTS, _SIDE = 100_000, 1000, 48


def pace_s() -> float:
    """Seconds for one of 20 equal chunks of work, a plain loop and small matrix products on one
    core: about 12 ms, a quarter of a second in all. The median, so that a moment in which somebody
    else had the core does not count; a neighbour who stays does."""
    matrix = np.full((_SIDE, _SIDE), 0.5, dtype=np.float32)
    return float(np.median([_chunk_s(matrix) for _ in range(_CHUNKS)]))


def _chunk_s(matrix: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> float:
    begin_s = time.perf_counter()
    total = 0
    for k in range(_STEPS):
        total += k & 3
    for _ in range(_PRODUCTS):
        matrix @ matrix
    assert total == 3 * _STEPS // 2
    return time.perf_counter() - begin_s
