"""Runs a scenario against a target: plans it, opens the target, records the requests, computes
the summary and writes the page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from loadgen.archive import checksums
from loadgen.archive.directory import run_directory
from loadgen.archive.engine_logs import ServedRun, adopt_engine_logs
from loadgen.drive.shard_process import PreforkedShard
from loadgen.drive.shards import Shards
from loadgen.errors import UsageError
from loadgen.records import Run, Status
from loadgen.registry import Plugin, Registry
from loadgen.run.manifest import surroundings
from loadgen.run.preload import Preload
from loadgen.run.run_options import RunOptions, RunSetup, split_keywords, takes_run_options
from loadgen.run.shard_tasks import shard_count, spare_cores
from loadgen.run.shown_run import ShownRun, shown
from loadgen.run.target import Server, Target, open_target
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan

if TYPE_CHECKING:
    from loadgen.measure.summary import Summary
    from loadgen.run.conclude import ReadEngineSection
    from loadgen.run.recording import Fleet
    from reports.run.engine_section import EngineSection

SIMULATED = "sim"
"""The target without a server: the bundled engine in virtual time."""

VIRTUAL_TIME = "--metrics-port and --otlp: the simulator runs in virtual time, without live metrics"

Record = Callable[[], Run]
"""Sends the load of an opened run and returns the recorded run."""
OpenFleet = Callable[[RunSetup], AbstractContextManager["Fleet"]]
"""Starts the load-generating processes of a run."""
OnSummary = Callable[["Summary", Path], object]
"""Receives the summary of a run, and its directory."""


class Opener(Plugin, ABC):
    """A target that is no server: its `kind` is the value of `--target`."""

    @abstractmethod
    def open(self, setup: RunSetup) -> AbstractContextManager[Record]:
        """Prepares a run and yields the function that records it. Raises UsageError for options
        that this target does not have."""

    def engine_section(
        self, directory: Path, run: Run, is_own_slo: bool = True
    ) -> EngineSection | None:
        """The report's section on the bundled engine, from the log that the engine left in a run
        directory; None without a log."""
        return None


OPENERS: Registry[Opener] = Registry("slobench.openers", "target")


@dataclass(frozen=True)
class FinishedRun:
    """A recorded run, its summary, and the directory that holds both."""

    run: Run
    summary: Summary
    directory: Path

    @property
    def was_interrupted(self) -> bool:
        return self.run.manifest.ended == "interrupted"


@takes_run_options
def run(
    scenario: Scenario | Path | str,
    target: str,
    out_dir: Path | str | None = None,
    **options: Any,
) -> ShownRun:
    """Runs a scenario (a file, or the name of a shipped one) against `target` (a URL, a target
    file, `reference`, `sim` or `mock`) and records it.

    Without `out_dir` the run is written to `runs/<scenario>-<time>`; further options are the fields
    of RunOptions, and the flags of `slobench run` that change a scenario (`rate="8/s"`,
    `duration="30s"`, `slo=["p99(ttft) <= 500ms"]`). Raises UsageError, TargetError or RunInvalid; a
    failed request is a row.
    """
    chosen, run_options = split_keywords(scenario, options)
    run_options = replace(run_options, out_dir=Path(out_dir) if out_dir else None)
    finished = execute(chosen, target, run_options, Console(quiet=True))
    return shown(finished.run, finished.directory)


def execute(
    scenario: Scenario,
    target: str,
    options: RunOptions,
    console: Console,
    *,
    server: Server | None = None,
    open_fleet: OpenFleet | None = None,
    on_summary: OnSummary | None = None,
) -> FinishedRun:
    """`run` with its progress on `console`; returns the summary and the directory too.

    A `server` that is up already is used and left up. `open_fleet` starts the load-generating
    processes; the default starts them on this machine. `on_summary` receives the summary before
    the page is made.
    """
    if open_fleet is not None and target in OPENERS.names():
        raise UsageError(f"--target {target} runs in one process: use slobench run")
    if not scenario.stream and target in OPENERS.names():
        raise UsageError(f"--target {target} streams every answer: remove stream: false")
    plan = make_plan(scenario)
    if server is None and any(slo.quantile for slo in scenario.all_slos()):
        from loadgen.workload.planned_counts import missing_percentiles  # not needed by other runs

        for problem in missing_percentiles(scenario, plan.schedule):
            console.print(f"note: {problem}", style="yellow", soft_wrap=True, markup=False)
    for note in scenario.notes() if server is None else ():
        console.print(f"note: {note}", style="dim", soft_wrap=True, markup=False)
    with run_directory(scenario.name, options.out_dir, options.force) as directory:
        setup = RunSetup(scenario, plan, target, options, directory, console)
        with _opened(setup, server, open_fleet or local_fleet) as record:
            recorded = record()
        served = ServedRun.of(recorded, directory)
        adopt_engine_logs(setup.log_dir, [served])
        return finished(recorded, directory, options, on_summary)


@contextmanager
def prepared(
    scenario: Scenario, target: str, options: RunOptions, console: Console, server: Server | None
) -> Iterator[Record]:
    """The part of `execute` before the first request, so that two runs can follow each other at
    once. Yields the function that records the run, which is then still to be `finished`. `server`
    is up and stays up; None for a target that has no server of its own."""
    plan = make_plan(scenario)
    with run_directory(scenario.name, options.out_dir, options.force) as directory:
        setup = RunSetup(scenario, plan, target, options, directory, console)
        if server is None:
            with _opened(setup, None, local_fleet) as record:
                yield record
            return
        with (
            local_fleet(setup) as fleet,
            _opened(setup, server, lambda _: nullcontext(fleet)) as record,
        ):
            fleet.await_started()
            yield record


def finished(
    recorded: Run, directory: Path, options: RunOptions, on_summary: OnSummary | None = None
) -> FinishedRun:
    """Computes the summary of a recorded run and writes it and the page into its directory."""
    from loadgen.run.conclude import summarized  # imported by the preload

    summary = summarized(
        recorded,
        directory,
        None,
        options.confidence,
        options.cache_dir,
        engine_reader(directory),
        clear=options.clear,
        on_summary=on_summary,
    )
    checksums.cover_rest(directory)
    return FinishedRun(recorded, summary, directory)


def engine_reader(directory: Path) -> ReadEngineSection | None:
    """The function that reads the bundled engine's log in a run directory; None without a log, so
    that nothing of the engine is imported for other servers."""
    if not (directory / "engine_steps.parquet").is_file():
        return None
    return OPENERS.get(SIMULATED)().engine_section


def local_fleet(setup: RunSetup, preforked: PreforkedShard | None = None) -> Shards:
    """Load-generating processes on this machine; `preforked` may be the first of them."""
    options = setup.options
    n = shard_count(setup.scenario, setup.plan, options.n_workers, options.cache_dir)
    return Shards(n, setup.log_dir, options.plugins, preforked)


def record(setup: RunSetup, target: Target) -> Run:
    """Sends a plan to an open target and returns the recorded run. The plan and the manifest are in
    the directory before the first request goes out."""
    with local_fleet(setup) as fleet:
        return _record(setup, target, fleet)


@contextmanager
def _opened(setup: RunSetup, server: Server | None, open_fleet: OpenFleet) -> Iterator[Record]:
    if setup.target in OPENERS.names():
        if setup.options.canary:
            raise UsageError(f"--target {setup.target} has no answers to compare: remove --canary")
        with OPENERS.get(setup.target)().open(setup) as record:
            yield record
        return
    preload = Preload(surroundings)
    with (
        open_fleet(setup) as fleet,  # its processes import their modules during the preflight
        open_target(setup, preload, server) as target,
    ):
        yield lambda: _record(setup, target, fleet, server, preload)


def _record(
    setup: RunSetup,
    target: Target,
    fleet: Fleet,
    server: Server | None = None,
    preload: Preload | None = None,
) -> Run:
    """Sends the plan of a run. Modules for its end are imported meanwhile, where this process does
    not share a core with those that generate load.

    A `server` that stays up loses what its preflights found unless every request succeeds: it may
    have become unfit, and the next run examines it again.
    """
    from loadgen.run.recording import Recording  # imported by the preload

    known = {} if server is None else dict(server.known)
    if server is not None:
        server.known.clear()
    has_core = fleet.pids is None or spare_cores(len(fleet.pids)) >= 0
    on_idle = preload.step if preload is not None and has_core else lambda: None
    recorded = Recording(setup, target, fleet, on_idle).record()
    if server is not None and np.all(recorded.request_rows["status"] == Status.ok):
        server.known.update(known)
    return recorded
