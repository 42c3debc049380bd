"""The conductor of a simulated cluster, made of parts that each do one thing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reference_engine.cluster.transfers import Transfers
from reference_engine.core.commit import StartedStep
from reference_engine.simulator import Replica, Simulator
from reference_engine.state.batch import StepTokens
from reference_engine.state.sequence import Request


class Part:
    """A part of a conductor, with the methods of `simulator.Conductor`; nothing by default."""

    def check(self, request: Request) -> None:
        return

    def next_s(self, simulator: Simulator) -> float:
        return math.inf

    def act(self, simulator: Simulator) -> None:
        return

    def began(self, replica: Replica, started: StartedStep, simulator: Simulator) -> None:
        return

    def stepped(self, replica: Replica, events: StepTokens, simulator: Simulator) -> None:
        return

    def freed(self, replica: Replica, simulator: Simulator) -> None:
        return

    def cancel(self, request_id: str, simulator: Simulator) -> bool:
        """Forget a request that is in no replica; False if it is not here."""
        return False


class Cluster:
    """Parts that act one after the other, and the transfers that they begin
    (`simulator.Conductor`)."""

    def __init__(self, transfers: Transfers, parts: Sequence[Part]) -> None:
        self.transfers, self._parts = transfers, parts

    def check(self, request: Request) -> None:
        for part in self._parts:
            part.check(request)

    def next_s(self, simulator: Simulator) -> float:
        instants_s = (part.next_s(simulator) for part in self._parts)
        return min(self.transfers.next_s(), *instants_s)

    def act(self, simulator: Simulator) -> None:
        self.transfers.act(simulator)
        for part in self._parts:
            part.act(simulator)

    def began(self, replica: Replica, started: StartedStep, simulator: Simulator) -> None:
        for part in self._parts:
            part.began(replica, started, simulator)

    def stepped(self, replica: Replica, events: StepTokens, simulator: Simulator) -> None:
        for part in self._parts:
            part.stepped(replica, events, simulator)
        self.transfers.stepped(replica, simulator)

    def freed(self, replica: Replica, simulator: Simulator) -> None:
        for part in self._parts:
            part.freed(replica, simulator)
        self.transfers.begin(replica, simulator)

    def cancel(self, request_id: str, simulator: Simulator) -> None:
        if not any(part.cancel(request_id, simulator) for part in self._parts):
            self.transfers.cancel(request_id, simulator)
