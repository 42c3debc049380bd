"""Measurement of planned runs: a single run, or a pair of runs in immediate sequence.

A machine drifts within seconds. So a pair is prepared completely before its first request (both
servers have passed preflight, both worker processes wait), and its summaries and pages are made
after the last answer of its second run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from loadgen.archive import checksums
from loadgen.archive.engine_logs import ServedRun
from loadgen.errors import SlobenchError, TargetError
from loadgen.records import Run
from loadgen.run.execute import SIMULATED, finished, prepared
from loadgen.run.run_options import RunOptions
from loadgen.run.target import Server, finish, print_check
from loadgen.studies.cells.cell import Cell, PlannedRun
from loadgen.studies.cells.servers import CellServer, CellServers
from loadgen.system.whole_file import read_result, replacing
from loadgen.workload.scenario import Scenario
from targets.preflight_result import PreflightCheck
from targets.quiesce import quiesce, unreachable_reason

if TYPE_CHECKING:
    from loadgen.measure.summary import Summary

Gauge = Callable[[Cell], float | None]
"""Seconds that the machine of a cell's server takes for a fixed calculation, measured while nothing
is sent; None where that is unknown."""
_SEEDS = 2**63
_PACE = "pace.json"


@dataclass(frozen=True)
class Between:
    """Preparation of the server before each run: it finishes its requests within `drain_s`, drops
    its cached prefixes, and receives at least `warm_up_s` of the cell's traffic that is not
    measured (more, if the scenario's own warm-up is longer)."""

    drain_s: float = 30.0
    resets_cache: bool = True
    warm_up_s: float = 0.0


BETWEEN = Between()


@dataclass(frozen=True)
class CellRun:
    """The finished `repeat` (from 1) of a cell. `was_reused`: it was measured earlier. `paces`: the
    readings of the gauge right before and after it, if any."""

    cell: Cell
    repeat: int
    directory: Path
    run: Run
    summary: Summary
    was_reused: bool
    paces: tuple[float, ...] = ()


@dataclass(frozen=True)
class CellFailure:
    """A repeat that could not be measured: its server did not start, or failed preflight."""

    cell: Cell
    repeat: int
    reason: str


@dataclass(frozen=True)
class _Ready:
    """A run prepared up to its first request. `up`: its server, None if simulated; `begin_s`: start
    of the preparation; `ending` releases the resources of this run alone."""

    turn: PlannedRun
    options: RunOptions
    up: CellServer | None
    begin_s: float
    record: Callable[[], Run]
    ending: ExitStack


@dataclass(frozen=True)
class _RecordedRun:
    """A recorded run without its summary and its page."""

    turn: PlannedRun
    options: RunOptions
    run: Run
    paces: tuple[float, ...]


@dataclass(frozen=True)
class CellRunner:
    """Measures planned runs on `servers`. The `gauge` is read before and after each run.
    `unsupported` holds the checks that a server does not support, each printed only once."""

    servers: CellServers
    console: Console
    between: Between
    gauge: Gauge
    unsupported: set[tuple[str, PreflightCheck]] = field(default_factory=set)

    def measure(self, row: Sequence[tuple[str, PlannedRun]]) -> list[CellRun | CellFailure]:
        """The results of a run, or of a pair of runs, each with its title.

        Raises KeyboardInterrupt when interrupted, after the summary and the page of the runs that
        had ended.
        """
        names = [turn.cell.name for _, turn in row]
        recorded: list[_RecordedRun | CellFailure] = []
        try:
            self._record(row, recorded)
        finally:
            results = [
                self._concluded(run) if isinstance(run, _RecordedRun) else run for run in recorded
            ]
        return sorted(results, key=lambda result: names.index(result.cell.name))

    def _record(
        self, row: Sequence[tuple[str, PlannedRun]], results: list[_RecordedRun | CellFailure]
    ) -> None:
        with ExitStack() as endings:
            ready: list[tuple[str, _Ready]] = []
            for title, turn in row:
                self.console.print(title, style="bold", markup=False, soft_wrap=True)
                try:
                    prepared_run = self._ready(turn)
                except SlobenchError as error:
                    results.append(failure(title, turn, error, self.console))
                    continue
                ready.append((title, prepared_run))
                endings.enter_context(prepared_run.ending)
            for title, next_run in ready:
                if len(row) > 1:
                    self._print(f"measuring {next_run.turn.cell.name}")
                try:
                    with next_run.ending:
                        is_later = next_run is not ready[0][1]
                        recorded = self._recorded(next_run, is_later=is_later)
                except SlobenchError as error:
                    results.append(failure(title, next_run.turn, error, self.console))
                    continue
                results.append(recorded)
                if recorded.run.manifest.ended == "interrupted":
                    raise KeyboardInterrupt

    def _ready(self, turn: PlannedRun) -> _Ready:
        cell = turn.cell
        moved = turn.make_room()
        if moved is not None:
            self._print(f"an unfinished run was moved to {moved}")
        scenario = repeated(cell.scenario, turn.repeat)
        options = replace(
            cell.options, out_dir=turn.directory, force=False, name=f"{cell.name}-r{turn.repeat}"
        )
        begin_s = time.monotonic()
        if cell.target == SIMULATED:  # a new engine for each run; virtual time has no live metrics
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
        """`is_later`: another run was measured after this run was prepared."""
        turn, up = ready.turn, ready.up
        if up is None:
            return _RecordedRun(turn, ready.options, ready.record(), ())
        if (reason := up.server.ended()) is not None:
            raise TargetError(reason)
        if (
            is_later and up.server.kind == "url"
        ):  # it may have ended, or be the partner's server too
            self._settle(up.server, turn.cell.scenario)
            if problem := finish(unreachable_reason(up.server.endpoint)):
                raise TargetError(
                    f"{up.server.name} ended while its partner was measured: {problem}"
                )
        before = self.gauge(turn.cell)
        run = ready.record()
        paces = tuple(pace for pace in (before, self.gauge(turn.cell)) if pace is not None)
        if paces:
            _keep_paces(turn.directory, paces)
        served = ServedRun.of(run, turn.directory)
        up.served(served._replace(begin_s=ready.begin_s, end_s=time.monotonic()))
        return _RecordedRun(turn, ready.options, run, paces)

    def _concluded(self, recorded: _RecordedRun) -> CellRun | CellFailure:
        turn, run = recorded.turn, recorded.run
        try:
            summary = finished(run, turn.directory, recorded.options).summary
        except SlobenchError as error:
            return failure(f"{turn.cell.name}, repeat {turn.repeat}", turn, error, self.console)
        paces = recorded.paces
        return CellRun(turn.cell, turn.repeat, turn.directory, run, summary, False, paces)

    def _settle(self, server: Server, scenario: Scenario) -> None:
        checks = finish(
            quiesce(
                server.endpoint,
                drain_s=self.between.drain_s,
                resets_cache=self.between.resets_cache,
            )
        )
        is_reset = any(check.check == "cache_reset" and check.ok for check in checks)
        for check in checks if is_reset else [*checks, _unprotected(scenario)]:
            key = (server.name, check)
            if key not in self.unsupported:
                print_check(check, self.console)
            if check.ok is None:
                self.unsupported.add(key)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def failure(title: str, turn: PlannedRun, error: SlobenchError, console: Console) -> CellFailure:
    """The CellFailure of a run, printed with its title."""
    console.print(f"{title} failed: {error}", style="red", markup=False)
    return CellFailure(turn.cell, turn.repeat, str(error))


def repeated(scenario: Scenario, repeat: int) -> Scenario:
    """The scenario of the `repeat`-th run (from 1): the first has the scenario's seed, each further
    run the next seed."""
    seed = (scenario.seed + repeat - 1) % _SEEDS
    return scenario.with_values(scenario.resolved() | {"seed": seed})


def kept_paces(directory: Path, console: Console) -> tuple[float, ...]:
    """The stored readings of the gauge; () without readings, and, with a warning, for a damaged
    file."""
    path = directory / _PACE
    try:
        return tuple(float(pace) for pace in json.loads(read_result(path)))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        text = f"{path} cannot be read ({error}): the machine speed in this run counts as unknown"
        console.print(text, style="yellow", markup=False, soft_wrap=True)
        return ()


def _keep_paces(directory: Path, paces: tuple[float, ...]) -> None:
    with replacing(directory / _PACE) as partial:
        partial.write_text(json.dumps(paces) + "\n", encoding="utf-8")
    checksums.cover(directory, directory / _PACE)


def _unprotected(scenario: Scenario) -> PreflightCheck:
    """The check result for a server cache that was not emptied."""
    if scenario.prompts.salt == "run":
        return PreflightCheck(
            "cache_reset", None, "prompts differ between runs, so the cache has none of them"
        )
    detail = (
        "prompts are the same in every run (salt: none): cached prefixes may make later runs faster"
    )
    return PreflightCheck("cache_reset", False, detail)
