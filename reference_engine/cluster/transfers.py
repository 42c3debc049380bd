"""Transfers of requests with their KV from replica to replica.

    handed over ── waits for memory of the target ── waits for links ── is copied ── in its queue
    blocks at    source                            source and target                  target

The source keeps its blocks until the copy is complete, so that a full target holds the source up.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from reference_engine.cluster.kv_links import KvLinks
from reference_engine.core.handover import Handover, give_back, hold
from reference_engine.simulator import Population, Replica, Simulator
from reference_engine.state.plan import Cause, Why
from reference_engine.state.sequence import State

_NO_MEMORY = Cause(Why.no_kv_blocks)


@dataclass(slots=True, eq=False)
class Transfer:
    """A request on its way, whose `n_bytes` are copied; `has_memory` of the target."""

    handover: Handover
    source: Replica
    target: Replica
    n_bytes: float
    has_memory: bool = False
    is_cancelled: bool = False

    @property
    def request_id(self) -> str:
        return self.handover.request.id


class Transfers:
    """Transfers over `links`. KV is copied with `kv_factor` times its bytes, as a compression does.

    The transfers to a target take memory in their order: as soon as it has blocks for the request,
    above the watermark of its mode, and a sequence slot. A copy begins when both links are free; of
    several, the first with memory. `copied_s` sums the seconds of the copies, the wait for links
    included, `waited_s` the waits for memory.
    """

    def __init__(self, links: KvLinks, kv_factor: float = 1.0) -> None:
        self.links, self.kv_factor = links, kv_factor
        self.population = Population()
        self.n_done = 0
        self.copied_s = self.waited_s = 0.0
        self._pending: dict[Replica, deque[Transfer]] = {}
        self._with_memory: list[Transfer] = []  # that wait for links
        self._ends: list[tuple[float, int, Transfer]] = []
        self._by_id: dict[str, Transfer] = {}
        self._n_begun = 0

    def next_s(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def send(
        self, handover: Handover, source: Replica, target: Replica, simulator: Simulator
    ) -> None:
        """Send a request that was handed over by the source."""
        n_bytes = handover.n_tokens * source.kv_token_bytes * self.kv_factor
        transfer = Transfer(handover, source, target, n_bytes)
        self._by_id[transfer.request_id] = transfer
        self.population.enter(transfer.request_id, simulator.now_s, simulator.now_s)
        target.coming[transfer.request_id] = handover.request
        self._pending.setdefault(target, deque()).append(transfer)
        self.begin(target, simulator)

    def begin(self, target: Replica, simulator: Simulator) -> None:
        """Take memory of a target for the transfers for which it has room now."""
        pending = self._pending.get(target)
        while pending:
            transfer = pending[0]
            if transfer.is_cancelled:
                pending.popleft()
                continue
            n_blocks = target.state.kv.blocks_for(transfer.handover.n_tokens + 1)
            if not self._has_room(target, n_blocks):
                break
            pending.popleft()
            self._take_memory(transfer, n_blocks, simulator)
        self._copy(simulator)

    def act(self, simulator: Simulator) -> None:
        """Complete the copies that end by now."""
        while self._ends and self._ends[0][0] <= simulator.now_s:
            _, _, transfer = heappop(self._ends)
            self._complete(transfer, simulator)

    def cancel(self, request_id: str, simulator: Simulator) -> None:
        """Forget a transfer. A copy under way goes on, and its memory is free at its end; else the
        memory is free now."""
        transfer = self._by_id.pop(request_id)
        transfer.is_cancelled = True
        self.population.leave(request_id, simulator.now_s)
        if not transfer.has_memory:
            del transfer.target.coming[request_id]
            self._give_back(transfer.source, transfer, simulator)
        elif transfer in self._with_memory:
            self._with_memory.remove(transfer)
            del transfer.target.copying[request_id]
            self._give_back(transfer.source, transfer, simulator)
            self._give_back(transfer.target, transfer, simulator)
            self.begin(transfer.target, simulator)

    def _take_memory(self, transfer: Transfer, n_blocks: int, simulator: Simulator) -> None:
        now_s, target, handover = simulator.now_s, transfer.target, transfer.handover
        simulator.interrupt(target)
        hold(target.state, transfer.request_id, n_blocks)
        self.waited_s += now_s - handover.since_s
        handover.charge(_NO_MEMORY, now_s)
        transfer.has_memory = True
        target.copying[transfer.request_id] = target.coming.pop(transfer.request_id)
        self._with_memory.append(transfer)

    def _copy(self, simulator: Simulator) -> None:
        """Begin the copies whose links are free."""
        waiting: list[Transfer] = []
        for transfer in self._with_memory:
            source, target = transfer.source.number, transfer.target.number
            if not self.links.is_free(source, target):
                waiting.append(transfer)
                continue
            took_s = self.links.begin(source, target, transfer.n_bytes)
            self._n_begun += 1
            heappush(self._ends, (simulator.now_s + took_s, self._n_begun, transfer))
        self._with_memory = waiting

    def _complete(self, transfer: Transfer, simulator: Simulator) -> None:
        source, target, handover = transfer.source, transfer.target, transfer.handover
        self.links.end(source.number, target.number)
        del target.copying[transfer.request_id]
        self._give_back(source, transfer, simulator)
        self._give_back(target, transfer, simulator)
        if not transfer.is_cancelled:
            del self._by_id[transfer.request_id]
            self.n_done += 1
            self.copied_s += simulator.now_s - handover.since_s
            self.population.leave(transfer.request_id, simulator.now_s)
            simulator.take_over(target, handover)
        self._copy(simulator)
        self.begin(source, simulator)
        self.begin(target, simulator)

    def _give_back(self, replica: Replica, transfer: Transfer, simulator: Simulator) -> None:
        simulator.interrupt(replica)
        give_back(replica.state, transfer.request_id)
        simulator.wake(replica)

    def _has_room(self, target: Replica, n_blocks: int) -> bool:
        state = target.state
        kv, queues, policy = state.kv, state.queues, state.policy
        n_coming = len(target.copying) + len(target.unread)
        n_requests = len(queues.running) + len(queues.waiting) + n_coming
        if not n_requests:
            return True
        first = next(iter(queues.waiting.values()), None)
        if first is not None and first.state is not State.received:
            return False  # a preempted request comes back first
        n_slots = min(state.limits.max_num_seqs, getattr(policy, "max_num_seqs", math.inf))
        watermark = int(getattr(policy, "watermark", 0.0) * kv.n_blocks)
        return n_requests < n_slots and kv.n_free - n_blocks >= watermark + self._owed(target)

    def _owed(self, target: Replica) -> int:
        """Blocks of requests that are copied and not admitted yet."""
        kv = target.state.kv
        copied = [r for r in target.state.queues.waiting.values() if r.state is State.received]
        copied += [entry.request for entry in target.inbox if isinstance(entry, Handover)]
        return sum(kv.blocks_for(request.n_swapped + 1) for request in copied)
