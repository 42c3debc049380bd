"""Page of a table of claims."""

from __future__ import annotations

from pathlib import Path

from loadgen.studies.claims.result import ClaimsFile
from loadgen.studies.claims.view import HEAD, cells, headline, source_rows, topics
from reports.page import render_page
from reports.redaction import redacted_command


def render(result: ClaimsFile, cache_dir: Path | None = None) -> str:
    """The page of claims.json. `cache_dir` caches compiled templates."""
    return render_page(
        "claims.html.j2",
        {},
        cache_dir,
        headline=headline(result),
        tone="invalid" if result.contradicted or result.unfinished else "met",
        head=HEAD,
        topics=[(topic, [cells(row) for row in rows]) for topic, rows in topics(result)],
        sources=source_rows(),
        n_seeds=len(result.seeds[0]),
        confidence=f"{100 * result.confidence:g} %",
        command=redacted_command(result.command),
    )
