"""What was promised and whether it was kept: the verdict, and a row for each promise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from loadgen.measure.catalog import METRICS
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.summary import Summary
from loadgen.measure.verdict import SloResult
from loadgen.measure.wording import format_count, format_value
from reports.run.advice import is_inconclusive
from reports.run.tables import TableCell, between

Tone = Literal["met", "missed", "unknown", "invalid"]


@dataclass(frozen=True, slots=True)
class Banner:
    """The verdict that nobody can overlook."""

    tone: Tone
    word: str
    sure: str
    reasons: tuple[str, ...]


def banner(summary: Summary) -> Banner:
    """The verdict's word, how sure it is, and why."""
    level = f"{100 * summary.confidence:g} %"
    if not summary.validity.trusted:
        return Banner(
            "invalid", "INVALID: NO VERDICT", "the run cannot be trusted", summary.reasons
        )
    if is_inconclusive(summary):
        unsettled = f"these samples do not settle it at {level}"
        return Banner("unknown", "INCONCLUSIVE", unsettled, summary.reasons)
    if summary.verdict == "no_verdict":
        return Banner("unknown", "NO VERDICT", "", summary.reasons)
    word = "MET" if summary.verdict == "met" else "MISSED"
    every = [*summary.slo, *(r for one in summary.classes.values() for r in one.slo)]
    judged = [r for r in every if r.met is (summary.verdict == "met")]
    sure = [bool(r.proven) for r in judged if r.proven is not None]
    is_sure = bool(sure) and (all(sure) if summary.verdict == "met" else any(sure))
    text = f"proven at {level}" if is_sure else f"by the estimate, not proven at {level}"
    return Banner("met" if word == "MET" else "missed", word, text, summary.reasons)


def slo_rows(summary: Summary) -> list[list[TableCell]]:
    """Promise, what was measured, the bound on it, n, verdict, proof."""
    return [_slo_row(result, k) for k, result in enumerate(summary.slo)]


def _slo_row(result: SloResult, k: int) -> list[TableCell]:
    path = f"slo.{k}"
    text = f"{result.shown} (implied)" if result.is_implied else result.shown
    value = TableCell(format_value(result.value, result.unit), f"{path}.value", result.unit)
    n = TableCell(format_count(result.n), f"{path}.n")
    if result.scope == "request":
        kept = TableCell(f"{value.text} kept it", value.path, result.unit)
        both = Interval(result.value, result.low, result.high)
        return [
            TableCell(text), kept, TableCell(between(both, result.unit)), n,
            TableCell("–", small="through attainment"), TableCell("–"),
        ]  # fmt: skip
    verdict = {True: "✓ kept", False: "✗ missed", None: "? no sample"}[result.met]
    return [TableCell(text), value, _bound(result, path), n, TableCell(verdict), _proof(result)]


def _bound(result: SloResult, path: str) -> TableCell:
    """The one-sided bound that decides: the worst plausible value of a kept promise, or the best of
    a missed one."""
    is_upper = (METRICS[result.metric].direction == "lower") is (result.met is not False)
    end, name, sign = (
        (result.high, "high", "at most") if is_upper else (result.low, "low", "at least")
    )
    if result.met is None or (result.low is None and result.high is None):
        return TableCell("–")
    if end is None:
        return TableCell("open", small="n is too small")
    if math.isinf(end):
        return TableCell("failures")
    return TableCell(f"{sign} {format_value(end, result.unit)}", f"{path}.{name}", result.unit)


def _proof(result: SloResult) -> TableCell:
    if result.proven is None:
        return TableCell("–")
    if result.proven:
        return TableCell("yes")
    if result.n_needed is None:
        return TableCell("no")
    return TableCell("no", small=f"needs n ≈ {format_count(result.n_needed)}")
