"""The measurements of a server at idle from outside: small runs over prompt lengths, batch sizes,
cached prompts and mixed steps, each a cell with a run directory, so that they can be resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console

from loadgen.errors import TargetError
from loadgen.run.run_options import RunOptions
from loadgen.studies.calibrate.calibration_file import Calibration, Measured
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

CALIBRATE = Study("calibrate", "calibration", Calibration, before=("cell.json",))
_PROMPTS = (16, 128, 512, 2048)
_BATCHES = (1, 4, 16, 64)
_DECODE_PROMPT, _DECODE_TOKENS = 128, 96
_CACHED_SHARE = 0.75  # of the prompts of the cached cell
_CACHED = "cached"
_CELL = "12s"  # at most; ten cells with preflight and page stay below five minutes
_REQUESTS = 8


def cells(target: str, options: RunOptions, max_input: int, max_batch: int) -> list[Cell]:
    """Prompts up to `max_input` tokens alone, decodes of up to `max_batch` requests at once, cached
    prompts, and prompts that arrive between decodes."""
    lengths = [length for length in _PROMPTS if length < max_input] + [max_input]
    batches = [batch for batch in _BATCHES if batch < max_batch] + [max_batch]
    prompt = min(_DECODE_PROMPT, max_input)
    cached = int(max_input * _CACHED_SHARE)
    planned = [
        *(_closed(f"prompt_{length}", 1, length, 8, _REQUESTS) for length in lengths),
        *(_closed(f"decode_{n}", n, prompt, _DECODE_TOKENS, max(2, 2 * n)) for n in batches),
        _closed(
            *("mixed", max(2, max_batch // 4), {"kind": "uniform", "min": 16, "max": max_input}),
            *({"kind": "uniform", "min": 8, "max": _DECODE_TOKENS}, 4 * max_batch),
        ),
    ]
    if cached:
        shared = {"requests.shared_prefix": {"tokens": cached}}
        planned.append(_closed(_CACHED, 1, max_input - cached, 8, _REQUESTS, shared))
    return [Cell(scenario.name, scenario, target, options) for scenario in planned]


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
            if result.cell.name == _CACHED and not reports_cached_tokens(result.run):
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


def _closed(
    name: str,
    n_users: int,
    input_len: int | Mapping[str, object],
    output_len: int | Mapping[str, object],
    n_requests: int,
    overrides: Mapping[str, object] | None = None,
) -> Scenario:
    return scenario_from_flags(
        name=name,
        concurrency=n_users,
        input_len=input_len,
        output_len=output_len,
        num_prompts=n_requests,
        duration=_CELL,
        overrides=overrides or {},
    )
