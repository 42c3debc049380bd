"""The result of a sweep, as it is stored, printed and shown."""

from __future__ import annotations

from typing import Any

from loadgen.manifest.json_section import JsonSection
from loadgen.measure.catalog import Unit
from loadgen.measure.statistics.intervals import BoundedSection, EstimateSection
from loadgen.studies.sweep.axes import How

SCHEMA = 1


class AxisSection(JsonSection, frozen=True, kw_only=True):
    """A key that varies, and its values as YAML reads them."""

    key: str
    values: list[Any]


class RunSection(JsonSection, frozen=True, kw_only=True):
    """A run of a cell. `directory` is relative to that of the sweep."""

    repeat: int
    directory: str
    verdict: str
    exit_code: int
    is_trusted: bool
    reasons: list[str]


class MissingRun(JsonSection, frozen=True, kw_only=True):
    """A run that could not be measured."""

    repeat: int
    reason: str


class CellRow(JsonSection, frozen=True, kw_only=True):
    """A cell over its runs. `benefit` is the throughput per GPU, `cost` the latency; `beaten_by`
    names the cell that keeps it off the Pareto front. `along` is the load as a number, `series` the
    other values."""

    cell: str
    factors: dict[str, str]
    series: str
    along: float | None
    n: int
    n_due: int
    gpus: int | None
    gpus_are_declared: bool
    offered_rate_per_s: EstimateSection
    verdicts: dict[str, int]
    n_untrusted: int
    benefit: EstimateSection
    cost: EstimateSection
    cost_is_infinite: bool
    measures: dict[str, EstimateSection]
    runs: list[RunSection]
    failures: list[MissingRun]
    is_front: bool = False
    beaten_by: str | None = None


class SweepResult(JsonSection, frozen=True, kw_only=True):
    """The content of sweep.json."""

    schema: int = SCHEMA
    slobench: str
    command: list[str]
    scenario: str
    scenario_text: str
    slo: list[str]
    targets: list[str]
    axes: list[AxisSection]
    how: How
    along: str
    cost: str
    cost_unit: Unit
    benefit: str
    repeats: int
    confidence: float
    order_seed: int
    n_runs: int
    n_done: int
    n_failed: int
    n_untrusted: int
    rows: list[CellRow]

    @property
    def without_valid_run(self) -> list[str]:
        """The cells of which every run failed or is invalid."""
        return [row.cell for row in self.rows if row.n_untrusted == row.n]


class SweptRun(JsonSection, frozen=True, kw_only=True):
    """A run, as a row of sweep.parquet."""

    cell: str
    repeat: int
    directory: str
    seed: int
    schedule_sha256: str
    verdict: str
    exit_code: int
    is_trusted: bool
    reasons: list[str]
    n_due: int
    offered_rate_per_s: float | None
    gpus: int
    gpus_are_declared: bool
    measures: dict[str, EstimateSection]
    cost_is_infinite: bool

    def section(self) -> RunSection:
        return RunSection(**{name: getattr(self, name) for name in RunSection.__struct_fields__})

    def per_gpu(self, text: str) -> BoundedSection:
        """A measure divided by the number of GPUs."""
        found = self.measures[text]
        ends = (found.value, found.low, found.high)
        value, low, high = (None if end is None else end / self.gpus for end in ends)
        return BoundedSection(value=value, low=low, high=high)
