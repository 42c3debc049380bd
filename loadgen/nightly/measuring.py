"""What a night keeps of one cell's runs while it goes on: their numbers, not their requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from loadgen.cells.runner import CellFailure, CellRun
from loadgen.manifest.manifest import Manifest
from loadgen.measure.comparison.comparable import Configuration, factor, slos_of
from loadgen.measure.comparison.measures import Measured
from loadgen.measure.nights.night_record import RunNumbers, numbers_of


@dataclass
class CellProgress:
    """One cell so far: by repeat its numbers, or why there are none; `manifest` is that of the
    first run, None before it."""

    numbers: dict[int, RunNumbers] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    manifest: Manifest | None = None

    def add(self, found: CellRun | CellFailure, directory: Path, asked: Sequence[str]) -> None:
        if isinstance(found, CellFailure):
            self.missing[found.repeat] = found.reason
            return
        self.manifest = self.manifest or found.run.manifest
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

    def slos(self) -> tuple[object, ...]:
        """Every SLO of the runs (`slos_of`), none without a run."""
        return ((), ()) if self.manifest is None else slos_of(self.manifest)

    def factor(self) -> Configuration:
        """What may differ between nights, flat; empty without a run."""
        if self.manifest is None:
            return {}
        target = self.manifest.target
        return {
            **factor(self.manifest),
            "target.model": target.model,
            "target.api": target.api,
        }

    def factor_of_control(self) -> Configuration:
        """What a control said of itself; client and machine are the cell's own."""
        said = self.factor()
        return {f"control.{key}": said[key] for key in said if key.startswith("target.")}


def _alone(reason: str) -> str:
    return f"its control could not be measured: {reason}"
