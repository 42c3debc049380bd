"""Verdict of a run, a row for each SLO, and the next steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadgen.measure.catalog import METRICS
from loadgen.measure.slo_result import SloResult
from loadgen.measure.statistics.percentiles import planned_for
from loadgen.measure.summary import ClassSummary, Summary
from loadgen.measure.verdict import error_note, is_dependent
from loadgen.measure.wording import format_count, format_value
from reports.ending import NextStep, Tone
from reports.run.tables import TableCell


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
    text = {
        "proven": f"with {level} confidence",
        "clear": "clear of the limit" if summary.verdict == "met" else "by far",
        "too_close": "in this run; too close to tell at this rate",
    }.get(summary.certainty or "", f"in this run; not certain at {level}")
    is_stated = any(r.certainty and not r.is_implied for r in run_slos(summary))
    if not is_stated and summary.certainty in ("in_run", "too_close"):
        text = ""  # of the default share alone, which nobody stated
    if summary.certainty != "proven" and summary.is_overloaded:
        cause = "the server was overloaded"
        text = f"{text}; {cause}" if summary.certainty == "clear" else cause
    return Banner("met" if word == "MET" else "missed", word, text, summary.reasons)


def headline(summary: Summary) -> str:
    """The result as a sentence: how many requests met the limits, and each other SLO's value with
    its limit. "" for an invalid run, and without a value to show."""
    if not summary.validity.trusted or not summary.counts["due"]:
        return ""
    parts = [_share_facts(summary), *map(_against_limit, run_slos(summary))]
    shown = [part for part in parts if part]
    return f"{'; '.join(shown)}." if shown else ""


def share_met(summary: Summary) -> str:
    """`62 of 62 requests met TTFT ≤ 1 s`; "" without a limit that counts for attainment."""
    share = summary.attainment
    limits = [r for r in _all_slos(summary) if r.scope == "request"]
    if share.met is None or share.reason or not limits:
        return ""
    is_common = all(r in summary.slo and math.isfinite(r.limit) and not r.n_own for r in limits)
    met = " and ".join(map(_limit_words, limits)) if is_common else "all their limits"
    return f"{format_count(share.met)} of {format_count(share.due)} requests met {met}"


def _share_facts(summary: Summary) -> str:
    """`62 of 62 requests met TTFT ≤ 1 s (target 95 %; at least 95.3 % with 95 % confidence)`."""
    share, shown = summary.attainment, share_met(summary)
    if not shown:
        return ""
    targets = [r.limit for r in summary.slo if r.metric == "attainment"]
    facts = [f"target {format_value(target, 'share')}" for target in targets]
    if share.bound is not None and share.bound.value is not None:
        facts.append(share.bound.at_level("share", summary.confidence))
    return f"{shown} ({'; '.join(facts)})" if facts else shown


def _limit_words(result: SloResult) -> str:
    sign = {"<=": "≤", ">=": "≥"}[result.slo.operator]
    metric = METRICS[result.metric]
    return f"{metric.title} {sign} {format_value(result.limit, metric.unit)}"


def _against_limit(result: SloResult) -> str:
    """`p99 TTFT 98 ms (limit 500 ms)`; "" for the attainment, and without a value."""
    if result.metric in ("attainment", "tree_attainment") or math.isnan(result.value):
        return ""
    name = f"{result.slo.aggregate or ''} {METRICS[result.metric].title}".strip()
    value, limit = (format_value(x, result.unit) for x in (result.value, result.limit))
    return f"{name} {value} (limit {limit})"


def slos_text(summary: Summary) -> str:
    """The SLOs that the run was made under, and those that judge it here if they are others; ""
    without any."""
    if not summary.made_under and not summary.judged_by:
        return ""
    made = ", ".join(summary.made_under) or "no SLO"
    if not summary.has_other_slos:
        return f"Made under and judged by: {made}."
    return f"Made under: {made}. Judged here by other SLOs: {', '.join(summary.judged_by)}."


def slo_head(summary: Summary) -> tuple[str, ...]:
    """The columns of `slo_rows`."""
    level = f"with {100 * summary.confidence:g} % confidence"
    return "SLO", "measured", level, "n", "verdict", "proven"


def slo_rows(summary: Summary) -> list[list[TableCell]]:
    """A row for each SLO of all traffic, then for those of each class: `chat: p99(ttft) <= 1s`."""
    is_valid = summary.validity.trusted
    rows = [_slo_row(result, f"slo.{k}", is_valid) for k, result in enumerate(summary.slo)]
    for name, of_class in summary.classes.items():
        rows += [
            _slo_row(result, f"classes.{name}.slo.{k}", is_valid, f"{name}: ")
            for k, result in enumerate(of_class.slo)
        ]
    return rows


_COUNTED = {"request": ("requests", "attainment"), "tree": ("trees", "attainment(tree)")}


def _slo_row(result: SloResult, path: str, is_valid: bool, prefix: str = "") -> list[TableCell]:
    text = f"{prefix}{result.shown}{' (default)' if result.is_implied else ''}"
    error = error_note(result) if result.has_shown_error and result.scope == "run" else ""
    value = TableCell(format_value(result.value, result.unit), f"{path}.value", result.unit, error)
    n = TableCell(format_count(result.n), f"{path}.n", small=_independent(result))
    if result.scope != "run":
        of, counted = _COUNTED[result.scope]
        share = TableCell(f"{value.text} of {of}", value.path, result.unit)
        return [
            TableCell(text),
            share,
            _bound(result, path),
            n,
            TableCell("–", small=f"counted in {counted}"),
            TableCell("–"),
        ]
    unknown = "? no verdict" if result.n else "? no sample"
    verdict = {True: "✓ met", False: "✗ missed", None: unknown}[result.met]
    if result.survives is False:
        verdict = "? within the instrument error"
    if not is_valid:
        verdict = "– run INVALID"
    cells = [TableCell(text), value, _bound(result, path), n]
    return [*cells, TableCell(verdict, small=result.note), _proof(result)]


def _independent(result: SloResult) -> str:
    """`worth 64 independent`, where the requests of the run depend on each other."""
    if not is_dependent(result) or result.n_effective is None:
        return ""
    return f"worth {format_count(max(1, round(result.n_effective)))} independent"


def _bound(result: SloResult, path: str) -> TableCell:
    """The one-sided confidence bound that the proof uses."""
    bound = result.bound
    if bound is None:
        return TableCell("–")
    if bound.value is None:
        return TableCell("run too short" if result.too_short else "too few samples")
    if math.isinf(bound.value):
        return TableCell("failures")
    return TableCell(bound.text(result.unit), f"{path}.bound.value", result.unit)


def _proof(result: SloResult) -> TableCell:
    word = {None: "–", True: "yes", False: "no"}[result.proven]
    if result.certainty == "clear":
        return TableCell("no", small="clear of the limit" if result.met else "missed by far")
    if result.n_wanted is None:
        return TableCell(word)
    if result.n_wanted != result.n_needed:
        return TableCell(word, small=f"clear from n ≈ {format_count(result.n_wanted)}")
    return TableCell(word, small=f"needs n ≈ {format_count(result.n_wanted)}")


_MANY_FAILURES = 0.01  # of the due requests


def is_inconclusive(summary: Summary) -> bool:
    """Whether a valid run lacks only samples for a verdict: an SLO was met or missed in the run,
    but not with the required confidence."""
    kinds = [kind for kind in summary.reason_kinds if kind != "cause"]
    return bool(kinds) and all(kind == "unproven" for kind in kinds)


def run_slos(summary: Summary) -> list[SloResult]:
    """The SLOs on the run as a whole, those of its classes included."""
    return [result for result in _all_slos(summary) if result.scope == "run"]


def _missed_slos(summary: Summary) -> list[SloResult]:
    return [result for result in run_slos(summary) if result.met is False]


def _all_slos(summary: Summary) -> list[SloResult]:
    return [*summary.slo, *(r for of_class in summary.classes.values() for r in of_class.slo)]


_CHECK = "To check how much load this machine can measure accurately:"


def next_steps(summary: Summary, place: str, is_probe: bool = False) -> list[NextStep]:
    """The steps that follow from a verdict. `place` is the directory of this run; a probe of a
    capacity search needs no further search."""
    if not summary.validity.trusted:
        return _repair(summary)
    if summary.verdict == "no_verdict" and not is_inconclusive(summary):
        return _no_verdict(summary, place)
    steps = [*_failures(summary), *of_cause(summary), *_longer(summary), *unreachable(summary)]
    if summary.verdict == "missed" and not unreachable(summary) and not of_cause(summary):
        cause = missed_cause(summary)
        steps += [] if cause is None else [cause.step]
    search = None if is_probe else search_step(summary)
    steps += [search] if search else []
    if not steps and summary.verdict == "missed":
        steps.append(NextStep("Lower the load, or use a faster server."))
    return steps


def search_step(summary: Summary) -> NextStep | None:
    """The search for the highest load that meets the SLO; None where it has no command (also where
    no load would help, `Cause.is_about_load`) or would not help."""
    if not summary.capacity_command or summary.verdict == "no_verdict" or unreachable(summary):
        return None
    if summary.counts["truncated"] > _MANY_FAILURES * summary.counts["due"]:
        return None  # at no load are short answers whole
    more = "" if summary.verdict == "missed" else " more"
    return NextStep(f"Find how much{more} load meets the SLO:", summary.capacity_command)


def unreachable(summary: Summary) -> list[NextStep]:
    """How to give the server a chance, if all that the run missed was out of reach of any server at
    the offered rate."""
    missed = _missed_slos(summary)
    is_missed = summary.verdict == "missed" and not summary.is_overloaded
    if not is_missed or not all(r.note_kind == "above_offered_rate" for r in missed):
        return []
    most = max(r.limit for r in missed)
    offered = f"Offer more than {format_value(most, 'per_s')} (--rate, arrivals.rate)"
    return [NextStep(f"{offered}: goodput cannot exceed the offered rate.", short=offered)]


def of_cause(summary: Summary) -> list[NextStep]:
    """The step that follows from the cause of the misses, where it is the first reason."""
    if summary.cause is None or summary.reason_kinds[:1] != ("cause",):
        return []
    return [NextStep(summary.cause.advice)] if summary.cause.advice else []


def _repair(summary: Summary) -> list[NextStep]:
    failed = [c for c in summary.validity.checks if c.is_gate and c.ok is False]
    remedies = dict.fromkeys(check.remedy for check in failed if check.remedy)
    steps = [
        NextStep(
            f"The load generator, not the server, was the limit: {remedy}. {_CHECK}",
            "slobench doctor",
            _CHECK,
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
                "State an SLO (--slo 'p99(ttft) <= 500ms'); to check this run against it"
                " without measuring again:",
                f"slobench rescore {place} --slo 'p99(ttft) <= 500ms'",
            )
        ]
    n_ok, least = summary.counts["ok"], summary.min_requests
    times = [r.n_needed / r.n for r in run_slos(summary) if r.met is None and r.n and r.n_needed]
    times += [least / n_ok] if 0 < n_ok < least else []
    if times:
        most = max([1, least, *(r.n_needed or 0 for r in run_slos(summary))])
        longer_by = max(times) * planned_for(most) / most
        length = _whole_seconds(longer_by * summary.window.length_s)
        longer = f"Measure for at least {length} (--duration {length})."
        if summary.measured_by:
            n = math.ceil(max(times) * summary.counts["due"])
            longer = f"Measure at least {format_count(n)} requests with {summary.measured_by}."
        return [*_failures(summary), NextStep(longer)]
    return of_cause(summary) or [NextStep(_again(summary))]


def _again(summary: Summary) -> str:
    """How to measure again after a run without a verdict, by the reason for that."""
    kinds = set(summary.reason_kinds)
    if "nothing_due" in kinds:
        return "Measure for longer (--duration), or with a shorter warm-up (--warmup)."
    loop = summary.closed_loop
    if "start_up" in kinds and loop is not None and loop.requests_needed:
        n = loop.requests_needed
        return f"Measure about {format_count(n)} requests (--num-prompts {n})."
    if "none_successful" in kinds:
        return (
            "Check the server (slobench doctor --target URL); the report shows how the requests "
            "failed."
        )
    kinds -= {"cause"}
    if kinds == {"ended_early"} and 2 * summary.counts["failed"] < summary.counts["due"]:
        return "Measure again, to the end."
    return "Fix the causes of failed requests and failed checks, and measure again."


def _failures(summary: Summary) -> list[NextStep]:
    due, n_failed = summary.counts["due"], summary.counts["failed"]
    if n_failed <= _MANY_FAILURES * due:
        return []
    failed = f"{format_count(n_failed)} of {format_count(due)} requests failed"
    see = "See the section “How requests failed” of the page first"
    return [NextStep(f"{see}: {failed}.", short=see)]


def _longer(summary: Summary) -> list[NextStep]:
    """The length of a run that would make the open SLOs certain. An SLO of a class needs requests
    of that class."""
    parts: dict[str, Summary | ClassSummary] = {"": summary, **summary.classes}
    is_open = summary.verdict == "no_verdict"
    needs = [
        (n * summary.window.length_s / part.counts["due"], n, name, n == result.n_needed)
        for name, part in parts.items()
        for result in part.slo
        for n in [result.n_needed if is_open else result.n_wanted]
        if result.certainty == "in_run" and n and part.counts["due"]
        if is_open or not result.is_implied
        if summary.verdict != "missed" or result.met is False  # what the run missed comes first
    ]
    if not needs:
        return []
    length_s, n_needed, name, is_proof = max(needs)
    requests = f"requests of {name}" if name else "requests"
    sure = (
        f"reach {100 * summary.confidence:g} % confidence" if is_proof else "be clear of the limit"
    )
    if summary.measured_by:
        tool = summary.measured_by
        return [
            NextStep(f"Measure about {format_count(n_needed)} {requests} with {tool} to {sure}.")
        ]
    length = _whole_minutes(length_s)
    longer = f"Measure for {length} (--duration {length}) to {sure}"
    needed = f"about {format_count(n_needed)} {requests} are needed"
    return [
        NextStep(f"{longer}: {needed}, which take {format_value(length_s, 's')}.", short=longer)
    ]


def _whole_seconds(length_s: float) -> str:
    return f"{math.ceil(length_s)}s" if length_s <= 120 else _whole_minutes(length_s)


def _whole_minutes(length_s: float) -> str:
    return f"{-int(-length_s // 60)}m"


@dataclass(frozen=True, slots=True)
class MissedCause:
    """Why requests missed their SLO, and what helps."""

    reason: str
    remedy: str

    @property
    def step(self) -> NextStep:
        remedy = f"{self.remedy[:1].upper()}{self.remedy[1:]}"
        return NextStep(f"{self.reason}: {self.remedy}.", short=remedy)


_PARTS = {
    "client_queue_s": (
        "waited in the load generator",
        "raise connections or concurrency cap",
    ),
    "server_queue_s": ("waited in the server's queue", "add capacity, or send less traffic"),
    "prefill_s": (
        "waited for the first token",
        "shorten prompts, or speed up or split prefills",
    ),
    "decode_s": ("decoded", "shorten answers, or run fewer of them at once"),
}
"""The parts of a request: what the slowest requests did, and what helps."""
_TO_FIRST_TOKEN = frozenset({"ttft_s", "ttft_from_send_s", "ttfat_s"})
_TO_LAST_TOKEN = frozenset({"e2e_s", "e2e_from_send_s", "close_s"})


def missed_cause(summary: Summary) -> MissedCause | None:
    """The part of a request that grew most among the slowest requests, of the parts that the missed
    SLOs limit; None where it is not known, or where they limit the gaps between tokens alone."""
    split = {} if summary.drivers is None else summary.drivers.split
    missed = {metric for result in _missed_slos(summary) for metric in _limited(summary, result)}
    is_whole = bool(missed & _TO_LAST_TOKEN)
    if len(split) < 2 or not (is_whole or missed & _TO_FIRST_TOKEN):
        return None
    groups = list(split.values())
    has_decodes = is_whole or not missed <= _TO_FIRST_TOKEN
    grown = {
        part: (getattr(groups[-1], part) or 0.0) - (getattr(groups[0], part) or 0.0)
        for part in _PARTS
        if has_decodes or part != "decode_s"
    }
    most = max(grown, key=lambda part: grown[part])
    did, remedy = _PARTS[most]
    return MissedCause(f"The slowest requests mostly {did}", remedy) if grown[most] > 0 else None


def _limited(summary: Summary, result: SloResult) -> set[str]:
    """The metrics that an SLO limits: of attainment and goodput those of the limits per request."""
    if result.metric not in ("attainment", "goodput"):
        return {result.metric}
    return {limit.metric for limit in _all_slos(summary) if limit.scope == "request"}
