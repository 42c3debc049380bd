"""The run as of now, put together from the shards' latest frames, for the page and the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadgen.drive.live_histogram import LiveCounts
from loadgen.drive.live_sample import FIELDS, FINE_BOUNDS_S
from loadgen.live.watched import meets_slos
from loadgen.measure.slo import Slo, parse_slo
from loadgen.records import Schedule, Status
from loadgen.web.control_messages import METRICS, ClassCounts, Frame
from loadgen.web.run_protocol import RemoteShard

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
_NEVER_ENDED = "open"
_POINT_S = 0.5
Facts = dict[str, Any]
_COUNTED = ("released", "sent", "in_flight", "waiting", "by_status", "withdrawn")


@dataclass
class _Class:
    by_status: list[int] = field(default_factory=lambda: [0] * len(Status))
    kept: int = 0
    events: int = 0


@dataclass(frozen=True)
class Ended:
    """One request that ended, as a stock statistic wants it; times in seconds."""

    class_name: str
    status: Status
    e2e_s: float | None
    duration_s: float | None
    n_bytes: int


class FrameBuilder:
    """Everything since the start. `promises` are the per-request ones of each class, in the order
    of class_id."""

    def __init__(self, run: str, shard: int, promises: Mapping[str, Sequence[str]]) -> None:
        self._run, self._shard, self._seq = run, shard, 0
        self._names = list(promises)
        self._promises: list[list[Slo]] = [
            [parse_slo(text) for text in texts] for texts in promises.values()
        ]
        self._classes = [_Class() for _ in self._names]
        self._counts = {metric: LiveCounts() for metric in METRICS}
        self._last: dict[str, Any] = {
            "now_s": 0.0,
            "by_status": [0] * len(Status),
            **dict.fromkeys(("released", "sent", "in_flight", "waiting", "withdrawn"), 0),
        }

    def take(self, beat: Mapping[str, Any]) -> list[Ended]:
        """A beat of the shard; the requests that ended in it."""
        self._last = {"now_s": beat["now_s"], **{key: beat[key] for key in _COUNTED}}
        for _, counts, _ in beat["gaps"]:
            self._add_gaps(counts)
        return [self._end(dict(zip(FIELDS, one, strict=True))) for one in beat["ended"]]

    def frame(self) -> Frame:
        """All of it, numbered."""
        self._seq += 1
        return Frame(
            run=self._run,
            shard=self._shard,
            seq=self._seq,
            histograms={metric: one.encode() for metric, one in self._counts.items()},
            classes={
                name: ClassCounts(list(one.by_status), one.kept, one.events)
                for name, one in zip(self._names, self._classes, strict=True)
            },
            **self._last,
        )

    def _end(self, ended: Mapping[str, Any]) -> Ended:
        number, status = ended["class_id"], Status(ended["status"])
        counts = self._classes[number]
        counts.by_status[status] += 1
        counts.events += ended["n_events"]
        for metric in ("ttft", "tpot", "e2e", "lateness"):
            value = ended[f"{metric}_s"]
            if value is not None and (status is Status.ok or metric == "lateness"):
                self._counts[metric].add([value])
        if status is Status.ok and ended["ttft_s"] is not None:
            counts.kept += meets_slos(ended, self._promises[number])
        name = self._names[number]
        return Ended(name, status, ended["e2e_s"], ended["duration_s"], ended["n_bytes"])

    def _add_gaps(self, counts: Sequence[int]) -> None:
        """Gaps come counted by bucket; each stands at its bucket's upper end here."""
        ends = [*FINE_BOUNDS_S, 2 * FINE_BOUNDS_S[-1]]
        for end_s, n in zip(ends, counts, strict=True):
            if n:
                self._counts["itl"].add_many(end_s, n)


def merged(frames: Sequence[Frame]) -> dict[str, LiveCounts]:
    """All shards' histograms in one per metric; exact. Raises ValueError for a damaged one."""
    found = {metric: LiveCounts() for metric in METRICS}
    for frame in frames:
        for metric, data in frame.histograms.items():
            if metric in found:
                found[metric].add_encoded(data)
    return found


def ledger(shards: Sequence[RemoteShard], frames: Sequence[Frame], is_over: bool) -> dict[str, int]:
    """How many requests are in which state; they always sum to the schedule. Of a shard that is
    lost, what its last frame does not tell is lost; `open` is what may still end."""
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
    """Called once a second with the shards; remembers one point of each series per call."""

    def __init__(self, schedule: Schedule, horizon_s: float) -> None:
        planned_s = schedule["scheduled_s"]
        self._planned_s = np.sort(planned_s[~np.isnan(planned_s)])
        self._n, self._horizon_s = len(schedule), horizon_s
        self._before = {metric: LiveCounts() for metric in METRICS}
        self._sums_before: dict[str, float] = {}
        self._now_before_s = 0.0

    def look(self, shards: Sequence[RemoteShard], is_over: bool = False) -> Facts:
        """Everything as of now, JSON-like; `point` is what happened since the last look."""
        frames = [shard.frame for shard in shards if shard.frame is not None]
        gone = [s.frame.in_flight for s in shards if s.frame and s.state in ("lost", "died")]
        counts = merged(frames)
        now_s = max((frame.now_s for frame in frames), default=0.0)
        sums = _sums(frames)
        sums["in_flight"] -= sum(gone)  # nobody is there to see them end
        point = self._point(counts, sums, now_s)
        if point is not None:
            self._before, self._sums_before, self._now_before_s = counts, sums, now_s
        due = int(np.searchsorted(self._planned_s, now_s, "right"))
        lasted_s = min(max(now_s, 0.0), self._horizon_s)
        return {
            "is_over": is_over,
            "now_s": round(now_s, 3),
            "horizon_s": self._horizon_s,
            "scheduled": self._n,
            "due": due,
            "ledger": ledger(shards, frames, is_over),
            "sums": sums,
            "asked_per_s": self._n / self._horizon_s,
            "achieved_per_s": sums["sent"] / lasted_s if lasted_s else 0.0,
            "goodput_per_s": sums["kept"] / lasted_s if lasted_s else 0.0,
            "goodput_share_of_due": sums["kept"] / due if due else None,
            "metrics": {metric: _row(one) for metric, one in counts.items()},
            "classes": _classes(frames),
            "shards": [_shard_row(shard) for shard in shards],
            "point": point,
        }

    def _point(
        self, counts: Mapping[str, LiveCounts], sums: Mapping[str, float], now_s: float
    ) -> Facts | None:
        """None too soon after the last one: frames of several shards come one by one, and what one
        more brings, divided by the moment since, would be a peak."""
        passed_s = now_s - self._now_before_s
        if passed_s < _POINT_S:
            return None
        point: Facts = {"t_s": round(now_s, 3), "in_flight": sums["in_flight"]}
        for metric, one in counts.items():
            new = one.more_than(self._before[metric])
            point[metric] = {name: _or_none(new.quantile(QUANTILES[name])) for name in _SHOWN}
        for name in ("ok", "failed", "kept", "events", "sent"):
            rose = sums[name] - self._sums_before.get(name, 0.0)
            point[f"{name}_per_s"] = round(max(0.0, rose) / passed_s, 3)
        return point


_SHOWN = ("p50", "p99")


def _sums(frames: Sequence[Frame]) -> dict[str, float]:
    by_status = [sum(column) for column in zip(*(f.by_status for f in frames), strict=False)]
    by_status = by_status or [0] * len(Status)
    unasked = by_status[Status.not_released] + by_status[Status.dropped]
    withdrawn = sum(frame.withdrawn for frame in frames)
    classes = [one for frame in frames for one in frame.classes.values()]
    return {
        "released": sum(frame.released for frame in frames),
        "sent": sum(frame.sent for frame in frames),
        "in_flight": sum(frame.in_flight for frame in frames),
        "waiting": sum(frame.waiting for frame in frames),
        "ok": by_status[Status.ok],
        "failed": sum(by_status) - by_status[Status.ok] - unasked - withdrawn,
        "kept": sum(one.kept for one in classes),
        "events": sum(one.events for one in classes),
    }


def _classes(frames: Sequence[Frame]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for frame in frames:
        for name, one in frame.classes.items():
            row = found.setdefault(name, {"ended": 0, "ok": 0, "kept": 0})
            row["ended"] += sum(one.by_status)
            row["ok"] += one.by_status[Status.ok] if one.by_status else 0
            row["kept"] += one.kept
    return found


def _row(counts: LiveCounts) -> Facts:
    values = {name: _or_none(counts.quantile(q)) for name, q in QUANTILES.items()}
    return {"n": counts.n, **values}


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
        "in_flight": frame.in_flight if frame else 0,
        "lateness_p99_s": _or_none(late.quantile(0.99)),
        "skew_bound_s": shard.skew.bound_s if shard.skew else None,
        "note": shard.note,
    }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
