"""A comparison of batching modes on the same requests: runs cells, stores them as files, compares
them.

modes.json  modes.csv  modes.html  goodput.svg  goodput.pdf     the results
cells/      a JSON file per cell; an interrupted comparison resumes from them
runs/       run directories of cells: of simulations with a single seed, and of all real runs
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.errors import UsageError
from loadgen.lab.sim_options import sim_options
from loadgen.run.cores import affine_cores
from loadgen.run.manifest import version
from loadgen.studies.modes.mode_runs import ModeRun, finished, load, store
from loadgen.studies.modes.result import ModeCell, ModesFile
from loadgen.studies.modes.spec import Mode, seeds_from, variant
from loadgen.studies.modes.table import leaders, rows
from loadgen.studies.study import Study
from loadgen.workload.scenario import Scenario

MODES = Study("modes", "comparison of modes", ModesFile)
TARGETS = ("sim", "reference")


@dataclass(frozen=True)
class ModesSpec:
    """The settings of a comparison. `settings` apply to every mode; `rates` None keeps the
    scenario's own. `n_workers` 0 means a process per core; real engines run in turn."""

    scenario: Scenario
    modes: Sequence[Mode]
    target: str = "sim"
    settings: dict[str, str] = field(default_factory=dict)
    rates: Sequence[float] | None = None
    n_seeds: int = 1
    confidence: float = 0.95
    n_workers: int = 0
    plugins: Sequence[Path] = ()
    command: Sequence[str] = ()
    cache_dir: Path | None = None


@dataclass(frozen=True)
class ComparedModes:
    """The result, and whether Ctrl-C ended the comparison."""

    result: ModesFile
    was_interrupted: bool


def compare(spec: ModesSpec, directory: Path, console: Console) -> ComparedModes:
    """Runs every cell that `directory` lacks and compares all cells.

    Ctrl-C keeps the finished cells and compares them. Raises UsageError before the first run.
    """
    tasks = list(_tasks(spec, directory))
    check_modes(spec)
    cells_dir = directory / "cells"
    done = {task.name: cell for task in tasks if (cell := load(cells_dir, task)) is not None}
    todo = deque(task for task in tasks if task.name not in done)
    if done:
        console.print(f"{len(done)} of {len(tasks)} cells exist already", markup=False)
    was_interrupted = False
    try:
        for task, cell in finished(todo, n_workers_of(spec, len(todo)), console):
            store(cells_dir, task, cell)
            done[task.name] = cell
            console.print(_line(len(done), len(tasks), task, cell), soft_wrap=True, markup=False)
    except KeyboardInterrupt:
        was_interrupted = True
    cells = [done[task.name] for task in tasks if task.name in done]
    return ComparedModes(_result(spec, cells, len(tasks)), was_interrupted)


def check_modes(spec: ModesSpec) -> None:
    """Raises UsageError for a wrong parameter of a simulated mode now, not after an hour."""
    if spec.target == "sim":
        for mode in spec.modes:
            sim_options({**spec.settings, **mode.parameters, "mode": mode.kind})


def _tasks(spec: ModesSpec, directory: Path) -> Iterator[ModeRun]:
    """All modes for each seed and rate in turn, so that finished cells can always be compared."""
    keeps_runs = spec.target != "sim" or (spec.rates is None and spec.n_seeds == 1)
    rates: Sequence[float | None] = spec.rates or (None,)
    for seed in seeds_from(spec.scenario, spec.n_seeds):
        for rate in rates:
            scenario = variant(spec.scenario, rate, seed).resolved()
            for mode in spec.modes:
                task = run_of(spec, scenario, mode, rate)
                run_dir = directory / "runs" / task.name if keeps_runs else None
                yield replace(task, run_dir=run_dir)


def run_of(
    spec: ModesSpec, scenario: dict[str, Any], mode: Mode, rate_per_s: float | None
) -> ModeRun:
    """A run of a resolved scenario with a mode, without a run directory."""
    return ModeRun(
        scenario,
        spec.scenario.source,
        mode,
        rate_per_s,
        spec.target,
        spec.settings,
        None,
        tuple(spec.plugins),
        tuple(spec.command),
        spec.cache_dir,
    )


def n_workers_of(spec: ModesSpec, n_runs: int) -> int:
    """Simulations run side by side; real engines run in turn."""
    n_workers = spec.n_workers or affine_cores()
    return min(n_workers, n_runs) if spec.target == "sim" else 1


def _line(n_done: int, n_cells: int, task: ModeRun, cell: ModeCell) -> str:
    rate = "" if task.rate_per_s is None else f" at {task.rate_per_s:g}/s"
    share = cell.attainment.value
    attainment = "" if share is None else f", {100 * share:.1f} % met the SLO"
    warning = "" if cell.is_trusted else " (not trusted: " + "; ".join(cell.reasons) + ")"
    return (
        f"[{n_done}/{n_cells}] {task.mode.label}{rate}, seed {cell.seed}: "
        f"goodput {cell.goodput.value:.3g}/s{attainment}{warning}"
    )


def head_of(spec: ModesSpec) -> dict[str, Any]:
    """The fields of ModesHead that state the comparison."""
    return {
        "slobench": version(),
        "command": list(spec.command),
        "scenario": spec.scenario.name,
        "scenario_text": spec.scenario.to_yaml(),
        "slo": list(spec.scenario.slo_texts()),
        "target": spec.target,
        "settings": dict(spec.settings),
        "modes": [mode.label for mode in spec.modes],
        "seeds": list(seeds_from(spec.scenario, spec.n_seeds)),
        "confidence": spec.confidence,
    }


def _result(spec: ModesSpec, cells: Sequence[ModeCell], n_cells: int) -> ModesFile:
    return ModesFile(
        **head_of(spec),
        baseline=spec.modes[0].label,
        rates_per_s=None if spec.rates is None else list(spec.rates),
        n_cells=n_cells,
        n_done=len(cells),
        n_untrusted=sum(not cell.is_trusted for cell in cells),
        rows=rows(cells, spec.confidence),
        leaders=leaders(cells, spec.confidence),
        cells=list(cells),
    )


def check_target(target: str) -> None:
    """Raises UsageError for a target without modes."""
    if target not in TARGETS:
        raise UsageError(
            f"--target {target}: modes run on {' or '.join(TARGETS)} only; to compare other "
            "servers, run each of them and compare the runs"
        )
