"""The answer to one request, on the event loop's side."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from reference_engine.sequence import Request
from reference_engine.wire.answer import Chosen, Usage


class Delta(NamedTuple):
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


class TokenStream:
    """The answer to one request. Iterate over it for lists of deltas, all that have come since
    the last; `close` it in any case. Whoever iterates may `hand` deltas on, and sleeps then."""

    def __init__(self, request: Request, close: Callable[[TokenStream], None]) -> None:
        self.request = request
        self.on_cut_off: Callable[[], None] | None = None
        self.is_over = self.is_closed = False
        self.is_blocked = False  # what was fetched last waits for the socket to take it
        self._close = close
        self._deltas: deque[Delta] = deque()
        self._take: Callable[[Delta], bool] | None = None
        self._ready = asyncio.Event()
        self._settled = asyncio.Event()
        self._refusal: Exception | None = None
        self._broken: Exception | None = None

    async def admitted(self) -> None:
        """Wait until the engine took the request or refused it, which is raised here."""
        await self._settled.wait()
        if self._refusal is not None:
            raise self._refusal

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        while not self.is_over or self._deltas:
            await self._ready.wait()
            self._ready.clear()
            if self._broken is not None:
                raise self._broken
            deltas = list(self._deltas)
            self._deltas.clear()
            yield deltas

    def hand(self, take: Callable[[Delta], bool]) -> None:
        """Give deltas to `take` as they come, at once, instead of waking the reader; from the first
        that it does not take they are the reader's again. Called by the reader with everything
        told that it fetched."""
        if not self._deltas:
            self._take = take

    def usage(self, n_output: int) -> Usage:
        """Counts so far. Times are known once the stream is over."""
        request, over = self.request, self.is_over
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

    def put(self, delta: Delta) -> int:
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


def _since(request: Request, instant_s: float | None) -> float | None:
    return None if instant_s is None else instant_s - request.arrived_s
