"""Placement of a checked plan: sequence slots and KV blocks for the requests of a step.

Preemptions that the plan names come first, so that an admission of the same plan can take the slot
and the blocks. Running requests are served before admissions, and a step that had to preempt to
give them memory admits none. The first admitted request is never preempted for another's memory, so
a request can always finish.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reference_engine.policies.base import Policy
from reference_engine.state.batch import Copy, Row, StepBatch
from reference_engine.state.cost_model import Padding, StepShape
from reference_engine.state.plan import Cause, How, Item, Plan, View, Why
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request, State
from reference_engine.state.swap import HostPool

NO_BLOCKS = Cause(Why.no_kv_blocks)


class Preempted(NamedTuple):
    """A preempted request, and the id of the request it makes room for."""

    request: Request
    by: str


class Placement:
    """Places a plan when constructed; its fields hold the outcome. `left_out` are the items of
    the plan that were not admitted: all unless `is_admitting`. `held` are running requests
    that wait for the blocks of requests in flight."""

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        view: View,
        queues: Queues,
        host: HostPool,
        preempt: How,
        is_admitting: bool = True,
    ) -> None:
        self.rows: dict[str, Row] = {}
        self.decodes: Sequence[Request] = ()
        self.copies: list[Copy] = []
        self.preempted: list[Preempted] = []
        self.admitted: list[Request] = []
        self.left_out: list[tuple[str, Cause]] = []
        self.held: set[str] = set()
        self._policy, self._view, self._queues = policy, view, queues
        self._kv, self._host, self._how = view.kv, host, preempt
        for request_id, how, by in plan.preempt:
            self._preempt(queues.running[request_id], by, how)
        n_planned = len(self.preempted)
        admissions = []
        for item in plan.items:
            if item.request_id in queues.waiting:
                admissions.append(item)
            else:
                self._run(item)
        if plan.decode_all:
            self._decode(plan)
        for item in admissions:
            is_short = not is_admitting or self.held or len(self.preempted) > n_planned
            if is_short or not self._admit(item):
                self.left_out.append((item.request_id, NO_BLOCKS))
        self._copy_prefixes()

    def batch(self, padding: Padding) -> StepBatch:
        queues, decodes = self._queues, self.decodes
        if len(decodes) == len(queues.decoding):
            context_tokens = queues.context_tokens
        else:
            context_tokens = sum(request.n_computed for request in decodes)
        rows, copies = tuple(self.rows.values()), tuple(self.copies)
        return StepBatch(rows, decodes, padding, copies, context_tokens)

    def _run(self, item: Item) -> None:
        """Give a running request room for its tokens, preempting others if need be."""
        request = self._queues.running.get(item.request_id)
        if request is None:  # preempted for an earlier item
            return
        if self._grow(request, item.n_tokens):
            self.rows[request.id] = _row(request, item.n_tokens)

    def _decode(self, plan: Plan) -> None:
        """Give room for a token to every decoding request that the plan does not name."""
        queues = self._queues
        named = {item.request_id for item in plan.items}.union(plan.hold)
        is_all = named.isdisjoint(queues.decoding)
        if is_all and self._kv.extend(queues.out_of_room.values()):
            queues.room_added_to_all()
        else:
            queues.settle()
            for request in list(queues.out_of_room.values()):
                # Growing a request may have preempted another that is still on this list.
                if request.id not in named and request.id in queues.decoding:
                    self._grow(request, 1)
        if is_all and not self.held:
            self.decodes = list(queues.decoding.values())
        else:
            left_out = named | self.held
            self.decodes = [r for key, r in queues.decoding.items() if key not in left_out]

    def _admit(self, item: Item) -> bool:
        request = self._queues.waiting[item.request_id]
        if not self._kv.admit(request, item.n_tokens, min(item.reserve_tokens, request.n_most)):
            return False
        if request.n_swapped:
            self._copy_prefixes()
            self.copies += self._host.swap_in(request, request.n_published)
        self._queues.start(request)
        request.state = State.running
        self.admitted.append(request)
        # A preemption publishes blocks, so more of the prompt may be cached than was planned with.
        self.rows[request.id] = _row(request, min(item.n_tokens, request.n_remaining))
        return True

    def _grow(self, request: Request, n_tokens: int) -> bool:
        """Give a running request room for `n_tokens`, preempting until it has it; False when it
        had to be preempted itself, or is `held`.

        The policy's victims go first. After them the last admitted goes first: a request displaces
        only those admitted after it, and last of all itself. So the first admitted request can
        always finish, which guarantees progress. While one admitted after it is in flight, whose
        memory cannot be taken, it is held instead of being preempted itself.
        """
        if self._kv.grow(request, n_tokens):
            self._queues.room_added(request)
            return True
        for victim in self._victims(request, n_tokens):
            if victim is request and self._queues.has_later_in_flight(request):
                self.held.add(request.id)
                return False
            self._preempt(victim, request.id, How.auto)
            self.rows.pop(victim.id, None)
            if victim is request:
                return False
            if self._kv.grow(request, n_tokens):
                self._queues.room_added(request)
                return True
        raise AssertionError(f"{request.id} was not among the victims for its own blocks")

    def _victims(self, request: Request, n_tokens: int) -> Iterator[Request]:
        running = self._queues.running
        self._queues.settle()  # a policy may rank the victims by their tokens
        need_blocks = self._kv.missing(request, n_tokens) - self._kv.n_free
        for request_id in self._policy.victims(self._view, request, need_blocks):
            victim = running.get(request_id)
            # `running` is in order of admission, and its first request is never displaced.
            is_first = victim is next(iter(running.values()))
            if victim is not None and victim is not request and not is_first:
                yield victim
        while True:
            yield running[next(reversed(running))]

    def _preempt(self, request: Request, by: str, how: How) -> None:
        """Put a running request back at the head of the queue, without blocks."""
        self._queues.requeue(request)
        if self._is_swapped(request, how):
            n_blocks = self._kv.blocks_for(request.n_computed)
            self._copy_prefixes()
            self.copies += self._host.swap_out(request, n_blocks)
            request.state = State.swapped
        else:
            request.state = State.preempted
        self._kv.free(request)
        request.n_preemptions += 1
        self.preempted.append(Preempted(request, by))

    def _is_swapped(self, request: Request, how: How) -> bool:
        """Whether the KV of a preempted request goes to host memory. `auto` compares the cost of
        copying it out and in with the cost of computing it again."""
        n_tokens, host = request.n_computed, self._host
        n_blocks = self._kv.blocks_for(n_tokens)
        how = self._how if how is How.auto else how
        if how is How.recompute or not n_tokens or n_blocks > host.n_free:
            return False
        if how is How.swap:
            return True
        again = StepShape(n_seqs=1, prefill_tokens=n_tokens, prefill_attention=n_tokens**2 / 2)
        return 2 * (n_blocks * host.copy_s + host.latency_s) < self._view.cost.estimate(again)

    def _copy_prefixes(self) -> None:
        """Add the copies of prefixes so far, before copies that may follow from them."""
        if self._host.keeps_prefixes:
            self.copies += self._host.drain()


def _row(request: Request, n_tokens: int) -> Row:
    start = request.n_computed
    return Row(request, start, n_tokens, n_tokens == len(request.tokens) - start)
