"""The directory of slobench's own files in the user's cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cache_dir(environ: Mapping[str, str]) -> Path | None:
    """The directory for files that are slow to make. Source: XDG Base Directory Specification."""
    base = environ.get("XDG_CACHE_HOME") or (
        f"{environ['HOME']}/.cache" if environ.get("HOME") else ""
    )
    return Path(base) / "slobench" if base else None
