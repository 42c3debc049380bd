"""One measurement in several circumstances: cells are run in turn, several times each, and kept.

    <cell>/cell.json      what the cell is; another definition under its name is refused
    <cell>/r<k>/          the run directory of its k-th repeat
    <cell>/unfinished/    what an interrupt left, moved aside
    servers/              logs of servers that served several runs

Every cell has its turn before any has its second, and every other round goes backwards, so that a
drift of the machine or the server (heat, fragmented memory, a neighbour) favours no cell. The k-th
repeat has the same seed in every cell: equal scenarios get equal requests at equal instants. A cell
with a control has it measured right beside each of its runs, now before and now after it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from loadgen.cells.cell import Cell, PlannedRun, check_cells
from loadgen.cells.runner import (
    BETWEEN,
    Between,
    CellFailure,
    CellRun,
    CellRunner,
    Gauge,
    failure,
    kept_paces,
)
from loadgen.cells.servers import CellServers
from loadgen.errors import SlobenchError
from loadgen.run.execute import finished

NO_CONTROLS: Mapping[str, Cell] = {}
ROUNDS_OF_A_SERVER = 2
"""Rounds after which servers that are up together are started anew, so that what two starts of a
server differ by is in what two pairs differ by, and not in a night."""


def turns(
    cells: Sequence[Cell],
    directory: Path,
    *,
    repeats: int,
    order_seed: int = 0,
    controls: Mapping[str, Cell] = NO_CONTROLS,
) -> list[PlannedRun]:
    """All runs in the order in which they are made: round by round all cells, those that share a
    server side by side; the order is shuffled for every other round and reversed for the one after
    it. So over two rounds a drift that is linear in time adds the same to every cell.

    A cell's control (by the cell's name) has its turn next to the cell's. Which of the two is first
    changes from cell to cell and is reversed with the order, so that neighbours can share a server.
    """
    rng = np.random.default_rng(order_seed)
    by_servers: dict[tuple[object, ...], list[tuple[Cell, ...]]] = {}
    for cell in cells:
        row = (controls[cell.name], cell) if cell.name in controls else (cell,)
        by_servers.setdefault(tuple(one.server_key for one in row), []).append(row)
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
    """Make every run that `directory` does not have yet, and give all of them, in their order, the
    runs of `controls` (by the name of their cell) among them. The `gauge` is read before and after
    each run, and what it said is kept in pace.json.

    A cell that cannot be measured is given as a CellFailure and the rest go on. Raises UsageError,
    before anything runs, for names that cannot be folders and for a cell that is another one than
    in `directory`; KeyboardInterrupt when interrupted: what is finished stays, and the same call
    goes on from there.
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
    """What is measured in one go: a turn, or the two of a pair whose servers are both up."""
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
    done = {turn.directory for turn in todo if turn.is_done}  # asked before any is made anew
    titles = {
        turn.directory: f"[{n}/{len(todo)}] {turn.cell.name}, repeat {turn.repeat}"
        for n, turn in enumerate(todo, start=1)
    }
    with CellServers(directory / "servers", console) as servers:
        taker = CellRunner(servers, console, between, gauge)
        for row in _rows(todo):
            if row[0].directory in done:
                yield from (_reused(turn, titles[turn.directory], console) for turn in row)
            else:
                yield from taker.take([(titles[turn.directory], turn) for turn in row])


def _reused(turn: PlannedRun, title: str, console: Console) -> CellRun | CellFailure:
    """A run that is there; the page and the summary are made where an interrupt left none."""
    from loadgen.drive.store import read_run
    from loadgen.measure.aggregate import summarize

    run, options = read_run(turn.directory), turn.cell.options
    if (turn.directory / "report.html").exists():
        summary = summarize(run, confidence=options.confidence)
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
