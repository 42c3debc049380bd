"""The result of a comparison of batching modes, as it is stored, printed and shown."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from loadgen.manifest.json_section import JsonSection
from loadgen.measure.statistics.intervals import BoundedSection, EstimateSection
from loadgen.studies.modes.seed_capacity import ModeCapacities, Outcome

SCHEMA = 1
N = TypeVar("N", bound=BoundedSection)


class Quantities(JsonSection, Generic[N], frozen=True, kw_only=True):
    """The quantities by which modes are compared, times in seconds. Failures count as infinitely
    slow, and an infinite percentile is None: a mode must not look fast because its requests
    fail."""

    goodput: N
    attainment: N
    output_tokens_per_s: N
    ttft_p50: N
    ttft_p99: N
    tpot_p50: N
    tpot_p99: N
    itl_p50: N
    itl_p99: N
    max_stall_p50: N
    max_stall_p99: N
    e2e_p50: N
    e2e_p99: N


class CellNumbers(Quantities[BoundedSection], frozen=True, kw_only=True):
    """The numbers of a run, or of a class in it; intervals are those of the run."""

    n_due: int
    n_ok: int
    offered_rate_per_s: float | None


class ModeCell(CellNumbers, frozen=True, kw_only=True):
    """A cell: the run of a mode, rate and seed. `waits_s`: seconds of waiting by class and
    reason."""

    mode: str
    rate_per_s: float | None
    seed: int
    schedule_sha256: str
    ended: str
    verdict: str
    is_trusted: bool
    reasons: list[str]
    classes: dict[str, CellNumbers]
    waits_s: dict[str, dict[str, float]]

    def part(self, name: str) -> CellNumbers:
        """The numbers of a class; of all traffic for ""."""
        return self.classes[name] if name else self


class ModeRow(Quantities[EstimateSection], frozen=True, kw_only=True):
    """A mode at a rate over its seeds. `class_name` is "" for all traffic; `difference` and `ratio`
    (by quantity) are those to the first mode; `waits_s`: seconds of waiting per request."""

    mode: str
    rate_per_s: float | None
    class_name: str = msgspec.field(name="class")
    n_seeds: int
    n_due: int
    offered_rate_per_s: float | None
    difference: dict[str, EstimateSection]
    ratio: dict[str, EstimateSection]
    waits_s: dict[str, float]


class Leader(JsonSection, frozen=True, kw_only=True):
    """The mode with the best goodput at a rate, and the difference to the runner-up (None: the only
    mode)."""

    rate_per_s: float | None
    best: str
    runner_up: str | None
    difference: EstimateSection


class ModesHead(JsonSection, frozen=True, kw_only=True):
    """The settings of a comparison, and how much of it is done."""

    schema: int = SCHEMA
    slobench: str
    command: list[str]
    scenario: str
    scenario_text: str
    slo: list[str]
    target: str
    settings: dict[str, str]
    modes: list[str]
    seeds: list[int]
    confidence: float
    n_done: int
    n_untrusted: int


class ModesFile(ModesHead, frozen=True, kw_only=True):
    """The content of modes.json."""

    baseline: str
    rates_per_s: list[float] | None
    n_cells: int
    rows: list[ModeRow]
    leaders: list[Leader]
    cells: list[ModeCell]

    @property
    def progress(self) -> str:
        return f"{self.n_done} of {self.n_cells} cells are finished"

    @property
    def without_valid_run(self) -> list[str]:
        """The modes, each with its rate, of which every run is invalid."""
        valid = {(cell.mode, cell.rate_per_s) for cell in self.cells if cell.is_trusted}
        places = dict.fromkeys((cell.mode, cell.rate_per_s) for cell in self.cells)
        return [
            mode if rate is None else f"{mode} at {rate:g}/s"
            for mode, rate in places
            if (mode, rate) not in valid
        ]


class TriedRate(JsonSection, frozen=True, kw_only=True):
    """A run of a search."""

    rate_per_s: float
    n_due: int
    n_met: int


class SeedSearch(JsonSection, frozen=True, kw_only=True):
    """The search for the capacity of a mode for a seed; `rate_per_s` is what it found."""

    mode: str
    seed: int
    outcome: Outcome
    rate_per_s: float
    sentence: str
    n_untrusted: int
    runs: list[TriedRate]


class ModeCapacitiesFile(ModesHead, frozen=True, kw_only=True):
    """The content of the modes.json of `slobench modes --capacity`."""

    attainment: float
    requests: int | None
    was_interrupted: bool
    n_searches: int
    n_runs: int
    capacity: ModeCapacities
    searches: list[SeedSearch]

    @property
    def progress(self) -> str:
        return f"{self.n_done} of {self.n_searches} searches are finished"

    @property
    def without_valid_run(self) -> list[str]:
        """The modes of which every run is invalid."""
        valid = {found.mode for found in self.searches if found.n_untrusted < len(found.runs)}
        return [mode for mode in dict.fromkeys(s.mode for s in self.searches) if mode not in valid]
