"""What `export` and `--export` do: recorded runs in other formats, to a file or standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from loadgen.errors import UsageError

_BINARY, _DASHBOARD = "parquet", "grafana"


def export(directories: Sequence[Path], format: str, rows: str | None, path: Path | None) -> None:
    """Runs as one table in a file, or on standard output."""
    from loadgen.drive.store import read_run
    from loadgen.exports.formats import check_format, export_path
    from loadgen.exports.formats import export as exported

    if format == _DASHBOARD:
        _export_dashboard(directories, path)
        return
    check_format(format, rows)
    if path is None and format == _BINARY and sys.stdout.isatty():
        raise UsageError("parquet is no text: name a file with -o, e.g. -o runs.parquet")
    once = {directory.resolve(): directory for directory in directories}  # runs/* has runs/latest
    made = exported([read_run(directory) for directory in once.values()], format, path, rows)
    if path is None:
        sys.stdout.buffer.write(made)
    else:
        typer.echo(f"export: {export_path(format, path)}", err=True)


def _export_dashboard(directories: Sequence[Path], path: Path | None) -> None:
    """The dashboard of the live series, which is the same for every run."""
    from loadgen.live.grafana import dashboard

    if directories:
        raise UsageError("the grafana dashboard is the same for every run: name none")
    text = json.dumps(dashboard(), indent=2) + "\n"
    if path is None:
        typer.echo(text, nl=False)
        return
    path.write_text(text)
    typer.echo(f"dashboard: {path}", err=True)


def read_exports(asked: Sequence[str]) -> list[tuple[str, Path | None]]:
    """`FORMAT` or `FORMAT=PATH` as (format, path). Raises UsageError for what no export writes."""
    if not asked:  # nothing need be imported before the first request
        return []
    from loadgen.exports.formats import check_format

    found = []
    for text in asked:
        format, has_path, path = text.partition("=")
        if has_path and not path:
            raise UsageError(f"--export {text}: which file? Write {format}=PATH, or just {format}")
        try:
            check_format(format)
        except UsageError as error:
            raise UsageError(f"--export: {error}") from None
        if has_path and not Path(path).parent.is_dir():  # told now, not after the run
            raise UsageError(f"--export {text}: there is no directory {Path(path).parent}")
        found.append((format, Path(path) if has_path else None))
    return found


def write_exports(
    directory: Path,
    asked: Sequence[tuple[str, Path | None]],
    slo: Sequence[str] | None = None,
) -> None:
    """A finished run in each format; without a path the file lies in the run's directory."""
    if not asked:
        return
    from loadgen.drive.store import read_run
    from loadgen.exports.formats import export as exported
    from loadgen.exports.formats import export_path

    run = read_run(directory)
    for format, path in asked:
        place = export_path(format, directory if path is None else path)
        exported(run, format, place, slo=slo)
        typer.echo(f"export: {place}", err=True)
