"""The pipe between Locust's process and the control process: a length, then MessagePack.

Both ends are on this machine and of this version. The workers' messages travel inside without being
decoded.
"""

from __future__ import annotations

import select
import signal
import socket
from typing import Any

import msgspec

from loadgen.manifest.json_section import JsonObject
from loadgen.system.endings import ending_signals

ENDING = frozenset(ending_signals())
STOP = signal.SIGTERM
"""What the master sends to the control process for Stop on the page; Ctrl-C is SIGINT."""
"""Signals that end a run. The control process starts with them blocked and unblocks them itself."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Starts a run: the values of the start form or the command line, and the workers."""

    form: JsonObject
    workers: list[str]


class FromWorker(msgspec.Struct, frozen=True, tag=True):
    """A message of a worker."""

    worker: str
    data: bytes


class Gone(msgspec.Struct, frozen=True, tag=True):
    """The master receives nothing from a worker."""

    worker: str


class Back(msgspec.Struct, frozen=True, tag=True):
    """A silent worker sends again."""

    worker: str


class ToWorker(msgspec.Struct, frozen=True, tag=True):
    """A message to relay to a worker."""

    worker: str
    data: bytes


class LiveUpdate(msgspec.Struct, frozen=True, tag=True):
    """The present state of the run (`frames.LiveStatus.snapshot`)."""

    facts: JsonObject


class Note(msgspec.Struct, frozen=True, tag=True):
    """A line for the user."""

    text: str


class Recording(msgspec.Struct, frozen=True, tag=True):
    """The run's directory, in which rows can be collected from now on."""

    directory: str


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """The result of the run; the last message of the control process. `slo` is the table of its
    SLOs, the head first; empty without SLOs."""

    exit_code: int
    directory: str = ""
    verdict: str = ""
    reasons: list[str] = []
    error: str = ""
    slo: list[list[str]] = []


ToControl = Begin | FromWorker | Gone | Back
ToMaster = ToWorker | LiveUpdate | Note | Recording | RunEnded
_TO_CONTROL = msgspec.msgpack.Decoder(ToControl)
_TO_MASTER = msgspec.msgpack.Decoder(ToMaster)
_HEAD = 4
_SEND_S = 5.0  # a Locust process under SIGSTOP reads nothing


def pack(message: ToControl | ToMaster) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_HEAD, "big") + data


class Unpacker:
    """Splits received bytes into whole messages."""

    def __init__(self, *, for_master: bool) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = _TO_MASTER if for_master else _TO_CONTROL
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEAD:
            end = _HEAD + int.from_bytes(self._buffer[:_HEAD], "big")
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(self._buffer[_HEAD:end]))
            del self._buffer[:end]
        return messages


class RelayPipe:
    """The control process's end, on a plain socket. A live update is left out while the other end
    does not read: the next holds all of it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._unpacker = end, Unpacker(for_master=False)
        self._waiting: list[ToControl] = []
        self.is_open = True

    def send(self, message: ToMaster) -> None:
        if isinstance(message, LiveUpdate) and not select.select([], [self._socket], [], 0)[1]:
            return
        if self.is_open:
            try:
                self._socket.settimeout(_SEND_S)
                self._socket.sendall(pack(message))
            except OSError:  # or TimeoutError: half a message ends the pipe, too
                self.is_open = False

    def receive(self, wait_s: float) -> list[ToControl]:
        """The received messages, after a wait of at most `wait_s` for the first."""
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
