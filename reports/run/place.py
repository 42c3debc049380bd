"""How a command line names a run that a page is about."""

from __future__ import annotations

import shlex
from pathlib import Path

from reports.redaction import redact

UNKNOWN = "RUN"  # as --help calls it


def run_word(directory: Path | None) -> str:
    """A run's directory as one word of a shell: relative as it was given, or where it lies below
    the directory one is in. A link such as `runs/latest`, which will point elsewhere, is followed.
    `UNKNOWN` where there is no directory."""
    if directory is None:
        return UNKNOWN
    if directory.is_symlink():
        directory = directory.parent / directory.readlink()
    here = Path.cwd()
    if directory.is_absolute() and directory.is_relative_to(here):
        directory = directory.relative_to(here)
    return shlex.quote(redact(str(directory)))
