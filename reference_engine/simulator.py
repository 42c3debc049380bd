"""Simulator of engines in virtual time: the core, policies and KV pool of a live engine, with steps
that take no time to compute.

A step is started at an instant and committed at its end, and the clock jumps from one such instant
to the next. Several replicas therefore overlap: each has a step of its own under way, and the
client acts in between.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from heapq import heappop, heappush
from operator import add
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from loadgen.errors import SlobenchError
from loadgen.system.clock import VirtualClock
from reference_engine.accounting.explain import Account
from reference_engine.accounting.totals import EngineTotals
from reference_engine.core.commit import StartedStep
from reference_engine.core.core import EngineState, end_step, start_step
from reference_engine.core.handover import (
    FAILURE,
    Handover,
    begin_anew,
    hand_over,
    lose,
    take_over,
)
from reference_engine.core.in_flight import end_batch, start_batch
from reference_engine.core.stretch import Repeating, Stretch, begin_lockstep, stretch_from
from reference_engine.executors.base import Caps, Executor
from reference_engine.executors.simulated import Simulated
from reference_engine.executors.staged import Staged
from reference_engine.policies.base import Policy
from reference_engine.state.batch import StepTokens
from reference_engine.state.cost_model import CostModel, StepCost
from reference_engine.state.kv import BLOCK_TOKENS, KvPool
from reference_engine.state.plan import AdmissionError, Limits
from reference_engine.state.predictor import Predictor
from reference_engine.state.sequence import Request, State
from reference_engine.state.steps import StepLog, StepRecord

Role = Literal["both", "prefill", "decode"]
"""The requests of a replica: all; up to their first token; from then on."""

_LITTLE_TOLERANCE = 1e-6
_OBJECTS = 200_000


class SimulationStuck(SlobenchError):
    """Requests wait, no client will act again, and no policy names an instant to continue at."""


class SimulatedService(Protocol):
    """A simulated engine, or several behind a router, as its clients see it."""

    @property
    def now_s(self) -> float: ...

    def submit(self, request: Request) -> None:
        """Submit a request. It may have arrived during the step that has just ended.

        Raises AdmissionError for a request that can never run or that the policy refuses. An engine
        that is computing a step refuses at the end of the step, by `EngineClient.refuse`.
        """

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it has not ended."""

    def explain(self, request_id: str) -> Account | None:
        """The account of a live or recently finished request."""

    def settle(self, request: Request) -> None:
        """Bring a live request's tokens, and their times, up to date."""


class EngineClient(Protocol):
    """A client of a simulated engine. It acts at instants of its own and on received tokens."""

    @property
    def is_closed(self) -> bool:
        """Whether it will submit no more requests, whatever it receives."""

    def next_s(self) -> float | None:
        """The next instant at which it acts unprompted; None: never."""

    def act(self, engine: SimulatedService) -> None:
        """Submit and cancel everything that is due by now."""

    def receive(self, events: StepTokens, engine: SimulatedService) -> None:
        """Receive the tokens and ended requests of a step, at its end."""

    def refuse(self, request: Request, error: AdmissionError) -> None:
        """Receive the refusal of a request that arrived during a step, at the end of the step."""


@runtime_checkable
class PatientClient(EngineClient, Protocol):
    """A client that reacts to ends of requests only. `receive` may then be left out for steps
    without an end, and is not passed the tokens of decoding requests: `token_times_s` of a request
    holds their instants, once it is settled or has ended."""

    def quiet_until_s(self) -> float:
        """The instant before which `act` has no effect unless a request ends."""


@runtime_checkable
class LossyClient(EngineClient, Protocol):
    """A client of engines that may fail."""

    def lose(self, request: Request, reason: str, engine: SimulatedService) -> None:
        """Receive the failure of a request whose replica has failed."""


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Look for garbage in cycles only after 200 000 new objects: a simulation makes no cycles, and
    looking through all objects that it keeps took a quarter of its time."""
    before = gc.get_threshold()
    if 0 < before[0] < _OBJECTS:
        gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Population:
    """The requests that are present in an engine. `check` asserts L = λW: the request seconds
    summed over time are those summed over requests."""

    def __init__(self) -> None:
        self._arrived_s: dict[str, float] = {}
        self._present_s = 0.0  # ∫ requests present dt
        self._stayed_s = 0.0  # Σ (end − arrival) of the ended requests
        self._until_s = 0.0  # of the integral

    def __len__(self) -> int:
        return len(self._arrived_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._arrived_s

    def enter(self, request_id: str, arrived_s: float, now_s: float) -> None:
        self._integrate(now_s)
        self._present_s += now_s - arrived_s
        self._arrived_s[request_id] = arrived_s

    def leave(self, request_id: str, now_s: float) -> None:
        self._integrate(now_s)
        self._stayed_s += now_s - self._arrived_s.pop(request_id)

    def request_s(self, now_s: float) -> float:
        """The request seconds until now; divided by the time, the mean number of requests."""
        self._integrate(now_s)
        return self._present_s

    def check(self, name: str) -> None:
        assert math.isclose(
            self._present_s, self._stayed_s, rel_tol=_LITTLE_TOLERANCE, abs_tol=_LITTLE_TOLERANCE
        ), f"{name}: Little's law: {self._present_s} by time, {self._stayed_s} by request"

    def _integrate(self, now_s: float) -> None:
        self._present_s += len(self._arrived_s) * (now_s - self._until_s)
        self._until_s = now_s


class Reached:
    """The last step end that a simulation has come to: its instant (s), and the number of its
    replica. All ends before it, and those at the same instant of lower numbers, are over."""

    __slots__ = ("number", "until_s")

    def __init__(self) -> None:
        self.to(-math.inf)

    def to(self, until_s: float, number: float = math.inf) -> None:
        self.until_s, self.number = until_s, number


class Replica:
    """An engine of a simulation. `population` are its requests, `busy_s` the time that its steps
    took, `n_received` the requests that it was given. `kv_token_bytes` is the KV of a token."""

    def __init__(
        self,
        state: EngineState,
        executor: Executor,
        name: str = "engine",
        role: Role = "both",
        kv_token_bytes: float = 0.0,
    ) -> None:
        self._state, self.executor, self.name = state, executor, name
        self.role, self.kv_token_bytes = role, kv_token_bytes
        self.repeating = executor if isinstance(executor, Repeating) else None
        self.population = Population()
        self.busy_s, self.n_received, self.n_failures = 0.0, 0, 0
        self._past = EngineTotals()  # of the engines before a failure
        self.number = 0  # its place among the replicas
        self.started: StartedStep | None = None  # the step under way, or the first of a stretch
        self.stretch: Stretch | None = None
        self.n_starts = 0  # of steps and stretches; an older end is void
        # Requests, also of other engines, and cancelled ids that arrived during it. As in a server,
        # the engine reads them between two steps.
        self.inbox: list[Request | Handover | str] = []
        # Requests of other replicas that wait for memory here, and those that have it and are
        # being copied.
        self.coming: dict[str, Request] = {}
        self.copying: dict[str, Request] = {}
        self.partner: Replica | None = None  # the other half of a divided GPU
        self.reached = Reached()  # of the simulation, which replaces it
        self.n_layers = 1
        self.is_single_step = False  # whether the conductor follows each of its steps

    @property
    def state(self) -> EngineState:
        """The engine as of now: all steps that are over are committed. Tokens of single decoding
        requests may be missing until `queues.settle()`."""
        if self.stretch is not None:
            self.commit(self.n_over(self.stretch))
        return self._state

    @property
    def is_busy(self) -> bool:
        """Whether it cannot begin a step now: it reads what arrives when a step ends."""
        return self.started is not None

    @property
    def is_computing(self) -> bool:
        return self.started is not None

    def is_computing_for(self, request_id: str) -> bool:
        """Whether a request cannot leave now, because a step under way may compute it."""
        return self.started is not None

    @property
    def unread(self) -> list[Request]:
        """The requests in the inbox."""
        entries = (e.request if isinstance(e, Handover) else e for e in self.inbox)
        return [entry for entry in entries if isinstance(entry, Request)]

    def n_over(self, stretch: Stretch) -> int:
        """How many steps of the stretch are over, the last excepted."""
        is_later = self.reached.number > self.number
        return min(stretch.n_ended(self.reached.until_s, is_later), stretch.n_steps - 1)

    def commit(self, n: int) -> None:
        """Commit the first `n` steps of the stretch."""
        stretch = self.stretch
        if stretch is None or n <= stretch.n_done:
            return
        self.busy_s = reduce(add, stretch.durations_s[stretch.n_done + 1 : n + 1], self.busy_s)
        stretch.commit(n)

    @property
    def totals(self) -> EngineTotals:
        """The totals of all engines that ran here."""
        return self._past.plus(self.state.counters)

    def fail(self, renewed: EngineState, now_s: float) -> tuple[list[Handover], list[str]]:
        """Lose all requests and KV, and the step under way; continue as `renewed`. Returns the lost
        requests, and the ids of those that were cancelled during the step."""
        state, inbox = self.state, self.inbox
        self._give_up(now_s)
        self._past = self.totals
        lost = lose(state)
        for entry in inbox:
            if isinstance(entry, Request):
                lost.append(Handover(begin_anew(entry), 0, {}, entry.arrived_s, FAILURE))
            elif isinstance(entry, Handover):
                request = begin_anew(entry.request)
                lost.append(Handover(request, 0, entry.waits, entry.since_s, FAILURE))
        cancelled = [entry for entry in inbox if isinstance(entry, str)]
        renewed.is_source_closed = state.is_source_closed
        self._state, self.inbox, self.started, self.stretch = renewed, [], None, None
        self.n_starts += 1
        self.n_failures += 1
        return lost, cancelled

    def _give_up(self, now_s: float) -> None:
        """Take the time of the step under way that is not over from the time that it computed."""
        if self.stretch is not None:
            self.stretch.give_up()
            self.busy_s -= self.stretch.ends_s[self.stretch.n_done] - now_s
        elif self.started is not None:
            self.busy_s -= self.started.began_s + self.started.result.simulated_s - now_s

    def submit(self, request: Request, arrived_s: float, now_s: float) -> None:
        if self.is_busy:
            self.inbox.append(request)
        else:
            self.state.admit(request)
        self.population.enter(request.id, arrived_s, now_s)
        self.n_received += 1

    def take_over(self, handover: Handover, now_s: float) -> None:
        if self.is_busy:
            self.inbox.append(handover)
        else:
            take_over(self.state, handover)
        self.population.enter(handover.request.id, now_s, now_s)
        self.n_received += 1

    def cancel(self, request_id: str, now_s: float) -> bool:
        """Whether a request was ended now; False also where it will be at the end of the step."""
        if self.is_computing_for(request_id):
            self.inbox.append(request_id)
            return False
        if self.state.end(request_id, State.finished_abort) is None:
            return False
        self.population.leave(request_id, now_s)
        return True


class Flight(NamedTuple):
    """A batch in a pipeline, and the instant (s) at which it leaves the last stage."""

    end_s: float
    started: StartedStep


class PipelinedReplica(Replica):
    """An engine whose executor is a pipeline: at most `n_batches` are under way, each of which
    admits requests while it has fewer than `batch_seqs`. `busy_s` is the mean of the stages."""

    def __init__(
        self,
        state: EngineState,
        executor: Staged,
        name: str = "engine",
        role: Role = "both",
        kv_token_bytes: float = 0.0,
        n_batches: int | None = None,
        batch_seqs: int | None = None,
    ) -> None:
        super().__init__(state, executor, name, role, kv_token_bytes)
        self.stages = executor.stages
        self.n_batches = n_batches or self.stages.n
        self.batch_seqs = batch_seqs or max(1, state.limits.max_num_seqs // self.n_batches)
        self.flights: deque[Flight] = deque()

    @property
    def is_busy(self) -> bool:
        return len(self.flights) == self.n_batches

    @property
    def is_computing(self) -> bool:
        return bool(self.flights)

    def is_computing_for(self, request_id: str) -> bool:
        return self.is_busy or request_id in self.state.queues.in_flight

    def begin(self, now_s: float) -> StartedStep:
        """Begin a batch, if there is work for it."""
        started = start_batch(self.state, self.executor, self.batch_seqs)
        duration_s = started.result.duration_s
        if duration_s is not None:
            end_s = now_s + duration_s
            if self.flights:  # rounding does not let it overtake
                end_s = max(end_s, self.flights[-1].end_s)
            self.flights.append(Flight(end_s, started))
            self.busy_s = self.stages.busy_s / self.stages.n
        return started

    def _give_up(self, now_s: float) -> None:
        self.flights.clear()
        self.stages.stop(now_s)
        self.busy_s = self.stages.busy_s / self.stages.n


Route = Callable[[Request], int | None]
"""The number of the replica for a request; None: it waits at the router until a request ends."""


def only_replica(request: Request) -> int:
    return 0


class Conductor(Protocol):
    """Moves requests between the replicas of a simulation, and replicas in and out of it. It acts
    at instants of its own and at the ends of steps."""

    def check(self, request: Request) -> None:
        """Raises AdmissionError for a request that could never run."""

    def next_s(self, simulator: Simulator) -> float:
        """The next instant (s) at which it acts; infinity: none while nothing else happens."""

    def act(self, simulator: Simulator) -> None:
        """Do everything that is due by now, before the client acts."""

    def began(self, replica: Replica, started: StartedStep, simulator: Simulator) -> None:
        """A step with work has begun, on a replica of which each step is followed."""

    def stepped(self, replica: Replica, events: StepTokens, simulator: Simulator) -> None:
        """A step has ended and the inbox is read; the client has not received the tokens yet.
        Steps of a stretch, in which no request starts or ends, are left out."""

    def freed(self, replica: Replica, simulator: Simulator) -> None:
        """A request was cancelled between two steps."""

    def cancel(self, request_id: str, simulator: Simulator) -> None:
        """Forget a request that is between two replicas."""


class Simulator:
    """Replicas on a virtual clock that starts at its present time (`SimulatedService`). `route`
    selects the replica of each request at its arrival.

    Steps that end at the same instant end in the order of their replicas' numbers."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        clock: VirtualClock,
        route: Route = only_replica,
        conductor: Conductor | None = None,
    ) -> None:
        assert replicas, "a simulation needs a replica"
        self.replicas, self.clock, self._route = tuple(replicas), clock, route
        self._conductor = conductor
        self._reached = Reached()
        self._reached.to(clock.now_s())
        for number, replica in enumerate(self.replicas):
            replica.number, replica.reached = number, self._reached
        self.population = Population()
        self._replica_of: dict[str, Replica] = {}
        self._moving: dict[str, Request] = {}  # between two replicas
        self._at_router: dict[str, Request] = {}
        # Heap of the steps and stretches under way: the end (s), the numbers of the replica and of
        # its start.
        self._ends: list[tuple[float, int, int]] = []
        self._ready: dict[Replica, None] = {}  # engines that may start a step now
        self._waiting: dict[Replica, float] = {}  # engines whose policy waits, until when (s)
        self._client: EngineClient | None = None  # of the present run
        self._is_patient = False

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    @property
    def n_at_router(self) -> int:
        """Requests that wait at the router."""
        return len(self._at_router)

    def submit(self, request: Request) -> None:
        now_s = self.now_s
        if self._conductor is not None:
            self._conductor.check(request)
        number = None if self._at_router else self._route(request)
        if number is None:
            self._at_router[request.id] = request
        else:
            self._send(request, number, request.arrived_s)
        self.population.enter(request.id, request.arrived_s, now_s)

    def cancel(self, request_id: str) -> None:
        if (request := self._at_router.pop(request_id, None)) is not None:
            request.state, request.finished_s = State.finished_abort, self.now_s
            self.population.leave(request_id, self.now_s)
            return
        if request_id in self._moving:
            self._cancel_moving(request_id)
            return
        replica = self._replica_of.get(request_id)
        if replica is None:
            return
        self.interrupt(replica)
        if replica.cancel(request_id, self.now_s):
            self.population.leave(request_id, self.now_s)
            self._ready[replica] = None
            if self._conductor is not None:
                self._conductor.freed(replica, self)
            self.empty_router()

    def explain(self, request_id: str) -> Account | None:
        replica = self._replica_of.get(request_id)
        return None if replica is None else replica.state.explain(request_id)

    def settle(self, request: Request) -> None:
        replica = self._replica_of.get(request.id)
        lockstep = None if replica is None else replica.state.queues.lockstep
        if lockstep is not None:
            lockstep.settle(request)

    def hand_over(self, replica: Replica, request_id: str) -> Handover:
        """Take a running request out of a replica that computes no step of it."""
        assert not replica.is_computing_for(request_id), f"{replica.name} computes {request_id}"
        handover = hand_over(replica.state, request_id)
        replica.population.leave(request_id, self.now_s)
        del self._replica_of[request_id]
        self._moving[request_id] = handover.request
        return handover

    def take_over(self, replica: Replica, handover: Handover) -> None:
        """Pass a request that was handed over, and its KV, to a replica."""
        self.interrupt(replica)
        request_id = handover.request.id
        del self._moving[request_id]
        replica.take_over(handover, self.now_s)
        self._replica_of[request_id] = replica
        self._ready[replica] = None

    def fail(self, replica: Replica, renewed: EngineState) -> list[Handover]:
        """Let a replica fail and continue as `renewed`, empty. Returns its requests, each to be
        passed to `take_over` or `lose`."""
        lost, cancelled = replica.fail(renewed, self.now_s)
        self._waiting.pop(replica, None)
        handovers: list[Handover] = []
        for handover in lost:
            request = handover.request
            replica.population.leave(request.id, self.now_s)
            del self._replica_of[request.id]
            if request.id in cancelled:
                request.state, request.finished_s = State.finished_abort, self.now_s
                self.population.leave(request.id, self.now_s)
            else:
                self._moving[request.id] = request
                handovers.append(handover)
        return handovers

    def lose(self, request: Request, reason: str) -> None:
        """End a request that is in no replica with an error."""
        del self._moving[request.id]
        request.state, request.finished_s = State.finished_abort, self.now_s
        self.population.leave(request.id, self.now_s)
        assert isinstance(self._client, LossyClient), "this client cannot lose a request"
        self._client.lose(request, reason, self)

    def wake(self, replica: Replica) -> None:
        """Let a replica plan again, because its memory has changed."""
        self._ready[replica] = None

    def run(self, client: EngineClient) -> None:
        """Run until the client will not act again and all requests have ended.

        Raises SimulationStuck if a policy would wait for ever.
        """
        with _seldom_collected():
            self._run(client)

    def _run(self, client: EngineClient) -> None:
        clock, was_closed, conductor = self.clock, None, self._conductor
        is_pipelined = isinstance(self.replicas[0], PipelinedReplica)
        is_single = len(self.replicas) == 1 and conductor is None and not is_pipelined
        patient = client if isinstance(client, PatientClient) else None
        self._client, self._is_patient = client, patient is not None
        while True:
            client.act(self)
            is_closed = client.is_closed
            if is_closed is not was_closed:
                was_closed = is_closed
                for replica in self.replicas:
                    self.interrupt(replica)
                    replica.state.is_source_closed = is_closed
                self._ready.update(dict.fromkeys(self._waiting))
            if self._start_steps(client):
                continue
            self._drop_void_ends()
            if patient is not None and self._ends:
                self._shorten(patient, is_single)
            # A single engine reads what arrived during a step when the step ends: the client need
            # not act before.
            if self._ends and is_single:
                self._end_step(client)
            elif self._ends or self._waiting:
                self._advance(client)
            elif conductor is not None:
                if client.next_s() is None and not self.population:
                    break
                self._advance(client)
            elif (next_s := client.next_s()) is None:
                break
            else:
                clock.jump_to(max(next_s, clock.now_s()))
                self._reached.to(clock.now_s())
        assert not self._at_router, f"{', '.join(self._at_router)} wait at the router for ever"
        for replica in self.replicas:
            replica.population.check(replica.name)
        self.population.check("all replicas")

    def _start_steps(self, client: EngineClient) -> bool:
        """Start a step on every engine that is ready; whether more may start now, because tokens
        were delivered, to which the client may react, or memory was freed."""
        is_delivered = False
        ready, self._ready = self._ready, {}
        for replica in ready:
            if replica.is_busy:
                continue
            if self._waiting:
                self._waiting.pop(replica, None)
            if isinstance(replica, PipelinedReplica):
                is_delivered |= self._start_batches(replica, client)
                continue
            if not replica.state.has_work:
                continue
            is_repeating = self._is_patient and not replica.is_single_step
            repeating = replica.repeating if is_repeating else None
            if repeating is not None:
                begin_lockstep(replica.state, repeating)
            started = start_step(replica.state, replica.executor)
            duration_s = started.result.duration_s
            if duration_s is not None:  # else there was no batch to execute
                replica.started = started
                replica.busy_s += duration_s
                end_s = self.clock.now_s() + duration_s
                if repeating is not None:
                    replica.stretch = stretch_from(replica.state, started, repeating)
                    if replica.stretch is not None:
                        end_s = replica.stretch.ends_s[-1]
                self._expect_end(replica, end_s)
                self._follow(replica, started)
                continue
            is_delivered |= self._end_idle(replica, started, client)
        return is_delivered

    def _start_batches(self, replica: PipelinedReplica, client: EngineClient) -> bool:
        """As `_start_steps`, for the batches that a pipeline may begin now."""
        while replica.state.has_work and not replica.is_busy:
            n_under_way = len(replica.flights)
            started = replica.begin(self.clock.now_s())
            if started.result.duration_s is None:
                return self._end_idle(replica, started, client)
            if not n_under_way:
                self._expect_end(replica, replica.flights[0].end_s)
            self._follow(replica, started)
        return False

    def _follow(self, replica: Replica, started: StartedStep) -> None:
        if replica.is_single_step and self._conductor is not None:
            self._conductor.began(replica, started, self)

    def _end_idle(self, replica: Replica, started: StartedStep, client: EngineClient) -> bool:
        """End a step that computes nothing; whether steps may start now."""
        assert not started.planned.batch.has_work, "a simulated step has a duration"
        events = end_step(replica.state, started)
        if events.ends:
            self._deliver(replica, events, client)
            return True
        until_s = replica.state.wait_until_s
        if until_s is None and started.planned.n_preempted:
            self._ready[replica] = None  # the memory that this freed is for the next plan
            return True
        self._waiting[replica] = math.inf if until_s is None else until_s
        return False

    def _expect_end(self, replica: Replica, end_s: float) -> None:
        replica.n_starts += 1
        heappush(self._ends, (end_s, replica.number, replica.n_starts))

    def _drop_void_ends(self) -> None:
        ends = self._ends
        while ends and self.replicas[ends[0][1]].n_starts != ends[0][2]:
            heappop(ends)

    def interrupt(self, replica: Replica) -> None:
        """Let a stretch end with the step that is computed now."""
        stretch = replica.stretch
        if stretch is None:
            return
        n = replica.n_over(stretch)
        replica.commit(n)
        replica.started, replica.stretch = stretch.started(), None
        self._expect_end(replica, stretch.ends_s[n])

    def _shorten(self, client: PatientClient, is_single: bool) -> None:
        """End stretches with their first step after which the client may act."""
        quiet_until_s = client.quiet_until_s()
        if self._ends[0][0] < quiet_until_s:
            return
        # Then it acts at that instant, whatever the engines do, and finds those between two steps
        # of which a step ends right then.
        is_punctual = not is_single and quiet_until_s == client.next_s()
        for replica in self.replicas:
            stretch = replica.stretch
            if stretch is None or stretch.ends_s[-1] <= quiet_until_s:
                continue
            n = stretch.n_ended(quiet_until_s, is_inclusive=False)
            if not is_punctual or stretch.ends_s[n] == quiet_until_s:
                stretch.shorten(n + 1)
                self._expect_end(replica, stretch.ends_s[n])
        self._drop_void_ends()

    def _end_step(self, client: EngineClient) -> None:
        """Advance to the end of the step that ends first."""
        end_s, number, _ = heappop(self._ends)
        replica = self.replicas[number]
        if isinstance(replica, PipelinedReplica):
            self._end_batch(replica, end_s, client)
            return
        stretch = replica.stretch
        if stretch is not None:
            replica.commit(stretch.n_steps - 1)
            replica.started, replica.stretch = stretch.started(), None
        started, replica.started = replica.started, None
        assert started is not None, f"{replica.name} ends a step that it never began"
        self.clock.jump_to(max(end_s, self.clock.now_s()))
        self._reached.to(end_s, number)
        self._deliver(replica, end_step(replica.state, started), client)

    def _end_batch(self, replica: PipelinedReplica, end_s: float, client: EngineClient) -> None:
        started = replica.flights.popleft().started
        if replica.flights:
            self._expect_end(replica, replica.flights[0].end_s)
        self.clock.jump_to(max(end_s, self.clock.now_s()))
        self._reached.to(end_s, replica.number)
        self._deliver(replica, end_batch(replica.state, started), client)

    def _advance(self, client: EngineClient) -> None:
        """Advance to the next instant at which a step ends, a policy continues or the client
        acts."""
        clock, ends, waiting, next_s = self.clock, self._ends, self._waiting, client.next_s()
        conductor = self._conductor
        client_s = math.inf if next_s is None else next_s
        wake_s = min(client_s, min(waiting.values())) if waiting else client_s
        if conductor is not None:
            wake_s = min(wake_s, conductor.next_s(self))
        if ends and ends[0][0] <= wake_s:
            self._end_step(client)
            return
        if wake_s == math.inf:
            names = ", ".join(request.id for replica in waiting for request in replica.state.queues)
            kinds = ", ".join(sorted({replica.state.policy.kind for replica in waiting}))
            raise SimulationStuck(
                f"policy '{kinds}' waits for ever at {self.now_s:g} s: {names} "
                "wait and no more requests will arrive; use view.is_source_closed"
            )
        clock.jump_to(max(wake_s, clock.now_s()))
        self._reached.to(clock.now_s())
        if conductor is not None:
            conductor.act(self)
        for replica, until_s in waiting.items():
            if min(until_s, client_s) <= wake_s:
                self._ready[replica] = None

    def _deliver(self, replica: Replica, events: StepTokens, client: EngineClient) -> None:
        """Pass the tokens of a step to the client, and the client's calls during it to the
        engine."""
        self._ready[replica] = None
        now_s = self.clock.now_s()
        for request in events.requests:
            if request.token_times_s is not None:
                request.token_times_s.append(now_s)
        for request in events.ends:
            self._leave(request.id, replica)
        refused = self._read_inbox(replica) if replica.inbox else []
        if self._conductor is not None:
            self._conductor.stepped(replica, events, self)
        if events.ends:
            self.empty_router()
        client.receive(events, self)
        for request, error in refused:
            client.refuse(request, error)

    def _read_inbox(self, replica: Replica) -> list[tuple[Request, AdmissionError]]:
        """Admit and cancel what arrived during a step; returns the refused requests."""
        refused: list[tuple[Request, AdmissionError]] = []
        inbox, replica.inbox = replica.inbox, []
        for entry in inbox:
            if isinstance(entry, str):
                if entry in replica.state.queues.in_flight:
                    replica.inbox.append(entry)
                elif replica.state.end(entry, State.finished_abort) is not None:
                    self._leave(entry, replica)
                continue
            if isinstance(entry, Handover):
                take_over(replica.state, entry)
                continue
            try:
                replica.state.admit(entry)
            except AdmissionError as error:
                self._leave(entry.id, replica)
                refused.append((entry, error))
        return refused

    def _send(self, request: Request, number: int, arrived_s: float) -> None:
        replica = self.replicas[number]
        self.interrupt(replica)
        replica.submit(request, arrived_s, self.now_s)
        self._replica_of[request.id] = replica
        self._ready[replica] = None

    def empty_router(self) -> None:
        """Send the requests that wait at the router, in order, as far as it finds replicas."""
        while self._at_router:
            request = next(iter(self._at_router.values()))
            number = self._route(request)
            if number is None:
                return
            del self._at_router[request.id]
            self._send(request, number, self.now_s)

    def _cancel_moving(self, request_id: str) -> None:
        request, conductor = self._moving.pop(request_id), self._conductor
        assert conductor is not None, f"{request_id} moves without a conductor"
        conductor.cancel(request_id, self)
        request.state, request.finished_s = State.finished_abort, self.now_s
        self.population.leave(request_id, self.now_s)

    def _leave(self, request_id: str, replica: Replica) -> None:
        replica.population.leave(request_id, self.now_s)
        self.population.leave(request_id, self.now_s)


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
    engine = Simulator([Replica(state, Simulated(priced, caps))], clock)
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

    def quiet_until_s(self) -> float:
        return self._queue[0].arrived_s if self._queue else math.inf

    def act(self, engine: SimulatedService) -> None:
        while self._queue and self._queue[0].arrived_s <= engine.now_s:
            request = self._queue.popleft()
            try:
                engine.submit(request)
            except AdmissionError as error:
                self.refuse(request, error)

    def refuse(self, request: Request, error: AdmissionError) -> None:
        self.rejected.append(request)

    def receive(self, events: StepTokens, engine: SimulatedService) -> None:
        for request in events.ends:
            self.finished.append(request)
            account = engine.explain(request.id)
            assert account is not None, f"{request.id} left no account"
            self.accounts.append(account)
