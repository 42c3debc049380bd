"""Lines between a load-generating process and its parent: JSON messages upwards, commands
downwards. A line that a pipe does not take at once is continued later, never cut: a write to a full
pipe is short when its process is stopped and continued, or non-blocking."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from loadgen.manifest.json_section import JsonObject

_SHOWN_BYTES = 60
_PIECE_BYTES = 48 << 10  # 64 KiB as base64


class BadMessage(Exception):
    """A line that is no message; the process that wrote it cannot be relied on."""


class Lines:
    """Splits received bytes into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


class MessageWriter:
    """Writes messages to `fd`, which must be a pipe's own end. A beat never waits, since that would
    stop the clock of the run: the bytes that a full pipe leaves go out with the next message. Any
    other message waits until all is written. Without a reader all is dropped."""

    def __init__(self, fd: int) -> None:
        self._fd, self._pending = fd, bytearray()

    def write(self, kind: str, **fields: object) -> None:
        self._pending += json.dumps({"kind": kind, **fields}).encode() + b"\n"
        os.set_blocking(self._fd, kind != "beat")
        _write(self._fd, self._pending)


class MessageReader:
    """Reads the messages of one process."""

    def __init__(self) -> None:
        self._lines = Lines()

    def feed(self, data: bytes) -> list[JsonObject]:
        """The messages that `data` completes. Raises BadMessage."""
        return [read_message(line) for line in self._lines.split(data)]


def read_message(line: bytes) -> JsonObject:
    """A message from its line. Raises BadMessage."""
    try:
        message = msgspec.json.decode(line)
    except msgspec.DecodeError:
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        beginning = ascii(line[:_SHOWN_BYTES].decode("latin-1"))
        raise BadMessage(f"unreadable message: {beginning}")
    return message


def part_messages(name: str, content: bytes) -> Iterator[dict[str, Any]]:
    """The fields of the messages `part` that carry a part of rows."""
    for at in range(0, len(content), _PIECE_BYTES):
        piece = base64.b64encode(content[at : at + _PIECE_BYTES]).decode()
        yield {"name": name, "data": piece, "is_last": at + _PIECE_BYTES >= len(content)}


class ReceivedParts:
    """Parts of rows from messages; `whole` maps the name of each complete part to its content."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self.whole: dict[str, bytes] = {}

    def add(self, message: JsonObject) -> None:
        """Raises BadMessage."""
        try:
            self._pending += base64.b64decode(message["data"], validate=True)
            if message["is_last"]:
                self.whole[str(message["name"])] = bytes(self._pending)
                self._pending.clear()
        except (KeyError, TypeError, ValueError) as error:
            raise BadMessage(f"unreadable rows: {error!r}") from None


class CommandWriter:
    """Writes commands to `fd` without waiting for a process that reads nothing; `flush` continues.
    Without a reader all is dropped."""

    def __init__(self, fd: int) -> None:
        self._fd, self._pending = fd, bytearray()
        os.set_blocking(fd, False)

    def write(self, *words: str) -> None:
        self._pending += " ".join(" ".join(words).split()).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Writes as much of the earlier commands as the pipe takes now."""
        _write(self._fd, self._pending)


def _write(fd: int, pending: bytearray) -> None:
    """Writes `pending` and removes what was written."""
    try:
        with contextlib.suppress(BlockingIOError):
            while pending:
                del pending[: os.write(fd, pending)]
    except BrokenPipeError:
        pending.clear()
