"""Bytes to server-sent events, in whatever pieces the bytes come.

Source: WHATWG HTML, section 9.2.6 "Interpreting an event stream": lines end with CR, LF or CRLF,
`data` lines are joined with LF, comments and unknown fields are ignored, a leading BOM is skipped.
Beyond it, an `error:` line (llama.cpp's way to fail after a 200) is data that holds an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"
BEFORE, BEHIND = b"data: ", b"\n\n"
"""What is around the data of an event in the plain form."""

_BETWEEN = BEHIND + BEFORE
N_FRAMING = len(_BETWEEN)


def plain_events(body: bytes) -> list[bytes] | None:
    """The data of every event of a whole body in the form nearly all servers send: one `data: `
    line and a blank line each, ended by LF. None for any other body: `SseDecoder` reads them all,
    in eight times the time."""
    n_lines = body.count(b"\n")
    n_between = body.count(_BETWEEN)
    # With so many line ends there is none left for other lines, nor for an event without data.
    if n_lines != 2 * (n_between + 1) or not body.startswith(BEFORE) or not body.endswith(BEHIND):
        return None
    return None if b"\r" in body else body[len(BEFORE) : -len(BEHIND)].split(_BETWEEN)


class SseEvent(NamedTuple):
    """One event: its `event:` name (b"" if none) and its data, undecoded."""

    name: bytes
    data: bytes


@dataclass(slots=True)
class SseDecoder:
    """Feed it reads, get the events each read completes; the result does not depend on the cuts.

    `pending` tells whether the stream stopped inside an event; `flush` returns that event, which
    the specification would drop but careless servers do send last.
    """

    _rest: bytes = b""  # what may be part of a BOM
    _held: list[bytes] = field(default_factory=list)  # pieces of the line that is not over yet
    _after_cr: bool = False
    _at_start: bool = True
    _name: bytes = b""
    _data: list[bytes] = field(default_factory=list)

    def feed(self, piece: bytes) -> list[SseEvent]:
        if self._at_start:
            piece = self._rest + piece
            self._rest = b""
            if len(piece) < 3 and _BOM.startswith(piece):
                self._rest = piece
                return []
            self._at_start = False
            piece = piece.removeprefix(_BOM)
        if self._after_cr and piece:
            self._after_cr = False
            piece = piece.removeprefix(b"\n")
        if b"\r" in piece:
            self._after_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._held.append(piece)
        if b"\n" not in piece:  # of a long line: joined once, at its end
            return []
        lines = b"".join(self._held).split(b"\n")
        self._held = [lines.pop()]
        return [event for line in lines if (event := self._take(line)) is not None]

    def flush(self) -> SseEvent | None:
        """The event the stream stopped in, if it had any data."""
        rest = self._rest + b"".join(self._held)
        self._rest, self._held = b"", []
        if rest:
            self._take(rest)
        return self._take(b"")

    def _take(self, line: bytes) -> SseEvent | None:
        if not line:
            event = SseEvent(self._name, b"\n".join(self._data)) if self._data else None
            self._name, self._data = b"", []
            return event
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"event":
            self._name = value.removeprefix(b" ")
        elif name == b"error" and value:
            self._data.append(b'{"error":' + value + b"}")
        return None
