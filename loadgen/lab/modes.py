"""A comparison of batching modes on the same requests: runs cells, stores them as files, compares
them.

modes.json  modes.csv  modes.html  goodput.svg  goodput.pdf     the results
cells/      a JSON file per cell; an interrupted comparison resumes from them
runs/       run directories of cells: of simulations with a single seed, and of all real runs
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.drive import checksums
from loadgen.endings import ending_signals
from loadgen.errors import UsageError
from loadgen.lab.mode_cell import Cell, cell_of, read_waits
from loadgen.lab.mode_spec import Mode, seeds_from, variant
from loadgen.lab.mode_table import leaders, rows
from loadgen.lab.simulate import record
from loadgen.lab.simulated_engine import sim_options
from loadgen.measure.aggregate import summarize
from loadgen.plugins import load_plugin
from loadgen.run.directory import make_directory
from loadgen.run.directory_lock import held, is_empty
from loadgen.run.manifest import version
from loadgen.run.run_options import RunOptions
from loadgen.whole_file import read_result, replacing
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan

SCHEMA = 1
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
class ModesResult:
    """The result; `facts` is the content of modes.json."""

    facts: dict[str, Any]
    was_interrupted: bool


@dataclass(frozen=True)
class _Task:
    """A cell to run, ready to be sent to another process."""

    scenario: dict[str, Any]  # resolved; a Scenario may hold classes of plugins not loaded there
    source: str
    mode: Mode
    rate_per_s: float | None
    target: str
    settings: dict[str, str]
    run_dir: Path | None
    plugins: tuple[Path, ...]
    command: tuple[str, ...]
    cache_dir: Path | None

    @property
    def name(self) -> str:
        """The name of the cell's files; cells that differ in any setting have different names."""
        rate = "" if self.rate_per_s is None else f"-{self.rate_per_s:g}"
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.mode.label)
        content = [self.scenario, self.mode.label, self.target, self.settings, version()]
        content += [path.read_text() for path in self.plugins]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"{slug}{rate}-seed{self.scenario['seed']}-{digest[:10]}"


def compare(spec: ModesSpec, directory: Path, console: Console) -> ModesResult:
    """Runs every cell that `directory` lacks and compares all cells.

    Ctrl-C keeps the finished cells and compares them. Raises UsageError before the first run.
    """
    tasks = list(_tasks(spec, directory))
    if spec.target == "sim":
        for mode in spec.modes:  # reports a wrong parameter now, not after an hour
            sim_options({**spec.settings, **mode.parameters, "mode": mode.kind})
    cells_dir = directory / "cells"
    cells_dir.mkdir(parents=True, exist_ok=True)
    done = {task.name: cell for task in tasks if (cell := _load(cells_dir, task)) is not None}
    todo = [task for task in tasks if task.name not in done]
    if done:
        console.print(f"{len(done)} of {len(tasks)} cells exist already", markup=False)
    was_interrupted = False
    try:
        for task, cell in _finished(spec, todo, console):
            _store(cells_dir, task, cell)
            done[task.name] = cell
            console.print(_line(len(done), len(tasks), task, cell), soft_wrap=True, markup=False)
    except KeyboardInterrupt:
        was_interrupted = True
        console.print(
            f"interrupted: comparing the {len(done)} of {len(tasks)} finished cells; "
            "the same command resumes here",
            soft_wrap=True,
        )
    cells = [done[task.name] for task in tasks if task.name in done]
    return ModesResult(_facts(spec, cells, len(tasks)), was_interrupted)


def _tasks(spec: ModesSpec, directory: Path) -> Iterator[_Task]:
    """All modes for each seed and rate in turn, so that finished cells can always be compared."""
    keeps_runs = spec.target != "sim" or (spec.rates is None and spec.n_seeds == 1)
    rates: Sequence[float | None] = spec.rates or (None,)
    for seed in seeds_from(spec.scenario, spec.n_seeds):
        for rate in rates:
            scenario = variant(spec.scenario, rate, seed).resolved()
            for mode in spec.modes:
                task = _Task(
                    scenario, spec.scenario.source, mode, rate, spec.target, spec.settings, None,
                    tuple(spec.plugins), tuple(spec.command), spec.cache_dir,
                )  # fmt: skip
                run_dir = directory / "runs" / task.name if keeps_runs else None
                yield replace(task, run_dir=run_dir)


def _finished(
    spec: ModesSpec, tasks: Sequence[_Task], console: Console
) -> Iterator[tuple[_Task, Cell]]:
    n_workers = spec.n_workers or len(os.sched_getaffinity(0))
    n_workers = min(n_workers, len(tasks)) if spec.target == "sim" else 1
    if n_workers <= 1:
        for task in tasks:
            yield task, _run(task, console)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(n_workers, spawn, initializer=_ignore_interrupts)
    try:
        futures: dict[Future[Cell], _Task] = {pool.submit(_run_quietly, t): t for t in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    pool.shutdown()


def _ignore_interrupts() -> None:
    """Leaves Ctrl-C and SIGHUP to the parent process, which ends this process by SIGTERM."""
    for number in set(ending_signals()) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)


def _run_quietly(task: _Task) -> Cell:
    for plugin in task.plugins:
        load_plugin(plugin)
    return _run(task, Console(quiet=True))


def _run(task: _Task, console: Console) -> Cell:
    scenario = Scenario.model_validate(task.scenario).from_source(task.source)
    run = {"sim": _simulated, "reference": _measured}[task.target]
    cell: Cell = run(task, scenario, console)
    return cell


def _simulated(task: _Task, scenario: Scenario, console: Console) -> Cell:
    from loadgen.run.conclude import write_results

    settings = {**task.settings, **task.mode.parameters, "mode": task.mode.kind}
    options, plan, quiet = sim_options(settings), make_plan(scenario), Console(quiet=True)
    if task.run_dir is not None:
        task.run_dir.mkdir(parents=True, exist_ok=True)
    run = record(
        scenario, plan, options, quiet,
        directory=task.run_dir, command=task.command, is_interruptible=False,
    )  # fmt: skip
    summary = summarize(run)
    if task.run_dir is not None:
        write_results(run, summary, task.run_dir, task.cache_dir)
        checksums.cover_rest(task.run_dir)
    assert run.manifest.engine is not None, "a simulated run has a simulated engine"
    waits_s = run.manifest.engine.waits_s
    return cell_of(run, summary, task.mode.label, task.rate_per_s, waits_s)


def _measured(task: _Task, scenario: Scenario, console: Console) -> Cell:
    """Runs a real engine in a process of its own, for this cell alone."""
    from loadgen.run.execute import execute

    settings = {**task.settings, **task.mode.parameters, "mode": task.mode.kind}
    options = RunOptions(
        out_dir=task.run_dir,
        force=True,
        engine=",".join(f"{key}={value}" for key, value in settings.items()),
        command=task.command,
        environ=dict(os.environ),
        cache_dir=task.cache_dir,
        plugins=task.plugins,
    )
    finished = execute(scenario, "reference", options, console)
    if finished.was_interrupted:
        raise KeyboardInterrupt
    waits_s = read_waits(finished.run)
    return cell_of(finished.run, finished.summary, task.mode.label, task.rate_per_s, waits_s)


def _load(cells_dir: Path, task: _Task) -> Cell | None:
    with suppress(OSError, ValueError):
        cell: Cell = json.loads(read_result(cells_dir / f"{task.name}.json"))
        return cell
    return None


def _store(cells_dir: Path, task: _Task, cell: Cell) -> None:
    with replacing(cells_dir / f"{task.name}.json") as partial:
        partial.write_text(json.dumps(cell, indent=1, allow_nan=False) + "\n")


def _line(n_done: int, n_cells: int, task: _Task, cell: Cell) -> str:
    rate = "" if task.rate_per_s is None else f" at {task.rate_per_s:g}/s"
    share = cell["attainment"]["value"]
    attainment = "" if share is None else f", {100 * share:.1f} % met the SLO"
    warning = "" if cell["is_trusted"] else " (not trusted: " + "; ".join(cell["reasons"]) + ")"
    return (
        f"[{n_done}/{n_cells}] {task.mode.label}{rate}, seed {cell['seed']}: "
        f"goodput {cell['goodput']['value']:.3g}/s{attainment}{warning}"
    )


def _facts(spec: ModesSpec, cells: Sequence[Cell], n_cells: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "slobench": version(),
        "command": list(spec.command),
        "scenario": spec.scenario.name,
        "scenario_text": spec.scenario.to_yaml(),
        "slo": list(spec.scenario.slo_texts()),
        "target": spec.target,
        "settings": dict(spec.settings),
        "modes": [mode.label for mode in spec.modes],
        "baseline": spec.modes[0].label,
        "rates_per_s": None if spec.rates is None else list(spec.rates),
        "seeds": list(seeds_from(spec.scenario, spec.n_seeds)),
        "confidence": spec.confidence,
        "n_cells": n_cells,
        "n_done": len(cells),
        "n_untrusted": sum(not cell["is_trusted"] for cell in cells),
        "rows": rows(cells, spec.confidence),
        "leaders": leaders(cells, spec.confidence),
        "cells": list(cells),
    }


@contextmanager
def held_directory(directory: Path, scenario: Scenario) -> Iterator[None]:
    """Makes the directory of a comparison and holds its lock; removes it if nothing was written.
    Raises UsageError for a directory with other content or in use by another process."""
    make_directory(directory)
    try:
        with held(directory, f"--out {directory}", f"the comparison of modes of {scenario.name}"):
            if not is_empty(directory) and not (directory / "cells").is_dir():
                raise UsageError(f"--out {directory}: exists and holds no comparison of modes")
            yield
    finally:
        with suppress(OSError):  # not empty, or gone
            directory.rmdir()


def check_target(target: str) -> None:
    """Raises UsageError for a target without modes."""
    if target not in TARGETS:
        raise UsageError(
            f"--target {target}: modes run on {' or '.join(TARGETS)} only; to compare other "
            "servers, run each of them and compare the runs"
        )
