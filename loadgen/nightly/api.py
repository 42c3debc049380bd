"""`sb.nightly`: a night from Python."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from rich.console import Console

from loadgen.nightly.night import FinishedNight, Nightly, NightOptions
from loadgen.nightly.outputs import write_night
from loadgen.run.run_options import RunOptions


def nightly(
    file: Path | str,
    out_dir: Path | str,
    *,
    baseline: Path | str | None = None,
    engine: str = "",
    repeats: int | None = None,
    cache_dir: Path | str | None = None,
) -> FinishedNight:
    """Measure a nightly file into `out_dir`, judge it against its baseline and keep it there.

    `baseline` and `repeats` are instead of the file's; `engine` are settings of the bundled engine
    under test, `step_delay=10%`, which a control does not get; `cache_dir` keeps what is slow to
    make. The night has its `verdict`, its `cells` with their measures, and `facts`, which are
    nightly.json. Raises UsageError before anything runs, KeyboardInterrupt where it was
    interrupted; the same call then goes on from there.
    """
    cache = None if cache_dir is None else Path(cache_dir)
    options = NightOptions(
        baseline=None if baseline is None else Path(baseline),
        engine=engine,
        repeats=repeats,
        run=RunOptions(environ=dict(os.environ), cache_dir=cache),
    )
    asked = Nightly(Path(file), options)
    night = asked.run(Console(quiet=True), datetime.now().astimezone(), Path(out_dir))
    write_night(night, cache)
    return night
