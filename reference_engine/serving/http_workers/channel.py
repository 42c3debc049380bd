"""Messages between two processes over a stream socket: four bytes of length (big-endian), then
MessagePack."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

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
