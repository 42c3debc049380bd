"""The answer to one request, on the event loop's side: where a service puts it, and what a reader
takes it from."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from reference_engine.serving.wire.response import Chosen, TokenUsage
from reference_engine.state.sequence import Request, StartForecast


class StreamDelta(NamedTuple):
    """What one token (or the end of the request) adds. `n_output` counts all tokens so far;
    `chosen` is there where logprobs were asked for."""

    text: str
    n_output: int
    finish_reason: str | None
    chosen: Chosen | None = None


class StreamBroken(Exception):
    """The engine failed, the server is leaving, or the reader was cut off: no more deltas will
    come. `status` is for an answer whose status line is not sent yet."""

    def __init__(self, why: str, status: int = 500) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """What a reader in another process knows of a request so far; the names are `Request`'s."""

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
        return cls(
            request.id,
            request.n_prompt,
            request.n_output,
            request.n_cached,
            request.arrived_s,
            request.scheduled_s,
            request.first_token_s,
            request.finished_s,
            request.forecast,
        )


def usage(request: Request | StreamProgress, n_output: int, is_over: bool) -> TokenUsage:
    """Counts so far. Times are known once the answer is over."""
    return TokenUsage(
        input_tokens=request.n_prompt,
        output_tokens=n_output,
        cached_tokens=request.n_cached,
        queue_s=_since(request, request.scheduled_s) if is_over else None,
        ttft_s=_since(request, request.first_token_s) if is_over else None,
        e2e_s=_since(request, request.finished_s) if is_over else None,
    )


class Sink(Protocol):
    """Where the answer to one request goes; see `TokenStream`."""

    request: Request | StreamProgress
    is_over: bool
    is_closed: bool
    is_blocked: bool

    @property
    def outcome(self) -> str: ...

    def admit(self) -> None: ...

    def put(self, delta: StreamDelta) -> int: ...

    def fail(self, why: Exception) -> None: ...

    def cut_off(self) -> None: ...


class TokenStream:
    """The answer to one request. Iterate over it for lists of deltas, all that have come since
    the last; `close` it in any case. Whoever iterates may `hand` deltas on, and sleeps then."""

    def __init__(
        self, request: Request | StreamProgress, close: Callable[[TokenStream], None]
    ) -> None:
        self.request = request
        self.on_cut_off: Callable[[], None] | None = None
        self.is_over = self.is_closed = False
        self.is_blocked = False  # what was fetched last waits for the socket to take it
        self._close = close
        self._deltas: deque[StreamDelta] = deque()
        self._take: Callable[[StreamDelta], bool] | None = None
        self._ready = asyncio.Event()
        self._settled = asyncio.Event()
        self._refusal: Exception | None = None
        self._broken: Exception | None = None

    async def admitted(self) -> None:
        """Wait until the engine took the request or refused it, which is raised here."""
        await self._settled.wait()
        if self._refusal is not None:
            raise self._refusal

    async def __aiter__(self) -> AsyncIterator[list[StreamDelta]]:
        while not self.is_over or self._deltas:
            await self._ready.wait()
            self._ready.clear()
            if self._broken is not None:
                raise self._broken
            deltas = list(self._deltas)
            self._deltas.clear()
            yield deltas

    def hand(self, take: Callable[[StreamDelta], bool]) -> None:
        """Give deltas to `take` as they come, at once, instead of waking the reader; from the first
        that it does not take they are the reader's again. Called by the reader with everything
        told that it fetched."""
        if not self._deltas:
            self._take = take

    def usage(self, n_output: int) -> TokenUsage:
        return usage(self.request, n_output, self.is_over)

    def close(self) -> None:
        """Cancel what is not over: its KV is free before the next plan."""
        self._close(self)

    @property
    def outcome(self) -> str:
        """One word for the log, once the stream is closed."""
        if self._broken is not None:
            return "failed"
        return "ok" if self.is_over else "disconnected"

    def admit(self) -> None:
        """The engine has taken the request."""
        self._settled.set()

    def put(self, delta: StreamDelta) -> int:
        """Hand over a delta; returns how many the reader has not fetched."""
        if self._take is not None:
            if self._take(delta):
                return 0
            self._take = None
        deltas = self._deltas
        if not deltas:
            self._ready.set()
        deltas.append(delta)
        if delta.finish_reason is not None:
            self.is_over = True
        return len(deltas)

    def fail(self, why: Exception) -> None:
        """End the stream with an exception, unless it ended by itself."""
        if not self.is_over:
            self._broken = why
            if not self._settled.is_set():
                self._refusal = why
                self._settled.set()
            self._ready.set()

    def cut_off(self) -> None:
        """End the stream of a reader who does not keep up, and drop the connection."""
        self.is_over = False
        self.fail(StreamBroken("the reader is too slow"))
        if self.on_cut_off is not None:
            self.on_cut_off()


def _since(request: Request | StreamProgress, instant_s: float | None) -> float | None:
    return None if instant_s is None else instant_s - request.arrived_s
