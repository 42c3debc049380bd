"""Decoder of server-sent events, for bytes in pieces of any size.

Source: WHATWG HTML, section 9.2.6 "Interpreting an event stream": lines end with CR, LF or CRLF,
`data` lines are joined with LF, comments and unknown fields are ignored, a leading BOM is skipped.
Extensions: an `error:` line, by which llama.cpp reports a failure after a 200, becomes data that
holds an error. Lines from one that begins with `{` up to the next field or blank line are data: the
JSON body by which a gateway reports a failure in a stream that it had begun.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

BOM = b"\xef\xbb\xbf"
BEFORE, BEHIND = b"data: ", b"\n\n"
"""Bytes before and after the data of an event in the plain form."""

HEARTBEATS = (b"ping", b"heartbeat", b"keepalive", b"keep-alive")
"""Names of events that only keep the connection alive; their data is none of the API's."""

_FIELDS = (b"data", b"event", b"id", b"retry", b"")
_NAMED = b"event: "
_NAME = re.compile(rb"^event: (?![^\n]*error)[^\n]*\n(?=data: )", re.MULTILINE | re.IGNORECASE)
_BETWEEN = BEHIND + BEFORE
N_FRAMING = len(_BETWEEN)


def plain_events(body: bytes) -> list[bytes] | None:
    """The data of each event of a body in the plain form that nearly all servers send: a single
    `data: ` line and a blank line per event, lines ended by LF. None for any other body; SseDecoder
    reads every form, but takes eight times as long."""
    n_lines = body.count(b"\n")
    n_between = body.count(_BETWEEN)
    # Two line ends per event leave none for another line or for an event without data.
    if n_lines != 2 * (n_between + 1) or not body.startswith(BEFORE) or not body.endswith(BEHIND):
        return None
    return None if b"\r" in body else body[len(BEFORE) : -len(BEHIND)].split(_BETWEEN)


def without_names(part: bytes) -> bytes:
    """A part of a body without the names of its events, except names of errors. For an API whose
    data repeat the name, so that its bodies can have the plain form."""
    return _NAME.sub(b"", part) if part.startswith(_NAMED) else part


class SseEvent(NamedTuple):
    """An event: its `event:` name (b"" if it has none) and its data, undecoded."""

    name: bytes
    data: bytes


@dataclass(slots=True)
class SseDecoder:
    """Returns for each read the events that it completes; where the bytes are cut does not matter.

    `flush` returns the event in which the stream stopped. The specification drops it, but some
    servers omit the last blank line.
    """

    _rest: bytes = b""  # possible part of a BOM
    _held: list[bytes] = field(default_factory=list)  # pieces of the unfinished line
    _after_cr: bool = False
    _at_start: bool = True
    _name: bytes = b""
    _data: list[bytes] = field(default_factory=list)
    _is_bare: bool = False  # inside of JSON without `data:`

    def feed(self, piece: bytes) -> list[SseEvent]:
        if self._at_start:
            piece = self._rest + piece
            self._rest = b""
            if len(piece) < 3 and BOM.startswith(piece):
                self._rest = piece
                return []
            self._at_start = False
            piece = piece.removeprefix(BOM)
        if self._after_cr and piece:
            self._after_cr = False
            piece = piece.removeprefix(b"\n")
        if b"\r" in piece:
            self._after_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._held.append(piece)
        if (
            b"\n" not in piece
        ):  # joined once, at the end of the line, so that long lines stay linear
            return []
        lines = b"".join(self._held).split(b"\n")
        self._held = [lines.pop()]
        return [event for line in lines if (event := self._take(line)) is not None]

    def flush(self) -> SseEvent | None:
        """The unfinished event, if it has data."""
        rest = self._rest + b"".join(self._held)
        self._rest, self._held = b"", []
        if rest:
            self._take(rest)
        return self._take(b"")

    def _take(self, line: bytes) -> SseEvent | None:
        if not line:
            return self._event()
        name, _, value = line.partition(b":")
        if line.startswith(b"{") or (self._is_bare and name not in _FIELDS):
            self._is_bare = True
            self._data.append(line)
            return None
        event = self._event() if self._is_bare else None
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"event":
            self._name = value.removeprefix(b" ")
        elif name == b"error" and value:
            self._data.append(b'{"error":' + value + b"}")
        return event

    def _event(self) -> SseEvent | None:
        """The event so far, if it has data; then begins another."""
        event = SseEvent(self._name, b"\n".join(self._data)) if self._data else None
        self._name, self._data, self._is_bare = b"", [], False
        return event
