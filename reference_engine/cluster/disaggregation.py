"""Prefill and decode on different replicas: a request computes its prompt and first token on a
prefill replica, its KV is copied, and a decode replica generates the rest.

Source: Zhong et al., DistServe, OSDI 2024; the copy begins when the decode replica has memory and
the prefill memory buffers it until then, as in its section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from loadgen.errors import UsageError
from reference_engine.cluster.conductors import Part
from reference_engine.cluster.routers import Router, Site
from reference_engine.cluster.transfers import Computing, Transfers
from reference_engine.core.commit import StartedStep
from reference_engine.core.handover import FAILURE, Handover, begin_anew, give_back
from reference_engine.simulator import Replica, Route, Simulator
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import check_admission
from reference_engine.state.sequence import Request

DecodeRoute = Callable[[Request], Replica | None]
"""The decode replica for a request with its first token; None: it waits, with its KV where it is,
until one receives requests."""


class Disaggregation(Part):
    """Hands each request with a first token over to the decode replica that `decode_route` selects.
    `route` selects the replica of a new request (`simulator.Route`). With `is_layerwise`, the
    decode replica is selected when the step with the last piece of the prompt begins, and the KV
    of each layer is sent while the layers after it are computed (Splitwise, ISCA 2024)."""

    def __init__(
        self,
        transfers: Transfers,
        route: Route,
        decoders: Sequence[Replica],
        decode_route: DecodeRoute,
        is_layerwise: bool = False,
    ) -> None:
        self.route, self._is_layerwise = route, is_layerwise
        self._transfers, self._decoders, self._decode_route = transfers, decoders, decode_route
        self._without_target: dict[str, tuple[Handover, Replica]] = {}

    @property
    def n_without_target(self) -> int:
        """Requests that wait for a decode replica that receives requests."""
        return len(self._without_target)

    def check(self, request: Request) -> None:
        for replica in self._decoders:
            state = replica.state
            check_admission(request.n_prompt, request.max_tokens, state.limits, state.kv)

    def began(self, replica: Replica, started: StartedStep, simulator: Simulator) -> None:
        if not self._is_layerwise or replica.role != "prefill":
            return
        began_s, end_s = started.began_s, started.began_s + started.result.simulated_s
        for request, start, n_tokens, samples in started.planned.batch.rows:
            is_ending = request.n_prompt + request.max_tokens == len(request.tokens) + 1
            if not samples or is_ending:
                continue
            target = self._decode_route(request)
            if target is not None:
                computing = Computing(began_s, end_s, n_tokens, replica.n_layers)
                self._transfers.stream(
                    request, replica, target, start + n_tokens, computing, simulator
                )

    def stepped(self, replica: Replica, events: StepTokens, simulator: Simulator) -> None:
        if replica.role != "prefill":
            if events.ends:
                self.act(simulator)
            return
        for request in events.requests:
            if request.state.is_over:
                self._transfers.abandon(request.id, simulator)
                continue
            handover = simulator.hand_over(replica, request.id)
            if not self._transfers.join(handover, simulator):
                self.send(handover, replica, simulator)

    def freed(self, replica: Replica, simulator: Simulator) -> None:
        self.act(simulator)

    def act(self, simulator: Simulator) -> None:
        """Send the requests that wait for a decode replica."""
        waiting, self._without_target = self._without_target, {}
        for handover, source in waiting.values():
            self.send(handover, source, simulator)

    def send(self, handover: Handover, source: Replica, simulator: Simulator) -> None:
        """Send a request that was handed over, with its KV at `source`."""
        target = self._decode_route(handover.request)
        if target is None:
            self._without_target[handover.request.id] = handover, source
        else:
            self._transfers.send(handover, source, target, simulator)

    def cancel(self, request_id: str, simulator: Simulator) -> bool:
        entry = self._without_target.pop(request_id, None)
        if entry is None:
            return False
        _, source = entry
        simulator.interrupt(source)
        give_back(source.state, request_id)
        simulator.wake(source)
        return True

    def fail(self, replica: Replica, now_s: float) -> list[Handover]:
        """The requests that wait for a decode replica and lose their KV with a replica that fails,
        as they would begin anew."""
        lost: list[Handover] = []
        for request_id, (handover, source) in list(self._without_target.items()):
            if source is replica:
                del self._without_target[request_id]
                handover.charge(handover.cause, now_s)
                request = begin_anew(handover.request)
                lost.append(Handover(request, 0, handover.waits, now_s, FAILURE))
        return lost


def disaggregation(
    replicas: Sequence[Replica],
    transfers: Transfers,
    now_s: Callable[[], float],
    rng: np.random.Generator,
    router: Router,
    decode_router: Router,
    is_layerwise: bool = False,
) -> Disaggregation:
    """Raises UsageError where a role has no partner, or a replica cannot hand its requests over."""
    decoders = check_roles(replicas)
    entry = [(number, r) for number, r in enumerate(replicas) if r.role != "decode"]
    front = router.route(Site([replica for _, replica in entry], now_s, rng))
    back = decode_router.route(Site(decoders, now_s, rng))

    def decode_route(request: Request) -> Replica | None:
        number = back(request)
        return None if number is None else decoders[number]

    def route(request: Request) -> int | None:
        number = front(request)
        return None if number is None else entry[number][0]

    return Disaggregation(transfers, route, decoders, decode_route, is_layerwise)


def check_roles(replicas: Sequence[Replica]) -> list[Replica]:
    """The decode replicas. Raises UsageError where a role has no partner, or a replica cannot hand
    its requests over."""
    decoders = [replica for replica in replicas if replica.role == "decode"]
    if not decoders or all(replica.role != "prefill" for replica in replicas):
        raise UsageError(
            "replicas: role=prefill needs a group with role=decode, and the reverse: "
            "2:role=prefill+6:role=decode"
        )
    for replica in replicas:
        if replica.role == "prefill":
            check_can_leave(replica)
    check_same_kv(replicas)
    return decoders


def check_can_leave(replica: Replica) -> None:
    """Raises UsageError for a replica that requests cannot leave between two tokens."""
    state = replica.state
    if state.async_depth or state.policy.is_answering_at_end:
        raise UsageError(
            f"replicas: a request cannot leave {replica.name} between two tokens: use "
            "async_depth=0 and a mode that streams, e.g. chunked"
        )


def check_same_kv(replicas: Sequence[Replica]) -> None:
    """Raises UsageError for replicas whose KV is not the same."""
    if len({replica.kv_token_bytes for replica in replicas}) > 1:
        raise UsageError("replicas: KV can only be copied between equal shapes and kv_dtypes")
