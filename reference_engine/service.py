"""The engine thread and its asyncio side: requests in, streams of text out.

Two threads. The engine thread owns `EngineState`, detokenizers and stop strings; the event loop
owns the streams. Loop → engine is a deque of callables and a wake-up; engine → loop is one
`call_soon_threadsafe` per step with everything the step produced, because one per token would be
tens of thousands of wake-ups a second. Nothing else is shared, except what never changes.

A stream whose reader falls `outbox` deltas behind is cut off and counted: the engine never waits
for a client. An exception in the engine thread ends the service: it is logged, every stream fails
with it, and `failure` says so from then on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

from loadgen.clock import Clock
from reference_engine.admission import AdmissionError, check_admission
from reference_engine.core import EngineState, step
from reference_engine.executors.base import Executor
from reference_engine.sequence import Request, Sampling, State
from reference_engine.step_tokens import StepTokens, TokenEvent
from reference_engine.stops import StopText
from reference_engine.tokenizer import Detokenizer, Tokenizer
from reference_engine.wire import Call, Usage, WireError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Delta(NamedTuple):
    """What one token (or the end of the request) adds. `n_output` counts all tokens so far."""

    text: str
    n_output: int
    finish_reason: str | None


class StreamBroken(Exception):
    """The engine failed, or the reader was cut off: no more deltas will come."""


class TokenStream:
    """The answer to one request, on the event loop. Iterate over it for lists of deltas, all that
    have come since the last; `close` it in any case."""

    def __init__(self, service: Service, request: Request) -> None:
        self.request = request
        self.on_cut_off: Callable[[], None] | None = None
        self._service = service
        self._deltas: deque[Delta] = deque()
        self._ready = asyncio.Event()
        self._broken: str | None = None
        self._is_over = False

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        while not self._is_over or self._deltas:
            await self._ready.wait()
            self._ready.clear()
            if self._broken is not None:
                raise StreamBroken(self._broken)
            deltas = list(self._deltas)
            self._deltas.clear()
            yield deltas

    def usage(self, n_output: int) -> Usage:
        """Counts so far. Times are known once the stream is over."""
        request, over = self.request, self._is_over
        return Usage(
            input_tokens=request.n_prompt,
            output_tokens=n_output,
            cached_tokens=request.n_cached,
            queue_s=_since(request, request.scheduled_s) if over else None,
            ttft_s=_since(request, request.first_token_s) if over else None,
            e2e_s=_since(request, request.finished_s) if over else None,
        )

    def close(self) -> None:
        """Cancel what is not over: its KV is free before the next plan."""
        self._service._forget(self)

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def outcome(self) -> str:
        """One word for the log, once the stream is closed."""
        if self._broken is not None:
            return "failed"
        return "ok" if self._is_over else "disconnected"

    def _put(self, delta: Delta) -> int:
        self._deltas.append(delta)
        self._is_over = delta.finish_reason is not None
        self._ready.set()
        return len(self._deltas)

    def _break(self, why: str) -> None:
        if not self._is_over:
            self._broken = why
            self._ready.set()


@dataclass(slots=True)
class _Live:
    """A request on the engine's side: its text so far and where it goes."""

    request: Request
    stream: TokenStream
    detokenizer: Detokenizer
    stops: StopText


class Service:
    """Runs `state` on `executor` in a thread of its own, for one event loop."""

    def __init__(
        self,
        state: EngineState,
        executor: Executor,
        tokenizer: Tokenizer,
        clock: Clock,
        outbox: int = 1024,
    ) -> None:
        self.failure: str | None = None
        self.is_draining = False
        self.n_slow_readers = 0
        self.clock = clock
        self._state, self._executor = state, executor
        self._tokenizer, self._outbox = tokenizer, outbox
        self._limits, self._kv = state.limits, state.kv
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._is_stopped = False
        self._live: dict[str, _Live] = {}  # engine thread only
        self._streams: dict[str, TokenStream] = {}  # event loop only
        self._questions: set[asyncio.Future[Any]] = set()
        self._n_submitted = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin; call it on the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

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
        for stream in list(self._streams.values()):
            stream._break("the server is shutting down")
            self._forget(stream)
        self._is_stopped = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    def hurry(self) -> None:
        """End the draining now: whoever asked for it a second time means it."""
        self._is_idle.set()

    def submit(self, call: Call, request_id: str | None, arrived_s: float) -> TokenStream:
        """Queue a parsed call. Raises WireError when it can never run, or nothing can any more."""
        if self.failure is not None:
            raise WireError(self.failure, status=500, type_="server_error", code="engine_failed")
        if self.is_draining:
            raise WireError(
                "the server is shutting down", status=503, type_="server_error", code="draining"
            )
        request = self._request(call, self._unused(request_id), arrived_s)
        try:
            check_admission(request.n_prompt, request.max_tokens, self._limits, self._kv)
        except AdmissionError as error:
            param = "messages" if call.is_chat else "prompt"
            raise WireError(str(error), param=param, code=error.code) from error
        stream = TokenStream(self, request)
        self._streams[request.id] = stream
        self._is_idle.clear()
        live = _Live(request, stream, self._tokenizer.detokenizer(), StopText(call.stop))
        self._post(partial(self._admit, live))
        return stream

    async def ask(self, question: Callable[[EngineState], T]) -> T:
        """The answer to a question about the state, asked on the engine thread between two
        steps."""
        if self.failure is not None:
            raise StreamBroken(self.failure)
        assert self._loop is not None, "the service was not started"
        answer: asyncio.Future[T] = self._loop.create_future()
        self._questions.add(answer)
        answer.add_done_callback(self._questions.discard)
        self._post(partial(self._answer, question, answer))
        return await answer

    # --- event loop side

    def _request(self, call: Call, request_id: str, arrived_s: float) -> Request:
        tokens = self._encode(call)
        sampling = call.sampling or Sampling()
        if not call.has_seed:
            drawn = random.getrandbits(63)
            sampling = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, drawn)
        return Request(
            id=request_id,
            tokens=tokens,
            max_tokens=call.max_tokens or self._room_after(len(tokens)),
            arrived_s=arrived_s,
            min_tokens=call.min_tokens,
            stop_ids=frozenset() if call.ignore_eos else self._tokenizer.eos_ids,
            sampling=sampling,
            tenant=call.tenant,
            priority=call.priority,
        )

    def _encode(self, call: Call) -> list[int]:
        if call.messages is not None:
            tokens = self._tokenizer.render(call.messages)
        elif call.prompt is not None:
            tokens = self._tokenizer.encode(call.prompt)
        else:
            assert call.prompt_ids is not None, "a call has messages, a prompt or ids"
            tokens = list(call.prompt_ids)
        vocab = self._limits.vocab_size
        # A tokenizer of another model may be the culprit; the model would fail on such an id.
        if min(tokens) < 0 or max(tokens) >= vocab:
            bad = next(token for token in tokens if not 0 <= token < vocab)
            raise WireError(f"prompt: token id {bad} is outside 0-{vocab - 1}", param="prompt")
        return tokens

    def _room_after(self, n_prompt: int) -> int:
        in_kv = self._kv.n_blocks * self._kv.block_tokens + 1
        return max(1, min(self._limits.max_model_len, in_kv) - n_prompt)

    def _unused(self, wanted: str | None) -> str:
        """The client's id if no live request has it, else one derived from it: a retry must not
        meet its first attempt."""
        self._n_submitted += 1
        if wanted is None:
            return f"req-{self._n_submitted}"
        return f"{wanted}#{self._n_submitted}" if wanted in self._streams else wanted

    def _forget(self, stream: TokenStream) -> None:
        request_id = stream.request.id
        if self._streams.pop(request_id, None) is None:
            return
        if not stream.is_over:
            self._post(partial(self._cancel, request_id))
        if not self._streams:
            self._is_idle.set()

    def _post(self, job: Callable[[], None]) -> None:
        self._inbox.append(job)
        self._wake.set()

    def _deliver(self, deltas: list[tuple[TokenStream, Delta]]) -> None:
        for stream, delta in deltas:
            if stream.request.id not in self._streams:
                continue  # closed while the step ran
            if stream._put(delta) > self._outbox:
                self.n_slow_readers += 1
                log.warning(
                    "request %s cut off: reader %d deltas behind", stream.request.id, self._outbox
                )
                stream._is_over = False
                stream._break("the reader is too slow")
                self._forget(stream)
                if stream.on_cut_off is not None:
                    stream.on_cut_off()

    def _fail(self, failure: str) -> None:
        self.failure = failure
        for stream in list(self._streams.values()):
            stream._break(failure)
            self._forget(stream)
        for question in list(self._questions):
            if not question.done():
                question.set_exception(StreamBroken(failure))

    # --- engine thread side

    def _run(self) -> None:
        assert self._loop is not None, "start() sets the loop"
        try:
            while not self._is_stopped:
                # Cleared before the inbox is read: a job posted in between costs one idle turn,
                # one posted after it is seen by the wait below.
                self._wake.clear()
                while self._inbox:
                    self._inbox.popleft()()
                if self._state.has_work:
                    self._publish(step(self._state, self._executor))
                self._wake.wait(self._idle_s())
        except BaseException as error:  # the thread's boundary: recorded, and told to every stream
            log.exception("the engine thread failed")
            failure = f"the engine failed: {type(error).__name__}: {error}"
            self._loop.call_soon_threadsafe(self._fail, failure)

    def _idle_s(self) -> float | None:
        if not self._state.has_work:
            return None
        until_s = self._state.wait_until_s
        if until_s is None:
            return 0.0
        return None if until_s == inf else max(0.0, until_s - self.clock.now_s())

    def _admit(self, live: _Live) -> None:
        self._live[live.request.id] = live
        self._state.admit(live.request)

    def _cancel(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._state.end(request_id, State.finished_abort)

    def _answer(self, question: Callable[[EngineState], T], answer: asyncio.Future[T]) -> None:
        value = question(self._state)
        assert self._loop is not None, "start() sets the loop"
        self._loop.call_soon_threadsafe(_resolve, answer, value)

    def _publish(self, events: StepTokens) -> None:
        deltas = [
            (live.stream, self._delta(live, event))
            for event in events
            if (live := self._live.get(event.request.id)) is not None
        ]
        if deltas:
            assert self._loop is not None, "start() sets the loop"
            self._loop.call_soon_threadsafe(self._deliver, deltas)

    def _delta(self, live: _Live, event: TokenEvent) -> Delta:
        request, finish = event.request, event.finish
        # A stop token is counted and has no text.
        text = "" if finish is State.finished_stop else live.detokenizer.push(event.token)
        if finish is not None:
            text += live.detokenizer.flush()
        if request.n_output > request.min_tokens:
            text, is_stopped = live.stops.push(text)
            if is_stopped:
                self._state.end(request.id, State.finished_stop)
                finish = State.finished_stop
            elif finish is not None:
                text += live.stops.flush()
        if finish is not None:
            del self._live[request.id]
        return Delta(text, request.n_output, None if finish is None else finish.value)


def _resolve(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def _since(request: Request, instant_s: float | None) -> float | None:
    return None if instant_s is None else instant_s - request.arrived_s
