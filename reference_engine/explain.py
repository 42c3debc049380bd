"""Where a request's waiting time went: seconds per cause, charged between one plan and the next.

A plan names a cause for the few requests it looked at and one cause (`Plan.rest`) for all others.
The others follow a shared timeline and are charged only when they leave it, so a thousand waiting
requests cost nothing per step. The charged seconds add up to the waiting time exactly: every
interval begins where the one before ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from reference_engine.plan import Cause, Why
from reference_engine.sequence import Request

ARRIVED = Cause(Why.step_in_flight)
_KEPT = 1024


class Ledger:
    """Causes of waiting, per request. `enter` and `leave` bracket each stay in the queue."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[Cause, float]] = {}  # cause of its own, since
        self._following: dict[str, float] = {}  # follows the timeline, since
        self._timeline: list[tuple[float, Cause]] = []
        self._waits: dict[str, dict[Cause, float]] = {}

    def enter(self, request_id: str, now_s: float, cause: Cause = ARRIVED) -> None:
        """Begin to wait; `cause` holds until the next plan."""
        self._waits.setdefault(request_id, {})
        self._named[request_id] = (cause, now_s)

    def note(self, now_s: float, causes: Iterable[tuple[str, Cause]], rest: Cause) -> None:
        """A plan was made: the named ones wait for their causes from now on, all others for
        `rest`."""
        named = {request_id: cause for request_id, cause in causes if request_id in self._waits}
        if not self._timeline or self._timeline[-1][1] != rest:
            self._timeline.append((now_s, rest))
        for request_id in [known for known in self._named if known not in named]:
            self._close(request_id, now_s)
            self._following[request_id] = now_s
        for request_id, cause in named.items():
            if self._named.get(request_id, (None,))[0] != cause and self._is_waiting(request_id):
                self._close(request_id, now_s)
                self._named[request_id] = (cause, now_s)
        self._prune()

    def leave(self, request_id: str, now_s: float) -> None:
        """Stop waiting, whether scheduled or cancelled."""
        self._close(request_id, now_s)

    def pop(self, request_id: str) -> dict[Cause, float]:
        """Seconds per cause of a request that is over, which is then forgotten."""
        return self._waits.pop(request_id, {})

    def waits(self, request_id: str, now_s: float) -> dict[Cause, float]:
        """Seconds per cause so far, an open interval included."""
        waits = dict(self._waits.get(request_id, {}))
        for cause, seconds in self._open(request_id, now_s):
            waits[cause] = waits.get(cause, 0.0) + seconds
        return waits

    def _is_waiting(self, request_id: str) -> bool:
        return request_id in self._named or request_id in self._following

    def _open(self, request_id: str, now_s: float) -> list[tuple[Cause, float]]:
        if request_id in self._named:
            cause, since_s = self._named[request_id]
            return [(cause, now_s - since_s)]
        if request_id not in self._following:
            return []
        since_s = self._following[request_id]
        first = bisect_right(self._timeline, since_s, key=lambda entry: entry[0]) - 1
        stretch = self._timeline[first:]
        ends = [start_s for start_s, _ in stretch[1:]] + [now_s]
        return [
            (cause, end_s - max(start_s, since_s))
            for (start_s, cause), end_s in zip(stretch, ends, strict=True)
        ]

    def _close(self, request_id: str, now_s: float) -> None:
        charged = self._open(request_id, now_s)
        self._named.pop(request_id, None)
        self._following.pop(request_id, None)
        waits = self._waits.setdefault(request_id, {})
        for cause, seconds in charged:
            waits[cause] = waits.get(cause, 0.0) + seconds

    def _prune(self) -> None:
        """Forget the timeline before the oldest follower; seldom, so that it costs nothing per
        step."""
        if len(self._timeline) <= _KEPT and self._following:
            return
        oldest_s = min(self._following.values(), default=float("inf"))
        first = bisect_right(self._timeline, oldest_s, key=lambda entry: entry[0]) - 1
        del self._timeline[:first]


@dataclass(frozen=True, slots=True)
class Account:
    """What is remembered of a request: its times (s), sizes (tokens) and the causes of its
    waits."""

    request_id: str
    tenant: str
    state: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    n_preemptions: int
    arrived_s: float
    queue_s: float
    ttft_s: float | None
    e2e_s: float | None
    waits: tuple[tuple[Cause, float], ...]

    def sentence(self) -> str:
        """`waited 1.84 s: 1.61 s behind req-17, 0.23 s for token budget`, the longest wait
        first."""
        total_s = sum(seconds for _, seconds in self.waits)
        parts = [
            f"{seconds:.3g} s {cause.why}{' ' + cause.blocker if cause.blocker else ''}"
            for cause, seconds in sorted(self.waits, key=lambda wait: -wait[1])
            if seconds > 0
        ]
        return f"waited {total_s:.3g} s: {', '.join(parts)}" if parts else "did not wait"


def account(request: Request, waits: dict[Cause, float], now_s: float) -> Account:
    """The account of a request as it stands at `now_s`."""
    arrived_s = request.arrived_s
    queued_until_s = next(
        (t for t in (request.scheduled_s, request.finished_s) if t is not None), now_s
    )
    return Account(
        request_id=request.id,
        tenant=request.tenant,
        state=request.state.name,
        input_tokens=request.n_prompt,
        cached_tokens=request.n_cached,
        output_tokens=request.n_output,
        n_preemptions=request.n_preemptions,
        arrived_s=arrived_s,
        queue_s=queued_until_s - arrived_s,
        ttft_s=None if request.first_token_s is None else request.first_token_s - arrived_s,
        e2e_s=None if request.finished_s is None else request.finished_s - arrived_s,
        waits=tuple(waits.items()),
    )


class Accounts:
    """The most recent finished requests, by id; the oldest is forgotten first."""

    def __init__(self, n_kept: int = _KEPT) -> None:
        self._n_kept = n_kept
        self._by_id: OrderedDict[str, Account] = OrderedDict()

    def add(self, entry: Account) -> None:
        self._by_id.pop(entry.request_id, None)
        self._by_id[entry.request_id] = entry
        while len(self._by_id) > self._n_kept:
            self._by_id.popitem(last=False)

    def get(self, request_id: str) -> Account | None:
        return self._by_id.get(request_id)
