"""A published claim, and how its number is measured here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

SEED, SEEDS = 7, 5
"""The first seed of a table, and the seeds of each number, unless others are chosen."""
Unit = Literal["times", "change", "share", "number"]
"""How a value is shown: 2.5 as `2.5×`; a ratio of 0.4 as `−60 %`; 0.4 as `40 %`; as it is."""


@dataclass(frozen=True, slots=True)
class Side:
    """A simulated engine under a workload (`workloads.WORKLOADS`). `mode` as in `slobench modes
    --modes`; `settings` as in `--engine`, in addition to the 8B shape on an H200."""

    workload: str
    mode: str
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quotient:
    """A quantity of `ours` over that of `other`, with the same seed, times `factor`. `quantity` is
    a field of `modes.result.Quantities`, `part` a class ("": all traffic)."""

    ours: Side
    other: Side
    quantity: str
    part: str = ""
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class CapacityQuotient:
    """The highest rate of `ours` at which a share `attainment` of the requests meets the SLO, over
    that of `other`, with the same seed. Searches begin at `start_per_s`."""

    ours: Side
    other: Side
    attainment: float
    start_per_s: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A number that is computed for each seed without a simulation."""

    compute: Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Exact:
    """A number that follows from a formula or from exact averages; it has no seed."""

    compute: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Values of a run on real hardware that is stored in the repository, as `file`."""

    values: tuple[float, ...]
    file: str


@dataclass(frozen=True, slots=True)
class Untested:
    """A claim that has no test here."""

    reason: str


Measurement: TypeAlias = Quotient | CapacityQuotient | Drawn | Exact | Recorded | Untested


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of the table.

    `source` is a letter of `catalog.SOURCES`. `workload` and `statement` are texts of the row. The
    statement holds for values within `bounds` (in the unit of the value; a bound that is None is
    open), which are printed with it. `topic` is the heading of its table.
    """

    key: str
    system: str
    source: str
    claimed: str
    workload: str
    measurement: Measurement
    unit: Unit
    bounds: tuple[float | None, float | None]
    statement: str
    topic: str = ""
