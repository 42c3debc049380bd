"""What `simulate --replay` and `simulate --misses` do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from loadgen.cli.terminal import print_json
from loadgen.errors import UsageError
from loadgen.plugins import load_plugin

DIFFERENT = 1
_N_NAMED, _N_TOLD = 3, 10


def replay(
    directory: Path, plugins: Sequence[Path], as_json: bool, others: Mapping[str, Any]
) -> int:
    """Decide a recorded run of the bundled engine again; `others` are flags that would mean
    something else, and must not be given."""
    from loadgen.lab.log_replay_api import replay as decide_again

    _prepare("--replay", plugins, others)
    found = decide_again(directory)
    if as_json:
        numbers = {name: getattr(found, name) for name in ("n_steps", "n_decisions", "n_open")}
        difference = None if found.difference is None else asdict(found.difference)
        print_json({"identical": found.is_identical, **numbers, "difference": difference})
    else:
        typer.echo(found.sentence())
    if found.n_open:
        typer.echo(f"note: {found.n_open} requests have no end in the log", err=True)
    return 0 if found.is_identical else DIFFERENT


def misses(
    directory: Path, plugins: Sequence[Path], as_json: bool, others: Mapping[str, Any]
) -> None:
    """Say whose fault the missed promises of a recorded run of the bundled engine are."""
    from loadgen.lab.misses import misses as judge

    _prepare("--misses", plugins, others)
    found = judge(directory)
    if as_json:
        misses_json = [miss.as_json() for miss in found.missed]
        print_json({"n_requests": found.n_requests, "misses": misses_json})
        return
    n_missed = len({miss.request_id for miss in found.missed})
    typer.echo(f"{n_missed} of {found.n_requests} requests missed a promise")
    for blame, named in found.by_blame().items():
        if named:
            most = ", ".join(f"{name} {n}" for name, n in named.most_common(_N_NAMED) if name)
            typer.echo(f"  {blame:12} {named.total():5}" + (f"   {most}" if most else ""))
    for miss in found.missed[:_N_TOLD]:
        typer.echo(f"  {miss.request_id}: {miss.cause}: {miss.sentence()}")
    if len(found.missed) > _N_TOLD:
        typer.echo(f"  … and {len(found.missed) - _N_TOLD} more (--json has all)")


def _prepare(flag: str, plugins: Sequence[Path], others: Mapping[str, Any]) -> None:
    given = [name for name, value in others.items() if value]
    if given:
        raise UsageError(f"{flag} looks at a recorded run, as it was: leave out {', '.join(given)}")
    for path in plugins:
        load_plugin(path)
