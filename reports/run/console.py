"""A run's results in the terminal with `--full`: all SLOs, latencies and notes; 100 columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loadgen.measure.definitions import Rescored
from loadgen.measure.server_load import describe_server
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.measure.summary import Distribution, Summary
from loadgen.measure.wording import format_count, format_value
from reports.redaction import redact
from reports.run import agents_section, tables, verdict_section

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_PERCENTILES = ("p50", "p90", "p99")
_PLANNED = ("scheduled", "warmup", "start", "due", "not_due")
_NO_OUTCOMES = tuple(f"counts.{key}" for key in _PLANNED)


def table(summary: Summary) -> Group:
    """All tables and notes of a run (`--full`), understandable without colour."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Text | Table] = []
    if slo_rows := verdict_section.slo_rows(summary):
        parts.append(_slos(verdict_section.slo_head(summary), slo_rows))
    parts.append(_latencies(summary))
    if summary.classes:
        parts.append(_filled(*tables.class_table(summary)))
    if summary.fairness:
        tenants = tables.tenant_rows(summary)
        parts.append(_filled(*tables.of_answers(summary, tables.TENANT_HEAD, tenants)))
    if len(summary.backends) > 1:
        backends = tables.backend_rows(summary)
        parts.append(_filled(*tables.of_answers(summary, tables.BACKEND_HEAD, backends)))
    if (agents := summary.agents) is not None:
        for head, rows in agents_section.both_tables(agents):
            parts.append(_filled(head, rows, has_small=True))
        parts += [Text(f"  {line}", overflow="fold") for line in agents_section.texts(agents)]
    parts += [Text(f"  {line}", overflow="fold") for line in _rates(summary)]
    parts += [Text(f"note: {redact(finding)}", overflow="fold") for finding in summary.findings]
    return Group(*parts)


def _latencies(summary: Summary) -> Table:
    from rich.text import Text

    grid = _grid("latency", "n", *(f"{key} [{summary.confidence:.0%}]" for key in _PERCENTILES))
    for name in tables.main_metrics(summary):
        found, title = summary.metrics[name], tables.marked_title(summary, name)
        cells = [_percentile(found, found.percentiles, key) for key in _PERCENTILES]
        grid.add_row(title, format_count(found.n), *map(Text, cells))
        if name in ("ttft_s", "e2e_s") and found.with_failures != found.percentiles:
            failures = found.with_failures
            cells = [_percentile(found, failures, key) for key in _PERCENTILES]
            n_due = format_count(summary.counts["due"])
            grid.add_row(f"  {tables.FAILURES}", n_due, *map(Text, cells))
    return grid


def _percentile(found: Distribution, view: Mapping[str, Percentile], key: str) -> str:
    if not tables.has_percentile(found.n, key) and not math.isinf(view[key].value):
        return "–"
    return tables.duration_with_interval(view[key])


def definitions_table(rows: Sequence[Rescored]) -> Group:
    """The same run by the metric definitions of several tools: a row per metric and tool, and below
    the rows each formula."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for k, head in enumerate(("metric", "by", "n", "mean", *rows[0].percentiles)):
        grid.add_column(head, justify="left" if k < 2 else "right")
    for row in rows:
        numbers = [format_value(value, "s") for value in (row.mean, *row.percentiles.values())]
        grid.add_row(row.metric.upper(), row.definition, format_count(row.n), *numbers)
    formulas = [Text(f"  {r.metric.upper()} by {r.definition}: {r.formula}") for r in rows]
    return Group(grid, *formulas)


def _slos(head: Sequence[str], rows: Sequence[Sequence[tables.TableCell]]) -> Table:
    from rich.text import Text

    grid = _grid(*head)
    for cells in rows:
        words = [cell.text for cell in cells]
        for k, joint in ((1, " "), (-1, ", ")):  # the instrument error, the samples needed
            if cells[k].small:
                words[k] += f"{joint}{cells[k].small}"
        grid.add_row(*map(Text, words))
    return grid


def _filled(
    head: Sequence[str], rows: Sequence[Sequence[tables.TableCell]], has_small: bool = False
) -> Table:
    from rich.text import Text

    grid = _grid(*head)
    for cells in rows:
        words = (f"{c.text} {c.small}".rstrip() if has_small else c.text for c in cells)
        grid.add_row(*map(Text, words))
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
    throughput = f"output tokens {format_value(summary.throughput.output_tokens_per_s, 'per_s')}"
    if summary.results or summary.reasoning is not None:
        throughput = tables.throughput_text(summary)
    outcomes = ", ".join(
        f"{word} {cell.text}"
        for word, cell in tables.count_rows(summary)
        if cell.path not in _NO_OUTCOMES
    )
    attainment = f"n/a: {share.reason}"
    if not share.reason:
        basis = tables.attainment_basis(share, summary.confidence)
        attainment = f"{format_value(share.value, 'share')} ({basis})"
    bound = tables.goodput_bound(summary, summary.confidence)
    return [
        f"goodput {format_value(goodput.value, 'per_s')} {bound}".rstrip(),
        f"attainment {attainment}",
        f"rate {tables.rate_text(summary)}",
        *([] if summary.closed_loop is None else [f"start: {summary.closed_loop.text}"]),
        *([text] if (text := tables.in_flight_text(summary)) else []),
        f"{throughput}; {outcomes or 'no requests due'}",
        *([tables.fairness_text(summary)] if summary.fairness else []),
        *([] if summary.server is None else [f"server: {describe_server(summary.server)}"]),
        *tables.mark_notes(summary),
        f"[ ]: two-sided {100 * summary.confidence:g} % confidence intervals, as far as the samples"
        " have them; –: too few samples for this percentile",
        "* fewer than ten independent samples lie beyond this percentile",
    ]
