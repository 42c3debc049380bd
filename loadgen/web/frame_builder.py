"""What a worker counts of its shard's beats: the frame that goes to the conductor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.drive.live_histogram import LiveCounts
from loadgen.drive.live_sample import FIELDS, FINE_BOUNDS_S
from loadgen.live.watched import meets_slos
from loadgen.measure.slo import Slo, parse_slo
from loadgen.records import Status
from loadgen.web.control_messages import ClassCounts, Frame

METRICS = ("ttft", "tpot", "itl", "e2e", "lateness")
"""What is counted in histograms, each from the planned instant where it has one."""
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
