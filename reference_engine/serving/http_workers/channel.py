"""Messages between two processes over a stream socket: four bytes of length (big-endian), then
MessagePack."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.streams import StreamDelta, StreamProgress
from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.wire_errors import WireError

_LENGTH_BYTES = 4

M = TypeVar("M")


class Channel(asyncio.Protocol, Generic[M]):
    """Takes messages of `kinds` to `on_message` as they come, and calls `on_end` once the other
    side is gone or has closed."""

    def __init__(
        self, kinds: Any, on_message: Callable[[M], None], on_end: Callable[[], None]
    ) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._unread = bytearray()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        """Begin on one end of a pair of sockets, which is the channel's from now on."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    @property
    def n_unsent(self) -> int:
        """Bytes that the other side has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: msgspec.Struct) -> None:
        """Never waits, and is nothing once the other side is gone."""
        if self._transport is not None and not self._transport.is_closing():
            body = self._encode(message)
            self._transport.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)

    def close(self) -> None:
        """What was sent still goes out."""
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


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag=True):
    """One of them; the name of its class goes with it."""


class Listening(Message, frozen=True):
    """Connections are accepted."""


class Submit(Message, frozen=True):
    """`arrived_s` is an instant of the engine's clock."""

    number: int
    call: Call
    request_id: str | None
    arrived_s: float


class Closed(Message, frozen=True):
    """Nobody reads the answer any more: cancel what is not over."""

    number: int


class CutOff(Message, frozen=True):
    """Its reader was too slow."""

    number: int


class Open(Message, frozen=True):
    """The engine is ready, accept connections. `worker` counts from 1, `epoch_ns` is the
    engine's clock's, `engine_path` the Unix socket where it answers what is no completion."""

    about: ServerIdentity
    worker: int
    epoch_ns: int
    engine_path: str
    outbox: int
    max_body_bytes: int
    api_key: str | None


class Admitted(Message, frozen=True):
    """The engine has taken the request."""

    number: int
    told: StreamProgress


class RequestRefused(Message, frozen=True):
    """A `WireError`."""

    number: int
    message: str
    param: str | None
    code: str | None
    status: int
    type: str
    more: dict[str, object]
    retry_after_s: int | None

    @classmethod
    def of(cls, number: int, error: WireError) -> RequestRefused:
        return cls(
            number,
            error.message,
            error.param,
            error.code,
            error.status,
            error.type,
            error.more,
            error.retry_after_s,
        )

    def error(self) -> WireError:
        return WireError(
            self.message,
            param=self.param,
            code=self.code,
            status=self.status,
            type_=self.type,
            more=self.more,
            retry_after_s=self.retry_after_s,
        )


class Broken(Message, frozen=True):
    """A `StreamBroken`."""

    number: int
    why: str
    status: int


class StepOutput(Message, frozen=True):
    """What a step brought to each number, and, to be known first, how far those requests are that
    began or ended with it."""

    told: list[tuple[int, StreamProgress]]
    deltas: list[tuple[int, StreamDelta]]


class Bye(Message, frozen=True):
    """The server stops: every answer is said or broken off."""


FromWorker = Listening | Submit | Closed | CutOff
FromEngine = Open | Admitted | RequestRefused | Broken | StepOutput | Bye
