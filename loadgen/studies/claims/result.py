"""The result of a table of claims, as it is stored."""

from __future__ import annotations

from loadgen.manifest.json_section import JsonSection
from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.studies.claims.claim import Unit

SCHEMA = 1


class ClaimRow(JsonSection, frozen=True, kw_only=True):
    """A claim with the value of the first set of seeds, in its `unit`.

    The interval of `value` is where a repeat with as many other seeds is expected; `repeats` are
    the values of the other sets, `n_inside` of them inside it. `holds`: all values are within the
    `bounds` of the statement (None: without a value). `method` is `simulated`, `computed`,
    `recorded`, `not tested` or `unfinished`.
    """

    key: str
    topic: str
    system: str
    source: str
    claimed: str
    workload: str
    unit: Unit
    value: EstimateSection
    repeats: list[float | None]
    n_inside: int
    low_bound: float | None
    high_bound: float | None
    holds: bool | None
    statement: str
    method: str


class ClaimsFile(JsonSection, frozen=True, kw_only=True):
    """The content of claims.json. `seeds` holds the sets of seeds; `n_repeated` counts the pairs of
    a row with an interval and a repeat, and `n_inside` those inside it."""

    schema: int = SCHEMA
    slobench: str
    command: list[str]
    seeds: list[list[int]]
    confidence: float
    n_repeated: int
    n_inside: int
    rows: list[ClaimRow]

    @property
    def unfinished(self) -> list[str]:
        """The keys of the rows whose simulations have no value."""
        return [row.key for row in self.rows if row.method == "unfinished"]

    @property
    def contradicted(self) -> list[str]:
        """The keys of the rows with a value outside the bounds of their statement."""
        return [row.key for row in self.rows if row.holds is False]
