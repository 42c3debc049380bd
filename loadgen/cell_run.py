"""One run of a cell, made on a server that may have served others before."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from loadgen.cell import Cell, Turn
from loadgen.cell_server import CellServers
from loadgen.drive.engine_logs import ServedRun
from loadgen.records import Run
from loadgen.run import SIMULATED, Finished, execute
from loadgen.run_options import NOBODY
from loadgen.target import Server, finish, tell
from loadgen.workload.scenario import Scenario
from targets.preflight import Check
from targets.settle import settle

if TYPE_CHECKING:
    from loadgen.measure.summary import Summary

Gauge = Callable[[Cell], float | None]
"""How long the machine that a cell's server runs on takes for something fixed, in seconds; None
where nobody can tell. Asked while nothing is sent."""
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


def run_turn(
    turn: Turn, servers: CellServers, console: Console, between: Between, gauge: Gauge
) -> tuple[Finished, tuple[float, ...]]:
    """The run, and what the gauge said before and after it."""
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


def repeated(scenario: Scenario, repeat: int) -> Scenario:
    """A scenario as its `repeat`-th run (from 1) draws it: the first with its own seed, the next
    with the seed after."""
    seed = (scenario.seed + repeat - 1) % _SEEDS
    return Scenario.model_validate(scenario.resolved() | {"seed": seed})


def _settle(server: Server, scenario: Scenario, console: Console, between: Between) -> None:
    checks = finish(
        settle(server.endpoint, drain_s=between.drain_s, resets_cache=between.resets_cache)
    )
    for check in checks:
        tell(check, console)
    is_reset = any(check.check == "cache_reset" and check.ok for check in checks)
    if not is_reset:
        tell(_unprotected(scenario), console)


def kept_paces(directory: Path, console: Console) -> tuple[float, ...]:
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


def _keep_paces(directory: Path, paces: tuple[float, ...]) -> None:
    partial = directory / f"{_PACE}.partial"
    partial.write_text(json.dumps(paces) + "\n", encoding="utf-8")
    partial.rename(directory / _PACE)


def _unprotected(scenario: Scenario) -> Check:
    """What a cache that was not emptied means for this scenario."""
    if scenario.prompts.salt == "run":
        return Check("cache_reset", None, "prompts differ between runs, so none is found in it")
    detail = "prompts are the same in every run (salt: none): the cache may answer for the server"
    return Check("cache_reset", False, detail)
