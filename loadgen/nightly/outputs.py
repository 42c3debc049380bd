"""The files of a finished night: what people open and what a CI system reads."""

from __future__ import annotations

import json
from pathlib import Path

from loadgen.nightly.night import FinishedNight
from reports.nightly.page import render
from reports.nightly.view import junit, markdown


def write_night(night: FinishedNight, cache_dir: Path | None = None) -> None:
    """index.html, junit.xml, summary.md and nightly.json, which is last: with it the night is over.
    `cache_dir` keeps the plotting bundle."""
    told = (night.verdict, night.cells, night.facts)
    texts = {
        "index.html": render(*told, cache_dir),
        "junit.xml": junit(night.cells),
        "summary.md": markdown(*told),
        "nightly.json": json.dumps(night.facts, indent=1, allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        (night.directory / name).write_text(text, encoding="utf-8")
