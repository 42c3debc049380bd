"""Order of repeated measurements: cells take turns, several times each, and their runs are stored.

    <cell>/cell.json      the definition of the cell; another definition of its name is rejected
    <cell>/r<k>/          the run directory of its k-th repeat
    <cell>/unfinished/    runs that an interrupt left unfinished
    servers/              logs of servers that served several runs

Every cell is measured once before any is measured twice, and every other round is reversed, so that
drift of the machine or the server (heat, fragmented memory, other users) favours no cell. The k-th
repeat has the same seed in every cell: equal scenarios have equal requests at equal times. The
control of a cell is measured right before or right after each of its runs, in turns.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from loadgen.errors import SlobenchError
from loadgen.run.execute import finished
from loadgen.studies.cells.cell import Cell, PlannedRun, check_cells
from loadgen.studies.cells.runner import (
    BETWEEN,
    Between,
    CellFailure,
    CellRun,
    CellRunner,
    Gauge,
    failure,
    kept_paces,
)
from loadgen.studies.cells.servers import CellServers

NO_CONTROLS: Mapping[str, Cell] = {}
ROUNDS_OF_A_SERVER = 2
"""Rounds after which servers that are up together are restarted: the difference between two starts
of a server then shows between pairs of the same night, not between nights."""


def turns(
    cells: Sequence[Cell],
    directory: Path,
    *,
    repeats: int,
    order_seed: int = 0,
    controls: Mapping[str, Cell] = NO_CONTROLS,
) -> list[PlannedRun]:
    """All runs in the order of measurement: round by round all cells, those that share a server in
    sequence. The order is shuffled for every odd round and reversed for the round after it, so that
    over two rounds a linear drift adds the same to every cell.

    The control of a cell (`controls`, by the cell's name) is measured next to the cell. The first
    of the two alternates from cell to cell and is reversed with the order, so that neighbours can
    share a server.
    """
    rng = np.random.default_rng(order_seed)
    by_servers: dict[tuple[object, ...], list[tuple[Cell, ...]]] = {}
    for cell in cells:
        row = (controls[cell.name], cell) if cell.name in controls else (cell,)
        by_servers.setdefault(tuple(member.server_key for member in row), []).append(row)
    groups, ordered = list(by_servers.values()), list[PlannedRun]()
    order: list[tuple[Cell, ...]] = []
    for repeat in range(1, repeats + 1):
        if repeat % 2:
            shuffled = [groups[k] for k in rng.permutation(len(groups))]
            rows = [group[k] for group in shuffled for k in rng.permutation(len(group))]
            order = [row[::-1] if k % 2 else row for k, row in enumerate(rows)]
        else:
            order = [row[::-1] for row in reversed(order)]
        ordered += [turn for row in order for turn in _side_by_side(row, repeat, directory)]
    return ordered


def run_cells(
    cells: Sequence[Cell],
    directory: Path,
    *,
    repeats: int,
    console: Console,
    between: Between = BETWEEN,
    order_seed: int = 0,
    controls: Mapping[str, Cell] = NO_CONTROLS,
    gauge: Gauge = lambda _: None,
) -> Generator[CellRun | CellFailure]:
    """Measure every run that `directory` does not have yet; yields all runs in order, those of
    `controls` (by the name of their cell) included. The `gauge` is read before and after each run,
    its readings are stored in pace.json.

    A cell that cannot be measured is yielded as a CellFailure, and the others continue. Raises
    UsageError, before the first run, for names that cannot be folders and for a cell with another
    definition in `directory`; KeyboardInterrupt when interrupted: finished runs stay, and the same
    call continues from there.
    """
    warmed = [_warmed(cell, between) for cell in cells]
    beside = {name: _warmed(cell, between) for name, cell in controls.items()}
    check_cells([*warmed, *beside.values()], directory)
    todo = turns(warmed, directory, repeats=repeats, order_seed=order_seed, controls=beside)
    return _run_cells(todo, directory, console, between, gauge)


def _side_by_side(row: Sequence[Cell], repeat: int, directory: Path) -> list[PlannedRun]:
    places = [directory / cell.name / f"r{repeat}" for cell in row]
    stay_up = any(cell.stays_up for cell in row)
    return [
        PlannedRun(
            cell,
            repeat,
            places[k],
            beside=tuple(places[:k] + places[k + 1 :]),
            up_beside=row[1 - k] if stay_up else None,
            starts_anew=stay_up and k == 0 and repeat % ROUNDS_OF_A_SERVER == 1,
        )
        for k, cell in enumerate(row)
    ]


def _rows(todo: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Runs measured in immediate sequence: a single run, or a pair whose servers are both up."""
    rows = list[list[PlannedRun]]()
    for turn in todo:
        if turn.up_beside is not None and rows and rows[-1][-1].directory in turn.beside:
            rows[-1].append(turn)
        else:
            rows.append([turn])
    return rows


def _run_cells(
    todo: Sequence[PlannedRun], directory: Path, console: Console, between: Between, gauge: Gauge
) -> Generator[CellRun | CellFailure]:
    done = {
        turn.directory for turn in todo if turn.is_done
    }  # read before any run is measured again
    titles = {
        turn.directory: f"[{n}/{len(todo)}] {turn.cell.name}, repeat {turn.repeat}"
        for n, turn in enumerate(todo, start=1)
    }
    with CellServers(directory / "servers", console) as servers:
        runner = CellRunner(servers, console, between, gauge)
        for row in _rows(todo):
            if row[0].directory in done:
                yield from (_reused(turn, titles[turn.directory], console) for turn in row)
            else:
                yield from runner.measure([(titles[turn.directory], turn) for turn in row])


def _reused(turn: PlannedRun, title: str, console: Console) -> CellRun | CellFailure:
    """A run measured earlier; its page is written if an interrupt prevented that."""
    from loadgen.archive.store import read_run
    from loadgen.measure.aggregate import summarize

    run, options = read_run(turn.directory), turn.cell.options
    if (turn.directory / "report.html").exists():
        summary = summarize(run, confidence=options.confidence, clear=options.clear)
    else:
        try:
            summary = finished(run, turn.directory, options).summary
        except SlobenchError as error:
            return failure(title, turn, error, console)
    paces = kept_paces(turn.directory, console)
    return CellRun(turn.cell, turn.repeat, turn.directory, run, summary, True, paces)


def _warmed(cell: Cell, between: Between) -> Cell:
    if cell.scenario.phases.warmup >= between.warm_up_s:
        return cell
    values = cell.scenario.resolved()
    values["phases"]["warmup"] = f"{between.warm_up_s:.9g}s"
    return replace(cell, scenario=cell.scenario.with_values(values))
