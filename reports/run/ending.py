"""The ending of a run: verdict, a line per SLO, traffic, certainty, findings, next command."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from loadgen.measure.catalog import METRICS
from loadgen.measure.findings import NO_LIMITS
from loadgen.measure.slo_result import CERTAINTIES, SloResult
from loadgen.measure.statistics.percentiles import fewest_samples
from loadgen.measure.summary import PERCENTILES, ClassSummary, Distribution, Summary
from loadgen.measure.verdict import duration, error_note
from loadgen.measure.wording import format_count, format_value
from loadgen.records import Status
from reports.ending import MOST_FINDINGS, Ending, EndingRow, NextStep
from reports.run import verdict_section
from reports.run.tables import has_percentile, throughput_text

MOST_SLOS = 4
MARKS = {True: "✓", False: "✗", None: "?"}
HELD_UP = "the load generator was held up"
_SIMULATED = "in virtual time, by a cost model: no server was measured"
_NEVER_SENT = (Status.dropped, Status.not_released)
_FAILURES = {
    "http_error": "HTTP error",
    "timeout": "timed out",
    "stream_error": "broken stream",
    "connect_error": "no connection",
    "dropped": "dropped",
    "not_released": "never sent",
    "lost": "lost",
    "truncated": "too short",
}


def ending(summary: Summary, place: str = "RUN") -> Ending:
    """The end of a run; `place` is the word for its directory in a command."""
    results = list(_ordered(summary))
    shown = results[:MOST_SLOS]
    why, steps = _why(summary), verdict_section.next_steps(summary, place)
    findings, n_findings = _findings(summary, why)
    facts = (
        ("why", why),
        ("simulated", _SIMULATED if summary.is_simulated else ""),
        ("traffic", _traffic(summary)),
        ("certainty", _certainty(summary)),
        ("canaries", summary.canaries),
        ("judged", verdict_section.slos_text(summary) if summary.has_other_slos else ""),
    )
    return Ending(
        verdict_section.banner(summary).tone,
        *_verdict(summary),
        tuple(_slo_line(summary, *each) for each in shown) or _latency_lines(summary),
        tuple((word, text) for word, text in facts if text),
        tuple(findings),
        _next(summary, steps, why),
        len(results) - len(shown),
        n_findings,
    )


def _findings(summary: Summary, why: str) -> tuple[list[str], int]:
    """The first sentence of the worst findings, and the number of the others. A finding that
    repeats `why` or is about figures that an ending lacks is neither."""
    shown: list[str] = []
    n_others = 0
    has_delays = not summary.validity.trusted  # `why` has them
    for finding in summary.findings:
        sentence, stop, _ = finding.partition(". ")
        sentence = f"{sentence}." if stop else finding
        if finding == NO_LIMITS or sentence.rstrip(".") in why:
            continue
        if summary.is_overloaded and finding.startswith("Load:"):
            continue
        is_delay = HELD_UP in sentence
        if len(shown) == MOST_FINDINGS or (is_delay and has_delays):
            n_others += 1
            continue
        if is_delay:
            has_delays = True
            first, _, rest = sentence.partition("; ")
            sentence = f"{first}; {rest.rpartition('; ')[2]}" if rest else first
        shown.append(sentence)
    return shown, n_others


def _verdict(summary: Summary) -> tuple[str, str]:
    """`MISSED by far`, `p50(tpot) <= 4ms: half of the requests took longer than 4.48 ms`."""
    banner = verdict_section.banner(summary)
    if banner.tone == "invalid":
        return "INVALID, no verdict", "the measurement cannot be trusted"
    if summary.verdict == "no_verdict":
        return banner.word, _why_none(summary)
    if summary.verdict == "missed":
        return _missed(summary)
    sure = {"proven": f" with {100 * summary.confidence:g} % confidence"}
    sure |= {"clear": ", clear of the limit"}
    in_run = " in this run" if banner.sure else ""
    return f"MET{sure.get(summary.certainty or '', in_run)}", _kept(summary)


def _kept(summary: Summary) -> str:
    """The result of a run that met its SLOs: the requests within their limits, or the SLO that is
    closest to its limit."""
    if share := verdict_section.share_met(summary):
        return share
    closest = max(verdict_section.run_slos(summary), key=_share_of_limit)
    if len(verdict_section.run_slos(summary)) == 1:
        return f"{closest.text} at {format_value(closest.value, closest.unit)}"
    n = format_count(len(verdict_section.run_slos(summary)))
    return (
        f"all {n} SLOs; closest to its limit {closest.text} at "
        f"{format_value(closest.value, closest.unit)}"
    )


def _missed(summary: Summary) -> tuple[str, str]:
    worst = _worst(summary)
    if worst is None:
        return "MISSED", "the server was overloaded"
    sure = {"proven": f" with {100 * summary.confidence:g} % confidence", "clear": " by far"}
    word = f"MISSED{sure.get(worst.certainty or '', '')}"
    if worst.certainty == "clear" and worst.margin is not None:
        return word, f"{worst.text}: {worst.margin.text}"
    return word, f"{worst.text} {_at(worst)}"


def _at(result: SloResult) -> str:
    if math.isinf(result.value):
        return "is ∞, because too many requests had no answer"
    return f"at {format_value(result.value, result.unit)}"


def _worst(summary: Summary) -> SloResult | None:
    """The most certain of the missed SLOs; of equals the farthest from its limit."""
    missed = [r for name, r, _ in _results(summary) if r.scope == "run" and r.met is False]

    def rank(result: SloResult) -> tuple[bool, int, float]:
        certainty = -1 if result.certainty is None else CERTAINTIES.index(result.certainty)
        return not result.is_implied, certainty, _share_of_limit(result)

    return max(missed, key=rank, default=None)


def _why_none(summary: Summary) -> str:
    """The reason why there is no verdict."""
    if verdict_section.is_inconclusive(summary):
        return f"not certain enough: {_uncertain(_weakest(summary), summary)}"
    few = [r for _, r, _ in _results(summary) if r.note_kind == "too_few_samples"]
    if few and set(summary.reason_kinds) == {"too_few_samples"}:
        most = max(few, key=_fewest)
        n = f"{format_count(most.n)} {'request is' if most.n == 1 else 'requests are'}"
        needed = format_count(_fewest(most))
        return f"{n} too few for {most.text}, which needs at least {needed}"
    reason = summary.reasons[0].rstrip(".") if summary.reasons else "no SLO was judged"
    return f"{reason[:1].lower()}{reason[1:]}"


def _fewest(result: SloResult) -> int:
    return fewest_samples(result.slo.quantile or 0.5)


def _results(summary: Summary) -> Iterator[tuple[str, SloResult, Summary | ClassSummary]]:
    """Each SLO with its class ("" for all traffic); its text begins with that of the class."""
    yield from (("", result, summary) for result in summary.slo)
    for name, found in summary.classes.items():
        for result in found.slo:
            named = replace(result, slo=replace(result.slo, text=f"{name}: {result.text}"))
            yield name, named, found


def _ordered(summary: Summary) -> Iterator[tuple[SloResult, Summary | ClassSummary]]:
    """The SLOs, the worst first where some are not met; else in the order in which they stand."""
    results = [(result, part) for _, result, part in _results(summary)]
    if summary.verdict == "missed":
        worst = _worst(summary)
        results.sort(key=lambda each: (each[0] != worst, each[0].met is not False))
    elif summary.verdict == "no_verdict":
        results.sort(key=lambda each: each[0].scope != "run" or each[0].met is not None)
    yield from results


def _slo_line(summary: Summary, result: SloResult, part: Summary | ClassSummary) -> EndingRow:
    if result.scope == "request":
        return EndingRow(_request_mark(result, part), result.shown, _of_requests(result, part))
    if result.scope == "tree":
        share = f"{format_value(result.value, 'share')} of the trees that show it"
        return EndingRow("", result.shown, share)
    mark = MARKS[result.met] if summary.validity.trusted else ""
    if result.met is None and result.note_kind == "too_few_samples":
        has = f"{format_count(result.n)} of the {format_count(_fewest(result))} requests"
        return EndingRow(mark, result.shown, f"{has} that it needs")
    value = format_value(result.value, result.unit)
    if math.isnan(result.value):
        return EndingRow(mark, result.shown, "no value, because there are no samples")
    facts = [value]
    if math.isinf(result.value):
        facts = ["∞: too many requests had no answer"]
    elif result.metric == "attainment":
        met = "" if part.attainment.met is None else f"{format_count(part.attainment.met)} of "
        facts = [f"{value} of requests, {met}{format_count(part.attainment.due)}"]
    elif result.limit and result.value:
        facts = [f"{value}, {_percent(_ratio(result))} of the limit"]
    if result.note:
        facts.append(result.note)
    if result.has_shown_error:
        facts.append(error_note(result))
    name = f"{result.shown} (default)" if result.is_implied else result.shown
    return EndingRow(mark, name, "; ".join(facts))


def _request_mark(result: SloResult, part: Summary | ClassSummary) -> str:
    """A limit of each request has no verdict of its own."""
    return "✓" if result.value == 1 and part.verdict == "met" else ""


def _of_requests(result: SloResult, part: Summary | ClassSummary) -> str:
    """`100 % of requests; p95 8.46 ms, 0.8 % of the limit`."""
    if not result.n:
        return "no request was due"
    share = f"{format_value(result.value, 'share')} of requests"
    found = part.metrics.get(result.metric)
    if found is None or not found.n or not math.isfinite(result.limit) or not result.limit:
        return share
    targets = [r.limit for r in part.slo if r.metric == "attainment"]
    name, value = _tail(found, max(targets, default=0.99))
    unit = METRICS[result.metric].unit
    of_limit = _percent(value / result.limit)
    return f"{share}; {name} {format_value(value, unit)}, {of_limit} of the limit"


def _tail(found: Distribution, share: float) -> tuple[str, float]:
    """The percentile of the share that has to be within a limit, or the largest value where n has
    none."""
    for key, quantile in PERCENTILES.items():
        if math.isclose(quantile, share) and has_percentile(found.n, key):
            return f"{key} of the answers", found.percentiles[key].value
    return "slowest", found.max


def _ratio(result: SloResult) -> float:
    return result.value / result.limit if result.limit else math.inf


def _share_of_limit(result: SloResult) -> float:
    """How much of its limit a result uses up; above 1 it is missed."""
    if math.isnan(result.value) or not result.limit:
        return 0.0
    if METRICS[result.metric].direction == "lower":
        return _ratio(result)
    return result.limit / result.value if result.value else math.inf


def _percent(ratio: float) -> str:
    """`96 %`, `0.9 %`, `1 380 %`: a share of a limit in two digits."""
    percent = 100 * ratio
    if percent >= 9.95:
        return f"{format_count(round(percent))} %"
    return f"{percent:.2g} %" if percent >= 0.1 or not percent else "<0.1 %"


def _latency_lines(summary: Summary) -> tuple[EndingRow, ...]:
    """The main latencies, for a run without an SLO."""
    lines = []
    answer = () if summary.reasoning is None else ("ttfat_s",)
    for name in ("ttft_s", *answer, "tpot_s", "e2e_s"):
        found = summary.metrics[name]
        parts = [
            f"{key} {format_value(found.percentiles[key].value, 's')}"
            for key in ("p50", "p90", "p99")
            if has_percentile(found.n, key)
        ]
        if parts:
            lines.append(EndingRow("", METRICS[name].title, ", ".join(parts)))
    return tuple(lines)


def _traffic(summary: Summary) -> str:
    """`requested 4/s, sent 3.88/s: 62 of 62 requests; 94.2 output tokens/s; none failed`."""
    counts, due = summary.counts, summary.counts["due"]
    if not due:
        return "no request was due in the measured window"
    n_sent = due - sum(counts[status.name] for status in _NEVER_SENT)
    rate = f"sent {format_value(summary.achieved_rate_per_s, 'per_s')}"
    requested = summary.requested_rate_per_s or summary.offered_rate_per_s
    of = " (starts of sessions)" if "sessions" in summary.rate_note else ""
    if requested:
        rate = f"requested {format_value(requested, 'per_s')}{of}, {rate}"
    else:
        rate += ", closed loop"
    return "; ".join(
        (
            f"{rate}: {format_count(n_sent)} of {format_count(due)} requests",
            throughput_text(summary),
            _failed(summary),
        )
    )


def _failed(summary: Summary) -> str:
    """`9 failed (HTTP 429 7, HTTP 503 2), 3 unfinished`."""
    counts = summary.counts
    kinds = [(f"HTTP {status}", n) for status, n in summary.http_statuses.items()]
    kinds += [
        (word, counts[status])
        for status, word in _FAILURES.items()
        if counts[status] and not (status == "http_error" and kinds)
    ]
    kinds.sort(key=lambda kind: -kind[1])
    parts = []
    if counts["failed"] == 1 or len(kinds) == 1:
        reasons = ", ".join(word for word, _ in kinds)
    else:
        reasons = ", ".join(f"{format_count(n)} {word}" for word, n in kinds)
    if counts["failed"]:
        of = f" ({reasons})" if reasons else ""
        parts.append(f"{format_count(counts['failed'])} failed{of}")
    if counts["unfinished"]:
        parts.append(f"{format_count(counts['unfinished'])} unfinished")
    return ", ".join(parts) or "none failed"


def _why(summary: Summary) -> str:
    """Why a run was missed, or is INVALID; "" where nothing is known."""
    if not summary.validity.trusted:
        kinds = zip(summary.reasons, summary.reason_kinds, strict=True)
        return " ".join(text for text, kind in kinds if kind == "invalid")
    if summary.verdict != "missed":
        return ""
    if summary.cause is not None:
        return summary.cause.sentence.rstrip(".")
    kinds = zip(summary.reasons, summary.reason_kinds, strict=True)
    for reason, kind in kinds:
        if kind == "overloaded":
            return reason.rstrip(".")
    if verdict_section.unreachable(summary):
        return ""
    if unanswered := _mostly_unanswered(summary):
        return unanswered
    cause = verdict_section.missed_cause(summary)
    return "" if cause is None else cause.reason


def _mostly_unanswered(summary: Summary) -> str:
    """`353 of the 353 misses are requests without an answer, not late answers`; "" where late
    answers are the larger part."""
    share = summary.attainment
    n_unanswered = summary.counts["failed"] + summary.counts["unfinished"]
    n_missed = share.due - (share.met or 0)
    if share.met is None or share.reason or 2 * n_unanswered < n_missed or not n_unanswered:
        return ""
    n, missed = format_count(n_unanswered), format_count(n_missed)
    words = "are requests without an answer" if n_unanswered > 1 else "is a request without answer"
    return f"{n} of the {missed} misses {words}, not late answers"


def _weakest(summary: Summary) -> SloResult | None:
    """The SLO that sets the certainty of a verdict that is not `missed`; of equals the one that
    needs the longest run."""
    judged = [(r, part) for _, r, part in _results(summary) if r.scope == "run" and r.certainty]
    stated = [each for each in judged if not each[0].is_implied] or judged

    def rank(each: tuple[SloResult, Summary | ClassSummary]) -> tuple[int, float]:
        result, part = each
        longer = (result.n_needed or 0) / max(1, part.counts["due"])
        return CERTAINTIES.index(result.certainty or "proven"), -longer

    return min(stated, key=rank)[0] if stated else None


def _certainty(summary: Summary) -> str:
    """How sure the verdict is, in a sentence."""
    is_judged = summary.validity.trusted and summary.verdict != "no_verdict"
    if not is_judged or summary.certainty is None:
        return ""
    result = _worst(summary) if summary.verdict == "missed" else _weakest(summary)
    if result is None or result.certainty is None:
        return ""
    level = f"{100 * summary.confidence:g} % confidence"
    if result.certainty == "proven":
        return _bound(result, level)
    if result.certainty == "clear" and summary.verdict == "missed":
        return "misses in each quarter of the run: a longer run would miss, too"
    if result.certainty == "clear" and result.margin is not None:
        return (
            f"{result.margin.text}; only a kind of slowness absent from the run could change this"
        )
    if summary.is_overloaded:
        return ""
    if result.is_implied and summary.verdict == "met":
        return (
            f"in this run only: {format_count(result.n)} requests do not prove 99 %, a default "
            "(--slo 'attainment >= 95%')"
        )
    text = _uncertain(result, summary)
    return text if result.certainty == "too_close" else f"in this run only: {text}"


def _bound(result: SloResult, level: str) -> str:
    bound = result.bound
    if bound is None or bound.value is None or math.isinf(bound.value):
        return f"proven with {level}"
    words = {"attainment": "the share within the limits", "goodput": "the goodput"}
    limited = result.text.removesuffix(result.slo.comparison).rstrip()
    name = words.get(result.metric, limited)
    return f"with {level}, {name} is {bound.text(result.unit)}"


def _uncertain(result: SloResult | None, summary: Summary) -> str:
    level = f"{100 * summary.confidence:g} % confidence"
    if result is None:
        return f"no proof with {level}"
    if result.certainty == "too_close":
        return f"too close to tell at this rate: {level} takes more than an hour; try another rate"
    parts = [f"the run is too short for {level}"]
    n = result.n_wanted
    if result.no_length:
        parts = [f"no length of run is advised, because {result.no_length}"]
    elif n:
        is_clear = n != result.n_needed
        aim = "to be clear of the limit, the run" if is_clear else level
        parts = [f"{aim} needs about {format_count(n)} requests{duration(result, n)}"]
    if result.margin is not None and not result.margin.is_clear and result.margin.text:
        parts.append(f"not clear of the limit, because {result.margin.text}")
    return "; ".join(parts)


def _next(summary: Summary, steps: Sequence[NextStep], why: str) -> NextStep | None:
    """The most useful of the next steps: a search where the run was missed, else what the verdict
    lacks."""
    if not steps:
        return None
    is_missed = summary.verdict == "missed" and summary.validity.trusted
    if is_missed and (search := verdict_section.search_step(summary)):
        return search
    if summary.validity.trusted and (of_cause := verdict_section.of_cause(summary)):
        return of_cause[0]
    step = steps[0]
    cause = verdict_section.missed_cause(summary) if is_missed else None
    if cause is not None and cause.reason == why:
        step = cause.step
    return NextStep(step.short or step.text, step.command)
