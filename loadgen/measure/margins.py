"""How clear the requests of a scope are of their limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from loadgen.measure.attainment import MeasuredWindow, request_limits
from loadgen.measure.catalog import METRICS, PASSES_UNDEFINED
from loadgen.measure.per_request import Mask, PerRequest, Seconds
from loadgen.measure.slo import Slo
from loadgen.measure.slo_result import Margin, SloResult
from loadgen.measure.statistics.dependence import Dependence, Load, Series
from loadgen.measure.statistics.margin import growth, is_clear, is_missed_by_far, margin_ratios
from loadgen.measure.statistics.proportions import first_n
from loadgen.measure.wording import format_count, format_value
from loadgen.records import Run

LEAST_OF_A_KIND = 3  # answers of a kind of request that a run may be called clear for
LONGEST_TENTH = 0.9
_WORST_GAP = {"itl_s": "max_itl_s", "icl_s": "max_stall_s"}
_PACES = ("tpot_s", "max_itl_s", "max_stall_s", *_WORST_GAP)  # nothing queues for a token
_GROWTH = {
    "latency": "latency rose through the window",
    "limit": "latency may rise to the limit in as many requests again",
    "in_flight": "requests in flight rose through the window",
}
_WAITS = ("ttft_s", "ttft_from_send_s", "ttfat_s", "e2e_s", "e2e_from_send_s")


Part = tuple[Slo, Seconds, Seconds, Seconds]
"""A limit with the values, limits and margin ratios of all rows, NaN where it does not apply."""


@dataclass(frozen=True)
class Margins:
    """The requests of a scope with the limits that count for attainment, each with the rows that it
    applies to. `failing` is the dependence between requests in failing."""

    run: Run
    columns: PerRequest
    due: Mask
    met: Mask
    window: MeasuredWindow
    limits: Sequence[tuple[Slo, Mask]]
    failing: Dependence
    confidence: float

    def with_margin(self, result: SloResult) -> SloResult:
        """The result with its margin; of a percentile, an attainment or a goodput."""
        slo, share = result.slo, self._share(result.slo)
        if result.met is None or result.note or share is None or not 0 < share < 1:
            return result
        if result.met is False:
            return replace(result, margin=self._missed_by_far(slo, share))
        return replace(result, margin=self._clear(slo, share))

    def _share(self, slo: Slo) -> float | None:
        """The share of requests that has to be within the limits."""
        if slo.metric == "goodput" and self.window.length_s > 0 and self.due.any():
            return slo.limit * self.window.length_s / int(np.count_nonzero(self.due))
        return slo.limit if slo.metric == "attainment" else slo.quantile

    @property
    def _answered(self) -> Mask:
        return self.due & self.columns.is_ok & self.columns.has_token

    def _ratios_by_limit(self, slo: Slo) -> Iterator[Part]:
        if slo.quantile is None:
            limits = [(own, rows) for own, rows in self.limits if own.scope == "request"]
        else:
            limits = [(slo, np.full(len(self.due), True))]
        for limit, applies in limits:
            values = self.columns.column(_WORST_GAP.get(limit.metric, limit.metric))
            within = limit.limit if slo.quantile else request_limits(self.columns, limit)
            limits_s = np.broadcast_to(np.asarray(within, np.float64), len(values))
            rows = self._answered & applies & np.isfinite(limits_s)
            known = rows & ~np.isnan(values)
            ratios = np.full(len(values), math.nan)
            ratios[known] = margin_ratios(values[known], limits_s[known])
            if limit.metric not in PASSES_UNDEFINED and limit.metric not in _WORST_GAP:
                ratios[rows & ~known] = math.inf
            yield limit, values, limits_s, ratios

    def _clear(self, slo: Slo, share: float) -> Margin | None:
        parts = list(self._ratios_by_limit(slo))
        most = np.full(len(self.due), math.nan)
        for _, _, _, ratios in parts:
            most = np.fmax(most, ratios)
        if slo.quantile is None:  # an answer without a limit, or too short for one, has met it
            most = np.where(self._answered & np.isnan(most), 0.0, most)
        counted = self._answered & ~np.isnan(most)
        allowed = 1 - share
        if slo.metric in _WORST_GAP and counted.any():
            n_tokens = self.columns.output_tokens[
                counted
            ]  # a request can have all of its gaps late
            allowed *= float(n_tokens.mean() / n_tokens.max())
        order = self.columns.release_order
        rows = order[counted[order]]
        ratios, n_failed = most[rows], int(np.count_nonzero(self.due & ~self._answered))
        if not len(ratios) or ratios.max() > 1:
            return None
        series = Series(ratios, Load(self.columns.in_flight[rows]))
        time, largest = series.at(share).time_requests, float(ratios.max())
        within = partial(is_clear, largest=largest, share=1 - allowed, time=time)
        has_margin = within(
            len(ratios), confidence=self.confidence, n_failed=n_failed, failing=self.failing
        )
        enough = None
        if not has_margin and not n_failed:
            enough = first_n(lambda n: within(n, confidence=self.confidence), len(ratios))
        if not has_margin and enough is None:
            return None
        why = self._growth(parts, counted) or self._thin_kind()
        if not has_margin:
            return None if why else Margin(largest, False, "", enough)
        if why:
            return Margin(largest, False, why)
        return Margin(largest, True, _closest(parts, int(rows[ratios.argmax()]), len(rows)))

    def _growth(self, parts: Sequence[Part], counted: Mask) -> str:
        """Why the load may still be growing; "" where nothing shows it."""
        order = self.columns.release_order
        for slo, values, _, ratios in parts:
            rows = order[counted[order] & np.isfinite(ratios[order])]
            in_flight, is_wait = self.columns.in_flight[rows], slo.metric not in _PACES
            kind = growth(values[rows], ratios[rows], in_flight, is_wait)
            if kind == "queue":
                return f"the queue has not settled within {format_count(len(rows))} requests"
            if kind is not None:
                return _GROWTH[kind]
        return ""

    def _thin_kind(self) -> str:
        """The first kind of scheduled request with fewer than 3 answers; "" without any."""
        for name, rows in _kinds(self.run):
            n = int(np.count_nonzero(rows & self._answered))
            if n < LEAST_OF_A_KIND:
                return f"only {n} {'answer' if n == 1 else 'answers'} of {name}"
        return ""

    def _missed_by_far(self, slo: Slo, share: float) -> Margin | None:
        """The margin of an SLO that was missed by far; None for others."""
        if slo.metric in _WORST_GAP:
            return None
        values, counted, missed = None, self.due, self.due & ~self.met
        if slo.quantile is not None:
            values = self.columns.column(slo.metric)
            if slo.metric in PASSES_UNDEFINED:
                counted = self.due & ~(self._answered & np.isnan(values))
            missed = counted & ~(self._answered & (values <= slo.limit))
        order = self.columns.release_order
        rows = order[counted[order]]
        released_s = self.run.request_rows["released_s"][rows]
        planned_s = self.run.schedule_rows["scheduled_s"][rows]
        at_s = np.where(np.isfinite(released_s), released_s, planned_s)
        edges_s = np.linspace(self.window.start_s, self.window.end_s, 5)[1:-1]
        quarters = np.searchsorted(edges_s, at_s, side="right")
        time = Series(missed[rows].astype(np.float64)).at(0.5).time_requests
        if not is_missed_by_far(missed[rows], quarters, share, time, self.confidence):
            return None
        n_missed = int(np.count_nonzero(missed))
        if values is None:
            text = f"{format_value(n_missed / len(rows), 'share')} of the requests missed"
            return Margin(math.inf, True, f"{text}, {format_value(1 - share, 'share')} may")
        waits_s = np.sort(np.where(self._answered & counted, values, math.inf)[rows])
        median_s = float(waits_s[(len(waits_s) - 1) // 2])
        if slo.limit < median_s < math.inf:
            longer = f"half of the requests took longer than {format_value(median_s, 's')}"
            return Margin(math.inf, True, longer)
        text = f"{format_value(n_missed / len(rows), 'share')} of the requests took longer than"
        return Margin(math.inf, True, f"{text} {format_value(slo.limit, 's')} or had no answer")


def _closest(parts: Sequence[Part], row: int, n: int) -> str:
    """`the slowest of 62 took 16 ms, 64 times below 1 s`: the request closest to its limit."""
    found = [part for part in parts if not math.isnan(part[3][row])]
    if not found:
        return f"none of {format_count(n)} has a limit"
    slo, values, limits_s, _ = max(found, key=lambda part: float(part[3][row]))
    value_s, limit_s = float(values[row]), float(limits_s[row])
    value, limit = format_value(value_s, "s"), format_value(limit_s, "s")
    times = limit_s / value_s if value_s > 0 else math.inf
    far = "far" if times >= 1e4 else f"{times:.0f} times" if times >= 10 else f"{times:.1f} times"
    if slo.metric in _WAITS:
        return f"the slowest of {format_count(n)} took {value}, {far} below {limit}"
    title = METRICS[slo.metric].title
    return f"the largest {title} of {format_count(n)} requests was {value}, {far} below {limit}"


def _kinds(run: Run) -> Iterator[tuple[str, Mask]]:
    """The kinds of scheduled requests, with their rows: classes, the turns after the first, and the
    longest tenth of the inputs and outputs. The deepest turns, which are always few, are those with
    the longest inputs."""
    schedule = run.schedule_rows
    for k, name in enumerate(run.names.classes):
        rows = schedule["class_id"] == k
        if rows.any():
            yield f"class {name}", rows
    is_later = schedule["context"] > 0  # than the first turn
    if is_later.any():
        yield "later turns of a conversation", is_later
    for name in ("input", "output"):
        tokens = schedule[f"{name}_tokens"]
        if len(tokens) and tokens.max() > tokens.min():
            least = int(np.quantile(tokens, LONGEST_TENTH, method="higher"))
            yield f"{name}s of {format_count(least)} tokens and more", tokens >= least
