"""`sb.capacity`: a search from a notebook or a script."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.capacity.capacity_spec import CapacitySpec
from loadgen.capacity.search import search
from loadgen.measure.capacity.capacity_result import Capacity
from loadgen.run.run_options import RunOptions
from loadgen.workload.scaling import Over
from loadgen.workload.scenario import Scenario, load_scenario


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
    precision: float = 0.05,
    resume: bool = False,
    **options: Any,
) -> Capacity:
    """The highest load at which a target keeps a scenario's promises, with an interval.

    Loads are requests per second, or users with `over="concurrency"`; further options are the
    fields of RunOptions (`engine`, `model`, `n_workers`, …). Probes are kept in `out_dir`, by
    default `runs/capacity-<scenario>-<time>`. Raises UsageError for what cannot be searched.
    """
    chosen = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
    options.setdefault("environ", dict(os.environ))
    asked = CapacitySpec(
        chosen, target, RunOptions(**options), over, attainment, between, budget_s, confidence,
        precision,
    )  # fmt: skip
    directory = Path(out_dir) if out_dir else None
    return search(asked, directory, Console(quiet=True), resume=resume)
