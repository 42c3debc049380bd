"""A run's results in a notebook: verdict, SLOs, latencies, and a link to the page."""

from __future__ import annotations

from html import escape
from urllib.parse import quote

from loadgen.measure.summary import Summary
from loadgen.measure.wording import format_count
from reports.run import tables, verdict_section

_COLORS = {"met": "#2e7d32", "missed": "#c62828", "unknown": "#546e7a", "invalid": "#b26a00"}
_PERCENTILES = ("p50", "p90", "p99")


def text(name: str, summary: Summary, page: str = "") -> str:
    """Some lines for a plain prompt; `page` is the path of report.html."""
    banner = verdict_section.banner(summary)
    sure = f" ({banner.sure})" if banner.sure else ""
    lines = [f"Run {name}: {banner.word}{sure}"]
    lines += [verdict_section.headline(summary) or " ".join(banner.reasons)]
    for title, cells in _latencies(summary):
        percentiles = zip(_PERCENTILES, cells[1:], strict=True)
        lines.append(f"{title}: " + ", ".join(f"{key} {cell}" for key, cell in percentiles))
    lines += [f"page: {page}"] if page else []
    return "\n  ".join(line for line in lines if line)


def html(name: str, summary: Summary, page: str = "") -> str:
    """The same as a piece of HTML with its own styles, for `_repr_html_`."""
    banner = verdict_section.banner(summary)
    sure = f" {escape(banner.sure)}" if banner.sure else ""
    parts = [
        f'<div style="border-left: 6px solid {_COLORS[banner.tone]}; padding-left: 12px">',
        f"<p><strong>{escape(banner.word)}</strong>{sure} &middot; run {escape(name)}</p>",
    ]
    sentences = [verdict_section.headline(summary)] if summary.validity.trusted else banner.reasons
    parts += [f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence]
    if rows := verdict_section.slo_rows(summary):
        cells = [[f"{c.text} {c.small}".strip() for c in row] for row in rows]
        parts.append(_table(verdict_section.slo_head(summary), cells))
    latencies = [[title, *row] for title, row in _latencies(summary)]
    parts.append(_table(("latency", "n", *_PERCENTILES), latencies))
    if page:
        parts.append(f'<p><a href="{escape(quote(page))}">{escape(page)}</a></p>')
    return "".join([*parts, "</div>"])


def _latencies(summary: Summary) -> list[tuple[str, list[str]]]:
    """Title, number of requests and percentiles of each main metric."""
    rows = []
    for name in tables.main_metrics(summary):
        found = summary.metrics[name]
        shown = [
            tables.percentile_text(found.percentiles[key], "s")
            if tables.has_percentile(found.n, key)
            else "–"
            for key in _PERCENTILES
        ]
        rows.append((tables.marked_title(summary, name), [format_count(found.n), *shown]))
    return rows


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    columns = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"
