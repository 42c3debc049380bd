"""The HTTP worker's end of the channel to the engine: calls out, streams of text in."""

from __future__ import annotations

from collections.abc import Callable

from loadgen.clock import Clock
from reference_engine.serving.http_workers.engine_messages import (
    Admitted,
    Broken,
    Closed,
    CutOff,
    FromEngine,
    Message,
    RequestRefused,
    StepOutput,
    Submit,
)
from reference_engine.serving.streams import StreamBroken, StreamProgress, TokenStream
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.wire_errors import WireError

_GONE = "the engine's process has ended"


class EngineLink:
    """Stands for the service in a worker. A stream whose reader falls `outbox` deltas behind is cut
    off here, and the engine counts it."""

    def __init__(self, send: Callable[[Message], None], clock: Clock, outbox: int) -> None:
        self.clock = clock
        self._send, self._outbox = send, outbox
        self._streams: dict[int, TokenStream] = {}
        self._n_submitted = 0
        self._is_gone = False

    def submit(self, call: Call, request_id: str | None, arrived_s: float) -> TokenStream:
        """Queue a call; whether the engine takes it is known when the stream is `admitted`. Raises
        WireError where there is no engine any more."""
        if self._is_gone:
            raise WireError(_GONE, status=500, type_="server_error", code="engine_failed")
        self._n_submitted += 1
        number = self._n_submitted
        stream = TokenStream(StreamProgress(arrived_s=arrived_s), lambda _: self._close(number))
        self._streams[number] = stream
        self._send(Submit(number, call, request_id, arrived_s))
        return stream

    def take(self, message: FromEngine) -> None:
        """What the engine says of a request, unless nobody reads it any more."""
        match message:
            case StepOutput(told, deltas):
                for number, facts in told:
                    if number in self._streams:
                        self._streams[number].request = facts
                for number, delta in deltas:
                    stream = self._streams.get(number)
                    if stream is None:
                        continue
                    n_unread = stream.put(delta)
                    # As in the service: behind because of the socket, not because we are late.
                    if n_unread > self._outbox and stream.is_blocked:
                        self._cut_off(number, stream)
            case Admitted(number, facts):
                if number in self._streams:
                    self._streams[number].request = facts
                    self._streams[number].admit()
            case RequestRefused(number):
                self._fail(number, message.error())
            case Broken(number, why, status):
                self._fail(number, StreamBroken(why, status))

    def lose(self) -> None:
        """The engine is gone: tell every reader."""
        self._is_gone = True
        for number in list(self._streams):
            self._fail(number, StreamBroken(_GONE))

    def _fail(self, number: int, why: Exception) -> None:
        if number in self._streams:
            self._streams[number].fail(why)

    def _cut_off(self, number: int, stream: TokenStream) -> None:
        del self._streams[number]
        self._send(CutOff(number))
        stream.cut_off()

    def _close(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            self._send(Closed(number))
