"""Figures of a run under way, summed over its workers: per class, per SLO, and over time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.drive.live_sample import FIELDS
from loadgen.live.live_histogram import LiveCounts
from loadgen.live.slo_so_far import SloSoFar, Tally, slos_so_far
from loadgen.live.watched import meets_slos
from loadgen.measure.catalog import METRICS, PASSES_UNDEFINED
from loadgen.measure.slo import Slo
from loadgen.records import Status
from loadgen.workload.scenario import Scenario

SHOWN = ("ttft_s", "ttfat_s", "tpot_s")
"""Latencies that are shown for each class, and over time; see `RunFigures.shown`."""
_STEPS = 24  # of a run, at most, in a latency over time
_RECENT_S = 5.0
_SETTLE_EVERY_S = 1.0
_NOT_JUDGED = (Status.cancelled, Status.not_released)


class RunFigures:
    """Estimates from undecoded bytes; the report computes everything from the decoded rows. SLOs
    count requests that end after the warm-up, classes and latencies over time count all.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.classes = tuple(scenario.traffic())
        self.requested_per_s = scenario.requested_rate_per_s()
        self._own = {name: own.slos() for name, own in scenario.classes.items()}
        self._shared = scenario.slos()
        self._limits = [
            [slo for slo in slos if slo.scope == "request"]
            for slos in scenario.slos_by_class().values()
        ]
        self._start_s, self._end_s = scenario.phases.warmup, scenario.horizon_s
        self._all = _tally(scenario.all_slos())
        self._of_class = [_tally(self._own.get(name, ())) for name in self.classes]
        self.by_class = [
            Tally(latencies={metric: LiveCounts() for metric in SHOWN}) for _ in self.classes
        ]
        """Per class, since the start of the run; its latencies are those of `SHOWN`."""
        self.latencies = self.by_class[0].latencies
        if len(self.classes) > 1:
            self.latencies = {metric: LiveCounts() for metric in SHOWN}
        self.over_time: dict[str, list[float]] = {metric: [] for metric in SHOWN}
        """p99 of the requests that ended in each step of the run, seconds; NaN without any."""
        self._step_s = max(1.0, self._end_s / _STEPS)
        self._step: dict[str, list[float]] = {metric: [] for metric in SHOWN}
        self._events: deque[tuple[float, int]] = deque([(0.0, 0)])
        self._n_events = 0
        self._now_s = 0.0
        self.has_reasoning = False
        """Whether an answer began with reasoning (or a call), so that TTFAT is not TTFT."""
        self._pending: list[Sequence[Any]] = []

    def take(self, now_s: float, ended: Sequence[Sequence[Any]]) -> None:
        """Adds the requests that a worker reports; each has the fields of `EndedSample`. They are
        counted once a second, or by `settle`."""
        self._now_s = max(self._now_s, now_s)
        self._pending += [values for values in ended if values[1] not in _NOT_JUDGED]
        if self._now_s >= self._events[-1][0] + _SETTLE_EVERY_S:
            self.settle()

    def settle(self) -> None:
        """Counts the requests that `take` has added."""
        if self._pending:
            self._add(self._pending, self._now_s)
            self._pending = []
        if self._now_s == self._events[-1][0]:
            return
        self._events.append((self._now_s, self._n_events))
        while self._events[0][0] < self._now_s - _RECENT_S and len(self._events) > 2:
            self._events.popleft()
        while self._now_s >= (len(self.over_time[SHOWN[0]]) + 1) * self._step_s:
            for metric, values in self._step.items():
                values.sort()
                index = math.ceil(0.99 * len(values)) - 1
                self.over_time[metric].append(values[index] if values else math.nan)
                self._step[metric] = []

    @property
    def shown(self) -> list[str]:
        """The metrics of `SHOWN`; TTFAT only where it differs from TTFT."""
        return [metric for metric in SHOWN if self.has_reasoning or metric != "ttfat_s"]

    def slos(self) -> list[SloSoFar]:
        """Every SLO, those of all traffic first."""
        self.settle()
        measured_s = min(self._now_s, self._end_s) - self._start_s
        for tally in (self._all, *self._of_class):
            tally.measured_s = measured_s
        rows = slos_so_far(self._shared, self._all)
        for name, tally in zip(self.classes, self._of_class, strict=True):
            rows += slos_so_far(self._own.get(name, ()), tally, name)
        return rows

    @property
    def tokens_per_s(self) -> float:
        """Events with tokens of the requests that ended in the last 5 s, per second."""
        (then_s, before), (now_s, now) = self._events[0], self._events[-1]
        return (now - before) / (now_s - then_s) if now_s > then_s else 0.0

    def _add(self, ended: Sequence[Sequence[Any]], now_s: float) -> None:
        """Counts all requests of a message at once: one at a time takes 30 µs a request."""
        columns = _columns(ended)
        class_ids, is_ok = columns["class_id"], columns["status"] == Status.ok
        is_met = self._met(ended, columns) & is_ok & ~np.isnan(columns["e2e_s"])
        self._n_events += int(columns["n_events"].sum())
        first_s, answer_s = columns["ttft_s"], columns["ttfat_s"]
        has_first = ~np.isnan(first_s)
        self.has_reasoning |= bool((first_s[has_first] != answer_s[has_first]).any())
        is_after = now_s > self._start_s
        if is_after:
            _count(self._all, columns, is_ok, is_met)
        for class_id in np.unique(class_ids).astype(int).tolist():
            mine = class_ids == class_id
            of_class = {name: values[mine] for name, values in columns.items()}
            tallies = [self.by_class[class_id]]
            if is_after and self._own:
                tallies.append(self._of_class[class_id])
            for tally in tallies:
                _count(tally, of_class, is_ok[mine], is_met[mine])
        for metric in SHOWN:
            values = columns[metric][is_ok]
            values = values[~np.isnan(values)]
            self._step[metric] += values.tolist()
            if self.latencies is not self.by_class[0].latencies:
                self.latencies[metric].add(values)

    def _met(
        self, ended: Sequence[Sequence[Any]], columns: Mapping[str, NDArray[np.float64]]
    ) -> NDArray[np.bool_]:
        """`meets_slos` of each request; those with limits of their own are rare."""
        met = np.ones(len(ended), bool)
        for class_id, slos in enumerate(self._limits):
            mine = columns["class_id"] == class_id
            for slo in slos if mine.any() else ():
                values = live_values(columns, slo.metric)
                holds = values <= slo.limit if slo.operator == "<=" else values >= slo.limit
                met &= ~mine | holds | (np.isnan(values) & (slo.metric in PASSES_UNDEFINED))
        for k, sample in enumerate(ended):
            if sample[-1] and columns["status"][k] == Status.ok and sample[_E2E] is not None:
                request = dict(zip(FIELDS, sample, strict=True))
                met[k] = meets_slos(request, self._limits[request["class_id"]])
        return met


def _columns(ended: Sequence[Sequence[Any]]) -> dict[str, NDArray[np.float64]]:
    """The fields of `EndedSample` but the last, as arrays [n]; NaN where undefined."""
    rows = np.array([values[:-1] for values in ended], np.float64)
    return dict(zip(FIELDS, rows.T, strict=False))


def _count(
    tally: Tally,
    columns: Mapping[str, NDArray[np.float64]],
    is_ok: NDArray[np.bool_],
    is_met: NDArray[np.bool_],
) -> None:
    n_ok = int(np.count_nonzero(is_ok))
    tally.n_ok += n_ok
    tally.n_failed += len(is_ok) - n_ok
    tally.n_met += int(np.count_nonzero(is_met))
    tally.n_events += int(columns["n_events"].sum())
    for metric, counts in tally.latencies.items():
        values = live_values(columns, metric)[is_ok]
        counts.add(values[~np.isnan(values)])


def live_values(columns: Mapping[str, NDArray[np.float64]], metric: str) -> NDArray[np.float64]:
    """A per-request metric of the catalogue, as `loadgen.live.watched` reads it from one sample."""
    base = {"max_itl_s": "max_stall_s"}.get(metric, metric)
    if metric == "e2e_per_token_s":
        return columns["e2e_s"] / np.maximum(1, columns["n_events"])
    values = columns[base.replace(_FROM_SEND, "_s")]
    return values - columns["lateness_s"] if metric.endswith(_FROM_SEND) else values


def _tally(slos: Sequence[Slo]) -> Tally:
    """A tally with the latencies of the SLOs."""
    metrics = {slo.metric for slo in slos if METRICS[slo.metric].scope == "request"}
    return Tally(latencies={metric: LiveCounts() for metric in metrics})


_FROM_SEND = "_from_send_s"
_E2E = FIELDS.index("e2e_s")
