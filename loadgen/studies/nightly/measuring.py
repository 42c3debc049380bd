"""Progress of a cell during a night: the numbers of its runs; and the speed of this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from loadgen.manifest.sections import Manifest
from loadgen.measure.measures import Measured
from loadgen.studies.cells.runner import CellFailure, CellRun
from loadgen.studies.compare.comparable import Configuration, factor, slos_of
from loadgen.studies.nightly.record import RunNumbers, numbers_of


@dataclass
class CellProgress:
    """The runs of a cell so far: by repeat their numbers, or the reason why there are none;
    `manifest` is that of the first run, None before it."""

    numbers: dict[int, RunNumbers] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    manifest: Manifest | None = None

    def add(self, result: CellRun | CellFailure, directory: Path, measures: Sequence[str]) -> None:
        if isinstance(result, CellFailure):
            self.missing[result.repeat] = result.reason
            return
        self.manifest = self.manifest or result.run.manifest
        where = result.directory.relative_to(directory)
        measured = Measured(result.run, f"{result.cell.name}/r{result.repeat}")
        numbers = numbers_of(measured, measures, str(where))
        pace_s = math.prod(result.paces) ** (1 / len(result.paces)) if result.paces else None
        self.numbers[result.repeat] = replace(numbers, pace_s=pace_s)

    @property
    def runs(self) -> tuple[RunNumbers, ...]:
        return tuple(self.numbers.values())

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(f"repeat {repeat}: {reason}" for repeat, reason in self.missing.items())

    def paired_with(self, control: CellProgress) -> tuple[RunNumbers, ...]:
        """The runs, each with the run of its control; a run without one is not trusted, with the
        reason."""
        return tuple(
            replace(run, control=control.numbers[repeat])
            if repeat in control.numbers
            else replace(run, reasons=(*run.reasons, _alone(control.missing.get(repeat, ""))))
            for repeat, run in self.numbers.items()
        )

    def slos(self) -> tuple[object, ...]:
        """Every SLO of the runs (`slos_of`), none without a run."""
        return ((), ()) if self.manifest is None else slos_of(self.manifest)

    def factor(self) -> Configuration:
        """The recorded settings that may differ between nights, flat; empty without a run."""
        if self.manifest is None:
            return {}
        target, has_pieces = self.manifest.target, bool(self.manifest.prompt_sharing)
        return {
            **factor(self.manifest),
            "target.model": target.model,
            "target.api": target.api,
            **({"prompt_sharing": self.manifest.prompt_sharing} if has_pieces else {}),
        }

    def factor_of_control(self) -> Configuration:
        """Those of a control's target; load generator and machine are those of the cell."""
        values = self.factor()
        return {f"control.{key}": values[key] for key in values if key.startswith("target.")}


def _alone(reason: str) -> str:
    return f"its control could not be measured: {reason}"


_CHUNKS = 20
_STEPS, _PRODUCTS, _SIDE = 100_000, 1000, 48


def machine_speed_s() -> float:
    """Seconds for a fixed calculation, a plain loop and small matrix products on one core: the
    median of 20 repeats of about 12 ms. Short interruptions by other programs do not count; lasting
    load does. Call it while nothing is sent."""
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
