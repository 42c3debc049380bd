"""Page of a capacity search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loadgen.studies.capacity import view
from loadgen.studies.capacity.charts import figures
from loadgen.studies.capacity.curve import Posterior
from loadgen.studies.capacity.result import Capacity
from reports.page import render_page


def render(
    answer: Capacity,
    posterior: Posterior | None,
    about: Mapping[str, str],
    cache_dir: Path | None = None,
) -> str:
    """The page. `about`: scenario, target, SLOs and command of the search; `cache_dir` caches the
    plotting bundle."""
    drawn = figures(answer, posterior)
    return render_page(
        "capacity.html.j2",
        drawn,
        cache_dir,
        answer=answer,
        about=about,
        tone=view.tone(answer),
        lines=view.lines(answer),
        steps=view.next_steps(answer),
        head=(*view.HEAD, "why"),
        rows=[
            (view.row(probe, answer), probe)
            for probe in sorted(answer.probes, key=lambda probe: probe.level)
        ],
    )
