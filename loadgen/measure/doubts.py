"""Reasons of a verdict that lie in the run and not in its SLOs: an invalid measurement, an early
end, an overload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.findings import unfinished_text
from loadgen.measure.load import SLOWER_BY, falls_behind, load_through
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.summary import ValidityCheck
from loadgen.measure.validity.error_bound import ErrorBound, shifted
from loadgen.measure.verdict import Reason
from loadgen.records import Run


def doubts(run: Run, checks: Sequence[ValidityCheck], due: Mask) -> list[Reason]:
    """Reasons for which no verdict can be given. A run that ended because its server froze has a
    verdict."""
    reasons = []
    ended = run.manifest.ended
    if ended != "completed" and run.manifest.end_kind == "refused":
        text = "The run was stopped, because its first requests all failed alike."
        reasons.append(Reason("ended_early", text))
    elif ended != "completed" and run.manifest.end_kind != "silent":
        why = run.manifest.end_reason.rstrip(".")
        reasons.append(Reason("ended_early", f"The run was {ended}{f': {why}' if why else ''}."))
    reasons += [Reason("invalid", _sentence(c)) for c in checks if c.is_gate and c.ok is False]
    if not due.any():
        reasons.append(Reason("nothing_due", "No request was due in the measured window."))
    return reasons


def overload(
    run: Run,
    columns: PerRequest,
    due: Mask,
    checks: Sequence[ValidityCheck],
    counts: Mapping[str, int],
) -> str:
    """The sentence on an offered rate above the server's capacity; "" for none."""
    grown = next((_sentence(c) for c in checks if c.name == "load" and c.ok is False), "")
    if counts["unfinished"] and (grown or falls_behind(run, columns, due)):
        return f"Overloaded: {unfinished_text(run, counts['unfinished'], counts['due'])}."
    return grown


def open_overload(
    run: Run, columns: PerRequest, error: ErrorBound, due: Mask, window: MeasuredWindow
) -> str:
    """A sentence where the load generator's own delays can explain that TTFT grew; else ""."""
    slowest, fastest = (
        load_through(run, shifted(run, columns, error, sign, has_gaps=False), due, window)
        for sign in (1, -1)
    )
    if slowest is None or fastest is None:
        return ""
    if fastest.ttft_s[-1] >= SLOWER_BY * slowest.ttft_s[0]:
        return ""
    return "the growth of TTFT over the window can be the load generator's"


def _sentence(check: ValidityCheck) -> str:
    remedy = f" Remedy: {check.remedy}." if check.remedy else ""
    return f"{check.detail[:1].upper()}{check.detail[1:]}.{remedy}"
