"""Requests that leave an engine with their KV and continue in another, in simulated clusters.

    engine A   running ─hand_over─▶ its blocks stay lent ────────────▶ give_back
    engine B         hold: blocks are lent to it ─▶ give_back, take_over ─▶ waiting ─plan─▶ running

Engine B admits a received request as a swapped request, without computing its KV again. What B
preempts later it computes again, or swaps, by itself. Where both engines share KV memory, B is lent
the blocks themselves, and the request runs on in B's next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reference_engine.accounting.ledger import Ticks, charge
from reference_engine.state.plan import Cause, Why
from reference_engine.state.sequence import NO_HITS, Request, State

if TYPE_CHECKING:
    from reference_engine.core.core import EngineState


_TRANSFER, FAILURE = Cause(Why.kv_transfer), Cause(Why.replica_failed)


@dataclass(slots=True, eq=False)
class Handover:
    """A request between two engines. `n_tokens` are in KV; `waits` are its waits up to `since_s`,
    from which on it waits for `cause`."""

    request: Request
    n_tokens: int
    waits: Ticks
    since_s: float
    cause: Cause = _TRANSFER

    def charge(self, cause: Cause, until_s: float) -> None:
        """Charge the wait since `since_s`."""
        charge(self.waits, cause, self.since_s, until_s)
        self.since_s = until_s


def hand_over(state: EngineState, request_id: str) -> Handover:
    """Take a running request out of an engine between two steps. Its blocks stay owned until
    `give_back`."""
    assert not state.async_depth, "a step is planned ahead"
    view, request = state.view(), state.queues.running[request_id]
    state.queues.remove(request)
    n_tokens = request.n_computed
    state.lent[request_id] = state.kv.detach(request)
    request.state, request.n_swapped, request._hits = State.received, n_tokens, NO_HITS
    state.policy.on_finish(request, view)
    waits = state.accounting.hand_over(request, view.now_s)
    _log(state, "hand_over", request, n_tokens)
    return Handover(request, n_tokens, waits, view.now_s)


def hold(state: EngineState, request_id: str, n_blocks: int) -> None:
    """Take blocks for a request that is to come, until `give_back`."""
    state.lent[request_id] = state.kv.hold(n_blocks)


def give_back(state: EngineState, request_id: str) -> None:
    """Free the blocks that are lent for a request."""
    state.kv.give_back(state.lent.pop(request_id))


def take_over(state: EngineState, handover: Handover) -> None:
    """Put a request of another engine into the queue; into the batch, if its blocks are lent."""
    request, view = handover.request, state.view()
    state.accounting.take_over(request, handover.waits, handover.since_s, handover.cause)
    state.queues.enter(request)
    _log(state, "take_over", request, handover.n_tokens)
    blocks = state.lent.pop(request.id, None)
    if blocks is not None:
        state.kv.attach(request, blocks, handover.n_tokens)
        state.queues.start(request)
        state.queues.advance(request)
        request.state, request.n_swapped = State.running, 0
        state.accounting.start([request], view.now_s)
    state.policy.on_arrival(request, view)


def lose(state: EngineState) -> list[Handover]:
    """The requests of an engine that has failed, as they would begin anew elsewhere: with the
    tokens of their answers so far and without KV. The engine cannot be used any more."""
    now_s, queues = state.view().now_s, state.queues
    queues.settle()
    return [
        Handover(begin_anew(request), 0, state.accounting.hand_over(request, now_s), now_s, FAILURE)
        for request in queues
    ]


def begin_anew(request: Request) -> Request:
    """The request without anything that an engine gave it, its answer and its times excepted."""
    request.state, request.blocks, request.host_blocks = State.waiting, [], []
    request.n_computed = request.n_room = request.n_published = request.n_swapped = 0
    request._runs, request._hits, request._order, request._due = [], NO_HITS, 0, -1
    if request.first_token_s is None:
        request.scheduled_s, request.n_cached = None, 0
    return request


def _log(state: EngineState, kind: str, request: Request, n_tokens: int) -> None:
    detail = {"n_tokens": n_tokens}
    now_s = state.view().now_s
    state.log_event(kind, detail, now_s, request_id=request.id, tenant=request.tenant)
