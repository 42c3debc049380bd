"""Verdict of a run, a row for each SLO, and the next steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from loadgen.measure.catalog import METRICS
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.summary import Summary
from loadgen.measure.verdict import SloResult, error_note, sentence
from loadgen.measure.wording import format_count, format_value
from reports.run.tables import TableCell, between

Tone = Literal["met", "missed", "unknown", "invalid"]


@dataclass(frozen=True, slots=True)
class Banner:
    """The verdict at the top of the page: its colour, its word and its certainty."""

    tone: Tone
    word: str
    sure: str
    reasons: tuple[str, ...]


def banner(summary: Summary) -> Banner:
    """The verdict of the run, its certainty and its reasons."""
    level = f"{100 * summary.confidence:g} %"
    if not summary.validity.trusted:
        return Banner(
            "invalid", "INVALID: NO VERDICT", "the measurement cannot be trusted", summary.reasons
        )
    if is_inconclusive(summary):
        open_ = f"too few requests for {level} confidence"
        return Banner("unknown", "INCONCLUSIVE", open_, summary.reasons)
    if summary.verdict == "no_verdict":
        return Banner("unknown", "NO VERDICT", "", summary.reasons)
    word = "MET" if summary.verdict == "met" else "MISSED"
    judged = [r for r in _all_slos(summary) if r.met is (summary.verdict == "met")]
    sure = [bool(r.proven) for r in judged if r.proven is not None]
    is_sure = bool(sure) and (all(sure) if summary.verdict == "met" else any(sure))
    text = f"with {level} confidence" if is_sure else f"in this run; not certain at {level}"
    return Banner("met" if word == "MET" else "missed", word, text, summary.reasons)


def slo_rows(summary: Summary) -> list[list[TableCell]]:
    """Cells per SLO: SLO, measured value, confidence bound, n, verdict, proven."""
    is_valid = summary.validity.trusted
    return [_slo_row(result, k, is_valid) for k, result in enumerate(summary.slo)]


def _slo_row(result: SloResult, k: int, is_valid: bool) -> list[TableCell]:
    path = f"slo.{k}"
    text = f"{result.shown} (implied)" if result.is_implied else result.shown
    error = error_note(result) if result.has_shown_error and result.scope == "run" else ""
    value = TableCell(format_value(result.value, result.unit), f"{path}.value", result.unit, error)
    n = TableCell(format_count(result.n), f"{path}.n")
    if result.scope == "request":
        share = TableCell(f"{value.text} of requests", value.path, result.unit)
        both = Interval(result.value, result.low, result.high)
        return [
            TableCell(text), share, TableCell(between(both, result.unit)), n,
            TableCell("–", small="counted in attainment"), TableCell("–"),
        ]  # fmt: skip
    verdict = {True: "✓ met", False: "✗ missed", None: "? no sample"}[result.met]
    if not is_valid:
        verdict = "– run INVALID"
    return [TableCell(text), value, _bound(result, path), n, TableCell(verdict), _proof(result)]


def _bound(result: SloResult, path: str) -> TableCell:
    """The one-sided confidence bound that decides: the worst plausible value of an SLO that was
    met, the best plausible value of an SLO that was missed."""
    is_upper = (METRICS[result.metric].direction == "lower") is (result.met is not False)
    bound, name, sign = (
        (result.high, "high", "at most") if is_upper else (result.low, "low", "at least")
    )
    if result.met is None or (result.low is None and result.high is None):
        return TableCell("–")
    if bound is None:
        return TableCell("open", small="too few samples")
    if math.isinf(bound):
        return TableCell("failures")
    return TableCell(f"{sign} {format_value(bound, result.unit)}", f"{path}.{name}", result.unit)


def _proof(result: SloResult) -> TableCell:
    if result.proven is None or result.proven or result.n_needed is None:
        return TableCell({None: "–", True: "yes", False: "no"}[result.proven])
    return TableCell("no", small=f"needs n ≈ {format_count(result.n_needed)}")


_MANY_FAILURES = 0.01  # of the due requests


@dataclass(frozen=True, slots=True)
class NextStep:
    """A step for the reader, and the command that does it ("" for none)."""

    text: str
    command: str = ""


def is_inconclusive(summary: Summary) -> bool:
    """Whether a valid run lacks only samples for a verdict: an SLO was met or missed in the run,
    but not with the required confidence."""
    if summary.verdict != "no_verdict" or not summary.validity.trusted:
        return False
    open_ = [r for r in run_slos(summary) if r.met is not None and r.proven is False]
    sentences = {f"{sentence(result, summary.confidence)}." for result in open_}
    return bool(summary.reasons) and all(
        reason in sentences or reason.partition(": ")[2] in sentences for reason in summary.reasons
    )


def run_slos(summary: Summary) -> list[SloResult]:
    """The SLOs on the run as a whole, those of its classes included."""
    return [result for result in _all_slos(summary) if result.scope == "run"]


def _all_slos(summary: Summary) -> list[SloResult]:
    return [*summary.slo, *(r for of_class in summary.classes.values() for r in of_class.slo)]


def next_steps(summary: Summary, scenario: str, target: str, place: str) -> list[NextStep]:
    """The steps that follow from a verdict. `scenario` and `target` are words for the command line
    of another run, '' for none; `place` is the directory of this run."""
    if not summary.validity.trusted:
        return _repair(summary)
    if summary.verdict == "no_verdict" and not is_inconclusive(summary):
        return _no_verdict(summary, place)
    steps = [*_failures(summary), *_longer(summary)]
    if summary.verdict == "missed":
        steps += _missed(summary)
    if scenario and summary.verdict != "no_verdict":
        more = "" if summary.verdict == "missed" else " more"
        command = f"slobench capacity {scenario} {target}".rstrip()
        steps.append(NextStep(f"Find how much{more} load meets the SLO:", command))
    return steps


def _repair(summary: Summary) -> list[NextStep]:
    failed = [c for c in summary.validity.checks if c.is_gate and c.ok is False]
    remedies = dict.fromkeys(check.remedy for check in failed if check.remedy)
    steps = [
        NextStep(
            f"The load generator, not the server, was the limit: {remedy}. To check how much load "
            "this machine can measure accurately:",
            "slobench doctor",
        )
        for remedy in remedies
    ]
    if not all(check.remedy for check in failed):
        steps.append(
            NextStep("Fix the cause of the failed validity checks below, and measure again.")
        )
    return steps


def _no_verdict(summary: Summary, place: str) -> list[NextStep]:
    if summary.exit_code == 0:
        return [
            NextStep(
                "State an SLO, e.g. --slo 'p99(ttft) <= 500ms'; to check this run against it"
                " without measuring again:",
                f"slobench rescore {place} --slo 'p99(ttft) <= 500ms'",
            )
        ]
    text = "Fix the causes of failed requests and failed checks below, and measure again."
    return [NextStep(text)]


def _failures(summary: Summary) -> list[NextStep]:
    due, ok = summary.counts["due"], summary.counts["ok"]
    if due - ok <= _MANY_FAILURES * due:
        return []
    failed = f"{format_count(due - ok)} of {format_count(due)} requests failed"
    return [NextStep(f"{failed}: see the section “How requests failed” first.")]


def _longer(summary: Summary) -> list[NextStep]:
    """The length of a run that would make the open SLOs certain."""
    needed = [r.n_needed for r in run_slos(summary) if r.proven is False and r.n_needed]
    rate = summary.offered_rate_per_s
    if not needed or rate <= 0:
        return []
    length_s = max(needed) / rate
    return [
        NextStep(
            f"Measure for {_whole_minutes(length_s)} (phases.measure) to reach"
            f" {100 * summary.confidence:g} % confidence: about {format_count(max(needed))}"
            f" requests are needed, which take {format_value(length_s, 's')}."
        )
    ]


def _whole_minutes(length_s: float) -> str:
    return f"{-int(-length_s // 60)}m"


def _missed(summary: Summary) -> list[NextStep]:
    """The part of a request that grew most among the slowest requests, where it is known."""
    split = {} if summary.drivers is None else summary.drivers.split
    if len(split) < 2:
        return []
    groups = list(split.values())
    parts = {
        "waited in the load generator: raise connections or concurrency cap": "client_queue_s",
        "waited in the server's queue: add capacity, or send less traffic": "server_queue_s",
        "waited for the first token: shorten prompts, or speed up or split prefills": "prefill_s",
        "decoded: shorten answers, or run fewer of them at once": "decode_s",
    }
    grown = {
        word: (getattr(groups[-1], part) or 0.0) - (getattr(groups[0], part) or 0.0)
        for word, part in parts.items()
    }
    most = max(grown, key=lambda word: grown[word])
    return [NextStep(f"The slowest requests mostly {most}.")] if grown[most] > 0 else []
