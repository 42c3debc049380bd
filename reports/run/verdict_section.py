"""What was promised and whether it was kept: the verdict, and a row for each promise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from loadgen.measure.catalog import METRICS
from loadgen.measure.statistics.stats import Interval
from loadgen.measure.summary import Summary
from loadgen.measure.verdict import SloResult, sentence
from loadgen.measure.wording import format_count, format_value
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


_MANY_FAILURES = 0.01  # of the due requests
_CLIENT_CHECKS = (
    "lateness",
    "event loop",
    "read backlog",
    "client CPU",
    "run delay",
    "throttling",
    "shared cores",
)


@dataclass(frozen=True, slots=True)
class NextStep:
    """One thing to do, and the command that does it ("" where none does)."""

    text: str
    command: str = ""


def is_inconclusive(summary: Summary) -> bool:
    """Whether the run can be believed and its verdict only lacks samples: a promise is kept or
    missed by the estimate, and the asked confidence leaves it open."""
    if summary.verdict != "no_verdict" or not summary.validity.trusted:
        return False
    unsettled = [r for r in promised(summary) if r.met is not None and r.proven is False]
    told = {f"{sentence(result, summary.confidence)}." for result in unsettled}
    return bool(summary.reasons) and all(
        reason in told or reason.partition(": ")[2] in told for reason in summary.reasons
    )


def promised(summary: Summary) -> list[SloResult]:
    """The promises about the run, those of its classes included."""
    every = [*summary.slo, *(r for one in summary.classes.values() for r in one.slo)]
    return [result for result in every if result.scope == "run"]


def next_steps(summary: Summary, scenario: str, target: str, place: str) -> list[NextStep]:
    """What follows from a verdict. `scenario` and `target` are words of a command line, '' where
    there are none that another run could be asked for with; `place` is the run's own."""
    if not summary.validity.trusted:
        return _repair(summary)
    if summary.verdict == "no_verdict" and not is_inconclusive(summary):
        return _nothing_known(summary, place)
    steps = [*_failures(summary), *_longer(summary)]
    if summary.verdict == "missed":
        steps += _missed(summary)
    if scenario and summary.verdict != "no_verdict":
        more = "" if summary.verdict == "missed" else " more"
        command = f"slobench capacity {scenario} {target}".rstrip()
        steps.append(NextStep(f"Find how much{more} it can take:", command))
    return steps


def _repair(summary: Summary) -> list[NextStep]:
    failed = {c.name for c in summary.validity.checks if c.is_gate and c.ok is False}
    steps = []
    if failed & set(_CLIENT_CHECKS):
        steps.append(
            NextStep(
                "The load generator was the bottleneck, not the server: give it a machine of its"
                " own or more processes (--workers), or ask for a lower rate. What this machine can"
                " measure truly:",
                "slobench doctor",
            )
        )
    if failed - set(_CLIENT_CHECKS):
        steps.append(NextStep("Read what the failed checks below found, and measure again."))
    return steps


def _nothing_known(summary: Summary, place: str) -> list[NextStep]:
    if summary.exit_code == 0:
        return [
            NextStep(
                "State a promise, e.g. --slo 'p99(ttft) <= 500ms'; this run can be judged by it"
                " without measuring again:",
                f"slobench rescore {place} --slo 'p99(ttft) <= 500ms'",
            )
        ]
    return [NextStep("See below how requests failed and what the checks found, and measure again.")]


def _failures(summary: Summary) -> list[NextStep]:
    due, ok = summary.counts["due"], summary.counts["ok"]
    if due - ok <= _MANY_FAILURES * due:
        return []
    failed = f"{format_count(due - ok)} of {format_count(due)} requests failed"
    return [NextStep(f"{failed}: look at how they failed before anything else.")]


def _longer(summary: Summary) -> list[NextStep]:
    """How long a run would settle what this one leaves open."""
    needed = [r.n_needed for r in promised(summary) if r.proven is False and r.n_needed]
    rate = summary.offered_rate_per_s
    if not needed or rate <= 0:
        return []
    length_s = max(needed) / rate
    return [
        NextStep(
            f"Measure for about {format_value(length_s, 's')} (n ≈ {format_count(max(needed))}) "
            "to prove what"
            f" this run leaves open: set phases.measure to {_whole_minutes(length_s)}."
        )
    ]


def _whole_minutes(length_s: float) -> str:
    return f"{-int(-length_s // 60)}m"


def _missed(summary: Summary) -> list[NextStep]:
    """The part of a request that grew most among the slowest, where the run could be split."""
    split = {} if summary.drivers is None else summary.drivers.split
    if len(split) < 2:
        return []
    groups = list(split.values())
    parts = {
        "waited in the client: raise its connections or its concurrency cap": "client_queue_s",
        "waited in the server's queue: it needs more capacity, or less traffic": "server_queue_s",
        "waited for the first token: shorten prompts, or speed up or split prefills": "prefill_s",
        "decoded: shorten answers, or run fewer of them at once": "decode_s",
    }
    grown = {
        word: (getattr(groups[-1], part) or 0.0) - (getattr(groups[0], part) or 0.0)
        for word, part in parts.items()
    }
    most = max(grown, key=lambda word: grown[word])
    return [NextStep(f"The slowest requests mostly {most}.")] if grown[most] > 0 else []
