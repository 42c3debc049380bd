"""One run, wired together: scenario → schedule → target → shards → tables → summary → report."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.drive import store
from loadgen.drive.engine_logs import adopt_engine_logs
from loadgen.errors import UsageError
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import derived
from loadgen.measure.summary import Summary
from loadgen.recording import Recording
from loadgen.records import Run
from loadgen.run_directory import run_directory
from loadgen.run_options import RunOptions
from loadgen.target import Choice, Target, open_target
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan, make_plan

SIMULATED = "sim"
"""The target that is no server: the bundled engine in virtual time."""


@dataclass(frozen=True)
class Finished:
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


def execute(scenario: Scenario, target: str, options: RunOptions, console: Console) -> Finished:
    """`run`, telling `console` how it goes, and returning the summary and the directory too."""
    plan = make_plan(scenario)
    with run_directory(scenario.name, options.out_dir, options.force) as directory:
        if target == SIMULATED:
            recorded = _simulated(scenario, plan, options, directory, console)
        else:
            recorded = _measured(scenario, plan, target, options, directory, console)
        summary = summarize(recorded, confidence=options.confidence)
        tell(recorded, summary, directory, options.cache_dir)
        return Finished(recorded, summary, directory)


def _measured(
    scenario: Scenario,
    plan: Plan,
    target: str,
    options: RunOptions,
    directory: Path,
    console: Console,
) -> Run:
    choice = Choice(
        target, options.engine, options.model, options.environ, options.scrape, options.plugins
    )
    with open_target(choice, scenario, plan.schedule, directory / "logs", console) as opened:
        recorded = record(scenario, plan, opened, options, directory, console)
    adopt_engine_logs(directory, recorded.manifest["epoch_monotonic_s"])
    return recorded


def _simulated(
    scenario: Scenario, plan: Plan, options: RunOptions, directory: Path, console: Console
) -> Run:
    from loadgen.lab.simulate import record as simulate
    from loadgen.lab.simulated_engine import read_settings, sim_options

    if options.model:
        raise UsageError("--model names a model to a server; for sim choose --engine shape=…")
    settings = sim_options(read_settings(options.engine))
    return simulate(scenario, plan, settings, console, directory=directory, command=options.command)


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
    return Recording(scenario, plan, target, options, directory, console).record()


def conclude(
    directory: Path, slo: Sequence[str] | None, confidence: float | None, cache_dir: Path | None
) -> Summary:
    """Compute a recorded run's numbers again, with other promises if given, and render its page.
    A run whose results were never put together is put together first."""
    run = store.read_run(directory)
    if not (directory / "requests.parquet").exists():
        ending = {"ended": "interrupted", "end_reason": "slobench was ended from outside"}
        run = replace(run, manifest=run.manifest | ending)
        store.write_run(directory, run, derived(run))
        shutil.rmtree(directory / "parts")
    summary = summarize(run, slo=slo, confidence=confidence)
    tell(run, summary, directory, cache_dir)
    return summary


def tell(run: Run, summary: Summary, directory: Path, cache_dir: Path | None) -> None:
    """What was made of a run, for programs and for people."""
    from reports.html import write

    store.write_summary(directory, summary.to_json())
    write(run, summary, directory / "report.html", cache_dir=cache_dir)
