"""Samples of finished requests for live metrics, taken from undecoded bytes as each request ends.

Token times come from `Adapter.looks_like_token`, so they are estimates; the report's numbers come
from the decoded rows. Only a run with live metrics takes the gaps between tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loadgen.archive.exchange import Exchange
from loadgen.manifest.json_section import JsonObject
from loadgen.records import Schedule, Status, own_limits
from targets.base import Adapter

GAP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0),
)
"""Upper bounds of the exported buckets of gaps between tokens, seconds."""
_FINEST_S, _STEP = 50e-6, 1.05
_EVENT, _EVENT_END = b"data:", b"\n\n"


def _fine_bounds() -> tuple[tuple[float, ...], NDArray[np.intp]]:
    """Finer bounds that include GAP_BOUNDS_S, each at most `_STEP` times the previous bound, and
    the index of the first fine bucket of each exported bucket."""
    bounds, starts = [_FINEST_S], [0]
    for bound_s in GAP_BOUNDS_S:
        n = math.ceil(math.log(bound_s / bounds[-1], _STEP))
        bounds += [*(bounds[-1] * (bound_s / bounds[-1]) ** (k / n) for k in range(1, n)), bound_s]
        starts.append(len(bounds))
    return tuple(bounds), np.array(starts)


FINE_BOUNDS_S, _STARTS = _fine_bounds()
"""Upper bounds of the buckets in which a shard counts gaps, seconds."""
_BOUNDS_NS = np.rint(np.array(FINE_BOUNDS_S) * 1e9)


def coarse_counts(counts: Sequence[int]) -> NDArray[np.int64]:
    """Counts by FINE_BOUNDS_S, summed into the buckets of GAP_BOUNDS_S; the last bucket of both has
    no upper bound."""
    return np.add.reduceat(np.array(counts), _STARTS)


class SecondsHistogram:
    """A histogram of durations: `counts[i]` of them in (bounds_s[i − 1], bounds_s[i]], the last
    bucket without an upper bound; `sum_s` is the sum of all."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s, self.sum_s = bounds_s, 0.0
        self.counts: NDArray[np.int64] = np.zeros(len(bounds_s) + 1, np.int64)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def add_counts(self, counts: ArrayLike, sum_s: float) -> None:
        """Adds durations that are already counted in the same buckets."""
        self.counts += np.asarray(counts, np.int64)
        self.sum_s += sum_s

    def copy(self) -> SecondsHistogram:
        copied = SecondsHistogram(self.bounds_s)
        copied.add_counts(self.counts, self.sum_s)
        return copied


class EndedSample(NamedTuple):
    """A finished request. Latencies count from the release, `duration_s` from the send; None
    where undefined. `own_slo_s` are the limits of a request that brings its own (0: none), in the
    order of `records.OWN_SLO`."""

    class_id: int
    status: int
    ttft_s: float | None = None
    lateness_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    close_s: float | None = None
    max_stall_s: float | None = None
    duration_s: float | None = None
    n_events: int = 0
    n_bytes: int = 0
    ttfat_s: float | None = None
    own_slo_s: tuple[float, ...] | None = None


FIELDS = EndedSample._fields


class LiveSamples:
    """Samples of the requests that ended since the last `take`, and with `has_gaps` the gaps
    between their tokens. Without gaps a request of 64 tokens costs a third of the time; it has no
    longest gap, and its events are counted without parsing, except in the first and the last read.
    Answers that are not `is_streamed` have no TTFT and no TPOT; their last token is their end.
    """

    def __init__(
        self,
        schedule: Schedule,
        adapter: Adapter,
        has_gaps: bool = True,
    ) -> None:
        self._is_streamed = adapter.stream
        self._has_gaps = has_gaps
        self._looks_like_answer = adapter.looks_like_answer
        self._class_ids: list[int] = schedule["class_id"].tolist()
        self._looks_like_token = adapter.looks_like_token
        self._own_slo_s = own_limits(schedule)
        self._ended: list[EndedSample] = []
        self._gaps: dict[int, SecondsHistogram] = {}

    def add_rows(self, rows: Schedule) -> None:
        """Adds rows after the last, without SLOs of their own."""
        self._class_ids += rows["class_id"].tolist()

    def unsent(self, row: int, status: Status) -> None:
        """Adds a row that was never sent."""
        own_slo_s = self._own_slo_s.get(row)
        self._ended.append(EndedSample(self._class_ids[row], int(status), own_slo_s=own_slo_s))

    def ended(self, exchange: Exchange, status: Status, released_ns: int) -> None:
        """Adds a row that was sent. Times are nanoseconds on the exchange's clock."""
        class_id = self._class_ids[exchange.row]
        first_ns, last_ns, n_later, longest_ns, n_events = self._tokens(exchange, class_id)
        has_token = first_ns > 0
        answer_ns = self._answer_ns(exchange, first_ns) if has_token and self._is_streamed else None
        sample = EndedSample(
            class_id,
            int(status),
            ttft_s=_seconds(first_ns - released_ns) if has_token and self._is_streamed else None,
            lateness_s=_seconds(exchange.sent_ns - released_ns),
            tpot_s=_seconds(last_ns - first_ns) / n_later if n_later > 0 else None,
            e2e_s=_seconds(last_ns - released_ns) if has_token else None,
            close_s=_seconds(exchange.done_ns - released_ns),
            max_stall_s=_seconds(longest_ns) if longest_ns else None,
            duration_s=_seconds(exchange.done_ns - exchange.sent_ns),
            n_events=n_events,
            n_bytes=exchange.n_bytes,
            ttfat_s=None if answer_ns is None else _seconds(answer_ns - released_ns),
            own_slo_s=self._own_slo_s.get(exchange.row),
        )
        self._ended.append(sample)

    def take(self) -> JsonObject:
        """The samples as fields of a progress message (`ended`, `gaps`); then starts afresh."""
        gaps = [[id_, gaps.counts.tolist(), gaps.sum_s] for id_, gaps in self._gaps.items()]
        fields = {"ended": self._ended, "gaps": gaps}
        self._ended, self._gaps = [], {}
        return fields

    def _tokens(self, exchange: Exchange, class_id: int) -> tuple[int, int, int, int, int]:
        """Times of the first and the last token, events after the first read, longest gap,
        events."""
        times, parts = exchange.times, exchange.parts
        if not exchange.first_guess_ns:
            return 0, 0, 0, 0, 0
        if not self._is_streamed:
            return times[-1], times[-1], 0, 0, 1
        first, last = bisect_left(times, exchange.first_guess_ns), len(parts) - 1
        while first < last and not self._looks_like_token(parts[first]):
            first += 1  # a role chunk that came with the same read
        while last > first and not self._looks_like_token(parts[last]):
            last -= 1
        if not self._has_gaps:
            n_first = n_events = self._token_events(parts[first])  # it may hold others, as the last
            if last > first:
                n_events += b"".join(parts[first + 1 : last]).count(_EVENT)
                n_events += self._token_events(parts[last])
            n_later = n_events - n_first
            return times[first], times[last], n_later, 0, n_events
        events = [part.count(_EVENT) for part in parts[first : last + 1]]
        if max(events) > 1 or not all(events):
            events = [self._token_events(part) for part in parts[first : last + 1]]
        gaps = self._gaps.setdefault(class_id, SecondsHistogram(FINE_BOUNDS_S))
        n_events, span_ns = sum(events), times[last] - times[first]
        if last == first:
            return times[first], times[last], 0, 0, n_events
        gap_ns = np.diff(np.array(times[first : last + 1]))
        n_sharing = np.array(events[1:])  # tokens that share each gap
        buckets = np.searchsorted(_BOUNDS_NS, gap_ns / n_sharing)
        gaps.add_counts(np.bincount(buckets, n_sharing, len(gaps.counts)), _seconds(span_ns))
        return times[first], times[last], n_events - events[0], int(gap_ns.max()), n_events

    def _answer_ns(self, exchange: Exchange, first_ns: int) -> int | None:
        """Time of the first token of the answer; None for an answer of reasoning or calls alone.

        Reasoning comes before the answer, so that the change is found by halving: a search of each
        read would take the event loop a millisecond for 2 000 tokens of reasoning."""
        times, parts = exchange.times, exchange.parts
        first = bisect_left(times, first_ns)
        if self._looks_like_answer(parts[first]):
            return first_ns
        last = len(parts) - 1
        while last > first and not self._looks_like_token(parts[last]):
            last -= 1
        if not self._looks_like_answer(parts[last]):  # a call after the answer
            if not self._looks_like_answer(b"".join(parts[first:last])):
                return None
            reads = (k for k in range(first, last) if self._looks_like_answer(parts[k]))
            last = next(reads, last)
        else:
            last = bisect_left(parts, True, first, last, key=self._looks_like_answer)
        return times[last]

    def _token_events(self, part: bytes) -> int:
        """Events with a token in a read. Others come before the first (role) or after the last
        (finish, usage); those between are counted without parsing."""
        n = part.count(_EVENT)
        if n < 2:
            return 1
        events = part.split(_EVENT_END)
        for ends in (events, reversed(events)):
            for event in ends:
                if n == 1 or self._looks_like_token(event):
                    break
                n -= _EVENT in event
        return n


def _seconds(ns: int) -> float:
    return round(ns * 1e-9, 7)
