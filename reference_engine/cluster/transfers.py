"""Transfers of requests with their KV from replica to replica.

    streamed  computes its prompt, while the KV of the layers before is copied ── handed over ── …
    sent      handed over ── waits for memory of the target ── waits for links ── copied ── queued
    migrated  ── computes its answer, while its KV is copied ── handed over ── rest copied ── queued

The source keeps the blocks until the copy is complete, so that a full target holds the source up.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from reference_engine.cluster.kv_links import KvLinks
from reference_engine.core.handover import FAILURE, Handover, begin_anew, give_back, hold
from reference_engine.simulator import Population, Replica, Simulator
from reference_engine.state.plan import Cause, Why
from reference_engine.state.sequence import Request, State

_NO_MEMORY = Cause(Why.no_kv_blocks)


class Computing(NamedTuple):
    """The step that computes the last `n_tokens` of a prompt, in `n_layers` equal times."""

    began_s: float
    end_s: float
    n_tokens: int
    n_layers: int

    def sent_s(self, copy_s: float) -> float:
        """The instant at which a link that is free has sent the tokens of the step, for which it
        needs `copy_s`: it waits for the first layer, or has only the last to send."""
        n, step_s = self.n_layers, self.end_s - self.began_s
        return max(self.began_s + step_s / n + copy_s, self.end_s + copy_s / n)


@dataclass(slots=True, eq=False)
class Transfer:
    """A request on its way; `handover` is None while it still computes at the source. The KV of
    `n_tokens` is copied, after that of `n_copied`. `has_memory` of the target. `computing` is the
    step during which it is streamed."""

    request: Request
    source: Replica
    target: Replica
    n_tokens: int
    handover: Handover | None = None
    computing: Computing | None = None
    n_copied: int = 0
    has_memory: bool = False
    is_cancelled: bool = False
    ends_s: float = math.inf  # of the copy under way
    took_s: float = 0.0
    n_bytes: float = 0.0


class Transfers:
    """Transfers over `links`. KV is copied with `kv_factor` times its bytes, as a compression does.

    The transfers to a target take memory in their order: as soon as it has blocks for the request,
    above the watermark of its mode, and a sequence slot. A copy begins when both links are free; of
    several, the first with memory. `population` are the requests that are in no replica. Of the
    `n_done` requests that moved, `n_migrated` had begun their answer elsewhere by a migration.
    `copied_s` sums the seconds without a replica for copies, the wait for links included,
    `waited_s` those for memory.
    """

    def __init__(self, links: KvLinks, kv_factor: float = 1.0) -> None:
        self.links, self.kv_factor = links, kv_factor
        self.population = Population()
        self.n_done = self.n_migrated = 0
        self.copied_s = self.waited_s = 0.0
        self._pending: dict[Replica, deque[Transfer]] = {}
        self._with_memory: list[Transfer] = []  # that wait for links
        self._ends: list[tuple[float, int, Transfer]] = []
        self._handed: dict[str, Transfer] = {}  # in no replica
        self._migrating: dict[str, Transfer] = {}  # that compute at the source
        self._streaming: dict[str, Transfer] = {}  # whose prompt is being computed
        self._leaving: dict[Replica, list[Transfer]] = {}  # of these, at the end of the step
        self._n_begun = 0

    def next_s(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def is_migrating(self, replica: Replica) -> bool:
        """Whether a request leaves or joins a replica by a migration."""
        return any(replica in (t.source, t.target) for t in self._migrating.values())

    def send(
        self, handover: Handover, source: Replica, target: Replica, simulator: Simulator
    ) -> None:
        """Send a request that was handed over by the source."""
        request = handover.request
        transfer = Transfer(request, source, target, handover.n_tokens, handover)
        self._hand(transfer, simulator)
        target.coming[request.id] = request
        self._pending.setdefault(target, deque()).append(transfer)
        self.begin(target, simulator)

    def stream(
        self,
        request: Request,
        source: Replica,
        target: Replica,
        n_tokens: int,
        computing: Computing,
        simulator: Simulator,
    ) -> None:
        """Begin to send a request whose prompt is being computed, layer by layer. At the end of the
        step it is handed over (`join`) or has ended (`abandon`)."""
        transfer = Transfer(request, source, target, n_tokens, computing=computing)
        self._streaming[request.id] = transfer
        target.coming[request.id] = request
        self._pending.setdefault(target, deque()).append(transfer)
        self.begin(target, simulator)

    def join(self, handover: Handover, simulator: Simulator) -> bool:
        """Continue the transfer of a request that was streamed and is handed over; False if there
        is none."""
        transfer = self._streaming.pop(handover.request.id, None)
        if transfer is None:
            return False
        transfer.handover = handover
        self._hand(transfer, simulator)
        return True

    def abandon(self, request_id: str, simulator: Simulator) -> None:
        """Forget the transfer of a request that was streamed and has ended, if there is one."""
        transfer = self._streaming.pop(request_id, None)
        if transfer is None:
            return
        transfer.is_cancelled = True
        if not transfer.has_memory:
            del transfer.target.coming[request_id]
        elif transfer in self._with_memory:
            self._with_memory.remove(transfer)
            self._drop(transfer, simulator)
            self.begin(transfer.target, simulator)

    def migrate(
        self, request: Request, source: Replica, target: Replica, simulator: Simulator
    ) -> bool:
        """Begin to copy the KV of a decoding request, which goes on. The rest is copied after a
        step at the end of which the request leaves the source, if it is still running and the
        target has memory for it. False if the target has no room now."""
        source.state.queues.settle()
        transfer = Transfer(request, source, target, request.n_computed)
        n_blocks = target.state.kv.blocks_for(request.n_computed + 1)
        if target.coming or not self._has_room(target, n_blocks):
            return False
        self._migrating[request.id] = transfer
        self._take_memory(transfer, n_blocks, simulator)
        self._copy(simulator)
        return True

    def begin(self, target: Replica, simulator: Simulator) -> None:
        """Take memory of a target for the transfers for which it has room now."""
        pending = self._pending.get(target)
        while pending:
            transfer = pending[0]
            if transfer.is_cancelled:
                pending.popleft()
                continue
            n_blocks = target.state.kv.blocks_for(transfer.n_tokens + 1)
            if not self._has_room(target, n_blocks):
                break
            pending.popleft()
            del target.coming[transfer.request.id]
            self._take_memory(transfer, n_blocks, simulator)
        self._copy(simulator)

    def act(self, simulator: Simulator) -> None:
        """Complete the copies that end by now."""
        while self._ends and self._ends[0][0] <= simulator.now_s:
            _, _, transfer = heappop(self._ends)
            self._complete(transfer, simulator)

    def stepped(self, replica: Replica, simulator: Simulator) -> None:
        """Hand over the requests that leave a replica at the end of a step, and use the memory
        that is free after it."""
        for transfer in self._leaving.pop(replica, ()):
            if transfer.request.id in replica.state.queues.in_flight:
                self._leaving.setdefault(replica, []).append(transfer)
            else:
                self._leave(transfer, simulator)
        self.begin(replica, simulator)

    def cancel(self, request_id: str, simulator: Simulator) -> None:
        """Forget a transfer. A copy under way goes on, and its memory is free at its end; else the
        memory is free now."""
        transfer = self._handed.pop(request_id)
        transfer.is_cancelled = True
        self.population.leave(request_id, simulator.now_s)
        if not transfer.has_memory:
            del transfer.target.coming[request_id]
            self._give_back(transfer.source, transfer, simulator)
        elif transfer in self._with_memory:
            self._with_memory.remove(transfer)
            self._give_back(transfer.source, transfer, simulator)
            self._drop(transfer, simulator)
            self.begin(transfer.target, simulator)

    def fail(self, replica: Replica, simulator: Simulator) -> tuple[list[Handover], list[Transfer]]:
        """Drop the transfers from and to a replica, just before it fails. Returns the requests
        whose KV is lost with it, as they would begin anew, and the transfers that need another
        target: their source still has the KV."""
        now_s, lost, without_target = simulator.now_s, list[Handover](), list[Transfer]()
        for transfer in self._between(replica):
            source, target, handover = transfer.source, transfer.target, transfer.handover
            request = transfer.request
            if transfer.ends_s < math.inf:
                left_s = transfer.ends_s - now_s
                n_bytes = transfer.n_bytes * left_s / transfer.took_s if transfer.took_s else 0.0
                self.links.abort(source.number, target.number, n_bytes, left_s)
            if target is replica:
                target.copying.pop(request.id, None)
                target.coming.pop(request.id, None)
            elif transfer.has_memory:
                self._drop(transfer, simulator)
            else:
                target.coming.pop(request.id, None)
            if handover is None:
                self._migrating.pop(request.id, None)
                self._streaming.pop(request.id, None)
                continue
            if transfer.is_cancelled:
                if source is not replica:
                    self._give_back(source, transfer, simulator)
                continue
            del self._handed[request.id]
            self.population.leave(request.id, now_s)
            handover.charge(handover.cause, now_s)
            if source is replica:
                anew = Handover(begin_anew(request), 0, handover.waits, now_s, FAILURE)
                lost.append(anew)
            else:
                without_target.append(transfer)
        self._leaving.pop(replica, None)
        self._pending.pop(replica, None)
        self._copy(simulator)
        for other in simulator.replicas:
            if other is not replica:
                self.begin(other, simulator)
        return lost, without_target

    def _between(self, replica: Replica) -> list[Transfer]:
        """Take out all transfers from and to a replica, in the order of their requests' ids."""

        def concerns(transfer: Transfer) -> bool:
            return replica in (transfer.source, transfer.target)

        waiting = [t for t in self._with_memory if concerns(t)]
        copying = [t for _, _, t in self._ends if concerns(t)]
        self._with_memory = [t for t in self._with_memory if not concerns(t)]
        self._ends = [entry for entry in self._ends if not concerns(entry[2])]
        heapify(self._ends)
        found = [*waiting, *copying]
        for target, pending in self._pending.items():
            found += [t for t in pending if concerns(t) and not t.is_cancelled]
            self._pending[target] = deque(t for t in pending if not concerns(t))
        for source, leaving in self._leaving.items():
            found += [t for t in leaving if concerns(t)]
            self._leaving[source] = [t for t in leaving if not concerns(t)]
        return sorted(found, key=lambda transfer: transfer.request.id)

    def _hand(self, transfer: Transfer, simulator: Simulator) -> None:
        self._handed[transfer.request.id] = transfer
        self.population.enter(transfer.request.id, simulator.now_s, simulator.now_s)

    def _take_memory(self, transfer: Transfer, n_blocks: int, simulator: Simulator) -> None:
        now_s, target, handover = simulator.now_s, transfer.target, transfer.handover
        simulator.interrupt(target)
        hold(target.state, transfer.request.id, n_blocks)
        if handover is not None:
            self.waited_s += now_s - handover.since_s
            handover.charge(_NO_MEMORY, now_s)
        transfer.has_memory = True
        target.copying[transfer.request.id] = transfer.request
        self._with_memory.append(transfer)

    def _copy(self, simulator: Simulator) -> None:
        """Begin the copies whose links are free."""
        waiting: list[Transfer] = []
        for transfer in self._with_memory:
            source, target = transfer.source, transfer.target
            if not self.links.is_free(source.number, target.number):
                waiting.append(transfer)
                continue
            n_tokens = transfer.n_tokens - transfer.n_copied
            transfer.n_bytes = n_tokens * source.kv_token_bytes * self.kv_factor
            transfer.took_s = self.links.begin(
                source.number, target.number, transfer.n_bytes, self._least_s(transfer, simulator)
            )
            transfer.ends_s = simulator.now_s + transfer.took_s
            self._n_begun += 1
            heappush(self._ends, (transfer.ends_s, self._n_begun, transfer))
        self._with_memory = waiting

    def _least_s(self, transfer: Transfer, simulator: Simulator) -> float:
        """The seconds until all layers of a streamed request are computed and sent, if its link is
        free from now on."""
        computing, source = transfer.computing, transfer.source
        if computing is None:
            return 0.0
        n_bytes = computing.n_tokens * source.kv_token_bytes * self.kv_factor
        return computing.sent_s(n_bytes / self.links.bytes_per_s) - simulator.now_s

    def _complete(self, transfer: Transfer, simulator: Simulator) -> None:
        source, target, handover = transfer.source, transfer.target, transfer.handover
        self.links.end(source.number, target.number)
        transfer.ends_s = math.inf
        transfer.n_copied = transfer.n_tokens
        if handover is None and transfer.is_cancelled:
            self._drop(transfer, simulator)
        elif handover is None:
            simulator.interrupt(source)
            if source.is_computing_for(transfer.request.id):
                self._leaving.setdefault(source, []).append(transfer)
            else:
                self._leave(transfer, simulator)
        else:
            self._give_back(source, transfer, simulator)
            if not transfer.is_cancelled:
                del self._handed[transfer.request.id]
                self.n_done += 1
                self.copied_s += simulator.now_s - handover.since_s
                self.population.leave(transfer.request.id, simulator.now_s)
            self._drop(transfer, simulator)
            if not transfer.is_cancelled:
                simulator.take_over(target, handover)
        self._copy(simulator)
        self.begin(source, simulator)
        self.begin(target, simulator)

    def _leave(self, transfer: Transfer, simulator: Simulator) -> None:
        """Hand a migrating request over between two steps, if that is still possible."""
        request, source, target = transfer.request, transfer.source, transfer.target
        del self._migrating[request.id]
        source.state.queues.settle()
        is_decoding = request.id in source.state.queues.decoding
        kv, held = target.state.kv, target.state.lent[request.id]
        n_more = kv.blocks_for(request.n_computed + 1) - len(held)
        if not is_decoding or n_more > kv.n_free:
            self._drop(transfer, simulator)
            self.begin(target, simulator)
            return
        simulator.interrupt(target)
        if n_more > 0:
            held += kv.hold(n_more)
        transfer.handover = simulator.hand_over(source, request.id)
        transfer.n_tokens = transfer.handover.n_tokens
        self.n_migrated += 1
        self._hand(transfer, simulator)
        self._with_memory.append(transfer)
        self._copy(simulator)

    def _drop(self, transfer: Transfer, simulator: Simulator) -> None:
        """Free the memory of the target."""
        target = transfer.target
        del target.copying[transfer.request.id]
        self._give_back(target, transfer, simulator)

    def _give_back(self, replica: Replica, transfer: Transfer, simulator: Simulator) -> None:
        simulator.interrupt(replica)
        give_back(replica.state, transfer.request.id)
        simulator.wake(replica)

    def _has_room(self, target: Replica, n_blocks: int) -> bool:
        state = target.state
        kv, queues, policy = state.kv, state.queues, state.policy
        n_coming = len(target.copying) + len(target.unread)
        n_requests = queues.n_running + len(queues.waiting) + n_coming
        if not n_requests:  # its blocks may still be lent to copies that leave it
            return n_blocks <= kv.n_free
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
