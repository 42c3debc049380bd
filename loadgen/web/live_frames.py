"""Frames: a worker's cumulative counts, and the live status of the run computed from the latest
frame of each shard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from loadgen.drive.live_sample import FIELDS, FINE_BOUNDS_S
from loadgen.live.early_warning import EarlyWarning, thread_use
from loadgen.live.live_histogram import LiveCounts
from loadgen.live.slo_so_far import SloSoFar, Tally, slos_so_far
from loadgen.live.watched import meets_slos
from loadgen.manifest.json_section import JsonObject
from loadgen.manifest.sections import LiveQuantiles
from loadgen.measure.slo import Slo, parse_slo
from loadgen.measure.wording import format_value
from loadgen.records import Schedule, Status
from loadgen.web.control_messages import METRICS, ClassCounts, Frame
from loadgen.web.run_protocol import RemoteShard

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
_NEVER_ENDED = "open"
_POINT_S = 0.5
Facts = JsonObject
NO_SLOS: Mapping[str, Sequence[Slo]] = MappingProxyType({})
_USE = ("window_s", "cpu_share", "run_delay_share", "throttled_share")
_KEPT = ("now_s", "heard_s", "by_status")
_SUMS = ("released", "sent", "in_flight", "waiting", "withdrawn", "measured")


@dataclass
class _ClassCounters:
    by_status: list[int] = field(default_factory=lambda: [0] * len(Status))
    slo_met: int = 0
    events: int = 0


@dataclass(frozen=True)
class Ended:
    """An ended request, for Locust's statistics; times in seconds."""

    class_name: str
    status: Status
    e2e_s: float | None
    duration_s: float | None
    n_bytes: int


class FrameBuilder:
    """Adds up the beats of a shard since its start. `slos` are the per-request SLOs of each class,
    in the order of class_id."""

    def __init__(self, run: str, shard: int, slos: Mapping[str, Sequence[str]]) -> None:
        self._run, self._shard, self._seq = run, shard, 0
        self._names = list(slos)
        self._slos: list[list[Slo]] = [
            [parse_slo(text) for text in texts] for texts in slos.values()
        ]
        self._classes = [_ClassCounters() for _ in self._names]
        self._counts = {metric: LiveCounts() for metric in METRICS}
        self._last: JsonObject = {
            "now_s": 0.0,
            "heard_s": None,
            "by_status": [0] * len(Status),
            **dict.fromkeys(_SUMS, 0),
        }
        self._use: list[float | None] = []

    def take(self, beat: Mapping[str, Any]) -> list[Ended]:
        """Adds a beat of the shard; returns the requests that ended in it."""
        self._use = list(beat.get("use", self._use))
        self._last = {key: beat[key] for key in (*_KEPT, *_SUMS)}
        for _, counts, _ in beat["gaps"]:
            self._add_gaps(counts)
        return [self._end(dict(zip(FIELDS, values, strict=True))) for values in beat["ended"]]

    def frame(self) -> Frame:
        """The next numbered frame with all counts so far."""
        self._seq += 1
        return Frame(
            run=self._run,
            shard=self._shard,
            seq=self._seq,
            histograms={metric: counts.encode() for metric, counts in self._counts.items()},
            classes={
                name: ClassCounts(list(counts.by_status), counts.slo_met, counts.events)
                for name, counts in zip(self._names, self._classes, strict=True)
            },
            use=self._use,
            **self._last,
        )

    def _end(self, ended: Mapping[str, Any]) -> Ended:
        class_id, status = ended["class_id"], Status(ended["status"])
        counts = self._classes[class_id]
        counts.by_status[status] += 1
        counts.events += ended["n_events"]
        for metric in ("ttft", "tpot", "e2e", "lateness"):
            value = ended[f"{metric}_s"]
            if value is not None and (status is Status.ok or metric == "lateness"):
                self._counts[metric].add([value])
        if status is Status.ok and ended["e2e_s"] is not None:
            counts.slo_met += meets_slos(ended, self._slos[class_id])
        name = self._names[class_id]
        return Ended(name, status, ended["e2e_s"], ended["duration_s"], ended["n_bytes"])

    def _add_gaps(self, counts: Sequence[int]) -> None:
        """Adds token gaps, which arrive as counts per bucket; each counts as its bucket's upper
        bound."""
        bounds_s = [*FINE_BOUNDS_S, 2 * FINE_BOUNDS_S[-1]]
        for bound_s, n in zip(bounds_s, counts, strict=True):
            if n:
                self._counts["itl"].add_many(bound_s, n)


def merged(frames: Sequence[Frame]) -> dict[str, LiveCounts]:
    """All shards' histograms, merged by metric; the merge is exact. Raises ValueError for a damaged
    histogram."""
    by_metric = {metric: LiveCounts() for metric in METRICS}
    for frame in frames:
        for metric, data in frame.histograms.items():
            if metric in by_metric:
                by_metric[metric].add_encoded(data)
    return by_metric


def quantiles(frames: Sequence[Frame]) -> dict[str, LiveQuantiles]:
    """Quantiles of each live metric over all shards, seconds."""
    return {metric: _quantiles(counts) for metric, counts in merged(frames).items()}


def ledger(shards: Sequence[RemoteShard], frames: Sequence[Frame], is_over: bool) -> dict[str, int]:
    """Number of requests in each state; the numbers always add up to the schedule. For a lost
    shard, requests without an end in its last frame are lost; `open` requests may still end."""
    counts = dict.fromkeys((*(status.name for status in Status), _NEVER_ENDED), 0)
    by_shard = {frame.shard: frame for frame in frames}
    for shard in shards:
        frame = by_shard.get(shard.number)
        ended = frame.by_status if frame is not None else []
        for status, n in zip(Status, ended, strict=False):
            counts[status.name] += n
        left = shard.n_requests - sum(ended)
        is_lost = shard.state in ("lost", "died")
        counts[Status.lost.name if is_lost or is_over else _NEVER_ENDED] += left
    return counts


class LiveStatus:
    """The live status of a run. `snapshot` is called once a second and appends a point to each
    series. `has_limits`: a per-request limit was given, so there is an attainment. A closed loop
    offers no rate; `requested_per_s` is that of the scenario. `n_measured`: so many requests after
    the warm-up end the window. `slos` are those of all traffic, under "", and of each class;
    `warning` compares the workers' delays with the limits of the report."""

    def __init__(
        self,
        schedule: Schedule,
        horizon_s: float,
        has_limits: bool,
        requested_per_s: float | None,
        is_closed_loop: bool,
        n_measured: int | None = None,
        slos: Mapping[str, Sequence[Slo]] = NO_SLOS,
        warning: EarlyWarning | None = None,
    ) -> None:
        self._n_measured = n_measured
        self._slos, self._warning = slos, warning
        self._has_limits, self._requested_per_s = has_limits, requested_per_s
        self._is_timed = not is_closed_loop and n_measured is None
        planned_s = schedule["scheduled_s"]
        self._planned_s = np.sort(planned_s[~np.isnan(planned_s)])
        self._n, self._horizon_s = len(schedule), horizon_s
        self._before = {metric: LiveCounts() for metric in METRICS}
        self._sums_before: dict[str, float] = {}
        self._now_before_s = 0.0

    def snapshot(self, shards: Sequence[RemoteShard], is_over: bool = False) -> Facts:
        """The present state, as JSON values; `point` covers the time since the last snapshot."""
        frames = [shard.frame for shard in shards if shard.frame is not None]
        lost = [s.frame.in_flight for s in shards if s.frame and s.state in ("lost", "died")]
        counts = merged(frames)
        now_s = max((frame.now_s for frame in frames), default=0.0)
        sums = _sums(frames)
        sums["in_flight"] -= sum(lost)  # no worker records their end
        point = self._point(counts, sums, now_s)
        if point is not None:
            self._before, self._sums_before, self._now_before_s = counts, sums, now_s
        due = int(np.searchsorted(self._planned_s, now_s, "right"))
        ended = sums["ok"] + sums["failed"]  # the requests in flight are not judged yet
        lasted_s = min(max(now_s, 0.0), self._horizon_s)
        return {
            "is_over": is_over,
            "now_s": round(now_s, 3),
            "horizon_s": self._horizon_s,
            "n_measured": self._n_measured,
            "scheduled": self._n,
            "due": due,
            "ledger": ledger(shards, frames, is_over),
            "sums": sums,
            "requested_per_s": self._requested_per_s,
            "asked_per_s": self._n / self._horizon_s if self._is_timed else None,
            "achieved_per_s": sums["sent"] / lasted_s if lasted_s else 0.0,
            "goodput_per_s": sums["kept"] / lasted_s if lasted_s else 0.0,
            "has_limits": self._has_limits,
            "attainment": sums["kept"] / ended if ended and self._has_limits else None,
            "metrics": {name: _quantiles(one).to_json() for name, one in counts.items()},
            "classes": _classes(frames),
            "slos": self._slos_so_far(frames, counts, sums, lasted_s),
            "warning": self._warning_now(frames, counts["lateness"]),
            "shards": [_shard_row(shard) for shard in shards],
            "point": point,
        }

    def _slos_so_far(
        self,
        frames: Sequence[Frame],
        counts: Mapping[str, LiveCounts],
        sums: Mapping[str, float],
        lasted_s: float,
    ) -> list[Facts]:
        """Each SLO with its value so far, warm-up included. Workers count latencies over all
        classes: with several, a class has its attainment only."""
        latencies = {f"{metric}_s": histogram for metric, histogram in counts.items()}
        by_class = _classes(frames)
        rows: list[SloSoFar] = []
        for name, slos in self._slos.items():
            own = by_class.get(name, {"ended": 0, "ok": 0, "kept": 0, "failed": 0})
            if not name:
                own = {key: int(sums[key]) for key in ("ok", "failed", "kept")}
            is_shared = not name or len(by_class) < 2
            tally = Tally(
                own["ok"],
                own["failed"],
                own["kept"],
                int(sums["events"]) if is_shared else 0,
                lasted_s,
                latencies if is_shared else {},
            )
            rows += slos_so_far(slos, tally, name)
        return [_slo_row(row) for row in rows]

    def _warning_now(self, frames: Sequence[Frame], lateness: LiveCounts) -> str | None:
        if self._warning is None:
            return None
        has_waiting = any(frame.waiting for frame in frames)
        uses = [thread_use(*frame.use) for frame in frames if len(frame.use) == len(_USE)]
        return self._warning.text(None if has_waiting else lateness, uses)

    def _point(
        self, counts: Mapping[str, LiveCounts], sums: Mapping[str, float], now_s: float
    ) -> Facts | None:
        """None too soon after the last point: frames of several shards arrive in turn, and the
        counts of one frame, divided by a short time, would show a peak."""
        passed_s = now_s - self._now_before_s
        if passed_s < _POINT_S:
            return None
        point: Facts = {"t_s": round(now_s, 3), "in_flight": sums["in_flight"]}
        for metric, histogram in counts.items():
            new = histogram.more_than(self._before[metric])
            point[metric] = {name: _or_none(new.quantile(QUANTILES[name])) for name in _SHOWN}
        for name in ("ok", "failed", "kept", "events", "sent"):
            increase = sums[name] - self._sums_before.get(name, 0.0)
            point[f"{name}_per_s"] = round(max(0.0, increase) / passed_s, 3)
        return point


_SHOWN = ("p50", "p99")


def _sums(frames: Sequence[Frame]) -> dict[str, float]:
    by_status = [sum(column) for column in zip(*(f.by_status for f in frames), strict=False)]
    by_status = by_status or [0] * len(Status)
    not_sent = by_status[Status.not_released] + by_status[Status.dropped]
    classes = [counts for frame in frames for counts in frame.classes.values()]
    return {
        "released": sum(frame.released for frame in frames),
        "sent": sum(frame.sent for frame in frames),
        "in_flight": sum(frame.in_flight for frame in frames),
        "waiting": sum(frame.waiting for frame in frames),
        "measured": sum(frame.measured for frame in frames),
        "ok": by_status[Status.ok],
        "failed": sum(by_status) - by_status[Status.ok] - by_status[Status.cancelled] - not_sent,
        "kept": sum(counts.slo_met for counts in classes),
        "events": sum(counts.events for counts in classes),
    }


def _classes(frames: Sequence[Frame]) -> dict[str, dict[str, int]]:
    by_class: dict[str, dict[str, int]] = {}
    for frame in frames:
        for name, counts in frame.classes.items():
            row = by_class.setdefault(name, {"ended": 0, "ok": 0, "kept": 0, "failed": 0})
            row["ended"] += sum(counts.by_status)
            row["ok"] += counts.by_status[Status.ok] if counts.by_status else 0
            row["kept"] += counts.slo_met
            not_failed = (Status.ok, Status.cancelled, Status.not_released)
            row["failed"] += sum(
                n
                for status, n in zip(Status, counts.by_status, strict=False)
                if status not in not_failed
            )
    return by_class


def _slo_row(slo: SloSoFar) -> Facts:
    """JSON has no infinity: such a value is None, and its text ∞."""
    share = slo.share_of_limit
    return {
        "text": slo.text,
        "class": slo.class_name,
        "metric": slo.metric,
        "unit": slo.unit,
        "operator": slo.operator,
        "limit": slo.limit,
        "limit_text": format_value(slo.limit, slo.unit),
        "value": None if slo.value is None or math.isinf(slo.value) else slo.value,
        "shown": slo.shown,
        "is_met": slo.is_met,
        "share_of_limit": None if share is None else min(share, 1e6),
    }


def _quantiles(counts: LiveCounts) -> LiveQuantiles:
    values = {name: _or_none(counts.quantile(q)) for name, q in QUANTILES.items()}
    return LiveQuantiles(n=counts.n, **values)


def _shard_row(shard: RemoteShard) -> Facts:
    frame = shard.frame
    ended = frame.by_status if frame is not None else [0] * len(Status)
    late = merged([frame])["lateness"] if frame is not None else LiveCounts()
    return {
        "shard": shard.number,
        "worker": shard.worker,
        "host": shard.host,
        "state": shard.state,
        "scheduled": shard.n_requests,
        "sent": frame.sent if frame else 0,
        "ok": ended[Status.ok],
        "ended": sum(ended),
        "failed": sum(ended) - ended[Status.ok] - ended[Status.cancelled],
        "in_flight": frame.in_flight if frame else 0,
        "lateness_p99_s": _or_none(late.quantile(0.99)),
        "skew_bound_s": shard.skew.bound_s if shard.skew else None,
        "note": shard.note,
    }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
