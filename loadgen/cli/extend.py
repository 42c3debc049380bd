"""Flags of the verbs for extending and coming from elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen.cli import extend_command as command
from loadgen.cli.flags import Json, Plugin

PANEL = "Extend"
verbs = typer.Typer()


@verbs.command("list", rich_help_panel=PANEL, epilog="Example: slobench list arrivals")
def list_(
    family: Annotated[
        str | None, typer.Argument(help="One family: arrivals, lengths, apis, modes, scenarios, …")
    ] = None,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """List the kinds that can be named in files and flags, with their parameters."""
    command.list_kinds(family, plugin or [], json)


@verbs.command(
    "from",
    rich_help_panel=PANEL,
    epilog="Example: slobench from 'vllm bench serve --model m --request-rate 8 --num-prompts 500'",
)
def from_(
    line: Annotated[
        str, typer.Argument(help="A command of vllm bench serve, guidellm or aiperf, in quotes.")
    ],
    json: Json = False,
) -> None:
    """Translate another tool's command line into a scenario and the command that runs it."""
    command.translate(line, json)
