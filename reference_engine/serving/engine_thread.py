"""The thread that owns the engine: `EngineState`, detokenizers and stop strings.

The event loop sends callables through a deque and wakes the thread. The thread sends all tokens of
a step in a single `call_soon_threadsafe`, because a call per token would wake the loop tens of
thousands of times a second; the requests admitted or refused between two steps go in another call.
Otherwise the two share only constants and single numbers.

An exception in the thread ends it: it is logged and passed to the loop, which fails every stream.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from loadgen.errors import SlobenchError
from loadgen.system.clock import Clock
from reference_engine.core.core import EngineState, step
from reference_engine.executors.base import Executor, Launching
from reference_engine.metrics.metrics import DepartureRate, EngineMetrics
from reference_engine.serving.active_request import ActiveRequest
from reference_engine.serving.streams import Sink, StreamDelta
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import Request, State

log = logging.getLogger(__name__)

# Idle time before the engine checks its own state, so that a leaked block fails loudly.
_CHECK_AFTER_S = 1.0
_STOP_S = 5.0

Deltas = list[tuple[Sink, StreamDelta]]
Admission = tuple[Sink, AdmissionError | None]  # None: admitted


class Listener(NamedTuple):
    """Callbacks of the thread, all called on the loop: for requests admitted or refused, for the
    deltas of a step, and for the error that ended the thread."""

    on_admissions: Callable[[list[Admission]], None]
    on_deltas: Callable[[Deltas], None]
    on_failure: Callable[[str], None]


class EngineHung(SlobenchError):
    """The engine thread does not stop, so the server ends with exit code 4."""


class EngineThread:
    """Steps `state` on `executor` while there is work, and sleeps otherwise."""

    def __init__(
        self, state: EngineState, executor: Executor, clock: Clock, metrics: EngineMetrics
    ) -> None:
        self._state, self._executor, self._clock = state, executor, clock
        self._metrics = metrics
        self._is_launching = state.async_depth > 0 and isinstance(executor, Launching)
        self.departures = DepartureRate()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._is_stopped = False
        self._live: dict[str, ActiveRequest] = {}
        self._n_stopping = 0  # of `_live`: requests that a stop string may end
        self._unpublished: StepTokens | None = None
        self._admissions: list[Admission] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- called on the loop

    def start(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self._loop, self._listener = loop, listener
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the running step and the jobs posted so far. Raises EngineHung if a
        step does not end within 5 s; a second call then returns at once."""
        was_stopped, self._is_stopped = self._is_stopped, True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, 0.0 if was_stopped else _STOP_S)
        if self._thread.is_alive() and not was_stopped:
            raise EngineHung(
                f"the running step did not end within {_STOP_S:g} s, so the server is killed: the "
                "batching policy or the executor does not return"
            )

    def post(self, job: Callable[[], None]) -> None:
        """Run `job` in the engine thread, between two steps."""
        self._inbox.append(job)
        self._wake.set()

    # --- jobs

    def admit(self, live: ActiveRequest) -> None:
        try:
            self._state.admit(live.request)
        except AdmissionError as error:
            self._admissions.append((live.stream, error))
            return
        self._live[live.request.id] = live
        self._n_stopping += live.may_stop
        self._admissions.append((live.stream, None))

    def cancel(self, request_id: str) -> None:
        self._forget(request_id)
        request = self._state.end(request_id, State.finished_abort)
        if request is not None:
            self._on_finish(request)

    def check(self) -> bool:
        """Check the engine's state until a job is posted; False if a job was."""
        return all(not self._wake.is_set() for _ in self._state.checks())

    # --- the thread

    def _run(self) -> None:
        is_checked = True
        try:
            while not self._is_stopped:
                # Cleared before the inbox is read. A job posted in between only costs an empty turn
                # of this loop; cleared afterwards, the job would wait until the next job comes.
                self._wake.clear()
                self._run_jobs()
                if self._state.has_work:
                    self._step()
                    is_checked = False
                elif not is_checked and not self._wake.wait(_CHECK_AFTER_S):
                    is_checked = self.check()
                idle_s = self._idle_s()
                if idle_s != 0.0:
                    self._publish()
                self._wake.wait(idle_s)
            self._run_jobs()
        except BaseException as error:  # the thread's boundary: logged, and every stream fails
            log.exception("the engine thread failed")
            failure = f"the engine failed: {type(error).__name__}: {error}"
            try:
                self._publish()  # tokens computed before the failure are valid
            finally:
                self._loop.call_soon_threadsafe(self._listener.on_failure, failure)

    def _step(self) -> None:
        """Compute a step. Its tokens are published while the next step runs, if the next step is
        already planned and no stop string in the text could change it; publishing then costs no
        time between steps."""
        events = step(self._state, self._executor, self._publish)
        self._publish()  # in case the executor did not call it during the step
        self._unpublished = events
        if self._n_stopping or not self._is_launching or self._state.ahead is None:
            self._publish()

    def _publish(self) -> None:
        """Send the tokens of the last step to the loop, unless that is done."""
        events, self._unpublished = self._unpublished, None
        if events is None:
            return
        now_s = self._clock.now_s()
        live_of = self._live.get
        since: dict[float, int] = {}  # tokens by the time of the previous token; few distinct times
        deltas: Deltas = []
        for request, token, finish, logprob in events:
            live = live_of(request.id)
            if live is None:
                continue
            last_s = live.token_s
            if last_s is None:
                self._metrics.on_first_token(request)
            else:
                since[last_s] = since.get(last_s, 0) + 1
            live.token_s = now_s
            delta = live.delta(token, finish, logprob)
            deltas.append((live.stream, delta))
            if delta.finish_reason is not None:
                self._finish(request, finish)
        if deltas:
            self._metrics.on_tokens(len(deltas), {now_s - at_s: n for at_s, n in since.items()})
            self._loop.call_soon_threadsafe(self._listener.on_deltas, deltas)

    def _run_jobs(self) -> None:
        while self._inbox:
            self._publish()  # a job must not see a request whose last token is unpublished
            self._inbox.popleft()()
        if self._admissions:
            self._loop.call_soon_threadsafe(self._listener.on_admissions, self._admissions)
            self._admissions = []

    def _idle_s(self) -> float | None:
        """Time to sleep before the next step; None sleeps until a job is posted."""
        if not self._state.has_work:
            return None
        until_s = self._state.wait_until_s
        if until_s is None:
            return 0.0
        return None if until_s == inf else max(0.0, until_s - self._clock.now_s())

    def _finish(self, request: Request, finish: State | None) -> None:
        if finish is None:  # ended by a stop string, which the engine does not see
            self._state.end(request.id, State.finished_stop)
        self._forget(request.id)
        self._on_finish(request)

    def _forget(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        self._n_stopping -= live is not None and live.may_stop

    def _on_finish(self, request: Request) -> None:
        self._metrics.on_finish(request, self._state.accounting.accounts.get(request.id))
        self.departures.add(self._clock.now_s())
