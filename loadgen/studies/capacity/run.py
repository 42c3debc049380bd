"""Capacity search: probe after probe, each a run in a directory of its own, until the confidence
interval is narrow enough, the budget is used up or the user interrupts."""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.archive.engine_logs import ServedRun
from loadgen.errors import RunInvalid, TargetError, UsageError
from loadgen.run.execute import SIMULATED, FinishedRun, execute
from loadgen.run.run_options import RunOptions, split_keywords, takes_run_options
from loadgen.run.target import finish
from loadgen.studies.capacity.early_stop import EarlyStop
from loadgen.studies.capacity.files import CAPACITY, definition, store, write
from loadgen.studies.capacity.limited import below_limit, limited_at
from loadgen.studies.capacity.next_probe import (
    NextProbe,
    Question,
    SearchState,
    fit_into,
    judge,
    next_probe,
)
from loadgen.studies.capacity.observed import NO_LOAD_HELPS, probe_of
from loadgen.studies.capacity.probe import Grade, Probe
from loadgen.studies.capacity.result import Capacity, CapacityFile, conclude, range_text
from loadgen.studies.capacity.spec import CapacitySpec, judged_by, question_of
from loadgen.studies.cells.cell import Cell
from loadgen.studies.cells.servers import CellServers
from loadgen.studies.study import Place
from loadgen.workload.scaling import LoadUnit, Over, scaled, with_window
from loadgen.workload.scenario import Scenario
from targets.quiesce import quiesce

_TRIES = 2  # at a load at which the client could not be trusted


@takes_run_options
def capacity(
    scenario: Scenario | Path | str,
    target: str,
    out_dir: Path | str | None = None,
    *,
    attainment: float | None = None,
    over: Over = "rate",
    between: tuple[float, float] | None = None,
    budget_s: float = math.inf,
    confidence: float = 0.95,
    precision: float | None = None,
    resume: bool = False,
    **options: Any,
) -> Capacity:
    """The highest load at which a target meets a scenario's SLO, with a confidence interval.

    Loads are requests per second, users with `over="concurrency"`, or agents with `over="agents"`
    (live, or arriving per minute); further options are the fields of RunOptions (`engine`, `model`,
    `n_workers`, …) and flags on the scenario (`slo`, …).
    Probes are stored in `out_dir`, by default `runs/capacity-<scenario>-<time>`. Raises UsageError
    for a scenario that cannot be searched.
    """
    chosen, run_options = split_keywords(scenario, options)
    spec = CapacitySpec(
        chosen, target, run_options, over, attainment, between, budget_s, confidence, precision
    )
    return search(spec, Path(out_dir) if out_dir else None, Console(quiet=True), resume=resume)


def search(
    spec: CapacitySpec,
    out_dir: Path | None,
    console: Console,
    *,
    resume: bool,
    execute_run: Callable[..., FinishedRun] = execute,
) -> Capacity:
    """The same from a spec, with progress on `console`. Ctrl-C ends the search with the best answer
    so far. `execute_run` runs each probe.

    Raises UsageError before the first probe, also for a directory with another search.
    """
    with opened(spec, out_dir, resume=resume) as place:
        return search_in(place, spec, console, execute_run)


@contextlib.contextmanager
def opened(spec: CapacitySpec, out: Path | None, *, resume: bool) -> Iterator[Place[CapacityFile]]:
    """The directory of a search. Raises UsageError, also for a scenario that cannot be searched."""
    question = question_of(spec)
    with CAPACITY.opened(
        spec.scenario.name,
        out,
        resume=resume,
        definition=definition(spec, question).to_json(),
        command=spec.options.command,
    ) as place:
        yield place


def search_in(
    place: Place[CapacityFile],
    spec: CapacitySpec,
    console: Console,
    execute_run: Callable[..., FinishedRun] = execute,
) -> Capacity:
    """The search in an open directory; it continues the probes that are stored there."""
    with _cache(spec.options) as cache_dir:  # every probe has a page, and the bundle takes seconds
        spec = replace(spec, options=replace(spec.options, cache_dir=cache_dir))
        return _Search(spec, question_of(spec), place, console, execute_run).conclude()


@contextlib.contextmanager
def _cache(options: RunOptions) -> Iterator[Path]:
    if options.cache_dir is not None:
        yield options.cache_dir
        return
    with tempfile.TemporaryDirectory(prefix="slobench-") as directory:
        yield Path(directory)


class _Search:
    """Probe after probe against one target."""

    def __init__(
        self,
        spec: CapacitySpec,
        question: Question,
        place: Place[CapacityFile],
        console: Console,
        execute_run: Callable[..., FinishedRun],
    ) -> None:
        self._spec, self._question, self._place = spec, question, place
        self._scenario = judged_by(spec, question.target)
        self._directory = place.directory
        self._console, self._quiet = console, Console(quiet=True)
        earlier = place.stored()
        self._probes = [] if earlier is None else list(earlier.probes)
        self._client_limit = self._rate_limit = math.inf
        for probe in self._probes:
            self._note_limit(probe)
        self._execute_run = execute_run

    def _note_limit(self, probe: Probe) -> None:
        if probe.grade == "limited":
            self._rate_limit = min(self._rate_limit, limited_at(probe, self._spec.unit))

    def conclude(self) -> Capacity:
        """Run the search and write its files; also the files of a search whose target or load
        generator failed, if it has a probe."""
        resume = f"the same command with {self._place.continuing} continues"
        try:
            is_interrupted = not self._run()
        except KeyboardInterrupt:
            is_interrupted = True
        except (TargetError, RunInvalid):
            if self._probes:
                answer = self._written(is_interrupted=False)
                self._print(
                    f"the search ended after {_count(self._probes)} ({answer.sentence()}); the "
                    f"last one may be affected by the error below; {resume}"
                )
            raise
        answer = self._written(is_interrupted)
        if is_interrupted:
            self._place.print_interrupted(self._console, f"{_count(self._probes)} done")
        return answer

    def _written(self, is_interrupted: bool) -> Capacity:
        spec = self._spec
        answer = conclude(self._question, self._probes, spec.unit, is_interrupted, spec.counted)
        write(self._spec, self._question, self._place, self._probes, answer)
        return answer

    def _run(self) -> bool:
        """True at the end of the search or of its budget; False when interrupted."""
        self._store()  # before the first probe: its page, too, shows the search it belongs to
        with CellServers(self._directory / "servers", self._quiet) as servers:
            while (planned := self._next()) is not None:
                self._print(
                    f"probe {len(self._probes) + 1}: {planned.level:.4g} {self._spec.unit}, "
                    f"{planned.warmup_s:.3g} s warm-up + {planned.measure_s:.3g} s"
                )
                probe = self._probe(planned, servers)
                if probe is None:
                    return False
                self._probes.append(probe)
                self._store()
                self._print_result(probe)
                self._note_limit(probe)
                self._check_reachable()
                if probe.grade == "untrusted" and self._tries_at(probe.level) >= _TRIES:
                    self._client_limit = min(self._client_limit, probe.level)
        return True

    def _next(self) -> NextProbe | None:
        planned = next_probe(self._question, self._probes)
        planned = below_limit(self._question, self._probes, planned, self._rate_limit)
        if planned is None or planned.level >= self._client_limit * (1 - 1e-9):
            if planned is None and judge(self._question, self._probes).outcome == "unsettled":
                self._print("the last two probes hardly narrowed the interval: the search ends")
            return None
        left_s = self._spec.budget_s - math.fsum(probe.spent_s for probe in self._probes)
        fitting = fit_into(self._question, self._probes, planned, left_s)
        if fitting is None and not self._probes and not self._question.is_fixed:
            raise UsageError(
                f"--budget {self._spec.budget_s:g}s: too short for a probe at "
                f"{planned.level:.4g} {self._spec.unit}; allow more time, or start at a higher "
                "load with --between"
            )
        return fitting

    def _check_reachable(self) -> None:
        """A broken probe is repeated; a second one in a row ends the search, as does a cause that
        no load changes."""
        last = self._probes[-2:]
        if last[-1].cause in NO_LOAD_HELPS:
            raise TargetError(f"{self._spec.target}: {last[-1].why} The search ends with this.")
        if len(last) == 2 and all(probe.grade == "broken" for probe in last):
            raise TargetError(
                f"{self._spec.target}: could not be measured in two probes in a row "
                f"({last[-1].why}); check the server"
            )

    def _tries_at(self, level: float) -> int:
        return sum(p.grade == "untrusted" and p.level == level for p in self._probes)

    def _probe(self, planned: NextProbe, servers: CellServers) -> Probe | None:
        """A finished probe; None when interrupted."""
        spec, number = self._spec, len(self._probes) + 1
        name = f"{number:02d}"
        run_dir = self._directory / "probes" / name
        if run_dir.exists():  # left by an interrupt
            shutil.rmtree(run_dir)
        scenario = with_window(
            scaled(self._scenario, planned.level, spec.over),
            planned.warmup_s,
            planned.measure_s,
            seed_of(spec.scenario, number),
        )
        target = self._question.target
        early = None
        if not self._question.is_fixed and spec.over != "agents":
            early = EarlyStop(scenario, target, planned.effect)
        name_of_run = f"{spec.scenario.name}-{name}"
        options = replace(spec.options, out_dir=run_dir, name=name_of_run, early=early)
        begin_s = time.monotonic()
        finished = self._execute(Cell("probes", scenario, spec.target, options), servers)
        if finished.was_interrupted:
            return None
        spent_s = time.monotonic() - begin_s
        if (engine := finished.run.manifest.engine) is not None:
            spent_s = engine.simulated_s
        grade: Grade = "measured" if early is None else early.grade
        return probe_of(finished, planned, grade, spent_s, target, name, spec.over, spec.counted)

    def _execute(self, cell: Cell, servers: CellServers) -> FinishedRun:
        if cell.target == SIMULATED:  # a new engine for each probe: idle, with an empty cache
            return self._execute_run(cell.scenario, cell.target, cell.options, self._quiet)
        begin_s = time.monotonic()
        up = servers.open(cell)
        if not up.is_fresh:
            drain_s = cell.scenario.phases.drain
            finish(quiesce(up.server.endpoint, drain_s=drain_s, resets_cache=True))
        finished = self._execute_run(
            cell.scenario, cell.target, cell.options, self._quiet, server=up.server
        )
        served = ServedRun.of(finished.run, finished.directory)
        up.served(served._replace(begin_s=begin_s, end_s=time.monotonic()))
        return finished

    def _store(self) -> None:
        store(self._spec, self._question, self._place, self._probes)

    def _print_result(self, probe: Probe) -> None:
        share = f"  {100 * probe.attainment:.1f} % of {probe.n_due} met the SLO"
        if probe.grade != "measured":
            share += f" ({probe.grade}: {probe.why})"
        state = judge(self._question, self._probes)
        self._print(f"{share}; {_so_far(state, self._spec.unit)}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _count(probes: Sequence[Probe]) -> str:
    return "1 probe" if len(probes) == 1 else f"{len(probes)} probes"


def seed_of(scenario: Scenario, number: int) -> int:
    """The seed of the probe `number`: different for each probe, so that chance does not repeat, and
    the same in a repeat of the search."""
    digest = hashlib.sha256(f"{scenario.seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _so_far(state: SearchState, unit: LoadUnit) -> str:
    if state.value is None or state.low is None or state.high is None:
        return "capacity not bracketed yet"
    return range_text(state.low, state.high, unit).partition(";")[0]
