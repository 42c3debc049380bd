"""The capacity of each batching mode, and how many times the best mode serves of the others.

Every seed draws the same traffic for all modes. For each mode and seed the highest rate that meets
the SLO is searched, with windows of equally many requests; the ratios are computed seed by seed.
The runs are cells of a comparison of modes, so an interrupted search resumes from their files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from loadgen.studies.capacity.next_probe import Question
from loadgen.studies.modes.mode_runs import ModeRun, finished, load, store
from loadgen.studies.modes.result import (
    ModeCapacitiesFile,
    ModeCell,
    SeedSearch,
    TriedRate,
)
from loadgen.studies.modes.run import ModesSpec, check_modes, head_of, n_workers_of, run_of
from loadgen.studies.modes.seed_capacity import (
    FIRST_STEP,
    NEXT_STEP,
    REQUESTS,
    WARM_SHARE,
    SeedCapacity,
    Tried,
    capacity_of,
    compare_capacities,
    next_level,
)
from loadgen.studies.modes.spec import Mode, seeds_from
from loadgen.studies.study import Place, Study
from loadgen.workload.scaling import scaled, with_window
from loadgen.workload.scenario import Scenario

MODE_CAPACITIES = Study("modes", "comparison of modes", ModeCapacitiesFile)
_DIGITS = 6  # of a rate, so that the files of a resumed search are found again


@dataclass(frozen=True)
class ComparedCapacities:
    """The result, and whether Ctrl-C ended the comparison."""

    result: ModeCapacitiesFile
    was_interrupted: bool


@dataclass
class _SeedSearch:
    """The search for a mode and seed: the rates tried so far, and the first of them."""

    mode: Mode
    seed: int
    start: float
    step: float
    tried: list[Tried] = field(default_factory=list)
    n_untrusted: int = 0


def compare_capacity(
    spec: ModesSpec, question: Question, directory: Path, console: Console
) -> ComparedCapacities:
    """Searches the capacity of every mode for every seed and compares the modes. `question` holds
    the target and the first rate; its other settings are not used.

    The first seed of a mode starts at the scenario's rate, the others at the first seed's capacity.
    Ctrl-C keeps the finished runs and compares the finished searches. Raises UsageError before the
    first run.
    """
    check_modes(spec)
    work = _Work(spec, question, directory / "cells", console)
    was_interrupted = False
    try:
        work.run()
    except KeyboardInterrupt:
        was_interrupted = True
    result = _result(spec, question, work, was_interrupted)
    return ComparedCapacities(result, was_interrupted)


class _Work:
    """All searches, each with at most a run in progress."""

    def __init__(
        self, spec: ModesSpec, question: Question, cells_dir: Path, console: Console
    ) -> None:
        self._spec, self._question = spec, question
        self._cells_dir, self._console = cells_dir, console
        self._seeds = seeds_from(spec.scenario, spec.n_seeds)
        self._todo: deque[ModeRun] = deque()
        self._running: dict[str, _SeedSearch] = {}  # by the name of the run
        self.ended: list[tuple[_SeedSearch, SeedCapacity]] = []
        self.n_searches = len(spec.modes) * spec.n_seeds

    @property
    def n_ended(self) -> int:
        return len(self.ended)

    def run(self) -> None:
        for mode in self._spec.modes:
            self._go_on(_SeedSearch(mode, self._seeds[0], self._question.start, FIRST_STEP))
        n_workers = n_workers_of(self._spec, self.n_searches)
        for task, cell in finished(self._todo, n_workers, self._console):
            store(self._cells_dir, task, cell)
            search = self._running.pop(task.name)
            if self._spec.target != "sim":
                self._print(f"{_title(search)} at {task.rate_per_s:.4g}/s: {_share(cell)}")
            self._note(search, cell)
            self._go_on(search)

    def _go_on(self, search: _SeedSearch) -> None:
        """Plans the next run of a search that is not stored yet, or ends the search."""
        target = self._question.target
        while (level := next_level(search.tried, target, search.start, search.step)) is not None:
            task = self._task(search, float(f"{level:.{_DIGITS}g}"))
            cell = load(self._cells_dir, task)
            if cell is None:
                self._running[task.name] = search
                self._todo.append(task)
                return
            self._note(search, cell)
        self._end(search)

    def _note(self, search: _SeedSearch, cell: ModeCell) -> None:
        search.n_untrusted += not cell.is_trusted
        share = cell.attainment.value or 0.0
        is_whole = cell.ended != "stopped"  # by stop_when: overloaded
        n_met = round(share * cell.n_due) if is_whole else 0
        assert cell.rate_per_s is not None, f"{cell.mode}: a search without a rate"
        search.tried.append(Tried(cell.rate_per_s, cell.n_due, n_met))

    def _end(self, search: _SeedSearch) -> None:
        found = capacity_of(search.tried, self._question.target)
        self.ended.append((search, found))
        self._print(
            f"[{self.n_ended}/{self.n_searches}] {_title(search)}: {outcome_text(found)} "
            f"({len(search.tried)} runs)"
        )
        if search.seed != self._seeds[0]:
            return
        if found.outcome != "found":
            self.n_searches -= len(self._seeds) - 1  # other seeds would not differ
            return
        for seed in self._seeds[1:]:
            self._go_on(_SeedSearch(search.mode, seed, found.value, NEXT_STEP))

    def _task(self, search: _SeedSearch, level: float) -> ModeRun:
        spec = self._spec
        scenario = at_rate(spec.scenario, self._question, level, search.seed)
        return run_of(spec, scenario.resolved(), search.mode, level)

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)


def at_rate(scenario: Scenario, question: Question, level: float, seed: int) -> Scenario:
    """The traffic of a seed at a rate, in a window of equally many requests at every rate. A rate
    that varies by design keeps its own window."""
    at_level = scaled(scenario, level, "rate")
    if question.is_fixed:
        return at_level.with_values(at_level.resolved() | {"seed": seed})
    n = n_requests(scenario)
    return with_window(at_level, WARM_SHARE * n / level, n / level, seed)


def n_requests(scenario: Scenario) -> int:
    """The requests of a window: the scenario's `phases.requests`, else 4 000."""
    return scenario.phases.requests or REQUESTS


def outcome_text(found: SeedCapacity) -> str:
    """The capacity for a seed in words."""
    return {
        "found": f"capacity {found.value:.4g} req/s",
        "misses": f"below {found.value:.4g} req/s: the SLO is missed even there",
        "at_least": f"at least {found.value:.4g} req/s: the SLO is met even there",
        "open": f"about {found.value:.4g} req/s, not settled",
    }[found.outcome]


def _title(search: _SeedSearch) -> str:
    return f"{search.mode.label}, seed {search.seed}"


def _share(cell: ModeCell) -> str:
    share = cell.attainment.value
    return "no request was due" if share is None else f"{100 * share:.1f} % met the SLO"


def _result(
    spec: ModesSpec, question: Question, work: _Work, was_interrupted: bool
) -> ModeCapacitiesFile:
    labels = [mode.label for mode in spec.modes]
    ended = sorted(work.ended, key=lambda pair: (labels.index(pair[0].mode.label), pair[0].seed))
    known: dict[str, dict[int, float]] = {}
    for search, found in ended:
        if found.outcome == "found":
            known.setdefault(search.mode.label, {})[search.seed] = found.value
    return ModeCapacitiesFile(
        **head_of(spec),
        attainment=question.target,
        requests=None if question.is_fixed else n_requests(spec.scenario),
        was_interrupted=was_interrupted,
        n_searches=work.n_searches,
        n_done=work.n_ended,
        n_runs=sum(len(search.tried) for search, _ in ended),
        n_untrusted=sum(search.n_untrusted for search, _ in ended),
        capacity=compare_capacities(known, spec.confidence),
        searches=list(_searches(ended)),
    )


def _searches(ended: Sequence[tuple[_SeedSearch, SeedCapacity]]) -> Iterator[SeedSearch]:
    for search, found in ended:
        yield SeedSearch(
            mode=search.mode.label,
            seed=search.seed,
            outcome=found.outcome,
            rate_per_s=found.value,
            sentence=outcome_text(found),
            n_untrusted=search.n_untrusted,
            runs=[
                TriedRate(rate_per_s=one.level, n_due=one.n_due, n_met=one.n_met)
                for one in search.tried
            ],
        )


def write_capacity(
    place: Place[ModeCapacitiesFile], result: ModeCapacitiesFile, cache_dir: Path | None
) -> None:
    """Writes `modes.json`, `modes.csv` (a line per run of every search) and `modes.html`."""
    from loadgen.studies.modes.capacity_page import render
    from loadgen.studies.modes.capacity_view import to_csv

    place.write(result)
    place.write_text("modes.csv", to_csv(result))
    place.write_text("modes.html", render(result, cache_dir))
