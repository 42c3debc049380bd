"""The result of a search for settings, as it is stored."""

from __future__ import annotations

from loadgen.manifest.json_section import JsonSection
from loadgen.measure.statistics.intervals import EstimateSection

SCHEMA = 1


class TriedSetting(JsonSection, frozen=True, kw_only=True):
    """A candidate over its seeds. `difference`: the goodput of the choice minus that of this
    candidate, over the seeds that both have (None for the choice). Goodput per second; latencies in
    seconds, None where requests failed."""

    label: str
    mode: str
    parameters: dict[str, str]
    goodput: EstimateSection
    attainment: EstimateSection
    ttft_p99: EstimateSection
    tpot_p99: EstimateSection
    difference: EstimateSection | None


class TuneRound(JsonSection, frozen=True, kw_only=True):
    """A round of the search: `labels` were measured with `n_seeds` seeds, the best first."""

    n_seeds: int
    labels: list[str]


class TuneFile(JsonSection, frozen=True, kw_only=True):
    """The content of tune.json.

    `searched` are all candidates in simulations: those of the last round first, each round by
    goodput. `confirmed` are the finalists and the first mode as it is, on seeds that the search did
    not use, on `target`; `choice` is the first of them. The search took `n_runs` of the
    `n_exhaustive` runs of all candidates with all seeds.
    """

    schema: int = SCHEMA
    slobench: str
    command: list[str]
    scenario: str
    scenario_text: str
    slo: list[str]
    target: str
    settings: dict[str, str]
    knobs: dict[str, list[str]]
    seeds: list[int]
    confirmed_seeds: list[int]
    confidence: float
    n_runs: int
    n_exhaustive: int
    rounds: list[TuneRound]
    searched: list[TriedSetting]
    confirmed: list[TriedSetting]
    baseline: str
    choice: str

    @property
    def chosen(self) -> TriedSetting:
        return self.confirmed[0]
