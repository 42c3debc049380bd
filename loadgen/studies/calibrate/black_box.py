"""The measurements of a server at idle from outside: small runs over prompt lengths, batch sizes,
cached prompts and mixed steps, each a cell with a run directory, so that they can be resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from loadgen.errors import TargetError
from loadgen.run.known_preflights import models_now
from loadgen.run.run_options import RunOptions
from loadgen.studies.calibrate.calibration_file import Calibration, Measured
from loadgen.studies.calibrate.grid import CACHED, MOST_ANSWER, Load, loads
from loadgen.studies.calibrate.run_samples import (
    Answers,
    answers_of_run,
    reports_cached_tokens,
    samples_of_run,
)
from loadgen.studies.calibrate.step_samples import StepSamples
from loadgen.studies.cells.cell import Cell
from loadgen.studies.cells.order import run_cells
from loadgen.studies.cells.runner import CellFailure
from loadgen.studies.study import Place, Study
from loadgen.workload.scenario import Scenario, scenario_from_flags
from reference_engine.executors.simulated import SIMULATED_CONTEXT
from reference_engine.model.zoo import resolve
from targets.address import is_url
from targets.endpoint import load_target

CALIBRATE = Study("calibrate", "calibration", Calibration, before=("cell.json",))
_CELL = "12s"  # of traffic at most


def cells(target: str, options: RunOptions, max_input: int, max_batch: int) -> list[Cell]:
    """The runs of `grid.loads` against a target."""
    scenarios = map(_closed, loads(max_input, max_batch))
    return [Cell(scenario.name, scenario, target, options) for scenario in scenarios]


def measure(
    place: Place[Calibration], planned: Sequence[Cell], target: str, console: Console
) -> Measured:
    """The steps of all cells; measures those that the directory lacks. Raises TargetError for a
    cell that could not be measured, KeyboardInterrupt when interrupted: finished runs stay."""
    parts: list[StepSamples] = []
    answers, n_done = Answers(), 0
    try:
        for result in run_cells(planned, place.directory, repeats=1, console=console):
            if isinstance(result, CellFailure):
                raise TargetError(f"cell {result.cell.name}: {result.reason}")
            n_done += 1
            if result.cell.name == CACHED and not reports_cached_tokens(result.run):
                console.print(
                    "the server reports no cached tokens: prompts with a cached prefix are left "
                    "out",
                    soft_wrap=True,
                )
                continue
            parts.append(samples_of_run(result.run))
            answers = answers.plus(answers_of_run(result.run))
    except KeyboardInterrupt:
        place.print_interrupted(console, f"{n_done} of {len(planned)} cells are measured")
        raise
    samples = StepSamples.joined(parts or [StepSamples(*np.empty((7, 0)))])
    return Measured(samples, f"{target}, measured from outside", answers=answers)


def _closed(load: Load) -> Scenario:
    shared = {"requests.shared_prefix": {"tokens": load.shared}} if load.shared else {}
    return scenario_from_flags(
        name=load.name,
        concurrency=load.n_users,
        input_len=_lengths(load.prompt),
        output_len=_lengths(load.answer),
        num_prompts=load.n_requests,
        duration=_CELL,
        overrides=shared,
    )


def _lengths(n: int | tuple[int, int]) -> int | Mapping[str, object]:
    return n if isinstance(n, int) else {"kind": "uniform", "min": n[0], "max": n[1]}


def longest_prompt(shape: str, stated: int | None = None) -> int:
    """The longest prompt (tokens) that leaves room for the answers, of a model of this shape on a
    server that states how long a sequence may be."""
    most = min(resolve(shape).config.max_model_len, SIMULATED_CONTEXT, stated or SIMULATED_CONTEXT)
    return max(1, most - MOST_ANSWER)


def stated_length(target: str, options: RunOptions) -> int | None:
    """The longest sequence (tokens) of the model that a server which is up states in its list of
    models (vLLM's `max_model_len`); None if it states none, and for servers that slobench starts.
    """
    if not (is_url(target) or Path(target).is_file()):
        return None
    endpoint = load_target(target, options.environ, options.target_settings)
    if endpoint.launch is not None:
        return None
    lengths = asyncio.run(models_now(endpoint)) or {}
    model = options.model or endpoint.model or next(iter(lengths), "")
    return lengths.get(model)
