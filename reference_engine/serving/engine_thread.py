"""The thread that owns the engine: `EngineState`, detokenizers and stop strings.

Loop → engine is a deque of callables and a wake-up. Engine → loop is one `call_soon_threadsafe` per
step with everything the step produced, because one per token would be tens of thousands of wake-ups
a second, and one for all that arrived between two steps. Nothing else is shared, except what never
changes and single numbers.

An exception in the thread ends it: it is logged and told to the loop, which fails every stream.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from loadgen.clock import Clock
from reference_engine.core.core import EngineState, step
from reference_engine.executors.base import Executor, Launching
from reference_engine.metrics.metrics import EngineMetrics
from reference_engine.serving.active_request import ActiveRequest
from reference_engine.serving.departures import Departures
from reference_engine.serving.streams import Sink, StreamDelta
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import Request, State

log = logging.getLogger(__name__)

# Idle for so long, the engine checks its books: a leaked block is a bug to be told, not to be kept.
_CHECK_AFTER_S = 1.0

Deltas = list[tuple[Sink, StreamDelta]]
Verdict = tuple[Sink, AdmissionError | None]  # taken, or why not


class Listener(NamedTuple):
    """Where the thread's news go, all called on the loop: who was taken or refused, the deltas of a
    step, and what ended the thread."""

    on_verdicts: Callable[[list[Verdict]], None]
    on_deltas: Callable[[Deltas], None]
    on_failure: Callable[[str], None]


class EngineThread:
    """Steps `state` on `executor` as long as there is work; sleeps otherwise."""

    def __init__(
        self, state: EngineState, executor: Executor, clock: Clock, metrics: EngineMetrics
    ) -> None:
        self._state, self._executor, self._clock = state, executor, clock
        self._metrics = metrics
        self._is_launching = state.async_depth > 0 and isinstance(executor, Launching)
        self.departures = Departures()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._is_stopped = False
        self._live: dict[str, ActiveRequest] = {}
        self._n_stopping = 0  # of them: those that their text may end
        self._untold: StepTokens | None = None
        self._verdicts: list[Verdict] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- called on the loop

    def start(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self._loop, self._listener = loop, listener
        self._thread.start()

    async def stop(self) -> None:
        """End after the running step; jobs that are posted already are done before."""
        self._is_stopped = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    def post(self, job: Callable[[], None]) -> None:
        """Do `job` in the engine thread, between two steps."""
        self._inbox.append(job)
        self._wake.set()

    # --- jobs

    def admit(self, live: ActiveRequest) -> None:
        try:
            self._state.admit(live.request)
        except AdmissionError as error:
            self._verdicts.append((live.stream, error))
            return
        self._live[live.request.id] = live
        self._n_stopping += live.may_stop
        self._verdicts.append((live.stream, None))

    def cancel(self, request_id: str) -> None:
        self._forget(request_id)
        request = self._state.end(request_id, State.finished_abort)
        if request is not None:
            self._on_finish(request)

    def check(self) -> bool:
        """Look through the engine's books until somebody comes; False if somebody did."""
        return all(not self._wake.is_set() for _ in self._state.checks())

    # --- the thread

    def _run(self) -> None:
        is_checked = True
        try:
            while not self._is_stopped:
                # Cleared before the inbox is read: a job posted in between costs one idle turn,
                # one posted after it is seen by the wait below.
                self._wake.clear()
                self._work_off_inbox()
                if self._state.has_work:
                    self._step()
                    is_checked = False
                elif not is_checked and not self._wake.wait(_CHECK_AFTER_S):
                    is_checked = self.check()
                idle_s = self._idle_s()
                if idle_s != 0.0:
                    self._tell()
                self._wake.wait(idle_s)
            self._work_off_inbox()
        except BaseException as error:  # the thread's boundary: recorded, and told to every stream
            log.exception("the engine thread failed")
            failure = f"the engine failed: {type(error).__name__}: {error}"
            try:
                self._tell()  # what was computed before stands
            finally:
                self._loop.call_soon_threadsafe(self._listener.on_failure, failure)

    def _step(self) -> None:
        """Tokens are told while the next step runs, if that is about to begin and needs no word of
        theirs: no time passes between two steps for it."""
        events = step(self._state, self._executor, self._tell)
        self._tell()  # nothing ran by itself
        self._untold = events
        if self._n_stopping or not self._is_launching or self._state.ahead is None:
            self._tell()

    def _tell(self) -> None:
        events, self._untold = self._untold, None
        if events is not None:
            self._publish(events)

    def _work_off_inbox(self) -> None:
        while self._inbox:
            self._tell()  # whoever asks, or leaves, finds all told
            self._inbox.popleft()()
        if self._verdicts:
            self._loop.call_soon_threadsafe(self._listener.on_verdicts, self._verdicts)
            self._verdicts = []

    def _idle_s(self) -> float | None:
        if not self._state.has_work:
            return None
        until_s = self._state.wait_until_s
        if until_s is None:
            return 0.0
        return None if until_s == inf else max(0.0, until_s - self._clock.now_s())

    def _publish(self, events: StepTokens) -> None:
        now_s = self._clock.now_s()
        live_of = self._live.get
        since: dict[float, int] = {}  # tokens by the instant of the one before; few instants
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

    def _finish(self, request: Request, finish: State | None) -> None:
        if finish is None:  # a stop string: the engine does not know yet
            self._state.end(request.id, State.finished_stop)
        self._forget(request.id)
        self._on_finish(request)

    def _forget(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        self._n_stopping -= live is not None and live.may_stop

    def _on_finish(self, request: Request) -> None:
        self._metrics.on_finish(request, self._state.accounting.accounts.get(request.id))
        self.departures.add(self._clock.now_s())
