"""Who waits and who runs, and in which order: the one place that moves requests about.

The running ones are also kept split into those that decode (one known token left to compute) and
those that still read their prompt, with the sums that would otherwise cost a loop per step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from reference_engine.state.sequence import Request


class Queues:
    """Requests by id. `waiting` is the queue (preempted ones at its head), `running` is in order
    of admission, `decoding` and `prefilling` split it. `held` are waiting ones whose tenant is
    paused; `landing` are running ones whose last token is computed but not yet known (only while
    a step is planned ahead)."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.held: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}
        self.prefilling: dict[str, Request] = {}
        self.landing: dict[str, Request] = {}
        self.cramped: dict[str, Request] = {}  # decoding, and the next token needs a block
        self.queued_tokens = 0  # Σ tokens of the waiting ones
        self.context_tokens = 0  # Σ n_computed of the decoding ones

    def find(self, request_id: str) -> Request | None:
        return (
            self.running.get(request_id)
            or self.waiting.get(request_id)
            or self.held.get(request_id)
        )

    def __iter__(self) -> Iterator[Request]:
        yield from self.running.values()
        yield from self.waiting.values()
        yield from self.held.values()

    def enter(self, request: Request) -> None:
        """To the end of the queue."""
        self.waiting[request.id] = request
        self.queued_tokens += len(request.tokens)

    def start(self, request: Request) -> None:
        """From the queue into the batch."""
        self._leave_queue(request)
        self.running[request.id] = request
        self.prefilling[request.id] = request

    def decode(self, request: Request) -> None:
        """One known token is left to compute: from now on a step gives it one token."""
        del self.prefilling[request.id]
        self.decoding[request.id] = request
        self.context_tokens += request.n_computed
        self.measure(request)

    def measure(self, request: Request) -> None:
        """Set the next point at which a decoding request needs more than one token appended."""
        n = request.n_computed
        if n == request.n_room:
            self.cramped[request.id] = request
        elif request.first_token_s is None:
            request._n_milestone = n + 1
        else:
            request._n_milestone = min(request.n_room, request._n_last)

    def land(self, request: Request) -> None:
        """Nothing is left to compute."""
        self._undecode(request)
        self.prefilling.pop(request.id, None)
        self.landing[request.id] = request

    def widen(self, request: Request) -> None:
        """A decoding request was given room."""
        if self.cramped.pop(request.id, None) is not None:
            self.measure(request)

    def widen_all(self) -> None:
        """All cramped ones were given room."""
        cramped = list(self.cramped.values())
        self.cramped.clear()
        for request in cramped:
            self.measure(request)

    def requeue(self, request: Request) -> None:
        """From the batch to the head of the queue."""
        self._stop(request)
        self.enter(request)
        self.waiting.move_to_end(request.id, last=False)

    def remove(self, request: Request) -> None:
        """Out, from wherever it is."""
        if request.id in self.running:
            self._stop(request)
        elif self.held.pop(request.id, None) is None:
            self._leave_queue(request)

    def hold(self, request: Request) -> None:
        """A waiting request is kept from the policy."""
        self._leave_queue(request)
        self.held[request.id] = request

    def release(self, requests: Iterable[Request]) -> None:
        """Held requests return to where they would be: those that ran before at the head, the
        others by arrival."""
        for request in requests:
            del self.held[request.id]
            self.enter(request)
        ordered = sorted(self.waiting.values(), key=lambda r: (r.scheduled_s is None, r.arrived_s))
        self.waiting = OrderedDict((request.id, request) for request in ordered)

    def _leave_queue(self, request: Request) -> None:
        del self.waiting[request.id]
        self.queued_tokens -= len(request.tokens)

    def _stop(self, request: Request) -> None:
        del self.running[request.id]
        self.prefilling.pop(request.id, None)
        self.landing.pop(request.id, None)
        self._undecode(request)

    def _undecode(self, request: Request) -> None:
        if self.decoding.pop(request.id, None) is not None:
            self.context_tokens -= request.n_computed
            self.cramped.pop(request.id, None)

    def check(self) -> None:
        """Assert that the parts agree."""
        assert not self.landing, f"landing between steps: {', '.join(self.landing)}"
        assert self.decoding.keys() | self.prefilling.keys() == self.running.keys()
        assert not self.decoding.keys() & self.prefilling.keys()
        for request in self.prefilling.values():
            assert request.n_remaining >= 1, f"{request.id} reads with nothing left"
        for request in self.decoding.values():
            assert request.n_remaining == 1, f"{request.id} decodes with {request.n_remaining} left"
            is_cramped = request.n_computed == request.n_room
            assert (request.id in self.cramped) == is_cramped, f"{request.id}: room {is_cramped}"
        assert self.queued_tokens == sum(r.n_tokens for r in self.waiting.values())
        assert self.context_tokens == sum(r.n_computed for r in self.decoding.values())
