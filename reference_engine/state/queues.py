"""The queue and the running batch, in their order: the only place that moves requests.

Running requests are also kept split into those that decode (a single token left to compute) and
those that still read their prompt, with sums that would otherwise cost a loop in every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from reference_engine.state.lockstep import Lockstep
from reference_engine.state.sequence import Request


class Queues:
    """Requests by id.

    `waiting` is the queue, preempted requests at its head; `held` are waiting requests of paused
    tenants. `running` is in order of admission and split into `decoding`, `prefilling` and
    `ending`: requests with their last token being computed (only while a step is planned ahead).
    `out_of_room` are the decoding requests whose next token needs a new block. During a
    `lockstep`, which only a simulator begins, the decoding requests are not up to date until it
    settles them. `in_flight` are the requests with a token in one of the batches of a pipeline:
    they hold blocks and a slot, and are in none of the other parts until the batch lands."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.held: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}
        self.prefilling: dict[str, Request] = {}
        self.ending: dict[str, Request] = {}
        self.out_of_room: dict[str, Request] = {}
        self.in_flight: dict[str, Request] = {}
        self.queued_tokens = 0  # Σ tokens of `waiting`
        self.context_tokens = 0  # Σ n_computed of `decoding`
        self.lockstep: Lockstep | None = None
        self._n_started = 0

    @property
    def n_running(self) -> int:
        """Requests that hold blocks and a sequence slot."""
        return len(self.running) + len(self.in_flight)

    def find(self, request_id: str) -> Request | None:
        return (
            self.running.get(request_id)
            or self.waiting.get(request_id)
            or self.held.get(request_id)
            or self.in_flight.get(request_id)
        )

    def __iter__(self) -> Iterator[Request]:
        yield from self.running.values()
        yield from self.in_flight.values()
        yield from self.waiting.values()
        yield from self.held.values()

    def begin_lockstep(self, token: int) -> Lockstep:
        """Let the decoding requests take steps together, each with this token."""
        self.lockstep = lockstep = Lockstep(token)
        for request in self.decoding.values():
            lockstep.join(request)
            if request.id not in self.out_of_room:
                lockstep.expect(request)
        return lockstep

    def end_lockstep(self) -> None:
        """Bring the decoding requests up to date, for steps that differ from one to another."""
        if self.lockstep is None:
            return
        for request in self.decoding.values():
            self.lockstep.leave(request)
        self.lockstep = None

    def settle(self) -> None:
        """Bring the decoding requests up to date."""
        if self.lockstep is not None:
            self.lockstep.settle_all()

    def enter(self, request: Request) -> None:
        """Add a request at the end of the queue."""
        self.waiting[request.id] = request
        self.queued_tokens += len(request.tokens)

    def start(self, request: Request) -> None:
        """Move a request from the queue into the batch."""
        self._leave_queue(request)
        self.running[request.id] = request
        self.prefilling[request.id] = request
        self._n_started += 1
        request._start = self._n_started

    def take_off(self, requests: Iterable[Request]) -> None:
        """Move running requests to `in_flight`, each with a token being computed."""
        for request in requests:
            self._leave_batch(request)
            self.in_flight[request.id] = request

    def land(self, requests: Iterable[Request]) -> None:
        """Move requests back from `in_flight`, before the token is appended."""
        for request in requests:
            del self.in_flight[request.id]
            self.running[request.id] = request
            self.prefilling[request.id] = request
            if request.n_remaining == 1:
                self.decode(request)
        ordered = sorted(self.running.values(), key=lambda request: request._start)
        self.running = {request.id: request for request in ordered}

    def has_later_in_flight(self, request: Request) -> bool:
        """Whether a request that was admitted after this is in flight."""
        return any(other._start > request._start for other in self.in_flight.values())

    def advance(self, request: Request) -> None:
        """Move a running request on after tokens of it were computed."""
        if request.n_computed >= request.n_most:
            self._stop_decoding(request)
            self.prefilling.pop(request.id, None)
            self.ending[request.id] = request
        elif request.id in self.decoding:
            self.set_milestone(request)
        elif len(request.tokens) - request.n_computed == 1:
            self.decode(request)

    def decode(self, request: Request) -> None:
        """Move a request with a single token left to compute to `decoding`."""
        del self.prefilling[request.id]
        self.decoding[request.id] = request
        self.context_tokens += request.n_computed
        if self.lockstep is not None:
            self.lockstep.join(request)
        self.set_milestone(request)

    def set_milestone(self, request: Request) -> None:
        """Set the `n_computed` at which a decoding request next needs more than an appended
        token."""
        n = request.n_computed
        if n == request.n_room:
            self.out_of_room[request.id] = request
            return
        if not request.n_output:
            request._n_milestone = n + 1
        else:
            request._n_milestone = min(request.n_room, request._n_last)
        if self.lockstep is not None:
            self.lockstep.expect(request)

    def room_added(self, request: Request) -> None:
        """Update a running request that was given blocks."""
        if self.out_of_room.pop(request.id, None) is not None:
            self.set_milestone(request)

    def room_added_to_all(self) -> None:
        """Update all of `out_of_room`, after each was given blocks."""
        requests = list(self.out_of_room.values())
        self.out_of_room.clear()
        for request in requests:
            self.set_milestone(request)

    def requeue(self, request: Request) -> None:
        """Move a running request to the head of the queue."""
        self._leave_batch(request)
        self.enter(request)
        self.waiting.move_to_end(request.id, last=False)

    def remove(self, request: Request) -> None:
        if request.id in self.running:
            self._leave_batch(request)
        elif self.held.pop(request.id, None) is None:
            self._leave_queue(request)

    def hold(self, request: Request) -> None:
        """Move a waiting request to `held`."""
        self._leave_queue(request)
        self.held[request.id] = request

    def release(self, requests: Iterable[Request]) -> None:
        """Return held requests to their places in the queue: those that ran before to its head,
        the others in order of arrival."""
        for request in requests:
            del self.held[request.id]
            self.enter(request)
        ordered = sorted(self.waiting.values(), key=lambda r: (r.scheduled_s is None, r.arrived_s))
        self.waiting = OrderedDict((request.id, request) for request in ordered)

    def _leave_queue(self, request: Request) -> None:
        del self.waiting[request.id]
        self.queued_tokens -= len(request.tokens)

    def _leave_batch(self, request: Request) -> None:
        del self.running[request.id]
        self.prefilling.pop(request.id, None)
        self.ending.pop(request.id, None)
        self._stop_decoding(request)

    def _stop_decoding(self, request: Request) -> None:
        if self.decoding.pop(request.id, None) is not None:
            if self.lockstep is not None:
                self.lockstep.leave(request)
            self.context_tokens -= request.n_computed
            self.out_of_room.pop(request.id, None)

    def check(self) -> None:
        """Assert that the parts agree."""
        self.settle()
        assert not self.ending, f"ending between steps: {', '.join(self.ending)}"
        assert self.decoding.keys() | self.prefilling.keys() == self.running.keys()
        assert not self.decoding.keys() & self.prefilling.keys()
        assert not self.in_flight.keys() & (self.running.keys() | self.waiting.keys())
        for request in self.prefilling.values():
            assert request.n_remaining >= 1, f"{request.id} is prefilling with nothing left"
        for request in self.decoding.values():
            assert request.n_remaining == 1, f"{request.id} decodes with {request.n_remaining} left"
            has_no_room = request.n_computed == request.n_room
            assert (request.id in self.out_of_room) == has_no_room, (
                f"{request.id}: computed {request.n_computed} tokens, room for {request.n_room}"
            )
        assert self.queued_tokens == sum(r.n_tokens for r in self.waiting.values())
        assert self.context_tokens == sum(r.n_computed for r in self.decoding.values())
