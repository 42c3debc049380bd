"""The command line as one typer application. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen import __version__
from loadgen.cli.lazy_verbs import VerbGroup

app = typer.Typer(
    name="slobench",
    cls=VerbGroup,
    help="How much of this traffic can this LLM server take before it breaks its latency SLO?",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slobench {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
