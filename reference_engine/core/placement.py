"""Who gets a slot and KV blocks: carries a plan out up to the computation.

Running requests are served before admissions, and a step that had to preempt admits nobody. The
first admitted request is never preempted for another's memory, so something can always finish.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reference_engine.policies.base import Policy
from reference_engine.state.batch import Copy, Row
from reference_engine.state.cost_model import StepShape
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Cause, How, Item, Plan, View, Why
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request, State
from reference_engine.state.swap import HostPool

NO_BLOCKS = Cause(Why.no_kv_blocks)


class Preempted(NamedTuple):
    """A request that had to go, and for whom."""

    request: Request
    by: str


class Placement:
    """One plan being carried out; what came of it is in its fields."""

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        view: View,
        queues: Queues,
        kv: KvPool,
        host: HostPool,
        preempt: How,
    ) -> None:
        self.rows: dict[str, Row] = {}
        self.decodes: Sequence[Request] = ()
        self.copies: list[Copy] = []
        self.preempted: list[Preempted] = []
        self.admitted: list[Request] = []
        self.left_out: list[tuple[str, Cause]] = []
        self._policy, self._view = policy, view
        self._queues, self._kv, self._host, self._how = queues, kv, host, preempt
        self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> None:
        queues = self._queues
        for request_id, how, by in plan.preempt:
            self._preempt(queues.running[request_id], by, how)
        admissions = []
        for item in plan.items:
            if item.request_id in queues.waiting:
                admissions.append(item)
            else:
                self._run(item)
        if plan.decode_all:
            self._decode(plan)
        for item in admissions:
            if self.preempted or not self._start(item):
                self.left_out.append((item.request_id, NO_BLOCKS))

    def _run(self, item: Item) -> None:
        """Give a running request its tokens, at the expense of others if need be."""
        request = self._queues.running.get(item.request_id)
        if request is None:  # made room for an item before it
            return
        if self._kv.grow(request, item.n_tokens) or self._make_room(request, item.n_tokens):
            self._queues.widen(request)
            self.rows[request.id] = _row(request, item.n_tokens)

    def _decode(self, plan: Plan) -> None:
        """One token for the decoding requests that are not named."""
        queues = self._queues
        unnamed = {item.request_id for item in plan.items}.union(plan.hold)
        is_everybody = unnamed.isdisjoint(queues.decoding)
        if is_everybody and self._kv.extend(queues.cramped.values()):
            queues.widen_all()
        else:
            for request in list(queues.cramped.values()):
                # Growing one may preempt another that is still on this list.
                if request.id in unnamed or request.id not in queues.decoding:
                    continue
                if self._kv.grow(request, 1) or self._make_room(request, 1):
                    queues.widen(request)
        if is_everybody:
            self.decodes = list(queues.decoding.values())
        else:
            self.decodes = [r for key, r in queues.decoding.items() if key not in unnamed]

    def _start(self, item: Item) -> bool:
        request = self._queues.waiting[item.request_id]
        if not self._kv.admit(request, item.n_tokens, min(item.reserve_tokens, request.n_most)):
            return False
        if request.n_swapped:
            self.copies += self._host.swap_in(request, request.n_published)
        self._queues.start(request)
        request.state = State.running
        self.admitted.append(request)
        self.rows[request.id] = _row(request, item.n_tokens)
        return True

    def _make_room(self, request: Request, n_tokens: int) -> bool:
        """Preempt until the request can grow; False when it had to go itself.

        The policy's victims go first. After them it is last in, first out: a request may only
        displace those admitted after it, itself at last. The first admitted can thus always
        finish, which is the progress guarantee.
        """
        for victim in self._victims(request, n_tokens):
            self._preempt(victim, request.id, How.auto)
            self.rows.pop(victim.id, None)
            if victim is request:
                return False
            if self._kv.grow(request, n_tokens):
                return True
        raise AssertionError(f"{request.id} was not among the victims for its own blocks")

    def _victims(self, request: Request, n_tokens: int) -> Iterator[Request]:
        running = self._queues.running
        need_blocks = self._kv.missing(request, n_tokens) - self._kv.n_free
        for request_id in self._policy.victims(self._view, request, need_blocks):
            victim = running.get(request_id)
            if victim is not None and victim is not request and self._may_lose(victim):
                yield victim
        while True:
            yield running[next(reversed(running))]

    def _may_lose(self, victim: Request) -> bool:
        return victim is not next(iter(self._queues.running.values()))

    def _preempt(self, request: Request, by: str, how: How) -> None:
        """Back to the head of the queue without blocks."""
        self._queues.requeue(request)
        if self._swaps(request, how):
            n_blocks = self._kv.blocks_for(request.n_computed)
            self.copies += self._host.swap_out(request, n_blocks)
            request.state = State.swapped
        else:
            request.state = State.preempted
        self._kv.free(request)
        request.n_preemptions += 1
        self.preempted.append(Preempted(request, by))

    def _swaps(self, request: Request, how: How) -> bool:
        """Whether its KV goes to host memory; `auto` by what is cheaper, copying it out and in
        again or computing it again."""
        n_tokens, host = request.n_computed, self._host
        n_blocks = self._kv.blocks_for(n_tokens)
        how = self._how if how is How.auto else how
        if how is How.recompute or not n_tokens or n_blocks > host.n_free:
            return False
        if how is How.swap:
            return True
        again = StepShape(n_seqs=1, prefill_tokens=n_tokens, prefill_attention=n_tokens**2 / 2)
        return 2 * n_blocks * host.copy_s < self._view.cost.estimate(again)


def _row(request: Request, n_tokens: int) -> Row:
    start = request.n_computed
    return Row(request, start, n_tokens, n_tokens == len(request.tokens) - start)
