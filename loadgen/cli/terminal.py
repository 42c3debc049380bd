"""Standard output: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from loadgen.measure.summary import Summary


_COLUMNS = 100


def stdout() -> Console:
    """Standard output; without a terminal as wide as the result table."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _COLUMNS)


def stderr() -> Console:
    """Progress and notes on standard error."""
    return Console(stderr=True, highlight=False, markup=False)


def print_json(value: object, indent: int | None = 2) -> None:
    """Raises ValueError for NaN and infinities, which are not JSON."""
    typer.echo(json.dumps(value, indent=indent, allow_nan=False))


def print_summary(
    summary: Summary, as_json: bool, *, is_full: bool = False, directory: Path | None = None
) -> None:
    """The ending of a run in about ten lines, with `is_full` also its tables and all notes; or
    summary.json. `directory` holds the run."""
    if as_json:
        print_json(summary.to_json())
        return
    from reports.ending import rendered
    from reports.run.console import table
    from reports.run.ending import ending
    from reports.run.page import run_word

    out = stdout()
    out.print(rendered(ending(summary, run_word(directory)), out.width), soft_wrap=True)
    if is_full:
        out.print()
        out.print(table(summary))
