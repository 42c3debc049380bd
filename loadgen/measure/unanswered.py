"""SLOs that leave requests out, where they would be met by the requests that are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadgen.measure.catalog import METRICS, PASSES_UNDEFINED
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.slo import Slo
from loadgen.measure.slo_result import SloResult
from loadgen.measure.wording import format_count, format_value
from loadgen.records import Requests, Status

MOST_SHARE = 0.01
"""Of the due requests: an SLO that leaves out more of them is not met."""
_ENDS = {
    "unfinished": Status.cancelled,
    "dropped": Status.dropped,
    "never sent": Status.not_released,
    "lost": Status.lost,
}
"""Ends that are no failure of the server, or that no server saw."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The due requests without an answer: failed, and in any other way, each with its count."""

    due: int
    failed: int
    others: Mapping[str, int]

    def n(self, most_failed: float = 0.0) -> int:
        """Their number, without the failures if at most the share `most_failed` of the due requests
        failed."""
        failed = 0 if self.failed <= most_failed * self.due + 1e-9 else self.failed
        return failed + sum(self.others.values())

    @property
    def counts(self) -> str:
        """`105 failed, 3 unfinished`."""
        kinds = {"failed": self.failed, **self.others}
        return ", ".join(f"{format_count(n)} {kind}" for kind, n in kinds.items() if n)


def unanswered(rows: Requests, columns: PerRequest, due: Mask) -> Unanswered:
    """The due requests without an answer; an answer without a token is none."""
    status = rows["status"]
    others = {kind: _count(due & (status == end)) for kind, end in _ENDS.items()}
    n_failed = _count(due & ~columns.is_ok) - sum(others.values())
    others["without a token"] = _count(due & columns.is_ok & ~columns.has_token)
    return Unanswered(_count(due), n_failed, others)


def left_open(
    results: Sequence[SloResult],
    rows: Requests,
    columns: PerRequest,
    due: Mask,
    most_failed: float,
) -> tuple[SloResult, ...]:
    """The results, without a verdict in place of met where more than 1 % of the due requests are
    left out, or where an error rate depends on requests that have not ended. `most_failed` is the
    share of failures that an SLO on the error rate allows, 0 without one."""
    missing = unanswered(rows, columns, due)
    return tuple(_judged(result, missing, columns, due, most_failed) for result in results)


def _judged(
    result: SloResult, missing: Unanswered, columns: PerRequest, due: Mask, most_failed: float
) -> SloResult:
    if result.met is not True:
        return result
    if result.metric == "error_rate":
        return _error_rate(result, missing)
    if not _leaves_out(result.slo):
        return result
    missing = replace(missing, others={**missing.others, **_without_value(result, columns, due)})
    n_out = missing.n(most_failed)
    if n_out <= MOST_SHARE * missing.due:
        return result
    n_with = missing.due - missing.n()
    of = f"{format_count(n_with)} of {format_count(missing.due)} due requests"
    note = (
        f"met by the values of {of}; the others have none ({missing.counts}). At most 1 % may be "
        "left out, beside failures that an error_rate SLO allows"
    )
    return _open(result, note)


def _leaves_out(slo: Slo) -> bool:
    """Whether an SLO is on a statistic of the answered requests. A percentile of a metric per
    request is not: a failure is infinitely slow in it. Among gaps a failure is a single gap."""
    is_gap_percentile = slo.quantile is not None and METRICS[slo.metric].scope == "gap"
    return slo.aggregate == "mean" or is_gap_percentile


def _without_value(result: SloResult, columns: PerRequest, due: Mask) -> dict[str, int]:
    """The answers that lack the metric, although each answer must have it."""
    metric = METRICS[result.metric]
    if metric.scope != "request" or metric.name in PASSES_UNDEFINED:
        return {}
    answered = due & columns.is_ok & columns.has_token
    return {f"without {metric.title}": _count(answered & np.isnan(columns.column(metric.name)))}


def _error_rate(result: SloResult, missing: Unanswered) -> SloResult:
    """Dropped, unsent and lost requests count as failures already."""
    kinds = ("unfinished", "without a token")
    neither = replace(missing, failed=0, others={kind: missing.others[kind] for kind in kinds})
    n = neither.n()
    if not n or result.slo.holds(missing.n() / missing.due):
        return result
    note = (
        f"met at {format_value(result.value, 'share')}, but {format_count(n)} of "
        f"{format_count(missing.due)} due requests neither failed nor have an answer "
        f"({neither.counts}); as failures they would miss it"
    )
    return _open(result, note)


def _open(result: SloResult, note: str) -> SloResult:
    return replace(
        result,
        met=None,
        proven=None,
        survives=None,
        n_needed=None,
        seconds_needed=None,
        margin=None,
        note=note,
        note_kind="unanswered",
    )


def _count(rows: Mask) -> int:
    return int(np.count_nonzero(rows))
