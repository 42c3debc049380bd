"""What `simulate --replay` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from loadgen.command.terminal import print_json
from loadgen.errors import UsageError
from loadgen.plugins import load_plugin

DIFFERENT = 1


def replay(
    directory: Path, plugins: Sequence[Path], as_json: bool, others: Mapping[str, Any]
) -> int:
    """Decide a recorded run of the bundled engine again; `others` are flags that would mean
    something else, and must not be given."""
    from loadgen.lab.replay import replay as decide_again

    given = [name for name, value in others.items() if value]
    if given:
        raise UsageError(
            f"--replay decides a recorded run again, as it was: leave out {', '.join(given)}"
        )
    for path in plugins:
        load_plugin(path)
    found = decide_again(directory)
    if as_json:
        print_json({"identical": found.is_identical, **asdict(found)})
    else:
        typer.echo(found.sentence())
    if found.n_open:
        typer.echo(f"note: {found.n_open} requests have no end in the log", err=True)
    return 0 if found.is_identical else DIFFERENT
