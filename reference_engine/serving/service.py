"""The engine as asyncio sees it: calls in, streams of text out.

Two threads. The engine thread (`engine_thread`) owns the engine's state; the event loop owns the
streams, and everything here but the questions' answers happens on it. A stream whose reader falls
`outbox` deltas behind is cut off and counted: the engine never waits for a client.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, TypeVar

from loadgen.clock import Clock
from loadgen.errors import SlobenchError
from reference_engine.core.core import EngineState
from reference_engine.executors.base import Executor
from reference_engine.metrics.metrics import EngineMetrics
from reference_engine.serving.active_request import ActiveRequest
from reference_engine.serving.engine_thread import Deltas, EngineThread, Listener, Verdict
from reference_engine.serving.intake import Intake
from reference_engine.serving.stops import StopText
from reference_engine.serving.streams import Sink, StreamBroken, TokenStream, usage
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.sequence import Request
from reference_engine.state.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S", bound=Sink)


class Service:
    """Runs `state` on `executor` in a thread of its own, for one event loop.

    At most `max_queue` requests wait to be scheduled; further ones are refused.
    """

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
        self._intake = Intake(tokenizer, state.limits, state.kv)
        self._thread = EngineThread(state, executor, clock, self.metrics)
        self._streams: dict[str, Sink] = {}
        self._questions: set[asyncio.Future[Any]] = set()
        self._n_submitted = 0
        self._n_over = 0  # of the streams: all is said, and not yet read
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin; call it on the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start(self._loop, Listener(self._admit, self._deliver, self._fail))

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones `drain_s`, cancel the rest, end the thread."""
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
        """End the draining now: whoever asked for it a second time means it."""
        self._is_idle.set()

    @property
    def phase(self) -> str:
        """ready, loading, draining or failed."""
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
        """Requests that are here and not running, those the engine has not seen yet included, and
        those without that only their readers have not seen the end of."""
        return max(0, len(self._streams) - self._n_over - self.n_running)

    def submit(self, call: Call, request_id: str | None, arrived_s: float) -> TokenStream:
        """Queue a parsed call. Raises WireError when it can never run, when the queue is full, or
        when nothing can run any more."""
        return self.submit_to(TokenStream, call, request_id, arrived_s)

    def submit_to(
        self,
        sink: Callable[[Request, Callable[[Sink], None]], S],
        call: Call,
        request_id: str | None,
        arrived_s: float,
    ) -> S:
        """`submit`, with what `sink` makes of the request and of what closes it for a stream."""
        self._check_open()
        self._check_room()
        request = self._intake.request(call, self._unused(request_id), arrived_s)
        stream = sink(request, self._forget)
        self._streams[request.id] = stream
        self._is_idle.clear()
        live = ActiveRequest(request, stream, self._tokenizer.detokenizer(), StopText(call.stop))
        self._thread.post(partial(self._thread.admit, live))
        return stream

    def cut_off(self, stream: Sink) -> None:
        """End the stream of a reader who is too far behind."""
        self.n_slow_readers += 1
        log.warning("request %s cut off: reader %d deltas behind", stream.request.id, self._outbox)
        self._n_over -= stream.is_over
        stream.cut_off()
        self._forget(stream)

    def draft(self, call: Call) -> Request:
        """The request a call would become. Raises WireError when it can never run."""
        self._check_open()
        return self._intake.request(call, "draft", self.clock.now_s())

    async def ask(self, question: Callable[[EngineState], T]) -> T:
        """The answer to a question about the state, or to a change of it, between two steps. What
        the question raises is raised here."""
        if self.failure is not None:
            raise StreamBroken(self.failure)
        assert self._loop is not None, "the service was not started"
        answer: asyncio.Future[T] = self._loop.create_future()
        self._questions.add(answer)
        answer.add_done_callback(self._questions.discard)
        self._thread.post(partial(self._answer, question, answer))
        return await answer

    def _check_open(self) -> None:
        if self.failure is not None:
            raise WireError(self.failure, status=500, type_="server_error", code="engine_failed")
        if self.is_draining:
            raise WireError(
                "the server is shutting down", status=503, type_="server_error", code="draining"
            )

    def _check_room(self) -> None:
        if self.n_waiting < self._max_queue:
            return
        wait_s = self._thread.departures.wait_s(self.n_waiting, self.clock.now_s())
        raise self._refusal(
            f"{self.n_waiting} requests are waiting, which is the most this server queues",
            "queue_full",
            wait_s,
        )

    def _refusal(self, what: str, reason: str, wait_s: float | None) -> WireError:
        """A 429, counted."""
        self.n_refused[reason] += 1
        wait_ms = None if wait_s is None else round(wait_s * 1e3)
        return WireError(
            what,
            status=429,
            type_="rate_limit_error",
            code=reason,
            more={"reason": reason, "predicted_wait_ms": wait_ms},
            retry_after_s=max(1, ceil(wait_s or 0.0)),
        )

    def _unused(self, wanted: str | None) -> str:
        """The client's id if no live request has it, else one derived from it: a retry must not
        meet its first attempt. A client may have taken a derived one, or one of ours, too."""
        self._n_submitted += 1
        name = f"req-{self._n_submitted}" if wanted is None else wanted
        while name in self._streams:
            name = f"{wanted or 'req'}#{self._n_submitted}"
            self._n_submitted += 1
        return name

    def _forget(self, stream: Sink) -> None:
        request_id = stream.request.id
        if self._streams.get(request_id) is not stream:  # forgotten, and its id taken again
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

    def _admit(self, verdicts: list[Verdict]) -> None:
        for stream, error in verdicts:
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
            # Behind because of the socket, not because this loop is late.
            if n_unread > self._outbox and stream.is_blocked:
                self.cut_off(stream)

    def _fail(self, failure: str) -> None:
        self.failure = failure
        self._break_all(failure)
        for question in list(self._questions):
            if not question.done():
                question.set_exception(StreamBroken(failure))

    def _break_all(self, why: str, status: int = 500) -> None:
        for stream in list(self._streams.values()):
            stream.fail(StreamBroken(why, status))
            self._forget(stream)

    def _answer(self, question: Callable[[EngineState], T], answer: asyncio.Future[T]) -> None:
        assert self._loop is not None, "start() sets the loop"
        try:
            value = question(self._state)
        except (SlobenchError, WireError) as error:  # the asker's mistake, not the engine's end
            self._loop.call_soon_threadsafe(_raise, answer, error)
        else:
            self._loop.call_soon_threadsafe(_resolve, answer, value)


def _log_end(stream: Sink) -> None:
    request = stream.request
    told = usage(request, request.n_output, stream.is_over)
    log.info(
        "request %s %s: %d prompt tokens (%d cached), %d generated, queue %s, ttft %s, e2e %s",
        request.id,
        stream.outcome,
        told.input_tokens,
        told.cached_tokens,
        told.output_tokens,
        *(f"{t:.4f} s" if t is not None else "-" for t in (told.queue_s, told.ttft_s, told.e2e_s)),
    )


def _resolve(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def _raise(answer: asyncio.Future[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
