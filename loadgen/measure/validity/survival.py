"""Whether the result of an SLO survives the load generator's own error (decision 57)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadgen.manifest.sections import InstrumentLimits
from loadgen.measure.attainment import MeasuredWindow, request_limits
from loadgen.measure.catalog import METRICS
from loadgen.measure.load import Throughput, throughput
from loadgen.measure.per_request import Mask, PerRequest, Seconds, greatest
from loadgen.measure.slo import Slo
from loadgen.measure.slo_result import SloResult
from loadgen.measure.statistics.percentiles import nearest_rank
from loadgen.measure.summary import ERROR_GATE, ValidityCheck, gate
from loadgen.measure.validity.causes import Cause, cause_of
from loadgen.measure.validity.error_bound import GAP_METRICS, ErrorBound, shifted
from loadgen.measure.verdict import error_note
from loadgen.measure.wording import format_value
from loadgen.records import Run

LEAST_ERROR_S = 5e-3  # without an SLO, an error below this is accepted; of TPOT a tenth
MOST_ERROR_SHARE = 0.1  # … and an error below this share of the measured value
_SHOWN = {"ttft_s": (0.5, 0.99), "tpot_s": (0.5, 0.99), "e2e_s": (0.5, 0.99)}
Judge = Callable[[PerRequest, Throughput], Sequence[SloResult]]


def survives(met: bool, at_slowest: bool | None, at_fastest: bool | None) -> bool:
    """Whether a result stands: a met SLO is also met with the error bound added to the
    measurements, a missed SLO also missed with it subtracted."""
    return at_slowest is True if met else at_fastest is False


def settle(plain: SloResult, slowest: SloResult, fastest: SloResult) -> SloResult:
    """The result with its instrument error. A met SLO stays proven (or clear of its limit) only if
    it is so with the error bound added, a missed SLO only if it is so with it subtracted."""
    shifts = [
        abs(end.value - plain.value)
        for end in (slowest, fastest)
        if end.value != plain.value and not math.isnan(end.value - plain.value)
    ]
    plain = replace(plain, error=max(shifts, default=0.0))
    if plain.met is None:
        return plain
    stands = survives(plain.met, slowest.met, fastest.met)
    proven = plain.proven
    if proven:
        proven = stands and bool((slowest if plain.met else fastest).proven)
    needed = plain.n_needed if proven == plain.proven else None
    margin, worst = plain.margin, (slowest if plain.met else fastest).margin
    if margin is not None and margin.is_clear:
        is_clear = stands and worst is not None and worst.is_clear
        margin = margin if is_clear else None
    return replace(plain, survives=stands, proven=proven, n_needed=needed, margin=margin)


def unsettled(results: Sequence[SloResult]) -> list[SloResult]:
    """The results that leave the verdict of a run open; empty where it stands.

    A run is missed if any missed SLO stands, and met only if every SLO stands.
    """
    judged = [result for result in results if result.scope == "run" and result.met is not None]
    if any(result.met is False and result.survives is not False for result in judged):
        return []
    return [result for result in judged if result.survives is False]


def with_error(
    run: Run,
    columns: PerRequest,
    bound: ErrorBound,
    window: MeasuredWindow,
    due: Mask,
    judge: Judge,
    stated: Sequence[Slo],
    plain: Sequence[SloResult],
    limits: Sequence[tuple[Slo, Mask]],
) -> tuple[SloResult, ...]:
    """The `plain` results of the columns as measured, each with its instrument error.

    `judge` returns the results of shifted columns, `stated` is the SLO of each result, and `limits`
    are the per-request SLOs behind attainment and goodput, each with the rows that it applies to.
    """
    if not bound.is_any:
        return tuple(settle(result, result, result) for result in plain)
    if not plain:
        return ()
    everything = {slo.metric for slo in stated} | {slo.metric for slo, _ in limits}
    has_gaps = bool(everything & GAP_METRICS)
    ends = []
    for sign in (1, -1):
        moved = shifted(run, columns, bound, sign, has_gaps)
        ends.append(judge(moved, _rates(run, columns, bound, window, sign)))
    found = []
    for slo, measured, slowest, fastest in zip(stated, plain, *ends, strict=True):
        reaches = _reaches_limit(run, columns, bound, window, due, slo, limits)
        settled = settle(measured, slowest, fastest)
        found.append(replace(settled, error_reaches_limit=reaches))
    return tuple(found)


def _rates(
    run: Run, columns: PerRequest, bound: ErrorBound, window: MeasuredWindow, sign: int
) -> Throughput:
    """The least (`sign` +1) or most throughput that the measurements allow: the measured window,
    shorter or longer at each end by the error of the requests in flight there."""
    rows = run.request_rows
    error_s = bound.late_s + np.maximum(bound.last_token_s, bound.done_s)

    def at(edge_s: float) -> float:
        is_near = (rows["released_s"] <= edge_s + error_s) & (rows["done_s"] >= edge_s - error_s)
        return float(error_s[is_near].max(initial=0.0))

    start_s = window.start_s + sign * at(window.start_s)
    end_s = max(start_s, window.end_s - sign * at(window.end_s))
    rates = throughput(run, columns, MeasuredWindow(start_s, end_s))
    scale = (end_s - start_s) / window.length_s if window.length_s > 0 else math.nan
    if end_s == start_s:
        return Throughput(0.0, 0.0, 0.0)
    return Throughput(
        rates.requests_per_s * scale,
        rates.output_tokens_per_s * scale,
        rates.input_tokens_per_s * scale,
    )


def _reaches_limit(
    run: Run,
    columns: PerRequest,
    bound: ErrorBound,
    window: MeasuredWindow,
    due: Mask,
    slo: Slo,
    limits: Sequence[tuple[Slo, Mask]],
) -> bool:
    """Whether the error alone is as large as the limit, in more requests than may miss the SLO.
    Such a measurement cannot show that the SLO was met."""
    n_due = int(np.count_nonzero(due))
    if slo.metric in ("attainment", "goodput"):
        unknown = np.zeros(len(due), bool)
        for limit, rows in limits:
            error_s = _row_error(run, columns, bound, limit.metric)
            unknown |= rows & columns.has_token & (error_s >= request_limits(columns, limit))
        share = slo.limit
        if slo.metric == "goodput":
            share = slo.limit * window.length_s / n_due if n_due else 1.0
        return bool(np.count_nonzero(unknown & due) > max(0.0, 1.0 - share) * n_due + 1e-9)
    if slo.scope != "run" or METRICS[slo.metric].unit != "s" or slo.aggregate == "max":
        return False
    if slo.metric in ("itl_s", "icl_s"):
        errors_s = bound.of_gaps(run, columns)[columns.gaps.of(due)]
    else:
        errors_s = _row_error(run, columns, bound, slo.metric)[due & columns.has_token]
    errors_s = np.sort(errors_s[~np.isnan(errors_s)])
    if not len(errors_s):
        return False
    if slo.quantile is None:
        return float(errors_s.mean()) >= slo.limit
    return float(errors_s[nearest_rank(len(errors_s), slo.quantile) - 1]) >= slo.limit


def _row_error(run: Run, columns: PerRequest, bound: ErrorBound, metric: str) -> Seconds:
    if metric in GAP_METRICS:
        return greatest(bound.of_gaps(run, columns), columns.gaps, len(columns.is_ok))
    return bound.of(metric, columns)


@dataclass(frozen=True, slots=True)
class Imprecise:
    """A percentile whose instrument error is too large for a run without an SLO, and for comparing
    runs; seconds."""

    metric: str
    quantile: float
    value_s: float
    error_s: float

    def __str__(self) -> str:
        return (
            f"p{100 * self.quantile:g} {METRICS[self.metric].title} "
            f"{format_value(self.value_s, 's')}, of which up to {format_value(self.error_s, 's')} "
            "may be the load generator's"
        )


def imprecise(
    run: Run, columns: PerRequest, bound: ErrorBound, due: Mask, limits: InstrumentLimits
) -> list[Imprecise]:
    """P50 and P99 of TTFT, TPOT and E2E that the error moves by 10 % and by 5 ms (TPOT: 0.5 ms) or
    more. `instrument.lateness` replaces the 5 ms. P99 counts from 100 requests on."""
    least_s = LEAST_ERROR_S if limits.lateness_s is None else limits.lateness_s
    answered = due & columns.is_ok
    ends = [shifted(run, columns, bound, sign, has_gaps=False) for sign in (1, -1)]
    found = []
    for metric, quantiles in _SHOWN.items():
        allowed_s = least_s * (0.1 if metric == "tpot_s" else 1.0)
        for quantile in quantiles:
            value_s = _quantile(columns.column(metric)[answered], quantile)
            error_s = max(
                abs(_quantile(end.column(metric)[answered], quantile) - value_s) for end in ends
            )
            if error_s >= max(allowed_s, MOST_ERROR_SHARE * value_s):
                found.append(Imprecise(metric, quantile, value_s, error_s))
    return found


def _quantile(values: Seconds, quantile: float) -> float:
    """The nearest-rank percentile; NaN where there are too few values for it."""
    known = np.sort(values[~np.isnan(values)])
    has_tail = quantile <= 0.5 or len(known) * (1 - quantile) >= 1 - 1e-9
    if not len(known) or not has_tail:
        return math.nan
    return float(known[nearest_rank(len(known), quantile) - 1])


def instrument_check(
    run: Run,
    results: Sequence[SloResult],
    too_large: Sequence[Imprecise],
    is_disturbed: bool,
    other: str = "",
) -> ValidityCheck:
    """The gate of the load generator's own error. With an SLO it fails if the error leaves the
    verdict open, without an SLO if the percentiles in `too_large` are imprecise. `other` is a
    sentence about a further result that the error leaves open. A failure has the cause and its
    remedy."""
    judged = [result for result in results if result.scope == "run" and result.met is not None]
    if judged:
        open_ = [error_sentence(result) for result in unsettled(judged)]
        is_missed = any(r.met is False and r.survives is not False for r in judged)
        open_ += [other] if other and not is_missed else []
        why = "the load generator's own delays can change the verdict"
    else:
        open_ = [str(value) for value in too_large]
        why = "the load generator's own delays are too large a part of the measured values"
    if not open_:
        return gate(ERROR_GATE, True, _largest(judged))
    cause = cause_of(run.instrument, run.manifest.instrument_limits) if is_disturbed else _CLOSE
    detail = f"{why}: {'; '.join(open_)}. Cause: {cause.text}"
    return gate(ERROR_GATE, False, detail, cause.remedy)


_CLOSE = Cause(
    "the value is as close to the limit as this load generator's timestamps are accurate",
    "choose a limit or a rate at which the result is clearer",
)


def error_sentence(result: SloResult) -> str:
    """`p99(ttft) <= 1s: met at 17 ms + up to 19 ms instrument error`."""
    text = f"{result.text}: {'met' if result.met else 'missed'} at "
    text += f"{format_value(result.value, result.unit)} {error_note(result)}"
    return f"{text}, which reaches the limit" if result.error_reaches_limit else text


def _largest(judged: Sequence[SloResult]) -> str:
    """The result whose error is the largest part of its limit."""
    if not judged:
        return "the load generator's own delays are a small part of the measured values"
    most = max(judged, key=lambda r: r.error / r.limit if r.limit else 0.0)
    return f"no verdict depends on the load generator's own delays ({error_sentence(most)})"
