"""The engine as asyncio code sees it: calls in, streams of text out.

There are two threads. The engine thread (`engine_thread`) owns the engine's state; the event loop
owns the streams and runs everything in this module except the functions passed to `between_steps`.
The engine never waits for a client: a stream whose reader falls `outbox` deltas behind is cut off
and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, TypeVar

from loadgen.errors import SlobenchError
from loadgen.system.clock import Clock
from reference_engine.core.core import EngineState
from reference_engine.executors.base import Executor
from reference_engine.metrics.metrics import EngineMetrics
from reference_engine.serving.active_request import ActiveRequest, StopText
from reference_engine.serving.engine_thread import Admission, Deltas, EngineThread, Listener
from reference_engine.serving.intake import Intake
from reference_engine.serving.streams import Sink, TokenStream, usage
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.sequence import Request
from reference_engine.state.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S", bound=Sink)


class Service:
    """Runs `state` on `executor` in a thread of its own, for a single event loop. At most
    `max_queue` requests wait to be scheduled; further requests are refused."""

    def __init__(
        self,
        state: EngineState,
        executor: Executor,
        tokenizer: Tokenizer,
        clock: Clock,
        outbox: int = 1024,
        max_queue: int = 10_000,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self.failure: str | None = None
        self.is_draining = False
        self.n_slow_readers = 0
        self.n_refused: Counter[str] = Counter()  # by reason
        self.clock = clock
        self.metrics = metrics or EngineMetrics(state.limits.max_model_len)
        self._state, self._tokenizer = state, tokenizer
        self._outbox, self._max_queue = outbox, max_queue
        self._intake = Intake(tokenizer, state.limits, state.kv, executor.caps.has_logits)
        self._thread = EngineThread(state, executor, clock, self.metrics)
        self._streams: dict[str, Sink] = {}
        self._results: set[asyncio.Future[Any]] = set()  # of functions for the engine thread
        self._n_submitted = 0
        self._n_over = 0  # of `_streams`: generated completely, not yet read completely
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the engine thread. Must be called on the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start(self._loop, Listener(self._on_admissions, self._deliver, self._fail))

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let running requests go on for up to `drain_s`, cancel the rest, and
        end the thread."""
        self.is_draining = True
        if drain_s > 0 and self.failure is None:
            try:
                await asyncio.wait_for(self._is_idle.wait(), drain_s)
            except TimeoutError:
                log.warning(
                    "%d requests cut off after %g s of draining", len(self._streams), drain_s
                )
        self._break_all("the server is shutting down", status=503)
        await self._thread.stop()

    def hurry(self) -> None:
        """End a draining `stop` now."""
        self._is_idle.set()

    @property
    def phase(self) -> str:
        """`ready`, `loading`, `draining` or `failed`."""
        if self.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        return "loading" if self._loop is None else "ready"

    @property
    def n_running(self) -> int:
        return len(self._state.queues.running)

    @property
    def n_waiting(self) -> int:
        """Requests that are not running and not over, including those that the engine thread has
        not admitted yet."""
        return max(0, len(self._streams) - self._n_over - self.n_running)

    def submit(self, call: Call, request_id: str | None, arrived_s: float) -> TokenStream:
        """Queue a parsed call. Raises WireError if the request can never run, if the queue is full,
        or if the engine has failed or is shutting down."""
        return self.submit_to(TokenStream, call, request_id, arrived_s)

    def submit_to(
        self,
        make_sink: Callable[[Request, Callable[[Sink], None]], S],
        call: Call,
        request_id: str | None,
        arrived_s: float,
    ) -> S:
        """`submit` with another kind of stream: `make_sink` gets the request and the function that
        closes the stream."""
        self._check_open()
        self._check_room()
        request = self._intake.request(call, self._unused(request_id), arrived_s)
        stream = make_sink(request, self._forget)
        self._streams[request.id] = stream
        self._is_idle.clear()
        active = ActiveRequest(request, stream, self._tokenizer, StopText(call.stop))
        self._thread.post(partial(self._thread.admit, active))
        return stream

    def cut_off(self, stream: Sink) -> None:
        """End the stream of a reader that is too far behind."""
        self.n_slow_readers += 1
        log.warning("request %s cut off: reader %d deltas behind", stream.request.id, self._outbox)
        self._n_over -= stream.is_over
        stream.cut_off()
        self._forget(stream)

    def cancel(self, request_id: str) -> None:
        """End a request for an operator: its client gets an error, and its KV is free before the
        next plan."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(WireError("cancelled by an operator", status=503, code="cancelled"))
            self._forget(stream)

    def draft(self, call: Call) -> Request:
        """The request of a call, not queued. Raises WireError if it can never run."""
        self._check_open()
        return self._intake.request(call, "draft", self.clock.now_s())

    async def between_steps(self, function: Callable[[EngineState], T]) -> T:
        """Call `function` with the state on the engine thread, between two steps, and return its
        result. Raises the function's SlobenchError or WireError, and WireError if the engine has
        failed."""
        if self.failure is not None:
            raise WireError(self.failure, status=500)
        assert self._loop is not None, "the service was not started"
        result: asyncio.Future[T] = self._loop.create_future()
        self._results.add(result)
        result.add_done_callback(self._results.discard)
        self._thread.post(partial(self._call, function, result))
        return await result

    def _check_open(self) -> None:
        if self.failure is not None:
            raise WireError(self.failure, status=500, code="engine_failed")
        if self.is_draining:
            raise WireError("the server is shutting down", status=503, code="draining")

    def _check_room(self) -> None:
        if self.n_waiting < self._max_queue:
            return
        wait_s = self._thread.departures.wait_s(self.n_waiting, self.clock.now_s())
        raise self._refusal(
            f"the queue is full: {self.n_waiting} requests wait, the limit is {self._max_queue}",
            "queue_full",
            wait_s,
        )

    def _refusal(self, message: str, reason: str, wait_s: float | None) -> WireError:
        """The error with status 429 for a request that may be sent again; counted."""
        self.n_refused[reason] += 1
        wait_ms = None if wait_s is None else round(wait_s * 1e3)
        return WireError(
            message,
            status=429,
            code=reason,
            more={"reason": reason, "predicted_wait_ms": wait_ms},
            retry_after_s=max(1, ceil(wait_s or 0.0)),
        )

    def _unused(self, client_id: str | None) -> str:
        """The client's id if no live request has it, else an id derived from it, so that a retry
        does not collide with its first attempt. Derived and generated ids are checked too, because
        a client may use such an id itself."""
        self._n_submitted += 1
        name = f"req-{self._n_submitted}" if client_id is None else client_id
        while name in self._streams:
            name = f"{client_id or 'req'}#{self._n_submitted}"
            self._n_submitted += 1
        return name

    def _forget(self, stream: Sink) -> None:
        request_id = stream.request.id
        if self._streams.get(request_id) is not stream:  # forgotten before; the id may be reused
            return
        del self._streams[request_id]
        stream.is_closed = True
        if stream.is_over:
            self._n_over -= 1
        else:
            self._thread.post(partial(self._thread.cancel, request_id))
        if not self._streams:
            self._is_idle.set()
        _log_end(stream)

    def _on_admissions(self, admissions: list[Admission]) -> None:
        for stream, error in admissions:
            if error is None:
                stream.admit()
            elif error.retry_after_s is None:
                stream.fail(WireError(str(error), code=error.code))
            else:
                stream.fail(self._refusal(str(error), error.code, error.retry_after_s))

    def _deliver(self, deltas: Deltas) -> None:
        for stream, delta in deltas:
            if stream.is_closed:  # while the step ran
                continue
            n_unread = stream.put(delta)
            if not n_unread:
                continue
            self._n_over += stream.is_over
            # A backlog counts only if the socket is full; this loop may be late itself.
            if n_unread > self._outbox and stream.is_blocked:
                self.cut_off(stream)

    def _fail(self, failure: str) -> None:
        self.failure = failure
        self._break_all(failure)
        for result in list(self._results):
            if not result.done():
                result.set_exception(WireError(failure, status=500))

    def _break_all(self, message: str, status: int = 500) -> None:
        for stream in list(self._streams.values()):
            stream.fail(WireError(message, status=status))
            self._forget(stream)

    def _call(self, function: Callable[[EngineState], T], result: asyncio.Future[T]) -> None:
        """Runs on the engine thread."""
        assert self._loop is not None, "start() sets the loop"
        try:
            value = function(self._state)
        except (SlobenchError, WireError) as error:  # an error of the caller, not of the engine
            self._loop.call_soon_threadsafe(_settle, result, result.set_exception, error)
        else:
            self._loop.call_soon_threadsafe(_settle, result, result.set_result, value)


def _settle(result: asyncio.Future[T], settle: Callable[[Any], None], value: object) -> None:
    if not result.done():  # the caller may have been cancelled
        settle(value)


def _log_end(stream: Sink) -> None:
    request = stream.request
    outcome = "failed" if stream.is_broken else "ok" if stream.is_over else "disconnected"
    total = usage(request, request.n_output, stream.is_over)
    log.info(
        "request %s %s: %d prompt tokens (%d cached), %d generated, queue %s, ttft %s, e2e %s",
        request.id,
        outcome,
        total.input_tokens,
        total.cached_tokens,
        total.output_tokens,
        *(
            f"{t:.4f} s" if t is not None else "-"
            for t in (total.queue_s, total.ttft_s, total.e2e_s)
        ),
    )
