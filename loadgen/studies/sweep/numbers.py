"""Numbers of a sweep: those of each run, and per cell means with confidence intervals and the
Pareto front."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from loadgen.manifest.sections import TargetSection
from loadgen.measure.measures import Measured, measure
from loadgen.measure.statistics.intervals import (
    BoundedSection,
    EstimateSection,
    Interval,
    estimate,
    over_runs,
)
from loadgen.studies.cells.cell import Cell
from loadgen.studies.cells.runner import CellFailure, CellRun
from loadgen.studies.sweep.axes import number
from loadgen.studies.sweep.pareto import Quantity, TradeOff, pareto_front
from loadgen.studies.sweep.result import CellRow, MissingRun, SweptRun
from loadgen.studies.sweep.spec import SweepSpec

SHOWN = (
    "output_tokens_per_s",
    "requests_per_s",
    "goodput",
    "attainment",
    "error_rate",
    "p50(ttft)",
    "p99(ttft)",
    "p50(ttfat)",
    "p99(ttfat)",
    "p50(tpot)",
    "p99(tpot)",
    "p99(itl)",
    "p99(e2e)",
)
"""The measures of every sweep, in addition to those of its trade-off."""


def measures_of(spec: SweepSpec) -> list[str]:
    return list(dict.fromkeys([spec.benefit.text, spec.cost.text, *SHOWN]))


def numbers_of(found: CellRun, spec: SweepSpec, directory: Path) -> SweptRun:
    """The numbers of a run; failures count as infinitely slow. `directory` is that of the sweep."""
    run, summary = found.run, found.summary
    measured = Measured(run)
    gpus, is_declared = _gpus(run.manifest.target)
    values = {text: measured.estimate(measure(text), spec.confidence) for text in measures_of(spec)}
    return SweptRun(
        cell=found.cell.name,
        repeat=found.repeat,
        directory=found.directory.relative_to(directory).as_posix(),
        seed=run.manifest.seed,
        schedule_sha256=run.manifest.schedule_sha256,
        verdict=summary.verdict,
        exit_code=summary.exit_code,
        is_trusted=summary.validity.trusted,
        reasons=list(summary.reasons),
        n_due=summary.counts["due"],
        offered_rate_per_s=summary.offered_rate_per_s,
        gpus=gpus,
        gpus_are_declared=is_declared,
        measures={text: estimate(value) for text, value in values.items()},
        cost_is_infinite=math.isinf(values[spec.cost.text].value),
    )


def rows(
    spec: SweepSpec, runs: Sequence[SweptRun], failures: Sequence[CellFailure]
) -> list[CellRow]:
    """A row per cell, in the order of the sweep."""
    by_cell: dict[str, list[SweptRun]] = {cell.name: [] for cell in spec.cells}
    for run in sorted(runs, key=lambda run: run.repeat):
        by_cell[run.cell].append(run)
    failed: dict[str, list[MissingRun]] = {cell.name: [] for cell in spec.cells}
    for failure in failures:
        failed[failure.cell.name].append(MissingRun(repeat=failure.repeat, reason=failure.reason))
    table = [_row(cell, by_cell[cell.name], failed[cell.name], spec) for cell in spec.cells]
    points = [_point(row, by_cell[row.cell], spec) for row in table]
    front = pareto_front(points, spec.confidence)
    names = [
        None if standing.beaten_by is None else table[standing.beaten_by].cell for standing in front
    ]
    return [
        structs.replace(row, is_front=standing.is_front, beaten_by=name)
        for row, standing, name in zip(table, front, names, strict=True)
    ]


def _row(
    cell: Cell, runs: Sequence[SweptRun], failures: list[MissingRun], spec: SweepSpec
) -> CellRow:
    others = [label for key, label in cell.factors.items() if key != spec.along]
    along = cell.factors.get(spec.along)
    confidence = spec.confidence
    return CellRow(
        cell=cell.name,
        factors=dict(cell.factors),
        series=", ".join(others),
        along=None if along is None else number(along),
        n=len(runs),
        n_due=sum(run.n_due for run in runs),
        gpus=max((run.gpus for run in runs), default=None),
        gpus_are_declared=all(run.gpus_are_declared for run in runs),
        offered_rate_per_s=over_runs(
            [BoundedSection(value=run.offered_rate_per_s) for run in runs], confidence
        ),
        verdicts=dict(Counter(run.verdict for run in runs)),
        n_untrusted=sum(not run.is_trusted for run in runs),
        benefit=over_runs([run.per_gpu(spec.benefit.text) for run in runs], confidence),
        cost=over_runs([run.measures[spec.cost.text] for run in runs], confidence),
        cost_is_infinite=any(run.cost_is_infinite for run in runs),
        measures={
            text: over_runs([run.measures[text] for run in runs], confidence)
            for text in measures_of(spec)
        },
        runs=[run.section() for run in runs],
        failures=failures,
    )


def _point(row: CellRow, runs: Sequence[SweptRun], spec: SweepSpec) -> TradeOff:
    """The trade-off of a cell; without values for a cell without runs."""
    benefits = {run.repeat: run.per_gpu(spec.benefit.text).value for run in runs}
    costs = {
        run.repeat: math.inf if run.cost_is_infinite else run.measures[spec.cost.text].value
        for run in runs
    }
    cost = Interval(math.inf) if row.cost_is_infinite else _interval(row.cost)
    return TradeOff(
        Quantity(_interval(row.benefit), _known(benefits)), Quantity(cost, _known(costs))
    )


def _known(by_run: Mapping[int, float | None]) -> dict[int, float]:
    return {k: value for k, value in by_run.items() if value is not None}


def _interval(found: EstimateSection) -> Interval:
    return Interval(math.nan if found.value is None else found.value, found.low, found.high)


def _gpus(target: TargetSection) -> tuple[int, bool]:
    """The number of GPUs in the target's labels, and whether they have one; 1 if not. That of a
    simulation is part of the hardware name: `4xh200`."""
    labels = target.labels
    if labels.gpus:
        return labels.gpus, True
    if target.kind == "sim":
        several = re.match(r"(\d+)x", labels.gpu or "")
        return int(several[1]) if several else 1, True
    return 1, False
