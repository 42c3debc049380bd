"""What the verbs under Extend do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from loadgen.cli.terminal import stdout
from loadgen.errors import UsageError, nearest
from loadgen.plugins import load_plugin


def translate(text: str, as_json: bool) -> None:
    """The scenario of another tool's command line on stdout, what does not carry over on stderr."""
    from dataclasses import asdict

    from loadgen.translate.command_line import translate as translated

    found = translated(text)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    typer.echo(found.scenario_yaml, nl=False)
    for line in found.missing:
        typer.echo(f"no equivalent: {line}", err=True)
    for line in found.notes:
        typer.echo(f"note: {line}", err=True)
    if found.target_yaml:
        typer.echo(f"save as target.yaml:\n{found.target_yaml}", err=True, nl=False)
    typer.echo(f"save as scenario.yaml, then run: {found.command}", err=True)


def list_kinds(family: str | None, plugins: Sequence[Path], as_json: bool) -> None:
    """Every registered kind with its parameters."""
    from loadgen.cli.kinds import FAMILIES, describe

    for plugin in plugins:
        load_plugin(plugin)
    if family is not None and family not in FAMILIES:
        raise UsageError(f"unknown family '{family}'; {nearest(family, FAMILIES)}")
    found = {name: describe(name) for name in ([family] if family else FAMILIES)}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from loadgen.cli.kinds import tables

    stdout().print(tables(found))
