"""A sweep, run: every cell several times, in turns, kept as runs, and told in one table.

sweep.yaml  scenario.yaml    what was asked: `slobench sweep --resume DIR` goes on from it
sweep.json  sweep.csv        a row per cell: means, intervals, the Pareto front
sweep.parquet                a row per run
report.html                  the page
<cell>/r<k>/                 the run directories (loadgen.cells.order)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.cells.cell import PlannedRun, check_cells
from loadgen.cells.order import run_cells, turns
from loadgen.cells.runner import CellFailure
from loadgen.errors import UsageError
from loadgen.run.execute import SIMULATED
from loadgen.run.manifest import version, without_key
from loadgen.run.run_options import RunOptions
from loadgen.sweep.numbers import Facts, facts_of, rows
from loadgen.sweep.points import Base
from loadgen.sweep.sweep_files import write_all
from loadgen.sweep.sweep_spec import (
    FILE,
    SCENARIO,
    SweepFile,
    SweepSpec,
    sweep_from_flags,
    sweep_spec,
)
from loadgen.workload.scenario import Scenario, load_scenario

SCHEMA = 1


@dataclass(frozen=True)
class Swept:
    """What came of a sweep: `facts` is the content of sweep.json, `runs` that of sweep.parquet."""

    facts: Facts
    runs: Sequence[Facts]
    directory: Path
    was_interrupted: bool

    @property
    def rows(self) -> list[Facts]:
        """A row per cell."""
        found: list[Facts] = self.facts["rows"]
        return found


@dataclass(frozen=True)
class SweepEstimate:
    """What a sweep would do: its turns, how long traffic arrives in those that are not there yet,
    how much longer draining them may take, and how often a server is started."""

    turns: Sequence[PlannedRun]
    arrivals_s: float
    drain_s: float
    n_starts: int


def run_sweep(
    asked: SweepSpec,
    scenario: Scenario,
    directory: Path,
    console: Console,
    command: Sequence[str] = (),
) -> Swept:
    """Make every run that `directory` does not have yet. Ctrl-C keeps what is finished and tells of
    that. Raises UsageError before anything runs."""
    running = run_cells(
        asked.cells,
        directory,
        repeats=asked.repeats,
        console=console,
        between=asked.between,
        order_seed=asked.order_seed,
    )
    runs: list[Facts] = []
    failures: list[CellFailure] = []
    was_interrupted = False
    try:
        for found in running:
            if isinstance(found, CellFailure):
                failures.append(found)
                continue
            runs.append(facts_of(found, asked, directory))
            console.print(_line(runs[-1], asked, found.was_reused), markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        was_interrupted = True
        n_asked = len(asked.cells) * asked.repeats
        console.print(
            f"interrupted: telling of the {len(runs)} of {n_asked} runs that are done; go on with "
            f"slobench sweep --resume {directory}",
            markup=False,
            soft_wrap=True,
        )
    facts = _facts(asked, scenario, runs, failures, command)
    return Swept(facts, runs, directory, was_interrupted)


def forecast(asked: SweepSpec, directory: Path) -> SweepEstimate:
    """What `run_sweep` would do now."""
    found = turns(asked.cells, directory, repeats=asked.repeats, order_seed=asked.order_seed)
    todo = [turn for turn in found if not turn.is_done]
    real = [turn.cell for turn in todo if turn.cell.target != SIMULATED]
    keys = [cell.server_key for cell in real]
    starts = [key for k, key in enumerate(keys) if k == 0 or key != keys[k - 1]]
    return SweepEstimate(
        found,
        sum(cell.scenario.horizon_s for cell in real),
        sum(cell.scenario.phases.drain for cell in real),
        len(starts),
    )


def prepare(directory: Path, file: SweepFile, base: Base, asked: SweepSpec) -> None:
    """Write down what was asked, without keys, so that it can be gone on with. Raises UsageError
    for a directory that holds something else, or other cells under the same names."""
    if directory.is_dir() and any(directory.iterdir()) and not (directory / FILE).is_file():
        raise UsageError(f"--out {directory}: exists already and is no sweep")
    check_cells(asked.cells, directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SCENARIO).write_text(base.scenario.to_yaml(), encoding="utf-8")
    engine = [word for word in base.options.engine.split(",") if without_key(word) == word]
    kept = file.model_copy(
        update={
            "scenario": SCENARIO, "set": {}, "target": base.target, "engine": ",".join(engine),
        }
    )  # fmt: skip
    (directory / FILE).write_text(kept.to_yaml(), encoding="utf-8")


def _line(run: Mapping[str, Any], asked: SweepSpec, was_reused: bool) -> str:
    from loadgen.measure.wording import format_value

    shown = [
        f"{one.text} {format_value(run['measures'][one.text]['value'], one.metric.unit)}"
        for one in (asked.benefit, asked.cost)
    ]
    doubt = "" if run["is_trusted"] else " (not trusted: " + "; ".join(run["reasons"]) + ")"
    there = ", there already" if was_reused else ""
    return f"  {run['cell']} r{run['repeat']}{there}: {', '.join(shown)}{doubt}"


def _facts(
    asked: SweepSpec,
    scenario: Scenario,
    runs: Sequence[Facts],
    failures: Sequence[CellFailure],
    command: Sequence[str],
) -> Facts:
    return {
        "schema": SCHEMA,
        "slobench": version(),
        "command": [without_key(word) for word in command],
        "scenario": scenario.name,
        "scenario_text": scenario.to_yaml(),
        "slo": list(scenario.slo_texts()),
        "targets": list(dict.fromkeys(cell.target for cell in asked.cells)),
        "axes": [{"key": axis.key, "values": list(axis.values)} for axis in asked.axes],
        "how": asked.how,
        "along": asked.along,
        "cost": asked.cost.text,
        "cost_unit": asked.cost.metric.unit,
        "benefit": asked.benefit.text,
        "repeats": asked.repeats,
        "confidence": asked.confidence,
        "order_seed": asked.order_seed,
        "n_runs": len(asked.cells) * asked.repeats,
        "n_done": len(runs),
        "n_failed": len(failures),
        "n_untrusted": sum(not run["is_trusted"] for run in runs),
        "rows": rows(asked, runs, failures),
    }


_OF_A_RUN = ("engine", "model", "environ", "cache_dir", "plugins", "transport", "n_workers",
             "scrape", "target_settings", "confidence")  # fmt: skip


def sweep(
    scenario: Scenario | Path | str,
    target: str,
    over: Mapping[str, Sequence[object]],
    out_dir: Path | str | None = None,
    *,
    how: str = "grid",
    repeats: int = 3,
    metric: str = "p99(ttft)",
    throughput: str = "output_tokens_per_s",
    **options: Any,
) -> Swept:
    """Run a scenario at every point that `over` spans (key → values, as after `--over`), `repeats`
    times each, and compare; what `out_dir` has already is not run again.

    `slobench.sweep(…).rows` is a row per cell: `pandas.json_normalize` makes a table of it.
    Without `out_dir` it goes to `runs/sweep-<scenario>-<time>`. Further options are the keys of a
    sweep file (`along`, `order_seed`, `drain`, `reset_cache`) and the fields of RunOptions.
    Raises UsageError; a cell that cannot be measured is a failure in its row, no error.
    """
    of_runs = {key: options.pop(key) for key in _OF_A_RUN if key in options}
    chosen = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
    said: dict[str, Any] = {"over": {key: list(values) for key, values in over.items()}, "how": how}
    said |= {"repeats": repeats, "metric": metric, "throughput": throughput, **options}
    file = sweep_from_flags(said)
    base = Base(chosen, target, RunOptions(**{"environ": dict(os.environ), **of_runs}))
    asked = sweep_spec(file, base)
    directory = Path(out_dir) if out_dir else default_directory(chosen)
    prepare(directory, file, base, asked)
    swept = run_sweep(asked, chosen, directory, Console(quiet=True))
    write_all(swept, base.options.cache_dir)
    return swept


def default_directory(scenario: Scenario) -> Path:
    return Path("runs") / f"sweep-{scenario.name}-{datetime.now():%Y%m%d-%H%M%S}"
