"""What a comparison of modes leaves behind: JSON, CSV, a page, and figures for papers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loadgen.lab.mode_table import to_csv
from reports.modes.charts import paper
from reports.modes.page import render
from reports.page import write_page
from reports.printed import write_figure


def write_all(facts: dict[str, Any], directory: Path, cache_dir: Path | None) -> None:
    """`modes.json`, `modes.csv` and `modes.html`; with rates also the curve of goodput over them,
    `goodput.csv`, `goodput.svg` and `goodput.pdf`."""
    text = json.dumps(facts, indent=1, allow_nan=False)
    (directory / "modes.json").write_text(text + "\n", encoding="utf-8")
    (directory / "modes.csv").write_text(to_csv(facts["rows"]), encoding="utf-8")
    write_page(directory / "modes.html", render(facts, cache_dir))
    if facts["rates_per_s"] is not None:
        whole = [row for row in facts["rows"] if not row["class"]]
        (directory / "goodput.csv").write_text(to_csv(whole), encoding="utf-8")
        for suffix in ("svg", "pdf"):
            write_figure(paper(facts), directory / f"goodput.{suffix}")
