"""The answer to a request on the event loop, between the service and the reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

from reference_engine.serving.wire.response import Chosen, TokenUsage
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.sequence import Request, StartForecast


class StreamDelta(NamedTuple):
    """The text that a token, or the end of the request, adds. `n_output` counts all output tokens
    so far; `chosen` is set if the request has logprobs."""

    text: str
    n_output: int
    finish_reason: str | None
    chosen: Chosen | None = None


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """A copy of the fields of `Request` that an HTTP worker needs, under the same names."""

    id: str = ""
    n_prompt: int = 0
    n_output: int = 0
    n_cached: int = 0
    arrived_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    forecast: StartForecast | None = None

    @classmethod
    def of(cls, request: Request) -> StreamProgress:
        return cls(*_progress_fields(request))


_progress_fields = attrgetter(*StreamProgress.__slots__)


def usage(request: Request | StreamProgress, n_output: int, is_over: bool) -> TokenUsage:
    """Token counts so far, and the times if the request is over."""
    instants_s = (request.scheduled_s, request.first_token_s, request.finished_s)
    return TokenUsage(
        request.n_prompt,
        n_output,
        request.n_cached,
        *(
            at_s - request.arrived_s if is_over and at_s is not None else None
            for at_s in instants_s
        ),
    )


class Sink(Protocol):
    """The place where a service puts the answer to a request; `TokenStream` describes the
    methods."""

    request: Request | StreamProgress
    is_over: bool
    is_closed: bool
    is_blocked: bool
    is_broken: bool

    def admit(self) -> None: ...

    def put(self, delta: StreamDelta) -> int: ...

    def fail(self, error: WireError) -> None: ...

    def cut_off(self) -> None: ...


class TokenStream:
    """The answer to a request. Iterating over it yields lists of deltas: all that arrived since the
    last list. The reader must `close` it in any case.

    A reader that has fetched everything may pass the following deltas to a function (`forward_to`),
    so that its task sleeps until the function returns False.
    """

    def __init__(
        self, request: Request | StreamProgress, close: Callable[[TokenStream], None]
    ) -> None:
        self.request = request
        self.on_cut_off: Callable[[], None] | None = None
        self.is_over = self.is_closed = self.is_broken = False
        self.is_blocked = False  # the reader waits for the socket to take the last deltas
        self._close = close
        self._deltas: deque[StreamDelta] = deque()
        self._accept: Callable[[StreamDelta], bool] | None = None
        self._ready = asyncio.Event()
        self._settled = asyncio.Event()
        self._refusal: WireError | None = None
        self._error: WireError | None = None

    async def admitted(self) -> None:
        """Wait until the engine admits the request. Raises the error if it refuses the request."""
        await self._settled.wait()
        if self._refusal is not None:
            raise self._refusal

    async def __aiter__(self) -> AsyncIterator[list[StreamDelta]]:
        while not self.is_over or self._deltas:
            await self._ready.wait()
            self._ready.clear()
            if self._error is not None:
                raise self._error
            deltas = list(self._deltas)
            self._deltas.clear()
            yield deltas

    def forward_to(self, accept: Callable[[StreamDelta], bool]) -> None:
        """Pass each new delta to `accept` at once, instead of waking the reader. The first delta
        for which `accept` returns False, and all later deltas, go to the reader again.

        The reader calls this after it has processed the deltas it fetched. Deltas that arrived in
        the meantime must stay in order, so with any of them unread nothing is forwarded.
        """
        if not self._deltas:
            self._accept = accept

    def usage(self, n_output: int) -> TokenUsage:
        return usage(self.request, n_output, self.is_over)

    def close(self) -> None:
        """Cancel the request if it is not over; its KV is free before the next plan."""
        self._close(self)

    def admit(self) -> None:
        """Record that the engine has admitted the request."""
        self._settled.set()

    def put(self, delta: StreamDelta) -> int:
        """Add a delta; returns the number of deltas that the reader has not fetched."""
        if self._accept is not None:
            if self._accept(delta):
                return 0
            self._accept = None
        deltas = self._deltas
        if not deltas:
            self._ready.set()
        deltas.append(delta)
        if delta.finish_reason is not None:
            self.is_over = True
        return len(deltas)

    def fail(self, error: WireError) -> None:
        """End the stream with an error, unless it is over."""
        if not self.is_over:
            self._error, self.is_broken = error, True
            if not self._settled.is_set():
                self._refusal = error
                self._settled.set()
            self._ready.set()

    def cut_off(self) -> None:
        """End the stream because its reader is too slow, and drop the connection."""
        self.is_over = False
        self.fail(WireError("the reader is too slow", status=500))
        if self.on_cut_off is not None:
            self.on_cut_off()
