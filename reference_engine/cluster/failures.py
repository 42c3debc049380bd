"""Failures of replicas: a replica loses its requests and KV, and is back, empty, after its repair.

A request without a token is sent to another replica, as gateways do that retry before the first
byte of an answer; with `resume`, a request also continues its answer elsewhere, as with the request
migration of NVIDIA Dynamo. All others fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from reference_engine.cluster.conductors import Part
from reference_engine.cluster.disaggregation import Disaggregation
from reference_engine.cluster.membership import Membership
from reference_engine.cluster.transfers import Transfers
from reference_engine.core.core import EngineState
from reference_engine.core.handover import Handover
from reference_engine.simulator import Replica, Simulator

_FAILED = "failed"


class Failure(NamedTuple):
    """A failure of the replica with this number, at an instant (s), and the seconds until it is
    back."""

    at_s: float
    number: int
    repair_s: float


class Retries(NamedTuple):
    """How often a request is sent again after failures, and whether also with a part of its
    answer."""

    most: int = 0
    resume: bool = False


class RandomFailures(NamedTuple):
    """Failures of each replica after exponentially distributed times of service with this mean
    (s)."""

    mean_s: float
    repair_s: float
    rng: np.random.Generator


class _Event(NamedTuple):
    """A failure or a repair to come, of the replica with this number."""

    at_s: float
    number: int
    is_repair: bool = False
    is_random: bool = False
    repair_s: float = 0.0


class Failures(Part):
    """Lets replicas fail: as listed in `planned`, and at random. A replica that is switched off
    does not fail. `renew` builds the engine of a replica after its repair. `n_retried` requests
    went to another replica, `n_lost` failed. `transfers` and `disaggregation` are those of
    replicas between which requests move: KV that was being copied to a failed replica goes to
    another, and a migrating request goes on where it was."""

    def __init__(
        self,
        members: Membership,
        renew: Callable[[Replica], EngineState],
        planned: Sequence[Failure] = (),
        random: RandomFailures | None = None,
        retries: Retries | None = None,
        transfers: Transfers | None = None,
        disaggregation: Disaggregation | None = None,
    ) -> None:
        self._transfers, self._disaggregation = transfers, disaggregation
        self._members, self._renew = members, renew
        self._random, self._retries = random, retries or Retries()
        self.n_retried = self.n_lost = 0
        self._due: list[_Event] = []
        self._n_retries: Counter[str] = Counter()
        self._stranded: dict[str, Handover] = {}  # while no replica receives requests
        for failure in planned:
            heappush(self._due, _Event(failure.at_s, failure.number, repair_s=failure.repair_s))
        for number in range(len(members.replicas)):
            self._plan_random(number, 0.0)

    def next_s(self, simulator: Simulator) -> float:
        return self._due[0][0] if self._due else math.inf

    def act(self, simulator: Simulator) -> None:
        while self._due and self._due[0][0] <= simulator.now_s:
            event = heappop(self._due)
            number, replica = event.number, self._members.replicas[event.number]
            if event.is_repair:
                self._members.open(replica, _FAILED)
                self._send_stranded(simulator)
                simulator.empty_router()
                continue
            is_serving = self._members.is_open(replica) or len(replica.population) > 0
            back_s = simulator.now_s + (event.repair_s if is_serving else 0.0)
            if is_serving:
                self._fail(replica, event.repair_s, simulator)
            if event.is_random:  # without a memory: time out of service does not count
                self._plan_random(number, back_s)

    def cancel(self, request_id: str, simulator: Simulator) -> bool:
        return self._stranded.pop(request_id, None) is not None

    def _fail(self, replica: Replica, repair_s: float, simulator: Simulator) -> None:
        self._members.close(replica, _FAILED)
        heappush(self._due, _Event(simulator.now_s + repair_s, replica.number, is_repair=True))
        handovers = self._fail_transfers(replica, simulator)
        handovers += simulator.fail(replica, self._renew(replica))
        for handover in handovers:
            request = handover.request
            is_new = request.first_token_s is None
            self._n_retries[request.id] += 1
            is_left = self._n_retries[request.id] <= self._retries.most
            if is_left and (is_new or self._retries.resume):
                self.n_retried += 1
                self._stranded[request.id] = handover
            else:
                self.n_lost += 1
                simulator.lose(request, f"{replica.name} failed")
        self._send_stranded(simulator)

    def _fail_transfers(self, replica: Replica, simulator: Simulator) -> list[Handover]:
        """Find new targets for the requests on their way to a replica that fails; returns those
        whose KV it had."""
        lost: list[Handover] = []
        disaggregation = self._disaggregation
        if disaggregation is not None:
            lost += disaggregation.fail(replica, simulator.now_s)
        if self._transfers is None:
            return lost
        with_source, without_target = self._transfers.fail(replica, simulator)
        for transfer in without_target:
            handover, source = transfer.handover, transfer.source
            assert handover is not None, "it has left its source"
            if disaggregation is not None and source.role == "prefill":
                disaggregation.send(handover, source, simulator)
            else:
                simulator.take_over(source, handover)  # where its blocks are
        return lost + with_source

    def _send_stranded(self, simulator: Simulator) -> None:
        while self._stranded:
            request_id, handover = next(iter(self._stranded.items()))
            number = self._members.route(handover.request)
            if number is None:
                return
            del self._stranded[request_id]
            simulator.take_over(self._members.replicas[number], handover)

    def _plan_random(self, number: int, since_s: float) -> None:
        if self._random is not None:
            at_s = since_s + float(self._random.rng.exponential(self._random.mean_s))
            event = _Event(at_s, number, is_random=True, repair_s=self._random.repair_s)
            heappush(self._due, event)
