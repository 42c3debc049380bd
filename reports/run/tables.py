"""Tables of a run's summary, shared by the page and the terminal.

A cell with a number has its place in summary.json (`path`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.measure.catalog import METRICS, NEEDS_TOKENS, Unit
from loadgen.measure.fairness import TenantShare
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.percentiles import Percentile, fewest_samples
from loadgen.measure.summary import (
    NO_LIMIT,
    PERCENTILES,
    Attainment,
    ClassSummary,
    Distribution,
    Summary,
)
from loadgen.measure.wording import format_count, format_number, format_value
from loadgen.records import Status
from loadgen.units import duration_parts, format_duration

MAIN_METRICS = ("ttft_s", "ttft_from_send_s", "tpot_s", "itl_s", "max_stall_s", "e2e_s")
MORE_METRICS = tuple(
    n
    for n, m in METRICS.items()
    if m.slo and m.scope in ("request", "gap") and n not in MAIN_METRICS
)
CLIENT_METRICS = tuple(n for n, m in METRICS.items() if not m.slo)
FAILURES = "unanswered as ∞"


@dataclass(frozen=True, slots=True)
class TableCell:
    """A text, the place of its number in summary.json, and a small second line."""

    text: str
    path: str = ""
    unit: Unit | Literal["count"] = "count"
    small: str = ""
    title: str = ""


_ABOUT_TOKENS = re.compile("TTFT|TTFAT|TPOT|^output|^longest gap")
"""Heads of columns that answers without tokens do not have."""


def shown(summary: Summary, names: Sequence[str]) -> list[str]:
    """The metrics that the answers of a run have: those without tokens have none about tokens."""
    return [name for name in names if not (summary.results and name in NEEDS_TOKENS)]


def main_metrics(summary: Summary) -> list[str]:
    """The metrics of the first table; TTFAT stands beside TTFT where answers have reasoning."""
    names = list(MAIN_METRICS)
    if summary.reasoning is not None:
        names.insert(2, "ttfat_s")
    return shown(summary, names)


def more_metrics(summary: Summary) -> list[str]:
    """The metrics of the second table."""
    return [name for name in shown(summary, MORE_METRICS) if name not in main_metrics(summary)]


def of_answers(
    summary: Summary, head: Sequence[str], rows: Sequence[Sequence[TableCell]]
) -> tuple[list[str], list[list[TableCell]]]:
    """A table, without its columns about tokens where answers have none, and without TTFAT where
    no answer has reasoning."""
    kept = [
        k
        for k, name in enumerate(head)
        if not (summary.results and _ABOUT_TOKENS.search(name))
        if name != "TTFAT" or summary.reasoning is not None
    ]
    return [head[k] for k in kept], [[row[k] for k in kept] for row in rows]


def has_percentile(n: int, key: str) -> bool:
    """Whether n samples have the percentile `p99`: one of them lies beyond it."""
    return n >= fewest_samples(PERCENTILES[key])


def between(interval: Interval | Percentile, unit: Unit) -> str:
    """`[95.9 ms, 100 ms]`; `[≥ 95.9 ms]` with one bound, "" without any."""
    return _bracketed(interval, lambda end: format_value(end, unit))


def duration_with_interval(percentile: Percentile) -> str:
    """`97.8 ms* [95.9, 100]`: the bounds have no unit where it is that of the value."""
    text = percentile_text(percentile, "s")
    if not math.isfinite(percentile.value):
        return text
    _, unit = duration_parts(percentile.value)

    def bound(end: float) -> str:
        number, own_unit = duration_parts(end)
        return number if own_unit == unit else format_duration(end)

    return f"{text} {_bracketed(percentile, bound)}".rstrip()


def _bracketed(interval: Interval | Percentile, text: Callable[[float], str]) -> str:
    low, high = interval.low, interval.high
    if low is not None and high is not None:
        return f"[{text(low)}, {text(high)}]"
    if low is not None:
        return f"[≥ {text(low)}]"
    return "" if high is None else f"[≤ {text(high)}]"


def rate_text(found: Summary | ClassSummary, has_achieved: bool = True) -> str:
    """`requested 10/s, offered 10.1/s, achieved 10.1/s`, with a note where a rate is n/a."""
    rates = {"requested": found.requested_rate_per_s, "offered": found.offered_rate_per_s}
    if has_achieved:
        rates["achieved"] = found.achieved_rate_per_s
    text = ", ".join(
        f"{word} {'n/a' if rate is None else format_value(rate, 'per_s')}"
        for word, rate in rates.items()
    )
    loop = found.closed_loop if isinstance(found, Summary) else None
    if loop is not None and loop.is_all_traffic:
        interval = between(loop.rate, "per_s")
        text += f" {interval}" if has_achieved and interval else ""
    return f"{text} ({found.rate_note})" if found.rate_note else text


def achieved_basis(summary: Summary) -> str:
    """The rates beside the achieved rate, and its interval in a closed loop."""
    loop, text = summary.closed_loop, rate_text(summary, has_achieved=False)
    if loop is None or not loop.is_all_traffic:
        return text
    return "; ".join(filter(None, (between(loop.rate, "per_s"), text)))


def in_flight_text(summary: Summary) -> str:
    """`in flight 3.6 on average, at most 9; 36.4 of 40 users thinking`."""
    found = summary.in_flight
    if found is None or math.isnan(found.mean):
        return ""
    text = f"in flight {format_number(found.mean)} on average, at most {format_count(found.max)}"
    if found.thinking is None:
        return text
    loop = summary.closed_loop
    users = "users" if loop is None else f"of {format_count(loop.users)} users"
    return f"{text}; {format_number(found.thinking)} {users} thinking"


def attainment_basis(share: Attainment, confidence: float) -> str:
    """`62 of 62 due; at least 95.3 % with 95 % confidence`."""
    basis = f"{format_count(share.met or 0)} of {format_count(share.due)} due"
    if share.bound is None or share.bound.value is None:
        return basis
    return f"{basis}; {share.bound.at_level('share', confidence)}"


def goodput_bound(found: Summary | ClassSummary, confidence: float) -> str:
    """The bound that an SLO on goodput is judged by; without such an SLO the two-sided interval."""
    for result in found.slo:
        if result.metric == "goodput" and result.bound and result.bound.value is not None:
            return result.bound.at_level("per_s", confidence)
    return between(found.goodput.requests_per_s, "per_s")


def _no_attainment(reason: str) -> TableCell:
    return TableCell("n/a", small=reason)


_CLASS_HEAD = ("class", "due", "offered", "attainment", "goodput")
_CLASS_PERCENTILES = (("ttft_s", "p50"), ("ttft_s", "p99"), ("tpot_s", "p99"))
_WITH_REASONING = (("ttft_s", "p99"), ("ttfat_s", "p50"), ("ttfat_s", "p99"), ("tpot_s", "p99"))
_WITHOUT_TOKENS = (("e2e_s", "p50"), ("e2e_s", "p99"))


def class_table(summary: Summary) -> tuple[list[str], list[list[TableCell]]]:
    """The head, and a row per class; no row where all traffic is of the same class."""
    latencies: Sequence[tuple[str, str]] = _CLASS_PERCENTILES
    if summary.results:
        latencies = _WITHOUT_TOKENS
    elif summary.reasoning is not None:
        latencies = _WITH_REASONING
    head = [*_CLASS_HEAD, *(f"{METRICS[name].title} {key}" for name, key in latencies), "verdict"]
    return head, [
        _class_row(name, found, summary.confidence, latencies)
        for name, found in summary.classes.items()
    ]


def _class_row(
    name: str, found: ClassSummary, confidence: float, latencies: Sequence[tuple[str, str]]
) -> list[TableCell]:
    path = f"classes.{name}"
    share, goodput = found.attainment, found.goodput.requests_per_s
    cells = [
        TableCell(name, title=f"tenant {found.tenant}, priority {found.priority}"),
        TableCell(format_count(found.counts["due"]), f"{path}.counts.due"),
        TableCell(
            "n/a"
            if found.offered_rate_per_s is None
            else format_value(found.offered_rate_per_s, "per_s"),
            f"{path}.offered_rate_per_s",
            "per_s",
            title=f"rate {rate_text(found)}",
        ),
        _no_attainment(share.reason)
        if share.reason
        else TableCell(
            format_value(share.value, "share"),
            f"{path}.attainment.value",
            "share",
            ""
            if share.bound is None or share.bound.value is None
            else share.bound.at_level("share", confidence),
        ),
        TableCell(
            format_value(goodput.value, "per_s"),
            f"{path}.goodput.requests_per_s.value",
            "per_s",
            goodput_bound(found, confidence),
        ),
    ]
    for metric, key in latencies:
        cells.append(_percentile_cell(found.metrics[metric], metric, key, f"{path}.", small=False))
    word = {"met": "✓ met", "missed": "✗ missed", "no_verdict": "no verdict"}[found.verdict]
    return [*cells, TableCell(word)]


TENANT_HEAD = (
    *("tenant", "due", "attainment", "TTFT p50", "TTFT p99"),
    *("tokens requested", "tokens served", "served share"),
)


def tenant_rows(summary: Summary) -> list[list[TableCell]]:
    """A row per tenant; none where all traffic is of the same tenant."""
    tenants = {} if summary.fairness is None else summary.fairness.tenants
    return [_tenant_row(name, found) for name, found in tenants.items()]


def _tenant_row(name: str, found: TenantShare) -> list[TableCell]:
    path = f"fairness.tenants.{name}"
    share = Interval(found.attainment, found.attainment_low, found.attainment_high)
    cells = [
        TableCell(name),
        TableCell(format_count(found.due), f"{path}.due"),
        _no_attainment(NO_LIMIT)
        if found.met is None
        else TableCell(
            format_value(share.value, "share"),
            f"{path}.attainment",
            "share",
            between(share, "share"),
        ),
    ]
    percentiles = {"ttft_p50": found.ttft_p50, "ttft_p99": found.ttft_p99}
    cells += [
        TableCell(percentile_text(percentile, "s"), f"{path}.{key}.value", "s")
        for key, percentile in percentiles.items()
    ]
    requested, served = found.asked_tokens_per_s, found.served_tokens_per_s
    cells += [
        TableCell(format_value(requested, "per_s"), f"{path}.asked_tokens_per_s", "per_s"),
        TableCell(format_value(served, "per_s"), f"{path}.served_tokens_per_s", "per_s"),
    ]
    return [*cells, TableCell(format_value(served / requested, "share"))]


def fairness_text(summary: Summary) -> str:
    """A sentence with Jain's index; "" where all traffic is of the same tenant."""
    found = summary.fairness
    if found is None:
        return ""
    return (
        f"Jain's fairness index over {len(found.tenants)} tenants (1: all are treated equally):"
        f" {found.jain_of_served:.3f} by tokens served, {found.jain_of_share:.3f} by the served"
        " share of the requested tokens"
    )


METRIC_HEAD = ("metric", "n", "mean", *PERCENTILES, "max")


def metric_rows(summary: Summary, names: Sequence[str]) -> list[list[TableCell]]:
    """Cells: name, n, mean, percentiles with confidence interval and `*`, maximum."""
    rows = []
    for name in shown(summary, names):
        found, unit = summary.metrics[name], METRICS[name].unit
        path = f"metrics.{name}"
        rows.append(
            [
                _metric_name(summary, name),
                TableCell(format_count(found.n), f"{path}.n"),
                TableCell(format_value(found.mean, unit), f"{path}.mean", unit),
                *_percentile_cells(found, name, "percentiles"),
                TableCell(format_value(found.max, unit), f"{path}.max", unit),
            ]
        )
    return rows


def failure_rows(summary: Summary, names: Sequence[str]) -> list[list[TableCell]]:
    """Percentiles with every failure as +inf, of the metrics for which they differ."""
    rows = []
    for name in shown(summary, names):
        found = summary.metrics[name]
        if found.with_failures and found.with_failures != found.percentiles:
            rows.append(
                [_metric_name(summary, name), *_percentile_cells(found, name, "with_failures")]
            )
    return rows


def _metric_name(summary: Summary, name: str) -> TableCell:
    return TableCell(marked_title(summary, name))


def marked_title(summary: Summary, name: str) -> str:
    """The title of a metric, with `†` if its values are doubtful (`Summary.marks`)."""
    return f"{METRICS[name].title} †" if name in summary.marks else METRICS[name].title


def mark_notes(summary: Summary) -> list[str]:
    """What `†` means: a line per reason, with the metrics that it applies to."""
    titles: dict[str, list[str]] = {}
    for name, reason in summary.marks.items():
        titles.setdefault(reason, []).append(METRICS[name].title)
    return [f"† {', '.join(names)}: {reason}" for reason, names in titles.items()]


def _percentile_cells(found: Distribution, name: str, view: str) -> list[TableCell]:
    return [_percentile_cell(found, name, key, view=view) for key in found.percentiles]


def _percentile_cell(
    found: Distribution,
    name: str,
    key: str,
    path: str = "",
    view: str = "percentiles",
    small: bool = True,
) -> TableCell:
    """A percentile with its interval; `–` where the samples are too few to have it."""
    unit = METRICS[name].unit
    percentile = (found.percentiles if view == "percentiles" else found.with_failures)[key]
    if not has_percentile(found.n, key) and not math.isinf(percentile.value):
        needed = format_count(fewest_samples(PERCENTILES[key]))
        return TableCell("–", title=f"{key} needs at least {needed} samples")
    shown = small and math.isfinite(percentile.value)
    return TableCell(
        percentile_text(percentile, unit),
        f"{path}metrics.{name}.{view}.{key}.value",
        unit,
        small=between(percentile, unit) if shown else "",
    )


def percentile_text(percentile: Percentile, unit: Unit) -> str:
    """`431 ms`, or `431 ms*` where fewer than ten samples lie beyond the percentile."""
    text = format_value(percentile.value, unit)
    return f"{text}*" if percentile.few and math.isfinite(percentile.value) else text


def _latency_tile(summary: Summary, metric: str) -> tuple[str, TableCell]:
    """The 99th percentile of a latency, or the highest that its samples have, against its limit:
    that of an SLO on this percentile, else that of each request."""
    found = summary.metrics[metric]
    key = next((k for k in ("p99", "p95", "p90") if has_percentile(found.n, k)), "p50")
    shown, whole = found.percentiles[key], found.with_failures.get(key)
    limits = {
        (r.scope, r.slo.quantile): r.limit
        for r in summary.slo
        if r.metric == metric and math.isfinite(r.limit)
    }
    limit_s = limits.get(("run", PERCENTILES[key]), limits.get(("request", None)))
    cell = TableCell(
        percentile_text(shown, "s"),
        f"metrics.{metric}.percentiles.{key}.value",
        "s",
        _against_limit(
            shown.value if whole is None else whole.value, limit_s, summary.validity.trusted
        ),
    )
    return f"{key} {marked_title(summary, metric)}", cell


def _against_limit(value_s: float, limit_s: float | None, is_trusted: bool) -> str:
    """`limit 500 ms, headroom 80 %`; the value has failures as infinite. The limit alone where the
    measurement is not to be trusted."""
    if limit_s is None:
        return "no limit in the SLOs"
    limit = f"limit {format_value(limit_s, 's')}"
    if math.isnan(value_s) or not is_trusted:
        return limit
    if math.isinf(value_s):
        return f"{limit}, exceeded: ∞ with unanswered requests"
    share = value_s / limit_s - 1
    word = "exceeded by" if share > 0 else "headroom"
    return f"{limit}, {word} {format_number(100 * abs(share))} %"


_TILES = ("ttft_s", "ttfat_s", "tpot_s")


def tiles(summary: Summary) -> list[tuple[str, TableCell]]:
    """The headline numbers: (name, cell with the number and its context)."""
    goodput, share = summary.goodput.requests_per_s, summary.attainment
    counts = summary.counts
    late = f", {format_count(counts['unfinished'])} unfinished" if counts["unfinished"] else ""
    return [
        *(_latency_tile(summary, name) for name in main_metrics(summary) if name in _TILES),
        *([_latency_tile(summary, "e2e_s")] if summary.results else []),
        (
            "Goodput",
            TableCell(
                format_value(goodput.value, "per_s"),
                "goodput.requests_per_s.value",
                "per_s",
                goodput_bound(summary, summary.confidence),
            ),
        ),
        (
            "SLO attainment",
            _no_attainment(share.reason)
            if share.reason
            else TableCell(
                format_value(share.value, "share"),
                "attainment.value",
                "share",
                attainment_basis(share, summary.confidence),
            ),
        ),
        (
            "Achieved rate",
            TableCell(
                format_value(summary.achieved_rate_per_s, "per_s"),
                "achieved_rate_per_s",
                "per_s",
                achieved_basis(summary),
            ),
        ),
        _throughput_tile(summary),
        (
            "Failed",
            TableCell(
                format_count(counts["failed"]),
                "counts.failed",
                "count",
                f"of {format_count(counts['due'])} due{late}",
            ),
        ),
    ]


def _throughput_tile(summary: Summary) -> tuple[str, TableCell]:
    """Output tokens per second, or the results of answers without tokens."""
    name = "results_per_s" if summary.results else "output_tokens_per_s"
    of_input = format_value(summary.throughput.input_tokens_per_s, "per_s")
    context = f"{of_input} input tokens" if summary.results else f"{of_input} input"
    if summary.reasoning is not None:
        context = f"{summary.reasoning.text}; {context}"
    cell = TableCell(
        format_value(getattr(summary.throughput, name), "per_s"),
        f"throughput.{name}",
        "per_s",
        context,
    )
    return summary.results.capitalize() or "Output tokens", cell


def throughput_text(summary: Summary) -> str:
    """`94.2 output tokens/s`, or `120 vectors/s, 6 400 input tokens/s`."""
    rates = summary.throughput
    if not summary.results:
        text = f"{format_value(rates.output_tokens_per_s, 'per_s')[:-2]} output tokens/s"
        return text if summary.reasoning is None else f"{text}, {summary.reasoning.text}"
    results, tokens = (
        format_value(value, "per_s")[:-2]
        for value in (rates.results_per_s, rates.input_tokens_per_s)
    )
    return f"{results} {summary.results}/s, {tokens} input tokens/s"


def checks_text(summary: Summary) -> str:
    """`26 of 28 fine, 2 not`: the validity checks, those of unknown result left out."""
    results = [check.ok for check in summary.validity.checks if check.ok is not None]
    n_bad = results.count(False)
    return f"{results.count(True)} of {len(results)} fine{f', {n_bad} not' if n_bad else ''}"


def counts_text(summary: Summary) -> str:
    """`62 due, 0 failed`."""
    due, failed = (format_count(summary.counts[key]) for key in ("due", "failed"))
    return f"{due} due, {failed} failed"


BACKEND_HEAD = ("address", "requests", "share", "ok", "output tokens", "median TTFT from send")


def backend_rows(summary: Summary) -> list[list[TableCell]]:
    """A row per server address; none where there is only a single address."""
    found = summary.backends if len(summary.backends) > 1 else ()
    total = sum(backend.requests for backend in found)
    return [
        [
            TableCell(backend.address),
            TableCell(format_count(backend.requests), f"backends.{k}.requests"),
            TableCell(format_value(backend.requests / total, "share")),
            TableCell(format_count(backend.ok), f"backends.{k}.ok"),
            TableCell(format_count(backend.output_tokens), f"backends.{k}.output_tokens"),
            TableCell(
                format_value(backend.ttft_from_send_s, "s"), f"backends.{k}.ttft_from_send_s", "s"
            ),
        ]
        for k, backend in enumerate(found)
    ]


STIMULUS_HEAD = ("arrivals", "scheduled", "sent")
LENGTH_HEAD = ("tokens", "n", "mean requested", "mean received", "differ", "largest difference")


def stimulus_rows(summary: Summary) -> list[list[TableCell]]:
    """Scheduled and sent requests: their numbers, their rates and the patterns of their gaps."""
    found = summary.stimulus
    if found is None:
        return []
    sides = (("scheduled", found.scheduled), ("sent", found.sent))
    counts = [TableCell(format_count(side.n), f"stimulus.{of}.n") for of, side in sides]
    rates = [
        TableCell(format_value(side.rate_per_s, "per_s"), f"stimulus.{of}.rate_per_s", "per_s")
        for of, side in sides
    ]
    patterns = (
        ("gap cv", "gap_cv"),
        ("lag-1 correlation of gaps", "gap_lag1"),
        ("dispersion of counts", "dispersion"),
    )
    rows = [[TableCell("requests"), *counts]]
    if summary.offered_rate_per_s is not None:  # a closed loop schedules only the first requests
        rows.append([TableCell("rate"), *rates])
    for word, name in patterns:
        figures = (TableCell(_figure(getattr(side, name))) for _, side in sides)
        rows.append([TableCell(word), *figures])
    return rows


def length_rows(summary: Summary) -> list[list[TableCell]]:
    """Prompt and answer lengths, requested and received."""
    found = summary.stimulus
    if found is None:
        return []
    rows = []
    sides = (
        ("input", "input_tokens"),
        ("output", "output_tokens"),
        ("output, streamed", "streamed_tokens"),
    )
    for word, name in sides:
        side, path = getattr(found, name), f"stimulus.{name}"
        if side is None:
            continue
        rows.append(
            [
                TableCell(word),
                TableCell(format_count(side.n), f"{path}.n"),
                TableCell(_figure(side.asked_mean)),
                TableCell(_figure(side.got_mean)),
                TableCell(format_count(side.differ), f"{path}.differ"),
                TableCell(format_count(side.most_off), f"{path}.most_off"),
            ]
        )
    return rows


def _figure(value: float | None) -> str:
    """A number of three digits; 0 for rounding errors."""
    if value is None or not math.isfinite(value):
        return "–"
    return "0" if abs(value) < 1e-6 else format_number(value)


def count_rows(summary: Summary) -> list[tuple[str, TableCell]]:
    """Numbers of requests: scheduled, warm-up, due, not due, and the due requests by status
    (without zeros), HTTP errors by HTTP status."""
    names = {"scheduled": "scheduled", "warmup": "warm-up", "start": "start of the users"}
    names |= {"due": "due", "withdrawn": "cancelled on purpose", "not_due": "never due"}
    rare = ("start", "withdrawn")
    rows = [(names[key], key) for key in names if summary.counts[key] or key not in rare]
    by_http_status = [(f"HTTP {status}", status) for status in summary.http_statuses]
    cells = [
        (word, TableCell(format_count(summary.counts[key]), f"counts.{key}")) for word, key in rows
    ]
    for status in Status:
        if status is Status.http_error and by_http_status:
            cells += [
                (word, TableCell(format_count(summary.http_statuses[key]), f"http_statuses.{key}"))
                for word, key in by_http_status
            ]
        elif n := summary.counts[status.name]:
            name = "unfinished" if status is Status.cancelled else status.name
            cells.append((name.replace("_", " "), TableCell(format_count(n), f"counts.{name}")))
    return cells
