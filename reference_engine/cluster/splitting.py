"""Prefill and decode on two parts of a GPU: a request computes its prompt and first token in one
engine and the rest in another, which share KV memory, so that nothing is copied.

    prefill half   prompt ─▶ first token ─┐ the request keeps its blocks
    decode half    step under way ────────┴▶ next step, if there is a sequence slot

A preempted request of the decode half is computed again there, and until it runs the prefill half
admits none. Source: Shi et al., Nexus (arXiv 2507.06608).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from reference_engine.cluster.conductors import Part
from reference_engine.cluster.disaggregation import check_can_leave
from reference_engine.cluster.routers import Router, Site
from reference_engine.core.handover import Handover
from reference_engine.executors.halves import Half
from reference_engine.simulator import Replica, Route, Simulator
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import Cause, Why
from reference_engine.state.sequence import Request

_NO_SLOT = Cause(Why.no_seq_slot)


class Splitting(Part):
    """Passes each request with a first token from the prefill half of its replica to the decode
    half. `route` selects the replica of a new request (`simulator.Route`); `n_passed` requests
    were passed."""

    def __init__(self, route: Route, decode_half: Mapping[Replica, Replica]) -> None:
        self.route, self.n_passed = route, 0
        self._decode_half = decode_half
        self._prefill_half = {decode: prefill for prefill, decode in decode_half.items()}
        self._coming: dict[Replica, deque[Handover]] = {
            half: deque() for half in self._prefill_half
        }

    def stepped(self, replica: Replica, events: StepTokens, simulator: Simulator) -> None:
        decode = self._decode_half.get(replica)
        if decode is None:
            decode = replica if replica in self._prefill_half else None
        else:
            for request in events.requests:
                if not request.state.is_over:
                    self._pass(request, replica, decode, simulator)
        if decode is not None:
            self._take_over(decode, simulator)
            self._wake(decode, simulator)

    def freed(self, replica: Replica, simulator: Simulator) -> None:
        decode = self._decode_half.get(replica, replica)
        if decode in self._coming:
            self._take_over(decode, simulator)
            self._wake(decode, simulator)

    def cancel(self, request_id: str, simulator: Simulator) -> bool:
        for decode, coming in self._coming.items():
            for handover in coming:
                if handover.request.id == request_id:
                    coming.remove(handover)
                    state = decode.state
                    state.kv.give_back(state.lent.pop(request_id))
                    del decode.coming[request_id]
                    self._wake(decode, simulator)
                    return True
        return False

    def _pass(
        self, request: Request, prefill: Replica, decode: Replica, simulator: Simulator
    ) -> None:
        handover = simulator.hand_over(prefill, request.id)
        handover.cause = Cause(Why.step_in_flight)
        decode.state.lent[request.id] = prefill.state.lent.pop(request.id)
        decode.coming[request.id] = request
        self._coming[decode].append(handover)

    def _take_over(self, decode: Replica, simulator: Simulator) -> None:
        """Let requests with a first token run in a decode half that is between two steps, as far as
        it has sequence slots."""
        coming, state = self._coming[decode], decode.state
        if decode.started is not None:
            return
        while coming:
            handover = coming[0]
            if len(state.queues.running) >= _most_running(decode):
                for waiting in coming:
                    waiting.charge(waiting.cause, simulator.now_s)
                    waiting.cause = _NO_SLOT
                return
            coming.popleft()
            del decode.coming[handover.request.id]
            self.n_passed += 1
            simulator.take_over(decode, handover)

    def _wake(self, decode: Replica, simulator: Simulator) -> None:
        """Let both halves plan again, because their memory has changed."""
        for half in (decode, self._prefill_half[decode]):
            if half.started is None:
                simulator.wake(half)


def splitting(
    replicas: Sequence[Replica],
    now_s: Callable[[], float],
    rng: np.random.Generator,
    router: Router,
) -> Splitting:
    """`replicas` are whole GPUs, and halves of divided GPUs: each prefill half before its decode
    half. Raises UsageError for a mode that requests cannot leave between two tokens."""
    decode_half: dict[Replica, Replica] = {}
    for prefill, decode in pairwise(replicas):
        if isinstance(prefill.executor, Half) and prefill.role == "prefill":
            check_can_leave(prefill)
            _share_memory(prefill, decode)
            decode_half[prefill] = decode
    decoders = set(decode_half.values())
    entry = [(number, r) for number, r in enumerate(replicas) if r not in decoders]
    front = router.route(Site([replica for _, replica in entry], now_s, rng))

    def route(request: Request) -> int | None:
        number = front(request)
        return None if number is None else entry[number][0]

    return Splitting(route, decode_half)


def _share_memory(prefill: Replica, decode: Replica) -> None:
    executor = prefill.executor
    assert isinstance(executor, Half), f"{prefill.name} is not half a GPU"
    assert prefill.state.kv is decode.state.kv, f"{prefill.name} has KV memory of its own"
    gpu = executor.gpu
    prefill.partner, decode.partner = decode, prefill
    prefill.state.sharing, decode.state.sharing = decode.state, prefill.state
    prefill.state.is_yielding = True
    gpu.is_busy["prefill"] = lambda: _is_computing(prefill)
    gpu.is_busy["decode"] = lambda: _is_computing(decode)
    gpu.decoding = lambda: _decoding(decode)


def _is_computing(replica: Replica) -> bool:
    return replica.started is not None or bool(replica.state.queues.running)


def _decoding(replica: Replica) -> tuple[int, int]:
    queues = replica.state.queues
    return len(queues.decoding), queues.context_tokens


def _most_running(replica: Replica) -> float:
    state = replica.state
    return min(state.limits.max_num_seqs, getattr(state.policy, "max_num_seqs", math.inf))
