"""The turns of cells, taken: one by itself, or those of a pair one right after the other.

The machine drifts within seconds, so all that can be done before the first request of a pair is
done then (both servers have passed their preflight, both load-generating processes wait), and what
is made of its runs is made when the last answer of the second is in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from loadgen.cells.cell import Cell, PlannedRun
from loadgen.cells.servers import CellServer, CellServers
from loadgen.drive.engine_logs import ServedRun
from loadgen.errors import SlobenchError, TargetError
from loadgen.records import Run
from loadgen.run.execute import SIMULATED, finished, prepared
from loadgen.run.run_options import RunOptions
from loadgen.run.target import Server, finish, print_check
from loadgen.workload.scenario import Scenario
from targets.preflight_result import PreflightCheck
from targets.quiesce import quiesce, unreachable_reason

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


@dataclass(frozen=True)
class _Ready:
    """A turn that lacks nothing but its requests; `up` is its server, None where it is simulated.
    Nothing of it was under way before `begin_s`. `ending` ends what is there for it alone."""

    turn: PlannedRun
    options: RunOptions
    up: CellServer | None
    begin_s: float
    record: Callable[[], Run]
    ending: ExitStack


@dataclass(frozen=True)
class _RecordedRun:
    """A turn of which nothing but the summary and the page is missing."""

    turn: PlannedRun
    options: RunOptions
    run: Run
    paces: tuple[float, ...]


@dataclass(frozen=True)
class CellRunner:
    """Takes turns on `servers`. The `gauge` is read before and after each run."""

    servers: CellServers
    console: Console
    between: Between
    gauge: Gauge

    def take(self, row: Sequence[tuple[str, PlannedRun]]) -> list[CellRun | CellFailure]:
        """What came of a turn, or of those of a pair, each with its title.

        Raises KeyboardInterrupt when interrupted; runs that had ended before have their summary and
        their page then, too.
        """
        names = [turn.cell.name for _, turn in row]
        found: list[_RecordedRun | CellFailure] = []
        try:
            self._record(row, found)
        finally:
            concluded = [
                self._concluded(one) if isinstance(one, _RecordedRun) else one for one in found
            ]
        return sorted(concluded, key=lambda one: names.index(one.cell.name))

    def _record(
        self, row: Sequence[tuple[str, PlannedRun]], found: list[_RecordedRun | CellFailure]
    ) -> None:
        with ExitStack() as endings:
            ready: list[tuple[str, _Ready]] = []
            for title, turn in row:
                self.console.print(title, style="bold", markup=False, soft_wrap=True)
                try:
                    one = self._ready(turn)
                except SlobenchError as error:
                    found.append(failure(title, turn, error, self.console))
                    continue
                ready.append((title, one))
                endings.enter_context(one.ending)
            for title, one in ready:
                if len(row) > 1:
                    self._tell(f"measuring {one.turn.cell.name}")
                try:
                    with one.ending:
                        recorded = self._recorded(one, is_later=one is not ready[0][1])
                except SlobenchError as error:
                    found.append(failure(title, one.turn, error, self.console))
                    continue
                found.append(recorded)
                if recorded.run.manifest.ended == "interrupted":
                    raise KeyboardInterrupt

    def _ready(self, turn: PlannedRun) -> _Ready:
        cell = turn.cell
        moved = turn.make_room()
        if moved is not None:
            self._tell(f"an unfinished run was moved to {moved}")
        scenario = repeated(cell.scenario, turn.repeat)
        options = replace(
            cell.options, out_dir=turn.directory, force=False, name=f"{cell.name}-r{turn.repeat}"
        )
        begin_s = time.monotonic()
        if cell.target == SIMULATED:  # a new engine every time, in a time that nobody can watch
            up, options = None, replace(options, watch=None)
        else:
            up = self.servers.open(cell, turn.up_beside, anew=turn.starts_anew)
            if not up.is_fresh:
                self._settle(up.server, scenario)
        with ExitStack() as opening:
            server = None if up is None else up.server
            record = opening.enter_context(
                prepared(scenario, cell.target, options, self.console, server)
            )
            return _Ready(turn, options, up, begin_s, record, opening.pop_all())

    def _recorded(self, ready: _Ready, *, is_later: bool) -> _RecordedRun:
        """`is_later`: another run was measured since it was ready."""
        turn, up = ready.turn, ready.up
        if up is None:
            return _RecordedRun(turn, ready.options, ready.record(), ())
        if (how := up.server.ended()) is not None:
            raise TargetError(how)
        if is_later and up.server.kind == "url":  # nobody knows what it became, and both may be one
            self._settle(up.server, turn.cell.scenario)
            if why := finish(unreachable_reason(up.server.endpoint)):
                raise TargetError(f"{up.server.name} ended while its partner was measured: {why}")
        before = self.gauge(turn.cell)
        run = ready.record()
        paces = tuple(pace for pace in (before, self.gauge(turn.cell)) if pace is not None)
        if paces:
            _keep_paces(turn.directory, paces)
        served = ServedRun.of(run, turn.directory)
        up.served(served._replace(begin_s=ready.begin_s, end_s=time.monotonic()))
        return _RecordedRun(turn, ready.options, run, paces)

    def _concluded(self, one: _RecordedRun) -> CellRun | CellFailure:
        turn = one.turn
        try:
            summary = finished(one.run, turn.directory, one.options).summary
        except SlobenchError as error:
            return failure(f"{turn.cell.name}, repeat {turn.repeat}", turn, error, self.console)
        return CellRun(turn.cell, turn.repeat, turn.directory, one.run, summary, False, one.paces)

    def _settle(self, server: Server, scenario: Scenario) -> None:
        checks = finish(
            quiesce(
                server.endpoint,
                drain_s=self.between.drain_s,
                resets_cache=self.between.resets_cache,
            )
        )
        for check in checks:
            print_check(check, self.console)
        is_reset = any(check.check == "cache_reset" and check.ok for check in checks)
        if not is_reset:
            print_check(_unprotected(scenario), self.console)

    def _tell(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def failure(title: str, turn: PlannedRun, error: SlobenchError, console: Console) -> CellFailure:
    """That a turn came to nothing, told under its title."""
    console.print(f"{title} failed: {error}", style="red", markup=False)
    return CellFailure(turn.cell, turn.repeat, str(error))


def repeated(scenario: Scenario, repeat: int) -> Scenario:
    """A scenario as its `repeat`-th run (from 1) draws it: the first with its own seed, the next
    with the seed after."""
    seed = (scenario.seed + repeat - 1) % _SEEDS
    return scenario.with_values(scenario.resolved() | {"seed": seed})


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


def _unprotected(scenario: Scenario) -> PreflightCheck:
    """What a cache that was not emptied means for this scenario."""
    if scenario.prompts.salt == "run":
        return PreflightCheck(
            "cache_reset", None, "prompts differ between runs, so none is found in it"
        )
    detail = "prompts are the same in every run (salt: none): the cache may answer for the server"
    return PreflightCheck("cache_reset", False, detail)
