"""Page of a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from loadgen.measure.catalog import METRICS
from loadgen.measure.measures import Measured
from loadgen.studies.compare import view
from loadgen.studies.compare.charts import COMPARED_METRICS, ecdf, ecdf_chart, shift_chart, shifts
from loadgen.studies.compare.judgement import Options
from loadgen.studies.compare.numbers import Comparison
from reports.charts import Spec
from reports.page import render_page

_TONES = {"better": "met", "same": "met", "worse": "missed", "invalid": "invalid"}
_DRAWN_MARGIN = 0.05


def figures(a: Sequence[Measured], b: Sequence[Measured], options: Options) -> dict[str, Spec]:
    """All figures by name; a metric without enough samples has none."""
    drawn: dict[str, Spec] = {}
    has_reasoning = any(m.has_reasoning for m in (*a, *b))
    for name in COMPARED_METRICS:
        if name == "ttfat_s" and not has_reasoning:
            continue
        word = name.removesuffix("_s")
        change, spread = shifts(name, a, b, options), ecdf(name, a, b)
        if change:
            margin = options.margins.get("", _DRAWN_MARGIN)
            drawn[f"shift-{word}"] = shift_chart(name, change, margin)
        if spread:
            drawn[f"ecdf-{word}"] = ecdf_chart(name, spread)
    return drawn


def render(
    comparison: Comparison,
    a: Sequence[Measured],
    b: Sequence[Measured],
    options: Options,
    cache_dir: Path | None = None,
) -> str:
    """The page. `cache_dir` caches the plotting bundle, which takes seconds to make."""
    drawn = figures(a, b, options)
    return render_page(
        "compare.html.j2",
        drawn,
        cache_dir,
        comparison=comparison,
        tone=_TONES.get(comparison.verdict, "unknown"),
        sentence=view.sentence(comparison),
        sides_line=view.sides_line(comparison),
        lines=view.lines(comparison),
        steps=view.next_steps(comparison),
        head=view.HEAD,
        rows=[(view.row(measure), measure.how) for measure in comparison.measures],
        command=shlex.join(
            ["slobench", "compare", *(",".join(side) for side in (comparison.a, comparison.b))]
        ),
        titles={n.removesuffix("_s"): METRICS[n].title for n in COMPARED_METRICS},
    )
