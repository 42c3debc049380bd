"""The machine a benchmark ran on, and what is kept and shown of its numbers."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadgen.drive.instrument import host

RESULTS = Path(__file__).parents[1] / "results"
Table = Mapping[str, Mapping[str, float]]


def machine() -> dict[str, Any]:
    known = host().to_json()
    return {key: known[key] for key in ("cpu_model", "cpus", "platform", "python")}


def machine_line() -> str:
    known = machine()
    line = f"{known['cpu_model']}, {known['cpus']} cores, Python {known['python']}"
    load = ", ".join(f"{one:.2f}" for one in os.getloadavg())
    return f"{line}; load average before {load}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, min and max; NaN where there is nothing."""
    known = [value for value in values if value == value]
    if not known:
        return dict.fromkeys(("median", "min", "max"), float("nan"))
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}


def spreads(rounds: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The spread of each figure over rounds."""
    names = dict.fromkeys(name for one in rounds for name in one)
    return {
        name: spread([one[name] for one in rounds if one.get(name) is not None]) for name in names
    }


@dataclass(frozen=True)
class Goal:
    """A figure that should not exceed (`at_most`) or reach (`at_least`) a limit."""

    name: str
    value: float
    limit: float
    unit: str = ""
    is_floor: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.is_floor else self.value <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.is_floor else "≤"
        word = "met   " if self.met else "MISSED"
        unit = f" {self.unit}" if self.unit else ""
        return f"  {word} {self.name}: {self.value:.3g}{unit} (goal {sign} {self.limit:g}{unit})"

    def to_json(self) -> dict[str, Any]:
        sign = ">=" if self.is_floor else "<="
        return {
            "name": self.name,
            "value": self.value,
            "goal": f"{sign} {self.limit:g}",
            "unit": self.unit,
            "met": self.met,
        }


def keep(name: str, asked: Mapping[str, Any], found: Mapping[str, Any]) -> Path:
    """The results file, with the machine line; NaN becomes null."""
    path = RESULTS / f"{name}.json"
    content = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "asked": dict(asked),
        **found,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(_finite(content), indent=2) + "\n")
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float):
        return None if value != value else float(f"{value:.6g}")
    return value


def show(title: str, columns: Sequence[str], table: Mapping[str, Table], digits: int = 3) -> None:
    """A table of medians with their range: a line per figure, a column per side."""
    print(f"\n{title}")
    names = dict.fromkeys(name for side in columns for name in table[side])
    width = max(map(len, names), default=0)
    print(" " * width, *(f"{side:>26}" for side in columns))
    for name in names:
        cells = (_cell(table[side].get(name), digits) for side in columns)
        print(f"{name:{width}}", *(f"{cell:>26}" for cell in cells))


def _cell(found: Mapping[str, float] | None, digits: int) -> str:
    if found is None or found["median"] != found["median"]:
        return "–"
    median, low, high = (f"{found[key]:.{digits}g}" for key in ("median", "min", "max"))
    return f"{median} [{low}, {high}]"


def interleaved(n_rounds: int, sides: Sequence[str], run: Callable[[str, int], None]) -> None:
    """Every side once per round, the order turning, so that drift meets all of them alike."""
    for number in range(n_rounds):
        turn = number % len(sides)
        for side in (*sides[turn:], *sides[:turn]):
            run(side, number)
