"""The line between Locust's process and the conductor beside it: length, then MessagePack.

Both ends are of this machine and this version; what workers said travels inside unread.
"""

from __future__ import annotations

import signal
import socket
from typing import Any

import msgspec

ENDING = frozenset((signal.SIGINT, signal.SIGTERM))
"""Signals that end a run; the conductor is started with them held back, and takes them itself."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """What the form, or the command line, asked for, and who is there to do it."""

    asked: dict[str, Any]
    workers: list[str]


class FromWorker(msgspec.Struct, frozen=True, tag=True):
    """What a worker said."""

    worker: str
    data: bytes


class Gone(msgspec.Struct, frozen=True, tag=True):
    """Nothing is heard of a worker."""

    worker: str


class Back(msgspec.Struct, frozen=True, tag=True):
    """Something is heard of it again."""

    worker: str


class ToWorker(msgspec.Struct, frozen=True, tag=True):
    """To be passed on."""

    worker: str
    data: bytes


class LiveUpdate(msgspec.Struct, frozen=True, tag=True):
    """The run as of now (`frames.LiveStatus.look`)."""

    facts: dict[str, Any]


class Note(msgspec.Struct, frozen=True, tag=True):
    """A line for people."""

    text: str


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """The conductor's last words."""

    exit_code: int
    directory: str = ""
    verdict: str = ""
    reasons: list[str] = []
    error: str = ""


ToConductor = Begin | FromWorker | Gone | Back
ToMaster = ToWorker | LiveUpdate | Note | RunEnded
_TO_CONDUCTOR = msgspec.msgpack.Decoder(ToConductor)
_TO_MASTER = msgspec.msgpack.Decoder(ToMaster)
_HEAD = 4


def pack(message: ToConductor | ToMaster) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_HEAD, "big") + data


class Unpacker:
    """Bytes as they come, in; whole messages out."""

    def __init__(self, *, for_master: bool) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = _TO_MASTER if for_master else _TO_CONDUCTOR
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        found = []
        while len(self._buffer) >= _HEAD:
            end = _HEAD + int.from_bytes(self._buffer[:_HEAD], "big")
            if len(self._buffer) < end:
                break
            found.append(self._decoder.decode(self._buffer[_HEAD:end]))
            del self._buffer[:end]
        return found


class RelayPipe:
    """The conductor's end, with plain sockets."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._unpacker = end, Unpacker(for_master=False)
        self._waiting: list[ToConductor] = []
        self.is_open = True

    def send(self, message: ToMaster) -> None:
        if self.is_open:
            try:
                self._socket.settimeout(None)
                self._socket.sendall(pack(message))
            except OSError:
                self.is_open = False

    def receive(self, wait_s: float) -> list[ToConductor]:
        """What has come, after waiting for something at most `wait_s`."""
        if not self.is_open:
            return []
        self._socket.settimeout(max(wait_s, 1e-3))
        try:
            data = self._socket.recv(1 << 20)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        self.is_open = bool(data)
        return self._unpacker.feed(data)
