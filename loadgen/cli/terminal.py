"""Data on standard output: tables for people, JSON for machines."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from loadgen.measure.summary import Summary


_COLUMNS = 100


def stdout() -> Console:
    """Where data goes; wide enough for the result table where there is no terminal to ask."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_summary(summary: Summary, as_json: bool) -> None:
    if as_json:
        print_json(summary.to_json())
        return
    from reports.run.console import table

    stdout().print(table(summary))
