"""The statistics that `locust --csv NAME` writes to `NAME_stats.csv`: a summary, without requests.

Its response times are those of whole answers, from the send, of failed requests too. Percentiles
are taken from response times that are rounded to two digits, in ms.

Source: Locust 2.47.0, stats.py (`StatsCSV`, `StatsEntry`).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.errors import UsageError
from loadgen.measure.slo import Slo, parse_slo

TOOL = "Locust"
_ALL = "Aggregated"
_KEYS = ("Name", "Request Count", "Failure Count", "Average Response Time", "50%", "100%")
_FEW_FAILED = 0.01  # of the requests: more say too little about the successful
_RESPONSE = ("e2e_s", "e2e_from_send_s")
Verdict = Literal["met", "missed", "no_verdict"]


@dataclass(frozen=True, slots=True)
class LocustStats:
    """The row of all requests: numbers by column, response times in ms."""

    name: str
    numbers: Mapping[str, float]

    @property
    def n(self) -> int:
        return int(self.numbers["Request Count"])


@dataclass(frozen=True, slots=True)
class SummarySlo:
    """An SLO against a number of a summary; seconds or a share. The true number is between `low`
    and `high`, as far as rounding goes. `met` is None for the reason `note`."""

    text: str
    value: float
    low: float
    high: float
    met: bool | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class JudgedSummary:
    """The verdict of a result that has no requests, so that its certainty is not known."""

    name: str
    tool: str
    verdict: Verdict
    exit_code: int
    n: int
    slo: tuple[SummarySlo, ...]
    kind: str = "summary_only"

    @property
    def text(self) -> str:
        words = {"met": "MET", "missed": "MISSED", "no_verdict": "NO VERDICT"}
        parts = [f"{slo.text}: {_shown(slo)}{slo.note and ', ' + slo.note}" for slo in self.slo]
        head = f"{self.name}: {words[self.verdict]}: " if parts else f"{self.name}: "
        parts.append(
            f"n = {self.n}; how sure that is cannot be known: a summary of {self.tool}, without "
            "requests"
        )
        return head + "; ".join(parts)


def _shown(slo: SummarySlo) -> str:
    return f"{100 * slo.value:.3g} %" if slo.text.startswith("error") else f"{1e3 * slo.value:g} ms"


def read_locust(text: str, where: str) -> LocustStats:
    """The statistics of a file. Raises UsageError with file and line for another or a damaged
    file."""
    rows = list(csv.reader(io.StringIO(text)))
    header = rows[0] if rows else []
    absent = [key for key in _KEYS if key not in header]
    if absent:
        raise UsageError(f"{where}:1: no column {absent[0]}: not the NAME_stats.csv of Locust")
    if not text.endswith("\n"):
        raise UsageError(f"{where}:{len(rows)}: the file ends within a row")
    at = header.index("Name")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise UsageError(f"{where}:{number}: {len(row)} values, but {len(header)} columns")
        if row[at] == _ALL:
            cells = {key: cell for key, cell in zip(header, row, strict=True) if key not in
                     ("Type", "Name")}  # fmt: skip
            numbers = {key: _number(cell, f"{where}:{number}: {key}") for key, cell in
                       cells.items()}  # fmt: skip
            return LocustStats(where, numbers)
    raise UsageError(f"{where}: no row {_ALL}: the file is damaged")


def _number(cell: str, where: str) -> float:
    """A number; NaN where Locust wrote none, as without a request."""
    if cell == "N/A":
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        raise UsageError(f"{where}: expected a number, found {cell!r}") from None
    if not 0 <= value < math.inf:
        raise UsageError(f"{where}: expected a number of 0 or more, found {cell}")
    return value


def judge_locust(stats: LocustStats, name: str, slos: Sequence[str]) -> JudgedSummary:
    """Each SLO against its number. Raises UsageError for an SLO whose number is not in the file."""
    results = tuple(_result(stats, parse_slo(text)) for text in slos)
    met = {result.met for result in results}
    verdict: Verdict = "met"
    if False in met:
        verdict = "missed"
    elif None in met:
        verdict = "no_verdict"
    code = {"met": 0, "missed": 1, "no_verdict": 3}[verdict]
    return JudgedSummary(name, TOOL, verdict, code, stats.n, results)


def _result(stats: LocustStats, slo: Slo) -> SummarySlo:
    value, half = _value(stats, slo)
    low, high = max(0.0, value - half), value + half
    failed = int(stats.numbers["Failure Count"])
    if not math.isfinite(value):
        return SummarySlo(slo.text, value, low, high, None, "no request")
    if slo.holds(low) != slo.holds(high):
        note = "too close to the limit for its rounding"
        return SummarySlo(slo.text, value, low, high, None, note)
    if slo.holds(value) and slo.metric in _RESPONSE and failed > _FEW_FAILED * stats.n:
        note = f"but {failed} of {stats.n} requests failed, whose times count there"
        return SummarySlo(slo.text, value, low, high, None, note)
    return SummarySlo(slo.text, value, low, high, slo.holds(value))


def _value(stats: LocustStats, slo: Slo) -> tuple[float, float]:
    """The number of an SLO, and half the width of its rounding."""
    numbers = stats.numbers
    if slo.metric == "error_rate" and slo.scope == "run":
        n = numbers["Request Count"]
        return (numbers["Failure Count"] / n if n else math.nan), 0.0
    if slo.metric in _RESPONSE and slo.scope == "run":
        if slo.aggregate == "mean":
            return numbers["Average Response Time"] / 1e3, 0.0
        if slo.aggregate == "max":
            return numbers["Max Response Time"] / 1e3, 0.0
        key = "" if slo.quantile is None else f"{100 * slo.quantile:g}%"
        if key in numbers:
            return numbers[key] / 1e3, _half_ms(numbers[key]) / 1e3
    known = ", ".join(f"p{key[:-1]}(e2e)" for key in numbers if key.endswith("%") and key != "100%")
    raise UsageError(
        f"{stats.name}: {slo.text}: not in the file, which has {known}, mean(e2e), max(e2e) and "
        "error_rate"
    )


def _half_ms(value_ms: float) -> float:
    """Half the width of the interval of response times that Locust rounds to this value."""
    digits = 0 if not value_ms >= 100 else math.floor(math.log10(value_ms)) - 1
    return 0.5 * 10.0 ** min(digits, 3)
