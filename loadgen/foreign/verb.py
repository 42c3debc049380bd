"""The verb import, of the panel Measure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.flags import Clear, Confidence, Full, Json, Slo
from loadgen.cli.terminal import print_json, print_summary
from loadgen.errors import UsageError

verbs = typer.Typer()
Results = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE|DIR...",
        help="Result files of other load generators, or directories of them.",
    ),
]


@verbs.command(
    "import",
    rich_help_panel="Measure",
    epilog="Example: slobench import vllm-results/ --slo 'p99(ttft)<=500ms'",
)
def import_(
    results: Results,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run directory; for several results, the folder of their directories. "
            "Default: in runs/."
        ),
    ] = None,
    slo: Slo = None,
    confidence: Confidence = None,
    clear: Clear = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing runs.")] = False,
    full: Full = False,
    json: Json = False,
) -> None:
    """Make runs of the result files of other load generators, recognized by their content. What a
    tool did not record is named and stays "not known"."""
    from loadgen.archive import store
    from loadgen.archive.directory import run_directory
    from loadgen.foreign.read import imported_runs
    from loadgen.measure.attainment import derived
    from loadgen.run.conclude import summarized
    from loadgen.run.manifest import recorded_command, version

    slos = parse.slo_flags(slo, None)
    found = list(
        imported_runs(results, recorded_command(["slobench", *sys.argv[1:]]), version(),
                      slos or (), _print_skipped)
    )  # fmt: skip
    names = [name for name, _ in found]
    if out is not None and (twice := {name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"--out {out}: several results are called {min(twice)}; import them one by one"
        )
    summaries = []
    for name, run in found:
        chosen = out if out is None or len(found) == 1 else out / name
        with run_directory(name, chosen, force) as directory:
            store.write_schedule(directory, run)
            store.write_run(directory, run, derived(run))
            summary = summarized(
                store.read_run(directory),
                directory,
                None,
                parse.read_confidence(confidence),
                parse.cache_dir(os.environ),
                clear=clear,
            )
        summaries.append(summary.to_json())
        if not json:
            print_summary(summary, as_json=False, is_full=full, directory=directory)
        typer.echo(f"report: {directory / 'report.html'}", err=True)
    if json:  # an object for one run, a list for several
        print_json(summaries[0] if len(summaries) == 1 else summaries)


def _print_skipped(path: Path) -> None:
    typer.echo(f"skipped: {path} (of no known tool)", err=True)
