"""Sweeps: every cell measured several times in turns, with one table over all cells.

sweep.yaml  scenario.yaml    the definition; `slobench sweep --resume DIR` continues from it
sweep.json  sweep.csv        a row per cell: means, confidence intervals, the Pareto front
sweep.parquet                a row per run
report.html                  the page
<cell>/r<k>/                 the run directories (loadgen.studies.cells.order)
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.archive.directory import make_directory, reserved
from loadgen.archive.directory_lock import held, is_empty
from loadgen.errors import UsageError
from loadgen.measure.wording import csv_cell
from loadgen.run.execute import SIMULATED
from loadgen.run.manifest import recorded_command, version, without_key
from loadgen.run.run_options import RunOptions, takes_run_options
from loadgen.studies.cells.cell import PlannedRun, check_cells
from loadgen.studies.cells.order import run_cells, turns
from loadgen.studies.cells.runner import CellFailure
from loadgen.studies.sweep.numbers import Facts, facts_of, rows
from loadgen.studies.sweep.page import render
from loadgen.studies.sweep.points import Base
from loadgen.studies.sweep.spec import (
    FILE,
    SCENARIO,
    SweepFile,
    SweepSpec,
    sweep_from_flags,
    sweep_spec,
)
from loadgen.whole_file import replacing
from loadgen.workload.scenario import Scenario, load_scenario
from reports.page import write_page

SCHEMA = 1


@dataclass(frozen=True)
class Swept:
    """Result of a sweep: `facts` is the content of sweep.json, `runs` that of sweep.parquet."""

    facts: Facts
    runs: Sequence[Facts]
    directory: Path
    was_interrupted: bool

    @property
    def rows(self) -> list[Facts]:
        """A row per cell."""
        rows: list[Facts] = self.facts["rows"]
        return rows


@dataclass(frozen=True)
class SweepEstimate:
    """Forecast of a sweep: its turns, the seconds of traffic in the turns still to be measured, the
    seconds that draining them may add, and the number of server starts."""

    turns: Sequence[PlannedRun]
    arrivals_s: float
    drain_s: float
    n_starts: int


def run_sweep(
    spec: SweepSpec,
    scenario: Scenario,
    directory: Path,
    console: Console,
    command: Sequence[str] = (),
) -> Swept:
    """Measure every run that `directory` does not have yet. After Ctrl-C the result covers the
    finished runs. Raises UsageError before the first run, also where another process measures in
    `directory`."""
    make_directory(directory)
    with held(directory, f"--out {directory}", f"the sweep {scenario.name}"):
        return _swept(spec, scenario, directory, console, command)


def _swept(
    spec: SweepSpec,
    scenario: Scenario,
    directory: Path,
    console: Console,
    command: Sequence[str],
) -> Swept:
    running = run_cells(
        spec.cells,
        directory,
        repeats=spec.repeats,
        console=console,
        between=spec.between,
        order_seed=spec.order_seed,
    )
    runs: list[Facts] = []
    failures: list[CellFailure] = []
    was_interrupted = False
    try:
        for result in running:
            if isinstance(result, CellFailure):
                failures.append(result)
                continue
            runs.append(facts_of(result, spec, directory))
            console.print(_line(runs[-1], spec, result.was_reused), markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        was_interrupted = True
        n_planned = len(spec.cells) * spec.repeats
        console.print(
            f"interrupted: results cover the {len(runs)} of {n_planned} finished runs; continue "
            f"with slobench sweep --resume {directory}",
            markup=False,
            soft_wrap=True,
        )
    facts = _facts(spec, scenario, runs, failures, command)
    return Swept(facts, runs, directory, was_interrupted)


def forecast(spec: SweepSpec, directory: Path) -> SweepEstimate:
    """What `run_sweep` would do now."""
    found = turns(spec.cells, directory, repeats=spec.repeats, order_seed=spec.order_seed)
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


def prepare(directory: Path, file: SweepFile, base: Base, spec: SweepSpec) -> None:
    """Write the definition of the sweep, without secrets, so that it can be resumed. Raises
    UsageError for a directory with other content, or with other cells of the same names."""
    if directory.is_dir() and not is_empty(directory) and not (directory / FILE).is_file():
        raise UsageError(f"--out {directory}: exists already and holds no sweep")
    check_cells(spec.cells, directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SCENARIO).write_text(base.scenario.to_yaml(), encoding="utf-8")
    engine = [word for word in base.options.engine.split(",") if without_key(word) == word]
    kept = file.model_copy(
        update={
            "scenario": SCENARIO, "set": {}, "target": base.target, "engine": ",".join(engine),
        }
    )  # fmt: skip
    (directory / FILE).write_text(kept.to_yaml(), encoding="utf-8")


def _line(run: Mapping[str, Any], spec: SweepSpec, was_reused: bool) -> str:
    from loadgen.measure.wording import format_value

    values = run["measures"]
    shown = [
        f"{measure.text} {format_value(values[measure.text]['value'], measure.metric.unit)}"
        for measure in (spec.benefit, spec.cost)
    ]
    doubt = "" if run["is_trusted"] else " (not trusted: " + "; ".join(run["reasons"]) + ")"
    reused = ", measured earlier" if was_reused else ""
    return f"  {run['cell']} r{run['repeat']}{reused}: {', '.join(shown)}{doubt}"


def _facts(
    spec: SweepSpec,
    scenario: Scenario,
    runs: Sequence[Facts],
    failures: Sequence[CellFailure],
    command: Sequence[str],
) -> Facts:
    return {
        "schema": SCHEMA,
        "slobench": version(),
        "command": list(recorded_command(command)),
        "scenario": scenario.name,
        "scenario_text": scenario.to_yaml(),
        "slo": list(scenario.slo_texts()),
        "targets": list(dict.fromkeys(cell.target for cell in spec.cells)),
        "axes": [{"key": axis.key, "values": list(axis.values)} for axis in spec.axes],
        "how": spec.how,
        "along": spec.along,
        "cost": spec.cost.text,
        "cost_unit": spec.cost.metric.unit,
        "benefit": spec.benefit.text,
        "repeats": spec.repeats,
        "confidence": spec.confidence,
        "order_seed": spec.order_seed,
        "n_runs": len(spec.cells) * spec.repeats,
        "n_done": len(runs),
        "n_failed": len(failures),
        "n_untrusted": sum(not run["is_trusted"] for run in runs),
        "rows": rows(spec, runs, failures),
    }


@takes_run_options
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
    along: str | None = None,
    order_seed: int = 0,
    drain: str = "30s",
    reset_cache: bool = True,
    **options: Any,
) -> Swept:
    """Measure a scenario at every point that `over` spans (key → values, as after `--over`),
    `repeats` times each, and compare; runs that `out_dir` already has are not measured again.

    `slobench.sweep(…).rows` is a row per cell: `pandas.json_normalize` makes a table of it.
    The default of `out_dir` is `runs/sweep-<scenario>-<time>`. The other parameters are the keys of
    a sweep file; further options are the fields of RunOptions. Raises UsageError; a cell that
    cannot be measured is a failure in its row, not an error.
    """
    chosen = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
    file = sweep_from_flags(
        {
            "over": {key: list(values) for key, values in over.items()},
            "how": how, "repeats": repeats, "metric": metric, "throughput": throughput,
            "along": along, "order_seed": order_seed, "drain": drain, "reset_cache": reset_cache,
        }
    )  # fmt: skip
    base = Base(chosen, target, RunOptions(**{"environ": dict(os.environ), **options}))
    spec = sweep_spec(file, base)
    directory = Path(out_dir) if out_dir else reserved(default_directory(chosen))
    prepare(directory, file, base, spec)
    swept = run_sweep(spec, chosen, directory, Console(quiet=True))
    write_all(swept, base.options.cache_dir)
    return swept


def default_directory(scenario: Scenario) -> Path:
    return Path("runs") / f"sweep-{scenario.name}-{datetime.now():%Y%m%d-%H%M%S}"


_BOUNDED = ("value", "low", "high")


def write_all(swept: Swept, cache_dir: Path | None) -> None:
    """`sweep.json` and `sweep.csv` with a row per cell, `sweep.parquet` with a row per run, and
    `report.html`."""
    facts, directory = swept.facts, swept.directory
    text = json.dumps(facts, indent=1, allow_nan=False)
    (directory / "sweep.json").write_text(text + "\n", encoding="utf-8")
    (directory / "sweep.csv").write_text(to_csv(facts["rows"]), encoding="utf-8")
    if swept.runs:
        _write_runs(swept.runs, facts["rows"], directory / "sweep.parquet")
    write_page(directory / "report.html", render(facts, cache_dir))


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row per cell: its factors, then every number with its lower and upper bound; times in
    seconds. An empty field is a value that does not exist or is infinite."""
    if not rows:
        return ""
    text = io.StringIO()
    flat = [_flat(row) for row in rows]
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in flat)
    return text.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    named = {
        "offered_rate_per_s": row["offered_rate_per_s"],
        "benefit_per_gpu": row["benefit"],
        **row["measures"],
    }
    numbers = {
        name if key == "value" else f"{name}_{key}": estimate[key]
        for name, estimate in named.items()
        for key in _BOUNDED
    }
    verdicts = " ".join(f"{verdict}:{n}" for verdict, n in row["verdicts"].items())
    return {
        "cell": row["cell"],
        **row["factors"],
        "n": row["n"],
        "n_failed": len(row["failures"]),
        "n_untrusted": row["n_untrusted"],
        "n_due": row["n_due"],
        "gpus": row["gpus"],
        "verdicts": verdicts,
        "is_front": row["is_front"],
        "beaten_by": row["beaten_by"],
        **{name: None if value is None else f"{value:.9g}" for name, value in numbers.items()},
    }


def _write_runs(
    runs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], path: Path
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    factors = {row["cell"]: row["factors"] for row in rows}
    plain = ("repeat", "directory", "seed", "schedule_sha256", "verdict", "is_trusted", "n_due",
             "offered_rate_per_s", "gpus")  # fmt: skip
    table = [
        {
            "cell": run["cell"],
            **factors[run["cell"]],
            **{key: run[key] for key in plain},
            **{text: estimate["value"] for text, estimate in run["measures"].items()},
        }
        for run in runs
    ]
    numbers = list(runs[0]["measures"])
    schema = pa.Table.from_pylist(table).schema
    for name in numbers:  # float64 also for a measure without a value in any run
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.float64()))
    with replacing(path) as partial:
        parquet.write_table(pa.Table.from_pylist(table, schema), partial, compression="zstd")
