"""A typer group that imports and builds a verb only when a command line names it.

Building a command from its signature takes about 4 ms; there are two dozen verbs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from typer import Typer
from typer.core import TyperGroup
from typer.main import get_command
from typer.models import CommandInfo

VERBS = {
    "measure": ("run", "preview", "validate", "fit", "doctor", "init", "report", "export"),
    "decide": ("rescore", "compare", "nightly", "capacity"),
    "sweep": ("sweep",),
    "lab": ("serve", "simulate", "modes"),
    "scale": ("web", "worker", "locustfile"),
    "extend": ("list", "from"),
}
"""Module of this package → its verbs, in the order of the help page."""


class VerbGroup(TyperGroup):
    """A group whose commands come from `VERBS`."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.commands = _Commands()  # type: ignore[assignment]  # typer only reads it


class _Commands(Mapping[str, Any]):
    """Name → click's command."""

    def __getitem__(self, name: str) -> Any:
        return command(name)

    def __iter__(self) -> Iterator[str]:
        return (name for names in VERBS.values() for name in names)

    def __len__(self) -> int:
        return sum(map(len, VERBS.values()))


@cache
def command(name: str) -> Any:
    """The click command of a verb. Raises KeyError for an unknown verb."""
    for module, names in VERBS.items():
        if name in names:
            verbs: Typer = import_module(f"loadgen.cli.{module}").verbs
            alone = Typer(rich_markup_mode="rich", add_completion=False)
            alone.registered_commands = [c for c in verbs.registered_commands if _name(c) == name]
            return get_command(alone)
    raise KeyError(name)


def _name(verb: CommandInfo) -> str:
    return verb.name or str(getattr(verb.callback, "__name__", ""))
