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
from reference_engine.cluster.transfers import Transfers
from reference_engine.simulator import Replica, Route, Simulator
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import check_admission
from reference_engine.state.sequence import Request


class Disaggregation(Part):
    """Hands each request with a first token over to the decode replica that `decode_route` selects.
    `route` selects the replica of a new request (`simulator.Route`)."""

    def __init__(
        self, transfers: Transfers, route: Route, decoders: Sequence[Replica], decode_route: Route
    ) -> None:
        self.route = route
        self._transfers, self._decoders, self._decode_route = transfers, decoders, decode_route

    def check(self, request: Request) -> None:
        for replica in self._decoders:
            state = replica.state
            check_admission(request.n_prompt, request.max_tokens, state.limits, state.kv)

    def stepped(self, replica: Replica, events: StepTokens, simulator: Simulator) -> None:
        if replica.role != "prefill":
            return
        for request in events.requests:
            if request.state.is_over:
                continue
            number = self._decode_route(request)
            assert number is not None, "a decode router selects at once"
            handover = simulator.hand_over(replica, request.id)
            self._transfers.send(handover, replica, self._decoders[number], simulator)


def disaggregation(
    replicas: Sequence[Replica],
    transfers: Transfers,
    now_s: Callable[[], float],
    rng: np.random.Generator,
    router: Router,
    decode_router: Router,
) -> Disaggregation:
    """Raises UsageError where a role has no partner, or a replica cannot hand its requests over."""
    entry = [(number, r) for number, r in enumerate(replicas) if r.role != "decode"]
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
    front = router.route(Site([replica for _, replica in entry], now_s, rng))
    back = decode_router.route(Site(decoders, now_s, rng))

    def route(request: Request) -> int | None:
        number = front(request)
        return None if number is None else entry[number][0]

    return Disaggregation(transfers, route, decoders, back)


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
