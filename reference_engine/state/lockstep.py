"""Decoding requests that take every step together, counted in a single number for all of them.

    n_steps          0    1    2    3    4    5        steps since the lockstep began
    request A        join ─────────────────── settle   5 tokens, appended at once
    request B                  join ──── settle        2 tokens

A simulated decode step gives each decoding request the same token. Only a few of them need more
than that in a step: a block, or their end. So a step costs as much as the requests that are due,
however many others decode.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import repeat

from reference_engine.state.sequence import Request

_MOST_INSTANTS = 1 << 16  # kept for requests that are not settled


class Lockstep:
    """The decoding requests of an engine, by the step at which each is due.

    `n_computed` and `tokens` of a request are those of its last `settle`. `token` is the token of
    every step, and `instants_s` holds the ends of the latest steps, for requests that keep the
    times of their tokens."""

    def __init__(self, token: int) -> None:
        self.n_steps = 0
        self.token = token
        self._instants_s: list[float] = []
        self._n_forgotten = 0  # steps before the first of `_instants_s`
        self._n_joined = 0
        self._due: list[tuple[int, int, Request]] = []  # heaps of (step, order, request)
        self._ends: list[tuple[int, int, Request]] = []
        self._members: dict[int, Request] = {}  # by order
        self._unanswered: set[int] = set()  # orders of requests without a token so far

    def join(self, request: Request) -> None:
        """Add a request that decodes from the next step on."""
        self._n_joined += 1
        request._order, request._since = self._n_joined, self.n_steps
        self._members[self._n_joined] = request
        if not request.n_output:
            self._unanswered.add(self._n_joined)
        heappush(self._ends, (self._last(request), self._n_joined, request))

    def leave(self, request: Request) -> None:
        """Remove a request, settled."""
        self.settle(request)
        self._members.pop(request._order, None)
        self._unanswered.discard(request._order)
        request._order = 0

    def expect(self, request: Request) -> None:
        """Make a settled request due at its next milestone."""
        if self.token in request.stop_ids:
            request._due = self.n_steps + 1
        else:
            request._due = self.n_steps + request._n_milestone - request.n_computed
        heappush(self._due, (request._due, request._order, request))

    def settle(self, request: Request) -> None:
        """Append the tokens of the steps since the last settlement."""
        n = self.n_steps - request._since
        if n <= 0 or not request._order:
            return
        request.n_computed += n
        request.tokens.extend(repeat(self.token, n))
        if request.token_times_s is not None:
            first = request._since - self._n_forgotten
            request.token_times_s += self._instants_s[first : first + n]
        request._since = self.n_steps

    @property
    def has_unanswered(self) -> bool:
        """Whether the next step gives a request its first token."""
        return bool(self._unanswered)

    def settle_all(self) -> None:
        for request in self._members.values():
            self.settle(request)

    def advance(self, ends_s: Iterable[float]) -> None:
        """Take steps that end at these instants (s)."""
        n_before = len(self._instants_s)
        self._instants_s += ends_s
        self.n_steps += len(self._instants_s) - n_before
        if len(self._instants_s) > _MOST_INSTANTS:
            self.settle_all()
            self._n_forgotten += len(self._instants_s)
            self._instants_s.clear()

    def next_end(self) -> int:
        """The first step with which a request may end; without requests, the present step."""
        ends, members = self._ends, self._members
        while ends and ends[0][1] not in members:
            heappop(ends)
        return ends[0][0] if ends else self.n_steps

    def pop_due(self) -> list[Request]:
        """The requests that are due by now, settled, in the order in which they joined."""
        requests: list[Request] = []
        due, members, now = self._due, self._members, self.n_steps
        while due and due[0][0] <= now:
            step, order, request = heappop(due)
            if order in members and request._due == step:
                request._due = -1
                self._unanswered.discard(order)
                self.settle(request)
                requests.append(request)
        return requests

    def take_due(self, until: int) -> tuple[int, list[Request]]:
        """The next step, at most `until`, after which the blocks of requests are full, and these
        requests, in the order in which they joined; `until` and none if there is none. The step is
        not counted yet, and they are not settled: `postpone` each after it was given blocks."""
        requests: list[Request] = []
        due, members = self._due, self._members
        step = until
        while due and due[0][0] <= step:
            at, order, request = heappop(due)
            if request._due == at and order in members:
                step, request._due = at, -1
                requests.append(request)
        return step, requests

    def postpone(self, request: Request, step: int, n_room: int) -> None:
        """Make a request due again that had room for `n_room` tokens, of which the last was
        computed at `step`."""
        last, room = request._n_last, request.n_room
        milestone = request._n_milestone = room if room < last else last
        request._due = due = step + milestone - n_room
        heappush(self._due, (due, request._order, request))

    def _last(self, request: Request) -> int:
        if self.token in request.stop_ids:
            return self.n_steps + 1
        return self.n_steps + request._n_last - request.n_computed
