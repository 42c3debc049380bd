"""The ledger of waiting: seconds per cause and request, charged between one plan and the next.

A plan gives single requests a cause of their own and each queue segment a common cause. A request
without its own cause follows its segment's timeline and is charged only when it stops following, so
a thousand waiting requests cost nothing per step. The charge takes a look-up for each cause that
was active in the meantime, however often the causes alternated.

Every interval begins where the one before ended, and instants are kept as integers, so the charged
seconds add up to the waiting time exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain

from reference_engine.state.plan import Cause, Why

ARRIVED = Cause(Why.step_in_flight)
Ticks = dict[Cause, int]
_TICKS_PER_S = 1 << 40
S_PER_TICK = 2.0**-40
_MOST_TURNS = 1024  # of a timeline, before the part without followers is dropped


class Ledger:
    """Causes of waiting, by request id. `enter` and `leave` bracket each stay in the queue."""

    def __init__(self) -> None:
        self._waits: dict[str, Ticks] = {}  # ticks that are charged already
        # A waiting request is in one of the next three: with a cause of its own, held with a cause
        # that no plan changes, or following a segment; each since an instant.
        self._named: dict[str, tuple[Cause, int]] = {}
        self._held: dict[str, tuple[Cause, int]] = {}
        self._following: dict[str, tuple[str, int]] = {}
        self._segments: dict[str, str] = {}  # by request, if not ""
        self._timelines: dict[str, _Timeline] = {"": _Timeline(0, ARRIVED)}
        self._n_followers: Counter[str] = Counter()
        self._segment_causes: dict[str, Cause] = {}  # of the last plan, as is `_rest`
        self._rest = ARRIVED

    def enter(self, request_id: str, now_s: float, cause: Cause = ARRIVED) -> None:
        """Begin to wait; `cause` applies until the next plan."""
        self._waits.setdefault(request_id, {})
        self._named[request_id] = (cause, _ticks(now_s))

    def assign(self, request_id: str, segment: str, now_s: float) -> None:
        """Put the request into a segment, for all its waits from now on."""
        if request_id not in self._waits or self._segments.get(request_id, "") == segment:
            return
        self._segments[request_id] = segment
        if request_id in self._following:
            now = _ticks(now_s)
            self._close(request_id, now)
            self._follow(request_id, now)

    def unassign(self, now_s: float) -> None:
        """Put all requests back into the segment ""."""
        for request_id in list(self._segments):
            self.assign(request_id, "", now_s)

    def hold(self, request_id: str, now_s: float, cause: Cause) -> None:
        """Make a waiting request wait for `cause` until it is released or leaves."""
        now = _ticks(now_s)
        self._close(request_id, now)
        self._held[request_id] = (cause, now)

    def release(self, request_id: str, now_s: float) -> None:
        """Make a held request wait for the causes of plans again."""
        self._close(request_id, _ticks(now_s))
        self._named[request_id] = (ARRIVED, _ticks(now_s))

    def set_causes(
        self,
        now_s: float,
        causes: Iterable[tuple[str, Cause]],
        segments: Iterable[tuple[str, Cause]],
        rest: Cause,
    ) -> None:
        """Apply the causes of a plan from now on: `causes` of single requests, `segments` of all
        others in a segment, and `rest` of all others."""
        now = _ticks(now_s)
        segment_causes = self._segment_causes = dict(segments)
        self._rest = rest
        for segment, timeline in self._timelines.items():
            timeline.turn(now, segment_causes.get(segment, rest))
        named = {request_id: cause for request_id, cause in causes if self._is_waiting(request_id)}
        for request_id in [name for name in self._named if name not in named]:
            self._close(request_id, now)
            self._follow(request_id, now)
        for request_id, cause in named.items():
            if self._named.get(request_id, (None,))[0] != cause:
                self._close(request_id, now)
                self._named[request_id] = (cause, now)

    def leave(self, request_id: str, now_s: float) -> None:
        """Stop waiting, whether scheduled or cancelled."""
        self._close(request_id, _ticks(now_s))

    def pop(self, request_id: str) -> dict[Cause, float]:
        """Remove a request that is over and return its seconds per cause."""
        self._segments.pop(request_id, None)
        return _seconds(self._waits.pop(request_id, {}))

    def hand_over(self, request_id: str, now_s: float) -> Ticks:
        """As `pop`, for `receive` of another engine's ledger."""
        self.leave(request_id, now_s)
        self._segments.pop(request_id, None)
        return self._waits.pop(request_id, {})

    def receive(self, request_id: str, waits: Ticks) -> None:
        """Take over a request that has waited elsewhere."""
        self._waits[request_id] = dict(waits)

    def waits(self, request_id: str, now_s: float) -> dict[Cause, float]:
        """Seconds per cause so far, the open interval included."""
        waits = dict(self._waits.get(request_id, {}))
        _add(waits, self._open(request_id, _ticks(now_s)))
        return _seconds(waits)

    def cause(self, request_id: str) -> Cause | None:
        """The cause for which the request waits now; None when it does not wait."""
        for causes in (self._named, self._held):
            if request_id in causes:
                return causes[request_id][0]
        if request_id in self._following:
            return self._timelines[self._following[request_id][0]].cause
        return None

    def counts(self) -> tuple[tuple[str, int], ...]:
        """The number of waiting requests by reason."""
        # By name, not by member: a member's hash and `name` are Python calls.
        counts: defaultdict[str, int] = defaultdict(int)
        for cause, _ in chain(self._named.values(), self._held.values()):
            counts[cause.why._name_] += 1
        for segment, n in self._n_followers.items():
            counts[self._timelines[segment].cause.why._name_] += n
        return tuple((why, n) for why, n in counts.items() if n)

    def _is_waiting(self, request_id: str) -> bool:
        return request_id in self._named or request_id in self._following

    def _follow(self, request_id: str, now: int) -> None:
        segment = self._segments.get(request_id, "")
        if segment not in self._timelines:
            cause = self._segment_causes.get(segment, self._rest)
            self._timelines[segment] = _Timeline(now, cause)
        self._following[request_id] = (segment, now)
        self._n_followers[segment] += 1

    def _open(self, request_id: str, now: int) -> Ticks:
        for causes in (self._named, self._held):
            if request_id in causes:
                cause, since = causes[request_id]
                return {cause: now - since}
        if request_id in self._following:
            segment, since = self._following[request_id]
            return self._timelines[segment].between(since, now)
        return {}

    def _close(self, request_id: str, now: int) -> None:
        _add(self._waits.setdefault(request_id, {}), self._open(request_id, now))
        self._named.pop(request_id, None)
        self._held.pop(request_id, None)
        if request_id in self._following:
            segment, _ = self._following.pop(request_id)
            self._n_followers[segment] -= 1
            self._shorten(segment)

    def _shorten(self, segment: str) -> None:
        """Drop the part of a timeline that no follower needs; seldom, so that it costs nothing per
        step."""
        timeline = self._timelines[segment]
        if self._n_followers[segment] == 0:
            del self._n_followers[segment]
            if segment:
                del self._timelines[segment]
            else:
                self._timelines[""] = _Timeline(timeline.since, timeline.cause)
        elif timeline.n_turns > _MOST_TURNS:
            timeline.forget(min(s for at, s in self._following.values() if at == segment))


class _Timeline:
    """The causes of a segment over time. Each cause has its spans as (start, ticks it was active
    before), so that its sum over any interval takes two look-ups."""

    def __init__(self, now: int, cause: Cause) -> None:
        self.cause, self.since = cause, now
        self.n_turns = 1
        # In the order in which they were last active.
        self._spans: dict[Cause, tuple[list[int], list[int]]] = {cause: ([now], [0])}

    def turn(self, now: int, cause: Cause) -> None:
        """Make `cause` the active one from now on."""
        if cause is self.cause or cause == self.cause:
            self.cause = cause  # its details may have changed
            return
        starts, before = self._spans[self.cause]
        before.append(before[-1] + now - self.since)  # closed: one longer than `starts`
        self.cause, self.since = cause, now
        starts, before = self._spans.pop(cause, ([], [0]))
        starts.append(now)
        self._spans[cause] = (starts, before)
        self.n_turns += 1

    def between(self, since: int, now: int) -> Ticks:
        """Ticks of each cause in [since, now]."""
        charged: Ticks = {}
        for cause in reversed(self._spans):
            starts, before = self._spans[cause]
            total = before[-1] + (now - self.since if cause == self.cause else 0)
            i = bisect_right(starts, since) - 1
            if i >= 0:
                end = before[i + 1] if i + 1 < len(before) else total
                total -= min(before[i] + since - starts[i], end)
            else:
                total -= before[0]
            if total:
                charged[cause] = total
            if starts[-1] <= since:
                break  # all earlier causes ended before this cause began
        return charged

    def forget(self, until: int) -> None:
        """Drop the spans that ended before `until`."""
        for cause, (starts, before) in list(self._spans.items()):
            i = bisect_right(starts, until) - 1
            if i > 0:
                del starts[:i], before[:i]
            is_over = cause != self.cause and len(starts) == 1
            if is_over and starts[0] + before[1] - before[0] <= until:
                del self._spans[cause]
        self.n_turns = 1


def _ticks(instant_s: float) -> int:
    return round(instant_s * _TICKS_PER_S)


def charge(waits: Ticks, cause: Cause, since_s: float, until_s: float) -> None:
    """Add a wait to those of a request that is in no ledger."""
    _add(waits, {cause: _ticks(until_s) - _ticks(since_s)})


def _add(waits: Ticks, more: Ticks) -> None:
    for cause, ticks in more.items():
        waits[cause] = waits.get(cause, 0) + ticks


def _seconds(ticks: Ticks) -> dict[Cause, float]:
    return {cause: n * S_PER_TICK for cause, n in ticks.items() if n}
