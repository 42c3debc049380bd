"""The result as text: verdict first, then promises, latencies and notes; 100 columns at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.measure.catalog import METRICS
from loadgen.measure.server_load import describe_server
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.measure.summary import Summary
from loadgen.measure.wording import format_count, format_value
from reports.run import tables, verdict_rows

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_STYLES = {"met": "bold green", "missed": "bold red", "unknown": "bold", "invalid": "bold yellow"}
_PERCENTILES = ("p50", "p90", "p99")


def table(summary: Summary) -> Group:
    """One rich renderable: print it to a Console. Understandable without colour."""
    from rich.console import Group
    from rich.text import Text

    banner = verdict_rows.banner(summary)
    sure = f" ({banner.sure})" if banner.sure else ""
    verdict = Text(f"{banner.word}{sure}", style=_STYLES[banner.tone])
    parts: list[Text | Table] = [verdict]
    parts += [Text(f"  {reason}", overflow="fold") for reason in banner.reasons]
    if summary.slo:
        parts.append(_promises(summary))
    parts.append(_latencies(summary))
    if summary.classes:
        parts.append(_classes(summary))
    if summary.fairness:
        parts.append(_tenants(summary))
    if len(summary.backends) > 1:
        parts.append(_backends(summary))
    parts += [Text(f"  {line}") for line in _rates(summary)]
    parts += [Text(f"note: {finding}", overflow="fold") for finding in summary.findings]
    return Group(*parts)


def _latencies(summary: Summary) -> Table:
    from rich.text import Text

    grid = _grid("latency", "n", *(f"{key} [{summary.confidence:.0%}]" for key in _PERCENTILES))
    for name in tables.MAIN_METRICS:
        found, title = summary.metrics[name], METRICS[name].title
        cells = [_with_interval(found.percentiles[key], name) for key in _PERCENTILES]
        grid.add_row(title, format_count(found.n), *map(Text, cells))
        if name in ("ttft_s", "e2e_s") and found.with_failures != found.percentiles:
            cells = [_with_interval(found.with_failures[key], name) for key in _PERCENTILES]
            n_due = format_count(summary.counts["due"])
            grid.add_row(f"  {tables.FAILURES}", n_due, *map(Text, cells))
    return grid


def _with_interval(percentile: Percentile, name: str) -> str:
    """`97.8 ms [95.9, 100]`: ends in the value's unit where they share it."""
    unit = METRICS[name].unit
    text = tables.percentile_text(percentile, unit)
    if text in ("–", "∞"):
        return text
    suffix = text.rstrip("*").rpartition(" ")[2]
    ends = tables.between(percentile, unit).replace(f" {suffix}", "")
    return f"{text} {ends}"


def _promises(summary: Summary) -> Table:
    from rich.text import Text

    grid = _grid("promise", "measured", f"at {summary.confidence:.0%}", "n", "verdict", "proven")
    for cells in verdict_rows.slo_rows(summary):
        words = [cell.text for cell in cells]
        if cells[-1].small:
            words[-1] += f", {cells[-1].small}"
        grid.add_row(*map(Text, words))
    return grid


def _classes(summary: Summary) -> Table:
    from rich.text import Text

    grid = _grid(*tables.CLASS_HEAD)
    for cells in tables.class_rows(summary):
        grid.add_row(*(Text(cell.text) for cell in cells))
    return grid


def _tenants(summary: Summary) -> Table:
    from rich.text import Text

    grid = _grid(*tables.TENANT_HEAD)
    for cells in tables.tenant_rows(summary):
        grid.add_row(*(Text(cell.text) for cell in cells))
    return grid


def _backends(summary: Summary) -> Table:
    from rich.text import Text

    grid = _grid(*tables.BACKEND_HEAD)
    for cells in tables.backend_rows(summary):
        grid.add_row(*(Text(cell.text) for cell in cells))
    return grid


def _grid(first: str, *others: str) -> Table:
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    grid.add_column(first, overflow="fold", min_width=16)
    for name in others:
        grid.add_column(name, overflow="fold")
    return grid


def _rates(summary: Summary) -> list[str]:
    share, goodput = summary.attainment, summary.goodput.requests_per_s
    rates = summary.throughput
    failed = ", ".join(
        f"{word} {cell.text}"
        for word, cell in tables.count_rows(summary)
        if word not in ("scheduled", "warm-up", "due", "never due")
    )
    return [
        f"goodput {format_value(goodput.value, 'per_s')} {tables.between(goodput, 'per_s')},"
        f" attainment {format_value(share.value, 'share')} ({format_count(share.met)} of"
        f" {format_count(share.due)} due)",
        f"rate offered {format_value(summary.offered_rate_per_s, 'per_s')}, achieved"
        f" {format_value(summary.achieved_rate_per_s, 'per_s')}; output tokens"
        f" {format_value(rates.output_tokens_per_s, 'per_s')}; {failed or 'nothing due'}",
        *([tables.fairness_text(summary)] if summary.fairness else []),
        *([] if summary.server is None else [f"server: {describe_server(summary.server)}"]),
        "* fewer than ten samples lie beyond this percentile; … an end these samples cannot give",
    ]
