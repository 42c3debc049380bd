"""Simulator of the engine in virtual time: the core, policies and KV pool of a live engine, with
steps that only advance the clock.

A single engine needs no event queue. While it works, time advances by steps; while it is idle, time
jumps to the next instant at which a client acts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from loadgen.clock import VirtualClock
from loadgen.errors import SlobenchError
from reference_engine.accounting.explain import Account
from reference_engine.core.core import EngineState, step
from reference_engine.executors.base import Caps, Executor
from reference_engine.executors.simulated import Simulated
from reference_engine.policies.base import Policy
from reference_engine.state.batch import StepTokens
from reference_engine.state.cost_model import CostModel, StepCost
from reference_engine.state.kv import BLOCK_TOKENS, KvPool
from reference_engine.state.plan import AdmissionError, Limits
from reference_engine.state.predictor import Predictor
from reference_engine.state.sequence import Request, State
from reference_engine.state.steps import StepLog, StepRecord

_LITTLE_TOLERANCE = 1e-6


class SimulationStuck(SlobenchError):
    """Requests wait, no client will act again, and the policy names no instant to continue at."""


class EngineClient(Protocol):
    """A client of a simulated engine. It acts at instants of its own and on received tokens."""

    @property
    def is_closed(self) -> bool:
        """Whether it will submit no more requests, whatever it receives."""

    def next_s(self) -> float | None:
        """The next instant at which it acts unprompted; None: never."""

    def act(self, engine: Simulator) -> None:
        """Submit and cancel everything that is due by now."""

    def receive(self, events: StepTokens, engine: Simulator) -> None:
        """Receive the tokens and ended requests of a step, at its end."""


class Simulator:
    """One engine on a virtual clock; it starts at the present time of `clock`."""

    def __init__(self, state: EngineState, executor: Executor, clock: VirtualClock) -> None:
        self.state, self.clock = state, clock
        self._executor = executor
        self._present_s = 0.0  # ∫ requests in the engine dt
        self._stayed_s = 0.0  # Σ (end − arrival) of the ended requests
        self._arrived_s: dict[str, float] = {}

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    def submit(self, request: Request) -> None:
        """Put a request into the queue. It may have arrived during the step that has just ended.

        Raises AdmissionError for a request that can never run or that the policy refuses.
        """
        self.state.admit(request)
        self._arrived_s[request.id] = request.arrived_s
        self._present_s += self.now_s - request.arrived_s

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it has not ended."""
        if self.state.end(request_id, State.finished_abort) is not None:
            self._leave(request_id)

    def run(self, client: EngineClient) -> None:
        """Run until the client will not act again and all requests have ended.

        Raises SimulationStuck if the policy would wait for ever.
        """
        while True:
            client.act(self)
            self.state.is_source_closed = client.is_closed
            if not self.state.has_work:
                next_s = client.next_s()
                if next_s is None:
                    break
                self.clock.advance_to(max(next_s, self.now_s))
            elif not self._step(client):
                self._wait(client)
        self._check_littles_law()

    def _step(self, client: EngineClient) -> bool:
        """Run one step; False if the policy chose to wait."""
        state, clock = self.state, self.clock
        n_present, started_s, n_steps = len(self._arrived_s), clock.now_s(), state.counters.steps
        events = step(state, self._executor)
        if state.counters.steps == n_steps and not events.ends:
            return False
        self._present_s += n_present * (clock.now_s() - started_s)
        for request in events.ends:
            self._leave(request.id)
        client.receive(events, self)
        return True

    def _wait(self, client: EngineClient) -> None:
        """Advance to the instant at which the policy continues or the client acts."""
        until_s, next_s = self.state.wait_until_s, client.next_s()
        wake_s = min((t for t in (until_s, next_s) if t is not None), default=math.inf)
        if wake_s == math.inf:
            waiting = ", ".join(request.id for request in self.state.queues)
            raise SimulationStuck(
                f"policy '{self.state.policy.kind}' waits for ever at {self.now_s:g} s: {waiting} "
                "wait and no more requests will arrive; use view.is_source_closed"
            )
        self._present_s += len(self._arrived_s) * (wake_s - self.now_s)
        self.clock.advance_to(wake_s)

    def _leave(self, request_id: str) -> None:
        self._stayed_s += self.now_s - self._arrived_s.pop(request_id)

    def _check_littles_law(self) -> None:
        """Assert L = λW over the whole run: request seconds summed by time and by request."""
        assert math.isclose(
            self._present_s, self._stayed_s, rel_tol=_LITTLE_TOLERANCE, abs_tol=_LITTLE_TOLERANCE
        ), f"Little's law: {self._present_s} request seconds by time, {self._stayed_s} by request"


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation: the finished requests, with their times; the rejected requests;
    the steps; and the accounts of the waits, in the order of `finished`."""

    finished: tuple[Request, ...]
    rejected: tuple[Request, ...]
    steps: tuple[StepRecord, ...]
    accounts: tuple[Account, ...]
    state: EngineState


def simulate(
    requests: Iterable[Request],
    policy: Policy,
    cost: CostModel | None = None,
    *,
    limits: Limits | None = None,
    n_blocks: int = 65_536,
    prefix_cache: bool = True,
    predictor: Predictor | None = None,
    caps: Caps | None = None,
    level: str = "sizes",
) -> Simulation:
    """Simulate a policy on requests that arrive at their `arrived_s` (seconds). The requests are
    changed in place and can be simulated only once. Without a cost model every step takes 1 s."""
    steps: list[StepRecord] = []
    log = StepLog(level="full" if level == "full" else "sizes", on_step=steps.append)
    clock, priced = VirtualClock(), cost or StepCost(step_s=1.0)
    state = EngineState(
        limits or Limits(256, 1 << 20, 1 << 17, 1 << 17),
        KvPool(n_blocks, BLOCK_TOKENS, prefix_cache),
        clock,
        policy,
        cost=priced,
        predictor=predictor,
        log=log,
    )
    engine = Simulator(state, Simulated(priced, clock.advance, caps), clock)
    client = _Arrivals(requests)
    engine.run(client)
    return Simulation(
        tuple(client.finished), tuple(client.rejected), tuple(steps), tuple(client.accounts), state
    )


class _Arrivals:
    """A client that submits requests at their arrival and keeps the results."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._queue = deque(sorted(requests, key=lambda request: request.arrived_s))
        self.finished: list[Request] = []
        self.rejected: list[Request] = []
        self.accounts: list[Account] = []

    @property
    def is_closed(self) -> bool:
        return not self._queue

    def next_s(self) -> float | None:
        return self._queue[0].arrived_s if self._queue else None

    def act(self, engine: Simulator) -> None:
        while self._queue and self._queue[0].arrived_s <= engine.now_s:
            request = self._queue.popleft()
            try:
                engine.submit(request)
            except AdmissionError:
                self.rejected.append(request)

    def receive(self, events: StepTokens, engine: Simulator) -> None:
        for request in events.ends:
            self.finished.append(request)
            account = engine.state.explain(request.id)
            assert account is not None, f"{request.id} left no account"
            self.accounts.append(account)
