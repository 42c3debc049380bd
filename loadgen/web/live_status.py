"""The run as of now, put together from the shards' latest frames, for the page and the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadgen.drive.live_histogram import LiveCounts
from loadgen.manifest import LiveQuantiles
from loadgen.records import Schedule, Status
from loadgen.web.control_messages import Frame
from loadgen.web.frame_builder import METRICS
from loadgen.web.run_protocol import RemoteShard

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
_NEVER_ENDED = "open"
_POINT_S = 0.5
Facts = dict[str, Any]


def merged(frames: Sequence[Frame]) -> dict[str, LiveCounts]:
    """All shards' histograms in one per metric; exact. Raises ValueError for a damaged one."""
    found = {metric: LiveCounts() for metric in METRICS}
    for frame in frames:
        for metric, data in frame.histograms.items():
            if metric in found:
                found[metric].add_encoded(data)
    return found


def quantiles(frames: Sequence[Frame]) -> dict[str, LiveQuantiles]:
    """Quantiles of each live metric over all shards, seconds."""
    return {metric: _quantiles(counts) for metric, counts in merged(frames).items()}


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
            "metrics": {metric: _quantiles(one).to_json() for metric, one in counts.items()},
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
        "in_flight": frame.in_flight if frame else 0,
        "lateness_p99_s": _or_none(late.quantile(0.99)),
        "skew_bound_s": shard.skew.bound_s if shard.skew else None,
        "note": shard.note,
    }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
