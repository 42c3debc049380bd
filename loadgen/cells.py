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

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from loadgen.cell import Cell, Turn, check_cells
from loadgen.cell_server import CellServers
from loadgen.drive.engine_logs import ServedRun
from loadgen.errors import SlobenchError
from loadgen.records import Run
from loadgen.run import SIMULATED, Finished, execute
from loadgen.run_options import NOBODY
from loadgen.target import Server, finish, tell
from loadgen.workload.scenario import Scenario
from targets.preflight import Check
from targets.settle import settle

if TYPE_CHECKING:
    from loadgen.measure.summary import Summary

NO_CONTROLS: Mapping[str, Cell] = {}
Gauge = Callable[[Cell], float | None]
"""How long the machine that a cell's server runs on takes for something fixed, in seconds; None
where nobody can tell. Asked while nothing is sent."""
PAIRS_OF_A_SERVER = 2
"""Pairs that two servers up together serve before both are started anew, so that what two starts of
a server differ by is in what two pairs differ by, and not in a night."""
_SEEDS = 2**63
_PACE = "pace.json"


@dataclass(frozen=True)
class Between:
    """What happens before each run of a cell: the server ends what it still computes, which may
    take `drain_s`, and forgets its cached prefixes; then at least `warm_up_s` of the cell's own
    traffic are sent that do not count (more, if its scenario's own warm-up is longer)."""

    drain_s: float = 30.0
    resets_cache: bool = True
    warm_up_s: float = 0.0


BETWEEN = Between()


@dataclass(frozen=True)
class CellRun:
    """The finished `repeat` (from 1) of a cell. `was_reused`: it was there already. `paces` is what
    the gauge said right before and after it, if there is one."""

    cell: Cell
    repeat: int
    directory: Path
    run: Run
    summary: Summary
    was_reused: bool
    paces: tuple[float, ...] = ()


@dataclass(frozen=True)
class CellFailure:
    """A repeat that could not be measured: its server did not start, or is unfit."""

    cell: Cell
    repeat: int
    reason: str


def turns(
    cells: Sequence[Cell],
    directory: Path,
    *,
    repeats: int,
    order_seed: int = 0,
    controls: Mapping[str, Cell] = NO_CONTROLS,
) -> list[Turn]:
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
    groups, ordered = list(by_servers.values()), list[Turn]()
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


def repeated(scenario: Scenario, repeat: int) -> Scenario:
    """A scenario as its `repeat`-th run (from 1) draws it: the first with its own seed, the next
    with the seed after."""
    seed = (scenario.seed + repeat - 1) % _SEEDS
    return Scenario.model_validate(scenario.resolved() | {"seed": seed})


def _side_by_side(row: Sequence[Cell], repeat: int, directory: Path) -> list[Turn]:
    places = [directory / cell.name / f"r{repeat}" for cell in row]
    stay_up = any(cell.stays_up for cell in row)
    return [
        Turn(
            cell,
            repeat,
            places[k],
            beside=tuple(places[:k] + places[k + 1 :]),
            up_beside=row[1 - k] if stay_up else None,
            starts_anew=stay_up and k == 0 and repeat % PAIRS_OF_A_SERVER == 1,
        )
        for k, cell in enumerate(row)
    ]


def _run_cells(
    todo: Sequence[Turn], directory: Path, console: Console, between: Between, gauge: Gauge
) -> Generator[CellRun | CellFailure]:
    done = {turn.directory for turn in todo if turn.is_done}  # asked before any is made anew
    with CellServers(directory / "servers", console) as servers:
        for n, turn in enumerate(todo, start=1):
            where = f"[{n}/{len(todo)}] {turn.cell.name}, repeat {turn.repeat}"
            if turn.directory in done:
                yield _reused(turn, console)
                continue
            console.print(where, style="bold", markup=False, soft_wrap=True)
            try:
                moved = turn.make_room()
                if moved is not None:
                    console.print(f"an unfinished run was moved to {moved}", markup=False)
                finished, paces = _run(turn, servers, console, between, gauge)
            except SlobenchError as error:
                console.print(f"{where} failed: {error}", style="red", markup=False)
                yield CellFailure(turn.cell, turn.repeat, str(error))
                continue
            if finished.was_interrupted:
                raise KeyboardInterrupt
            yield CellRun(
                turn.cell, turn.repeat, turn.directory, finished.run, finished.summary, False, paces
            )


def _run(
    turn: Turn, servers: CellServers, console: Console, between: Between, gauge: Gauge
) -> tuple[Finished, tuple[float, ...]]:
    cell = turn.cell
    scenario = repeated(cell.scenario, turn.repeat)
    options = replace(
        cell.options, out_dir=turn.directory, force=False, name=f"{cell.name}-r{turn.repeat}"
    )
    if cell.target == SIMULATED:  # a new engine every time, in a time that nobody can watch
        options = replace(options, watch=NOBODY)
        return execute(scenario, cell.target, options, console), ()
    begin_s = time.monotonic()
    up = servers.open(cell, turn.up_beside, anew=turn.starts_anew)
    if not up.is_fresh:
        _settle(up.server, scenario, console, between)
    before = gauge(cell)
    finished = execute(scenario, cell.target, options, console, up.server)
    paces = tuple(pace for pace in (before, gauge(cell)) if pace is not None)
    if paces:
        _keep_paces(turn.directory, paces)
    said = finished.run.manifest
    up.served(
        ServedRun(turn.directory, said["run"], said["epoch_monotonic_s"], begin_s, time.monotonic())
    )
    return finished, paces


def _settle(server: Server, scenario: Scenario, console: Console, between: Between) -> None:
    checks = finish(
        settle(server.endpoint, drain_s=between.drain_s, resets_cache=between.resets_cache)
    )
    for check in checks:
        tell(check, console)
    is_reset = any(check.check == "cache_reset" and check.ok for check in checks)
    if not is_reset:
        tell(_unprotected(scenario), console)


def _unprotected(scenario: Scenario) -> Check:
    """What a cache that was not emptied means for this scenario."""
    if scenario.prompts.salt == "run":
        return Check("cache_reset", None, "prompts differ between runs, so none is found in it")
    detail = "prompts are the same in every run (salt: none): the cache may answer for the server"
    return Check("cache_reset", False, detail)


def _reused(turn: Turn, console: Console) -> CellRun:
    from loadgen.drive.store import read_run
    from loadgen.measure.aggregate import summarize

    run = read_run(turn.directory)
    summary = summarize(run, confidence=turn.cell.options.confidence)
    paces = _kept_paces(turn.directory, console)
    return CellRun(turn.cell, turn.repeat, turn.directory, run, summary, True, paces)


def _keep_paces(directory: Path, paces: tuple[float, ...]) -> None:
    partial = directory / f"{_PACE}.partial"
    partial.write_text(json.dumps(paces) + "\n", encoding="utf-8")
    partial.rename(directory / _PACE)


def _kept_paces(directory: Path, console: Console) -> tuple[float, ...]:
    """() where the gauge said nothing, and, with a word about it, where that cannot be read."""
    path = directory / _PACE
    try:
        return tuple(float(pace) for pace in json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        said = f"{path} cannot be read ({error}): the machine's pace in this run counts as unknown"
        console.print(said, style="yellow", markup=False, soft_wrap=True)
        return ()


def _warmed(cell: Cell, between: Between) -> Cell:
    if cell.scenario.phases.warmup >= between.warm_up_s:
        return cell
    values = cell.scenario.resolved()
    values["phases"]["warmup"] = f"{between.warm_up_s:.9g}s"
    return replace(cell, scenario=Scenario.model_validate(values))
