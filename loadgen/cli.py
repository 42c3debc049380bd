"""The command line: its verbs, put together. No logic here.

Exit codes: 0 met · 1 missed · 2 usage or scenario error · 3 no verdict · 4 internal error ·
130 interrupted. Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import Annotated

import typer

from loadgen.command import guard
from loadgen.verbs.built_when_named import VerbGroup

_OBJECTS = 200_000  # between two collections: importing makes half of that, and it all stays

app = typer.Typer(
    name="slobench",
    cls=VerbGroup,
    help="How much of this traffic can this LLM server take before it breaks its latency promise?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slobench {guard.version()}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script: every way to fail is a line and an exit code, never a bare traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):  # in a script's background, too, Ctrl-C is heard
        signal.signal(number, signal.default_int_handler)  # clean up, say so
    gc.set_threshold(_OBJECTS)
    guard.leave(guard.guarded(app, os.environ))
