"""Messages between the engine and an HTTP worker, over a stream socket: a length of four bytes
(big-endian), then MessagePack. A request is identified by a number that its HTTP worker assigns.

    worker → engine   Listening · Submit · Closed · CutOff
    engine → worker   Open · Admitted · StepOutput · Failed · Bye

The engine responds to `Submit` with Admitted followed by StepOutputs. Failed may come instead or
end the answer at any time. In every case the worker finally sends Closed or CutOff.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from loadgen.system.host_names import HostNames
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.streams import StreamDelta, StreamProgress
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.wire_errors import WireError

_LENGTH_BYTES = 4

M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag=True):
    """Base class; the name of the subclass is sent with each message."""


class Listening(Message, frozen=True):
    """The worker accepts connections."""


class Submit(Message, frozen=True):
    """A request. `arrived_s` is a time on the engine's clock."""

    number: int
    call: Call
    request_id: str | None
    arrived_s: float


class Closed(Message, frozen=True):
    """The reader has finished or is gone: cancel the request if it is not over."""

    number: int


class CutOff(Message, frozen=True):
    """The reader was too slow."""

    number: int


class Open(Message, frozen=True):
    """The engine is ready: accept connections. `worker` counts from 1; `epoch_ns` is that of the
    engine's clock; `engine_path` is the Unix socket for all routes except completions."""

    identity: ServerIdentity
    worker: int
    epoch_ns: int
    engine_path: str
    outbox: int
    max_body_bytes: int
    api_key: str | None
    cors: str | None = None
    operator_token: str | None = None
    names: HostNames | None = None


class Admitted(Message, frozen=True):
    """The engine has admitted the request."""

    number: int
    progress: StreamProgress


class Failed(Message, frozen=True):
    """The request was refused, or its answer broken off, with a `WireError` of these fields."""

    number: int
    message: str
    param: str | None
    code: str | None
    status: int
    more: dict[str, object]
    retry_after_s: int | None

    @classmethod
    def of(cls, number: int, error: WireError) -> Failed:
        return cls(number, **vars(error))

    def error(self) -> WireError:
        fields = msgspec.structs.asdict(self)
        del fields["number"]
        return WireError(**fields)


class StepOutput(Message, frozen=True):
    """The deltas of a step, by number. `progress` is that of requests that began or ended in the
    step, and must be applied before the deltas."""

    progress: list[tuple[int, StreamProgress]]
    deltas: list[tuple[int, StreamDelta]]


class Bye(Message, frozen=True):
    """The server stops, after every answer was completed or broken off."""


FromWorker = Listening | Submit | Closed | CutOff
FromEngine = Open | Admitted | StepOutput | Failed | Bye


class Channel(asyncio.Protocol, Generic[M]):
    """An end of a channel. Passes each message of `kinds` to `on_message`, and calls `on_end` when
    the other side has closed or died."""

    def __init__(
        self, kinds: Any, on_message: Callable[[M], None], on_end: Callable[[], None]
    ) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._unread = bytearray()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        """Start on an end of a socket pair, which the channel then owns."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    @property
    def n_unsent(self) -> int:
        """Bytes that the other side has not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: Message) -> None:
        """Send without waiting. Does nothing after the other side is gone."""
        if self._transport is not None and not self._transport.is_closing():
            body = self._encode(message)
            self._transport.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)

    def close(self) -> None:
        """Close after all messages were sent."""
        if self._transport is not None:
            self._transport.close()

    # --- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        unread = self._unread
        unread += data
        at = 0
        while len(unread) >= (begin := at + _LENGTH_BYTES):
            end = begin + int.from_bytes(unread[at:begin], "big")
            if end > len(unread):
                break
            self._on_message(self._decode(unread[begin:end]))
            at = end
        del unread[:at]

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()
