"""`slobench.sweep`: a sweep from a notebook or a script."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.run.run_options import RunOptions
from loadgen.sweep.points import Base
from loadgen.sweep.sweep import Swept, prepare, run_sweep
from loadgen.sweep.sweep_files import write_all
from loadgen.sweep.sweep_spec import sweep_from_flags, sweep_spec
from loadgen.workload.scenario import Scenario, load_scenario

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
