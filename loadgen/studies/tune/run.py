"""A search for the mode and knobs with the most goodput under an SLO.

tune.json    the result
cells/       a JSON file per run; an interrupted search resumes from them
runs/        with `--target reference`: the run directories of the confirmation
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadgen.errors import UsageError
from loadgen.measure.statistics.intervals import EstimateSection, mean_over, over_runs
from loadgen.run.manifest import version
from loadgen.studies.modes.mode_runs import ModeRun, finished, load, store
from loadgen.studies.modes.result import ModeCell
from loadgen.studies.modes.spec import Mode, seeds_from, variant
from loadgen.studies.study import Study
from loadgen.studies.tune.halving import FINALISTS, n_runs, paired, rounds, survivors
from loadgen.studies.tune.result import TriedSetting, TuneFile, TuneRound
from loadgen.studies.tune.spec import TuneSpec, candidates

TUNE = Study("tune", "search for settings", TuneFile)
Cells = Mapping[str, Sequence[ModeCell]]
"""Label of a candidate → its cells, by seed in order."""


def tune(spec: TuneSpec, directory: Path, console: Console) -> TuneFile:
    """Searches in simulations, then confirms the finalists and the first mode as it is on further
    seeds. Ctrl-C leaves the cells of the finished runs. Raises UsageError before the first run."""
    if not spec.scenario.has_per_request_limit:
        raise UsageError("tune needs an SLO of each request, e.g. --slo 'ttft<=500ms'")
    modes = {mode.label: mode for mode in candidates(spec)}
    search = rounds(len(modes), spec.n_seeds)
    both = seeds_from(spec.scenario, 2 * spec.n_seeds)
    seeds, held_out = both[: spec.n_seeds], both[spec.n_seeds :]
    console.print(
        f"{len(modes)} candidates: {n_runs(search)} of {len(modes) * spec.n_seeds} simulations",
        markup=False,
    )
    work = _Work(spec, directory, console)
    found: dict[str, list[ModeCell]] = {}
    kept, passed = list(modes), list[TuneRound]()
    for each in search:
        kept = kept[: each.n_candidates]
        cells = work.cells("sim", [modes[label] for label in kept], seeds[: each.n_seeds])
        found |= cells
        kept = survivors({label: _goodput(cells[label]) for label in kept}, len(kept))
        passed.append(TuneRound(n_seeds=each.n_seeds, labels=kept))
        console.print(f"{each.n_seeds} seeds: {kept[0]} of {len(kept)}", markup=False)
    baseline = spec.modes[0]
    finalists = [modes[label] for label in kept[:FINALISTS]]
    others = [] if baseline.label in kept[:FINALISTS] else [baseline]
    confirmed = work.cells(spec.target, [*finalists, *others], held_out)
    ranked = survivors(
        {label: _goodput(cells) for label, cells in confirmed.items()}, len(confirmed)
    )
    known = modes | {baseline.label: baseline}
    order = sorted(found, key=lambda label: (-len(found[label]), -sum(_goodput(found[label]))))
    return TuneFile(
        slobench=version(),
        command=list(spec.command),
        scenario=spec.scenario.name,
        scenario_text=spec.scenario.to_yaml(),
        slo=list(spec.scenario.slo_texts()),
        target=spec.target,
        settings=dict(spec.settings),
        knobs={key: list(values) for key, values in spec.knobs.items()},
        seeds=list(seeds),
        confirmed_seeds=list(held_out),
        confidence=spec.confidence,
        n_runs=n_runs(search),
        n_exhaustive=len(modes) * spec.n_seeds,
        rounds=passed,
        searched=_rows(order, found, known, ranked[0], spec.confidence),
        confirmed=_rows(ranked, confirmed, known, ranked[0], spec.confidence),
        baseline=baseline.label,
        choice=ranked[0],
    )


class _Work:
    """Runs of candidates, stored as cells."""

    def __init__(self, spec: TuneSpec, directory: Path, console: Console) -> None:
        self._spec, self._directory, self._console = spec, directory, console

    def cells(
        self, target: str, modes: Sequence[Mode], seeds: Iterable[int]
    ) -> dict[str, list[ModeCell]]:
        """The cells of each mode for each seed; runs those that are not stored."""
        cells_dir = self._directory / "cells"
        tasks = [self._task(target, mode, seed) for seed in seeds for mode in modes]
        done = {task.name: cell for task in tasks if (cell := load(cells_dir, task)) is not None}
        todo = deque(task for task in tasks if task.name not in done)
        n_workers = min(self._spec.n_workers, len(todo)) if target == "sim" else 1
        for task, cell in finished(todo, n_workers, self._console):
            store(cells_dir, task, cell)
            done[task.name] = cell
        cells: dict[str, list[ModeCell]] = {mode.label: [] for mode in modes}
        for task in tasks:
            cells[task.mode.label].append(done[task.name])
        return cells

    def _task(self, target: str, mode: Mode, seed: int) -> ModeRun:
        spec = self._spec
        task = ModeRun(
            variant(spec.scenario, None, seed).resolved(),
            spec.scenario.source,
            mode,
            None,
            target,
            spec.simulated_settings if target == "sim" else spec.settings,
            None,
            tuple(spec.plugins),
            tuple(spec.command),
            spec.cache_dir,
        )
        if target == "sim":
            return task
        return replace(task, run_dir=self._directory / "runs" / task.name)


def _goodput(cells: Sequence[ModeCell]) -> list[float]:
    return [cell.goodput.value or 0.0 for cell in cells]


def _rows(
    labels: Sequence[str],
    cells: Cells,
    modes: Mapping[str, Mode],
    choice: str,
    confidence: float,
) -> list[TriedSetting]:
    return [
        TriedSetting(
            label=label,
            mode=modes[label].kind,
            parameters=dict(modes[label].parameters),
            **{
                name: over_runs([getattr(cell, name) for cell in cells[label]], confidence)
                for name in ("goodput", "attainment", "ttft_p99", "tpot_p99")
            },
            difference=_difference(cells[choice], cells[label], confidence)
            if label != choice and choice in cells
            else None,
        )
        for label in labels
    ]


def _difference(
    ours: Sequence[ModeCell], other: Sequence[ModeCell], confidence: float
) -> EstimateSection:
    return mean_over(list(paired(_goodput(ours), _goodput(other))), confidence)
