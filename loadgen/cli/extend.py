"""The verbs of the panel Extend: list, from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli.completion import families
from loadgen.cli.flags import Json, Plugin
from loadgen.cli.parse import load_plugins
from loadgen.cli.terminal import print_json, stdout
from loadgen.errors import UsageError, nearest

verbs = typer.Typer()


@verbs.command("list", epilog="Example: slobench list arrivals")
def list_(
    family: Annotated[
        str | None,
        typer.Argument(
            help="One family: arrivals, lengths, apis, modes, scenarios, …",
            autocompletion=families,
        ),
    ] = None,
    plugin: Plugin = None,
    full: Annotated[
        bool, typer.Option("--full", help="All families with parameters and descriptions.")
    ] = False,
    schema: Annotated[
        str | None,
        typer.Option(
            metavar="VERB", help="Print the JSON schema of what a verb prints with --json."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the kinds that files and flags can name: the names of all families, or one family with
    its parameters."""
    if schema is not None:
        from loadgen.cli.output_schemas import output_schema

        print_json(output_schema(schema))
        return
    from loadgen.cli.kinds import FAMILIES, describe

    load_plugins(plugin)
    if family is not None and family not in FAMILIES:
        raise UsageError(f"unknown family '{family}'; {nearest(family, FAMILIES)}")
    kinds = {name: describe(name) for name in ([family] if family else FAMILIES)}
    if json:
        print_json(kinds)
        return
    from loadgen.cli.kinds import names_of_families, tables

    if family is None and not full:
        stdout().print(names_of_families(kinds))
        typer.echo("with parameters: slobench list FAMILY, or --full", err=True)
        return
    stdout().print(tables(kinds))


@verbs.command(
    "from",
    epilog="Example: slobench from 'vllm bench serve --model m --request-rate 8 --num-prompts 500'",
)
def from_(
    line: Annotated[
        str,
        typer.Argument(
            help="In quotes: a command of vllm bench serve, sglang.bench_serving, guidellm, aiperf,"
            " genai-perf, evalscope perf, genai-bench, inference-perf or llmperf, or the text of"
            " inference-perf's configuration file."
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Write scenario.yaml and, if needed, target.yaml there; overwrites nothing.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Translate another tool's command line into a scenario and the command that runs it."""
    from loadgen.translate.command_line import translate

    translation = translate(line)
    if to is not None:
        _write(to, "scenario.yaml", translation.scenario_yaml)
        if translation.target_yaml:
            _write(to, "target.yaml", translation.target_yaml)
    if json:
        print_json(asdict(translation))
        return
    if to is None:
        typer.echo(translation.scenario_yaml, nl=False)
    for option in translation.missing:
        typer.echo(f"no equivalent: {option}", err=True)
    for note in translation.notes:
        typer.echo(f"note: {note}", err=True)
    if to is not None:
        typer.echo(f"run in {to}: {translation.command}", err=True)
        return
    if translation.target_yaml:
        typer.echo(f"save as target.yaml:\n{translation.target_yaml}", err=True, nl=False)
    typer.echo(f"save as scenario.yaml, then run: {translation.command}", err=True)


def _write(folder: Path, name: str, text: str) -> None:
    """Write a new file. Raises UsageError if it exists or cannot be written."""
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
