"""A capacity search on one HTML page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loadgen.measure.capacity.answer import Capacity
from loadgen.measure.capacity.curve import Posterior
from reports import capacity_view, page
from reports.bundle import vega_bundle
from reports.capacity_charts import figures

_TONES = {"found": "met", "misses": "missed"}


def render(
    answer: Capacity,
    posterior: Posterior | None,
    about: Mapping[str, str],
    cache_dir: Path | None = None,
) -> str:
    """The page. `about` says what was searched; `cache_dir` keeps the plotting bundle."""
    drawn = figures(answer, posterior)
    scripts = [vega_bundle(cache_dir), page.asset("static/page.js")]
    template = page.environment().get_template("capacity.html.j2")
    return template.render(
        answer=answer,
        about=about,
        tone=_TONES.get(answer.outcome, "unknown"),
        lines=capacity_view.lines(answer),
        head=capacity_view.HEAD,
        rows=[
            (capacity_view.row(probe, answer), probe.why)
            for probe in sorted(answer.probes, key=lambda probe: probe.level)
        ],
        drawn=drawn,
        style=page.asset("static/page.css"),
        policy=page.policy(scripts),
        scripts=scripts,
        specs=page.embedded(drawn),
    )


def write(
    answer: Capacity,
    posterior: Posterior | None,
    about: Mapping[str, str],
    path: Path,
    cache_dir: Path | None = None,
) -> None:
    """`render` into a file."""
    path.write_text(render(answer, posterior, about, cache_dir), encoding="utf-8")
