"""One run, wired together: scenario → schedule → target → shards → tables → summary → report.

What is not needed before the first request is imported while the preflight waits (`warm_up`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from loadgen.drive.engine_logs import ServedRun, adopt_engine_logs
from loadgen.drive.shard_process import PreforkedShard
from loadgen.drive.shards import Shards
from loadgen.errors import UsageError
from loadgen.records import Run, Status
from loadgen.run.directory import run_directory
from loadgen.run.fleet import Fleet, LocalFleet, OpenFleet
from loadgen.run.manifest import surroundings
from loadgen.run.preload import Preload
from loadgen.run.run_options import RunOptions
from loadgen.run.shard_tasks import shard_count
from loadgen.run.target import Choice, Server, Target, open_target
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan, make_plan

if TYPE_CHECKING:
    from loadgen.measure.summary import Summary
    from loadgen.run.conclude import ReadEngineSection

SIMULATED = "sim"
"""The target that is no server: the bundled engine in virtual time."""


@dataclass(frozen=True)
class FinishedRun:
    """A run and what was made of it."""

    run: Run
    summary: Summary
    directory: Path

    @property
    def was_interrupted(self) -> bool:
        return bool(self.run.manifest["ended"] == "interrupted")


def run(scenario: Scenario, target: str, out_dir: Path | str | None = None, **options: Any) -> Run:
    """Run a scenario against `target` (a URL, a target file, `reference`, `sim` or `mock`) and
    record it.

    Without `out_dir` the run goes to `runs/<scenario>-<time>`; further options are the fields of
    RunOptions. Raises UsageError, TargetError or RunInvalid; failing requests are rows, not errors.
    """
    options.setdefault("environ", dict(os.environ))
    chosen = RunOptions(out_dir=Path(out_dir) if out_dir else None, **options)
    return execute(scenario, target, chosen, Console(quiet=True)).run


def execute(
    scenario: Scenario,
    target: str,
    options: RunOptions,
    console: Console,
    server: Server | None = None,
    open_fleet: OpenFleet | None = None,
    early: PreforkedShard | None = None,
) -> FinishedRun:
    """`run`, telling `console` how it goes, and returning the summary and the directory too. A
    `server` that is up already for this target is used and left up. `open_fleet` says where the
    load-generating processes are, if not here; if here, `early` may be one of them."""
    plan = make_plan(scenario)
    with run_directory(scenario.name, options.out_dir, options.force) as directory:
        if target == SIMULATED and open_fleet is not None:
            raise UsageError("--target sim: the simulator runs in one process; use slobench run")
        if target == SIMULATED:
            recorded = _simulated(scenario, plan, options, directory, console)
        else:
            fleet = open_fleet or partial(_local_fleet, options, early)
            with _opened(
                scenario, plan, target, options, directory, console, server, fleet
            ) as record:
                recorded = record()
            said = recorded.manifest
            served = ServedRun(directory, said["run"], said["epoch_monotonic_s"])
            adopt_engine_logs(directory / "logs", [served])
        return finished(recorded, directory, options)


@contextmanager
def prepared(
    scenario: Scenario, target: str, options: RunOptions, console: Console, server: Server | None
) -> Iterator[Callable[[], Run]]:
    """All of `execute` that can be done before the first request, so that runs can follow each
    other at once. What is given records the run, which is then still to be `finished`. `server` is
    up and left up; None for the simulator."""
    plan = make_plan(scenario)
    with run_directory(scenario.name, options.out_dir, options.force) as directory:
        if server is None:
            assert target == SIMULATED, f"no server for {target}"
            yield partial(_simulated, scenario, plan, options, directory, console)
            return
        fleet = _local_fleet(options, None, scenario, plan, directory / "logs")
        with _opened(
            scenario, plan, target, options, directory, console, server, lambda *_: fleet
        ) as record:
            fleet.await_started()
            yield record


def finished(recorded: Run, directory: Path, options: RunOptions) -> FinishedRun:
    """A recorded run with its summary and its page, which are written beside it."""
    from loadgen.run.conclude import summarized  # imported by the warm-up

    summary = summarized(
        recorded, directory, None, options.confidence, options.cache_dir, read_story(directory)
    )
    return FinishedRun(recorded, summary, directory)


def read_story(directory: Path) -> ReadEngineSection | None:
    """Who can read the bundled engine's log of a run; None where there is none to read. Nothing of
    the engine is imported for other servers."""
    if not (directory / "engine_steps.parquet").is_file():
        return None
    from loadgen.lab.engine_report import engine_section

    return engine_section


@contextmanager
def _opened(
    scenario: Scenario,
    plan: Plan,
    target: str,
    options: RunOptions,
    directory: Path,
    console: Console,
    server: Server | None,
    open_fleet: OpenFleet,
) -> Iterator[Callable[[], Run]]:
    """The load-generating processes and a server that passed its preflight, while what is given
    records the run."""
    choice = choice_of(target, options)
    logs, warm_up = directory / "logs", Preload(surroundings)
    with (
        open_fleet(scenario, plan, logs) as fleet,  # its processes import during the preflight
        open_target(choice, scenario, plan.schedule, logs, console, warm_up, server) as opened,
    ):
        record = partial(_record, scenario, plan, opened, options, directory, console, fleet)
        yield record if server is None else partial(_as_fit, server, record)


def _as_fit(server: Server, record: Callable[[], Run]) -> Run:
    """Record a run on a server that goes on; unless every request was answered well, what its
    probes found is forgotten, and it has to pass one again."""
    known = dict(server.known)
    server.known.clear()
    recorded = record()
    if np.all(recorded.request_rows["status"] == Status.ok):
        server.known.update(known)
    return recorded


def choice_of(target: str, options: RunOptions) -> Choice:
    """The part of the options that says what is measured."""
    return Choice(
        target,
        options.engine,
        options.model,
        options.environ,
        options.scrape,
        options.plugins,
        options.target_settings,
    )


def _simulated(
    scenario: Scenario, plan: Plan, options: RunOptions, directory: Path, console: Console
) -> Run:
    from loadgen.lab.simulate import record as simulate
    from loadgen.lab.simulated_engine import read_settings, sim_options

    if options.model:
        raise UsageError("--model names a model to a server; for sim choose --engine shape=…")
    if options.target_settings:
        raise UsageError(
            f"target setting {options.target_settings[0]}: sim has no target file; it is set up by "
            "--engine"
        )
    if options.watch.is_on:
        raise UsageError(
            "--metrics-port and --otlp: the simulator runs in virtual time, which nobody can watch"
        )
    settings = sim_options(read_settings(options.engine))
    return simulate(
        scenario, plan, settings, console,
        directory=directory, command=options.command, name=options.name, early=options.early,
    )  # fmt: skip


def record(
    scenario: Scenario,
    plan: Plan,
    target: Target,
    options: RunOptions,
    directory: Path,
    console: Console,
) -> Run:
    """Send a plan to an open target and put the run together; the plan and the manifest are in
    `directory` before the first request goes out."""
    with _local_fleet(options, None, scenario, plan, directory / "logs") as fleet:
        return _record(scenario, plan, target, options, directory, console, fleet)


def _local_fleet(
    options: RunOptions, early: PreforkedShard | None, scenario: Scenario, plan: Plan, logs: Path
) -> LocalFleet:
    n = shard_count(scenario, plan, options.n_workers, options.cache_dir)
    return LocalFleet(Shards(n, logs, options.plugins, early))


def _record(
    scenario: Scenario,
    plan: Plan,
    target: Target,
    options: RunOptions,
    directory: Path,
    console: Console,
    fleet: Fleet,
) -> Run:
    from loadgen.run.recording import Recording  # imported by the warm-up

    return Recording(scenario, plan, target, options, directory, console, fleet).record()
