"""The verdict of a run, decided by the results of its SLOs, and the reasons for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.measure.catalog import METRICS
from loadgen.measure.slo_result import CERTAINTIES, Certainty, SloResult
from loadgen.measure.wording import format_count, format_value

DEFAULT_CONFIDENCE = 0.95
Verdict = Literal["met", "missed", "no_verdict"]
ReasonKind = Literal[
    "cause",
    "ended_early",
    "tokens_missing",
    "other_prompts",
    "wrong_answers",
    "invalid",
    "nothing_due",
    "too_few_successful",
    "none_successful",
    "no_slo",
    "overloaded",
    "missed",
    "met",
    "unproven",
    "too_few_samples",
    "unanswered",
    "open_trees",
    "start_up",
    "no_value",
    "imported",
]


def sentence(
    result: SloResult,
    confidence: float,
    is_overloaded: bool = False,
    required: Certainty | None = None,
) -> str:
    """The result of an SLO as a sentence, for the reasons of a verdict: the value, and whether it
    is proven. A growing queue (`is_overloaded`) has no lasting percentile that a longer run could
    prove. A result that is less certain than `required` gives no verdict, so that the samples that
    it needs count, and not its margin."""
    is_open = required is not None
    if result.met is None:
        return f"{result.text}: {result.note or 'no value, because there are no samples'}"
    if result.note:
        value = format_value(result.value, result.unit)
        return f"{result.text}: missed at {value}; it {result.note}"
    text = f"{result.text}: {'met' if result.met else 'missed'}"
    is_clear = result.certainty == "clear" and not is_open
    is_by_far = is_clear or (result.bound is not None and result.bound.value == _above(result))
    if result.met is False and result.margin is not None and is_by_far and not is_open:
        return f"{text} by far: {result.margin.text}"
    if math.isinf(result.value):
        text += f" because too many requests failed or did not finish, n = {format_count(result.n)}"
    else:
        error = f" {error_note(result)}" if result.has_shown_error else ""
        text += f" at {format_value(result.value, result.unit)}{error}"
        text += f", n = {format_count(result.n)}"
    if is_overloaded and not result.proven:
        return text
    if is_clear and result.margin is not None:
        clear = f"clear of the limit: {result.margin.text}"
        return f"{text}; {clear}. Only a kind of slowness absent from the run could change this"
    if result.margin is not None and not result.margin.is_clear and result.margin.text:
        text += "" if result.proven else f"; not clear of the limit, because {result.margin.text}"
    if result.is_implied and not is_open and not result.proven:
        return f"{text}; the share of 99 % is a default: --slo 'attainment >= 95%' sets another"
    if is_dependent(result):
        text += f" ({worth(result)})"
    if result.proven is None:
        return text
    level = f"{100 * confidence:g} % confidence"
    if result.proven:
        bound = result.bound
        if bound is None or bound.value is None or math.isinf(bound.value):
            return f"{text}, with {level}"
        return f"{text}; {bound.at_level(result.unit, confidence)}"
    if result.no_length:
        return f"{text}, without {level}; no length of run is advised, because {result.no_length}"
    if result.n_needed is None:
        return f"{text}, without {level}"
    if result.certainty == "too_close":
        return f"{text}; {level} takes more than an hour at this rate: try another rate"
    n_wanted = result.n_needed if required == "proven" else result.n_wanted
    needs = f"about {format_count(n_wanted or 0)} samples{duration(result, n_wanted)}"
    if n_wanted != result.n_needed:
        return f"{text}; clear of the limit from {needs}"
    return f"{text}; {level} needs {needs}"


def _above(result: SloResult) -> float:
    """The lower bound of a percentile of which only its limit is known (`percentile_result`)."""
    return math.nextafter(result.limit, math.inf)


def is_dependent(result: SloResult) -> bool:
    """Whether the samples count for clearly fewer independent samples."""
    return result.n_effective is not None and result.n_effective < 0.95 * result.n


def worth(result: SloResult) -> str:
    """`as informative as 12 independent samples`."""
    count = format_count(max(1, round(result.n_effective or 0.0)))
    return f"as informative as {count} independent samples"


def duration(result: SloResult, n: int | None) -> str:
    """`, 9 minutes at this rate`, the length of a run of n samples; "" where no rate is known."""
    seconds = result.seconds_of(n)
    return "" if seconds is None else f", {format_value(seconds, 's')} at this rate"


def error_note(result: SloResult) -> str:
    """`+ up to 19 ms instrument error`, with the sign of the direction that could change the
    result."""
    is_upper = (METRICS[result.metric].direction == "lower") is (result.met is not False)
    if math.isinf(result.error):
        return "with an unbounded instrument error"
    sign = "+" if is_upper else "−"
    return f"{sign} up to {format_value(result.error, result.unit)} instrument error"


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason for a verdict: a sentence for people, and its kind for programs.

    Of the run: `cause` (`cause.Cause`), `ended_early`, `invalid` (a failed validity gate),
    `nothing_due`, `too_few_successful` (`--min-requests`), `none_successful`, `no_slo`,
    `overloaded`; `tokens_missing` and `other_prompts` (met, but with another workload than
    planned); `wrong_answers` (met, but by answers that cannot be those to the prompts);
    `imported` (the last of a verdict on a run that another tool measured). Of an SLO:
    `met`, `missed`, `unproven` (met or missed, but not with the required confidence),
    `too_few_samples` (of a percentile), `unanswered` (it leaves too many requests out), `start_up`
    (the start of a closed loop can have decided it), `open_trees` (trees that had not ended decide
    it), `no_value`.
    """

    kind: ReasonKind
    sentence: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict of a run, its exit code and the reasons for it."""

    verdict: Verdict
    exit_code: int
    reasons: tuple[Reason, ...]


def decide(
    results: Sequence[SloResult],
    doubts: Sequence[Reason],
    breakdown: Reason | None,
    confidence: float,
    required: Certainty | None,
    n_ok: int,
    min_requests: int = 0,
) -> Decision:
    """The verdict that the results of a run's SLOs give.

    `doubts` (an invalid measurement, a run cut short) allow no verdict, nor do fewer successful
    requests (`n_ok`) than `min_requests`, nor a run without any. Otherwise a missed SLO or
    a `breakdown` (an overload, a frozen server) makes the run missed; otherwise all SLOs are met. A
    result that is less certain than `required` counts as open, and an open SLO gives no verdict. A
    run without any SLO has no verdict either, which is a failure only if none of its due requests
    was successful, or if the server froze.
    """
    judged = [result for result in results if result.scope == "run"]
    none_successful = Reason("none_successful", "No request was successful.")
    if doubts:
        return Decision("no_verdict", 3, tuple(doubts))
    if n_ok < min_requests:
        fewer = f"fewer than the {format_count(min_requests)} that --min-requests requires"
        text = f"{format_count(n_ok)} requests were successful, {fewer}."
        return Decision("no_verdict", 3, (Reason("too_few_successful", text),))
    if not judged and breakdown is not None and breakdown.kind == "cause":
        return Decision("no_verdict", 3, (breakdown,))
    if not judged and not n_ok:
        return Decision("no_verdict", 3, (none_successful,))
    if not judged:
        no_slo = Reason("no_slo", "No SLO was given, so there is nothing to meet or miss.")
        return Decision("no_verdict", 0, (no_slo,))
    open_ = [r for r in judged if r.met is None or _is_below(r, required)]
    missed = [r for r in judged if r.met is False and not _is_below(r, required)]
    if missed or breakdown:
        reasons = [breakdown] if breakdown else []
        reasons += [_reason(r, "missed", confidence, breakdown is not None) for r in missed]
        return Decision("missed", 1, tuple(reasons))
    if open_:
        return Decision(
            "no_verdict",
            3,
            tuple(_reason(r, _why_open(r), confidence, required=required) for r in open_),
        )
    if not n_ok:
        return Decision("no_verdict", 3, (none_successful,))
    return Decision("met", 0, tuple(_reason(r, "met", confidence) for r in judged))


def _is_below(result: SloResult, required: Certainty | None) -> bool:
    if required is None or result.certainty is None:
        return False
    return CERTAINTIES.index(result.certainty) < CERTAINTIES.index(required)


def certainty_of(verdict: Verdict, results: Sequence[SloResult]) -> Certainty | None:
    """The certainty of a verdict: of a run that met its SLOs the weakest, of a run that missed any
    the strongest of those missed. Implied SLOs count only where no other SLO has a certainty; None
    without any."""
    judged = [r for r in results if r.certainty and r.met is (verdict == "met")]
    counted = [r for r in judged if not r.is_implied] or judged
    found = [r.certainty for r in counted if r.certainty]
    if verdict == "no_verdict" or not found:
        return None
    return (min if verdict == "met" else max)(found, key=CERTAINTIES.index)


def _reason(
    result: SloResult,
    kind: ReasonKind,
    confidence: float,
    is_overloaded: bool = False,
    required: Certainty | None = None,
) -> Reason:
    return Reason(kind, f"{sentence(result, confidence, is_overloaded, required)}.")


def _why_open(result: SloResult) -> ReasonKind:
    """The kind of reason for which an SLO gives no verdict."""
    if result.met is not None:
        return "unproven"
    if result.note_kind in ("too_few_samples", "unanswered", "start_up", "open_trees"):
        return result.note_kind
    return "no_value"
