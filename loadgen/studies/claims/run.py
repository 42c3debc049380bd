"""Measurement of the claims: simulations as cells in files, so that an interrupted study resumes.

claims.json  claims.md  claims.html    the results
cells/       a JSON file per simulation
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from loadgen.run.manifest import version
from loadgen.studies.claims.catalog import CLAIMS
from loadgen.studies.claims.claim import (
    SEED,
    SEEDS,
    CapacityQuotient,
    Claim,
    Drawn,
    Exact,
    Quotient,
    Recorded,
    Side,
    Untested,
)
from loadgen.studies.claims.numbers import judged
from loadgen.studies.claims.result import ClaimsFile
from loadgen.studies.claims.workloads import scenario_of
from loadgen.studies.modes.mode_runs import ModeRun, finished, load, store
from loadgen.studies.modes.result import ModeCell
from loadgen.studies.modes.seed_capacity import FIRST_STEP, Tried, capacity_of, next_level
from loadgen.studies.modes.spec import read_modes
from loadgen.studies.study import Study
from loadgen.workload.scaling import scaled, with_window

CLAIMS_STUDY = Study("claims", "table of claims", ClaimsFile)
ENGINE = {"shape": "8b", "hardware": "h200"}
_CAPACITY_REQUESTS, _CAPACITY_WARMUP = 600, 100
_DIGITS = 6  # of a rate, so that the files of a resumed search are found again
_SHOWN_EVERY = 50  # simulations
Job: TypeAlias = Generator[ModeRun, ModeCell, float | None]
"""Yields the next simulation, is sent its cell, returns the value of a seed (None: none)."""
Key: TypeAlias = tuple[str, int, int]  # claim, set of seeds, seed


@dataclass(frozen=True)
class ClaimsSpec:
    """The settings of a study: `n_sets` disjoint sets of `n_seeds` seeds from `seed` on."""

    claims: Sequence[Claim] = CLAIMS
    seed: int = SEED
    n_seeds: int = SEEDS
    n_sets: int = 1
    confidence: float = 0.95
    n_workers: int = 1
    command: Sequence[str] = ()

    def seeds(self, of_set: int) -> range:
        first = self.seed + of_set * self.n_seeds
        return range(first, first + self.n_seeds)


def measure(spec: ClaimsSpec, directory: Path, console: Console) -> tuple[ClaimsFile, bool]:
    """Measures every claim; the result, and whether Ctrl-C ended the study. Claims without all
    their values are then left without a number."""
    values: dict[Key, float | None] = {}
    was_interrupted = False
    try:
        _simulate(dict(_jobs(spec)), directory / "cells", spec.n_workers, console, values)
    except KeyboardInterrupt:
        was_interrupted = True
    rows = [judged(claim, _sets_of(claim, spec, values), spec.confidence) for claim in spec.claims]
    repeated = [row for row in rows if row.value.low is not None and row.repeats]
    result = ClaimsFile(
        slobench=version(),
        command=list(spec.command),
        seeds=[list(spec.seeds(k)) for k in range(spec.n_sets)],
        confidence=spec.confidence,
        n_repeated=sum(len(row.repeats) for row in repeated),
        n_inside=sum(row.n_inside for row in repeated),
        rows=rows,
    )
    return result, was_interrupted


def _sets_of(
    claim: Claim, spec: ClaimsSpec, values: dict[Key, float | None]
) -> list[list[float | None]]:
    """The values by set of seeds."""
    kind = claim.measurement
    if isinstance(kind, Recorded):
        return [list(kind.values)]
    if isinstance(kind, Exact):
        return [[kind.compute()]]
    if isinstance(kind, Untested):
        return []
    if isinstance(kind, Drawn):
        return [[kind.compute(seed) for seed in spec.seeds(k)] for k in range(spec.n_sets)]
    return [
        [values.get((claim.key, k, seed)) for seed in spec.seeds(k)] for k in range(spec.n_sets)
    ]


def _jobs(spec: ClaimsSpec) -> Iterator[tuple[Key, Job]]:
    for k in range(spec.n_sets):
        for claim in spec.claims:
            kind = claim.measurement
            make: Callable[[int], Job]
            if isinstance(kind, Quotient):
                make = partial(_quotient, kind)
            elif isinstance(kind, CapacityQuotient):
                make = partial(_capacity_quotient, kind)
            else:
                continue
            for seed in spec.seeds(k):
                yield (claim.key, k, seed), make(seed)


def _simulate(
    jobs: dict[Key, Job],
    cells_dir: Path,
    n_workers: int,
    console: Console,
    values: dict[Key, float | None],
) -> None:
    """Runs the jobs; a simulation that several need runs once."""
    todo: deque[ModeRun] = deque()
    waiting: dict[str, list[Key]] = {}

    def advance(key: Key, cell: ModeCell | None) -> None:
        """Goes on until a simulation is needed that is not stored."""
        is_first = cell is None
        try:
            task = next(jobs[key]) if cell is None else jobs[key].send(cell)
            while (cell := load(cells_dir, task)) is not None:
                task = jobs[key].send(cell)
        except StopIteration as end:
            values[key] = end.value
            n_left = sum(1 for other in jobs if other[:2] == key[:2] and other not in values)
            if not n_left:
                console.print(f"[{len(values)}/{len(jobs)}] {key[0]}", markup=False)
            return
        if task.name not in waiting:
            (todo.append if is_first else todo.appendleft)(task)
        waiting.setdefault(task.name, []).append(key)

    for key in jobs:
        advance(key, None)
    for n_done, (task, cell) in enumerate(finished(todo, n_workers, console), 1):
        store(cells_dir, task, cell)
        if n_done % _SHOWN_EVERY == 0:
            console.print(f"{n_done} simulations", markup=False)
        for key in waiting.pop(task.name):
            advance(key, cell)


def _quotient(kind: Quotient, seed: int) -> Job:
    values = []
    for side in (kind.ours, kind.other):
        cell = yield _task(side, scenario_of(side.workload, seed).resolved(), None)
        part = cell.classes.get(kind.part, cell)  # traffic of a single class has no parts
        values.append(getattr(part, kind.quantity).value)
    ours, other = values
    return None if ours is None or not other else kind.factor * ours / other


def _capacity_quotient(kind: CapacityQuotient, seed: int) -> Job:
    ours = yield from _capacity(kind.ours, kind, seed)
    other = yield from _capacity(kind.other, kind, seed)
    return None if ours is None or other is None else ours / other


def _capacity(side: Side, kind: CapacityQuotient, seed: int) -> Job:
    """The highest rate of a side for a seed; None if the search has no answer."""
    tried: list[Tried] = []
    while (level := next_level(tried, kind.attainment, kind.start_per_s, FIRST_STEP)) is not None:
        level = float(f"{level:.{_DIGITS}g}")
        loaded = scaled(scenario_of(side.workload, seed), level, "rate")
        scenario = with_window(loaded, _CAPACITY_WARMUP / level, _CAPACITY_REQUESTS / level, seed)
        cell = yield _task(side, scenario.resolved(), level)
        n_met = round((cell.attainment.value or 0.0) * cell.n_due)
        tried.append(Tried(level, cell.n_due, n_met))
    found = capacity_of(tried, kind.attainment)
    return found.value if found.outcome == "found" else None


def _task(side: Side, scenario: dict[str, object], rate_per_s: float | None) -> ModeRun:
    (mode,) = read_modes(side.mode)
    settings = {**ENGINE, **side.settings}
    return ModeRun(scenario, "", mode, rate_per_s, "sim", settings, None, (), (), None)
