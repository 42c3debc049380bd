"""The verbs import, of the panel Measure, and judge, of the panel Decide."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.flags import Clear, Confidence, Full, Goodput, Json, MinRequests, Slo
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
        imported_runs(
            results,
            recorded_command(["slobench", *sys.argv[1:]]),
            version(),
            slos or (),
            _print_skipped,
        )
    )
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


@verbs.command(
    epilog="Example: slobench judge results/*.json --slo 'p99(ttft)<=500ms'",
)
def judge(
    results: Results,
    slo: Slo = None,
    goodput: Goodput = None,
    confidence: Confidence = None,
    clear: Clear = False,
    min_requests: MinRequests = None,
    change: Annotated[
        str, typer.Option(help="The change of latency that a second run should show.")
    ] = "10%",
    full: Full = False,
    json: Json = False,
) -> None:
    """Check result files of other load generators against an SLO; writes nothing. A verdict for
    each, and the number of requests that a comparison needs. Of Locust, NAME_stats.csv."""
    from loadgen.foreign.change import shown_change
    from loadgen.foreign.read import imported_runs, read_summaries
    from loadgen.measure.aggregate import summarize
    from loadgen.measure.closed_loop import with_start_left_out
    from loadgen.measure.findings import origin_note
    from loadgen.measure.summary import plain_json
    from reports.run.ending import ending

    share = parse.read_share("--change", change)
    slos, level = parse.slo_flags(slo, goodput), parse.read_confidence(confidence)
    contents, codes, notes = [], [], dict[str, None]()
    for judged in read_summaries([path for path in results if path.suffix == ".csv"], slos or ()):
        codes.append(judged.exit_code)
        contents.append(plain_json(asdict(judged)))
        if not json:
            typer.echo(judged.text)
    results = [path for path in results if path.suffix != ".csv"]
    for name, imported in imported_runs(results, (), "", (), _print_skipped):
        run = with_start_left_out(imported)
        summary = summarize(run, slos, level, min_requests, clear)
        shown = shown_change(run, share)
        codes.append(summary.exit_code)
        notes[origin_note(run)] = None  # once for all files of a tool
        contents.append({"name": name, **summary.to_json(), "change": asdict(shown)})
        if json:
            continue
        if full:
            typer.echo(name)
            print_summary(summary, as_json=False, is_full=True)
            typer.echo(f"  {shown.text}")
            continue
        found = ending(summary)
        verdict = ": ".join(filter(None, (found.word, found.result)))
        typer.echo(f"{name}: {verdict}; {shown.text}")
    if json:
        print_json(contents)
    else:
        for note in () if full else notes:
            typer.echo(f"note: {note.partition(' Also: ')[0]}")
    raise typer.Exit(max(codes))


def _print_skipped(path: Path) -> None:
    typer.echo(f"skipped: {path} (of no known tool)", err=True)
