"""What a shard tells of every ended request while somebody watches the run from outside.

Looked at when the request ends, from undecoded bytes: reads that hold a token by the codec's quick
look, and the events in them. The report's numbers come from the decoded rows instead.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loadgen.drive.transport import Exchange
from loadgen.records import Schedule, Status, own_limits

GAP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0),
)
"""Upper ends of the buckets in which gaps between tokens are told to the outside, seconds."""
_FINEST_S, _STEP = 50e-6, 1.05


def _refined() -> tuple[tuple[float, ...], NDArray[np.intp]]:
    """Finer upper ends, each at most `_STEP` times the one before it, with the coarse ones among
    them; and where each coarse bucket begins."""
    ends, starts = [_FINEST_S], [0]
    for end_s in GAP_BOUNDS_S:
        n = math.ceil(math.log(end_s / ends[-1], _STEP))
        ends += [*(ends[-1] * (end_s / ends[-1]) ** (k / n) for k in range(1, n)), end_s]
        starts.append(len(ends))
    return tuple(ends), np.array(starts)


FINE_BOUNDS_S, _STARTS = _refined()
"""Upper ends of the buckets that gaps are counted in, seconds."""
_BOUNDS_NS = np.rint(np.array(FINE_BOUNDS_S) * 1e9)


def coarse_counts(counts: Sequence[int]) -> NDArray[np.int64]:
    """Counts of the fine buckets as those of `GAP_BOUNDS_S`; both have one without an end."""
    return np.add.reduceat(np.array(counts), _STARTS)


_EVENT, _END = b"data:", b"\n\n"


class SecondsHistogram:
    """Durations by bucket: `counts[i]` of them in (bounds_s[i − 1], bounds_s[i]], the last above
    all; `sum_s` is their sum."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s, self.sum_s = bounds_s, 0.0
        self.counts: NDArray[np.int64] = np.zeros(len(bounds_s) + 1, np.int64)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def add_counts(self, counts: ArrayLike, sum_s: float) -> None:
        """Durations that are counted by the same buckets already."""
        self.counts += np.asarray(counts, np.int64)
        self.sum_s += sum_s

    def copy(self) -> SecondsHistogram:
        copied = SecondsHistogram(self.bounds_s)
        copied.add_counts(self.counts, self.sum_s)
        return copied


class LiveSamples:
    """Everything since the last `take`."""

    def __init__(self, schedule: Schedule, looks_like_token: Callable[[bytes], bool]) -> None:
        self._class_ids: list[int] = schedule["class_id"].tolist()
        self._looks_like_token = looks_like_token
        self._own_slo_s = own_limits(schedule)
        self._ended: list[list[Any]] = []
        self._gaps: dict[int, SecondsHistogram] = {}

    def unsent(self, row: int, status: Status) -> None:
        """A row that never went out."""
        own_slo_s = self._own_slo_s.get(row)
        self._ended.append([self._class_ids[row], int(status), *[None] * 7, 0, 0, own_slo_s])

    def ended(self, exchange: Exchange, status: Status, released_ns: int) -> None:
        """A row that did. Instants are nanoseconds on the exchange's clock."""
        class_id = self._class_ids[exchange.row]
        first_ns, last_ns, n_later, longest_ns, n_events = self._tokens(exchange, class_id)
        has_token, has_more = first_ns > 0, n_later > 0
        self._ended.append(
            [
                class_id,
                int(status),
                _seconds(first_ns - released_ns) if has_token else None,
                _seconds(exchange.sent_ns - released_ns),
                _seconds(last_ns - first_ns) / n_later if has_more else None,
                _seconds(last_ns - released_ns) if has_token else None,
                _seconds(exchange.done_ns - released_ns),
                _seconds(longest_ns) if longest_ns else None,
                _seconds(exchange.done_ns - exchange.sent_ns),
                n_events,
                exchange.n_bytes,
                self._own_slo_s.get(exchange.row),
            ]
        )

    def take(self) -> dict[str, Any]:
        """The part of a beat that tells them: `ended` in the order of `FIELDS`, and `gaps`."""
        told = {
            "ended": self._ended,
            "gaps": [[id_, gaps.counts.tolist(), gaps.sum_s] for id_, gaps in self._gaps.items()],
        }
        self._ended, self._gaps = [], {}
        return told

    def _tokens(self, exchange: Exchange, class_id: int) -> tuple[int, int, int, int, int]:
        """First and last instant of a token, events after the first, longest gap, events."""
        times, parts = exchange.times, exchange.parts
        if not exchange.first_guess_ns:
            return 0, 0, 0, 0, 0
        first, last = bisect_left(times, exchange.first_guess_ns), len(parts) - 1
        while first < last and not self._looks_like_token(parts[first]):
            first += 1  # the role chunk of the same read
        while last > first and not self._looks_like_token(parts[last]):
            last -= 1
        events = [part.count(_EVENT) for part in parts[first : last + 1]]
        if max(events) > 1 or not all(events):
            events = [self._events(part) for part in parts[first : last + 1]]
        gaps = self._gaps.setdefault(class_id, SecondsHistogram(FINE_BOUNDS_S))
        n_events, span_ns = sum(events), times[last] - times[first]
        gaps.counts[0] += events[0] - 1  # came with the first one
        if last == first:
            return times[first], times[last], n_events - 1, 0, n_events
        gap_ns = np.diff(np.array(times[first : last + 1]))
        shared = np.array(events[1:])
        buckets = np.searchsorted(_BOUNDS_NS, gap_ns / shared)
        gaps.add_counts(np.bincount(buckets, shared, len(gaps.counts)), _seconds(span_ns))
        return times[first], times[last], n_events - 1, int(gap_ns.max()), n_events

    def _events(self, part: bytes) -> int:
        """Events of a read that hold a token: it may also bring the finish and usage lines."""
        if part.count(_EVENT) < 2:
            return 1
        return max(1, sum(map(self._looks_like_token, part.split(_END))))


FIELDS = (
    "class_id",
    "status",
    "ttft_s",
    "lateness_s",
    "tpot_s",
    "e2e_s",
    "close_s",
    "max_stall_s",
    "duration_s",
    "n_events",
    "n_bytes",
    "own_slo_s",
)
"""What the entries of a glimpse are; latencies from the release, `duration_s` from the send.
`own_slo_s` are the limits a request brought itself, in the order of `records.OWN_SLO`, or None."""


def _seconds(ns: int) -> float:
    return round(ns * 1e-9, 7)
