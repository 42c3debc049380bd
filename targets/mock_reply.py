"""The mock server's replies in progress, each a head and events at their deadlines, and the log of
what was written and when.
"""

from __future__ import annotations

import asyncio
import csv
import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol

from loadgen.system.timer import make_timer
from targets import mock_wire as wire
from targets.mock_script import Script

_HALF_WAY = ("cut", "inband", "short", "utf8")
"""Failures after half of the tokens."""
_PAGE = b"<!doctype html><html><body><h1>It works!</h1></body></html>"


@dataclass
class LogRow:
    """The log of a request. Instants are CLOCK_MONOTONIC nanoseconds; 0: it did not happen."""

    seq: int
    number: int
    connection: int
    api: str
    outcome: str = "ok"
    asked_tokens: int = 0
    sent_tokens: int = 0
    prompt_tokens: int = 0
    read_ns: int = 0  # the last byte of the request had been read
    due_ns: int = 0  # the first token was due
    first_ns: int = 0  # just before the first token was written
    last_ns: int = 0  # just before the last token was written
    done_ns: int = 0
    late_max_ns: int = 0  # the longest time from a deadline to its write


class Replies:
    """The replies in progress, in order of their next deadline, and the rows of the log."""

    def __init__(self, script: Script, loop: asyncio.AbstractEventLoop) -> None:
        self.script = script
        self.rows: list[LogRow] = []
        self.n_connections = 0
        self.first_read_ns: int | None = None
        self._begin_ns = time.monotonic_ns()
        self._due: list[tuple[int, int, Reply]] = []
        self._n_pushed = 0
        self._is_numbered = False
        self._timer = make_timer(loop)

    def age_s(self) -> float:
        """Seconds since the server began to serve."""
        return (time.monotonic_ns() - self._begin_ns) * 1e-9

    def begin(self, row: LogRow) -> None:
        """Log a request. The clock of the stalls starts at the first request, and starts again at
        the first with an `x-seq` header: the load generator's first, after any preflight.
        """
        if not self.rows or (row.seq >= 0 and not self._is_numbered):
            self.first_read_ns = row.read_ns
        self._is_numbered = self._is_numbered or row.seq >= 0
        self.rows.append(row)

    def push(self, due_ns: int, reply: Reply) -> None:
        self._n_pushed += 1  # ties are served in the order they were pushed
        heapq.heappush(self._due, (due_ns, self._n_pushed, reply))
        if self._due[0][1] == self._n_pushed:  # the new reply is the next
            self._timer.arm_ns(due_ns, self._fire)

    def after_stalls_ns(self, due_ns: int, script: Script) -> int:
        """The instant itself, or the end of the stall that contains it."""
        if not script.stalls or self.first_read_ns is None:
            return due_ns
        at_s = (due_ns - self.first_read_ns) * 1e-9
        later_s = script.after_stalls_s(at_s)
        return due_ns if later_s == at_s else self.first_read_ns + round(later_s * 1e9)

    def close(self) -> None:
        self._timer.close()

    def _fire(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic_ns():
            due_ns, _, reply = heapq.heappop(self._due)
            reply.step(due_ns)
        if self._due:
            self._timer.arm_ns(self._due[0][0], self._fire)


class ReplyConnection(Protocol):
    """The connection of a reply; every method except `write` ends the reply."""

    reply: Reply | None

    def write(self, data: bytes) -> None: ...
    def finish(self, data: bytes) -> None: ...
    def cut(self) -> None: ...
    def hang_up(self) -> None: ...
    def reset(self) -> None: ...


@dataclass(eq=False)
class Reply:
    """A reply in progress: a head and events at their deadlines, changed by a scripted failure."""

    replies: Replies
    connection: ReplyConnection
    script: Script
    row: LogRow
    text: wire.ReplyText
    streams: bool
    failure: str | None
    _event: int = field(default=-1)  # the next to write; -1 is the head
    _refusal: bytes | None = None

    @property
    def breaks_at(self) -> int | None:
        """The event before which the reply fails, for a failure half way."""
        return self.text.n_events // 2 if self.failure in _HALF_WAY else None

    def start(self) -> None:
        self.row.due_ns = self.row.read_ns + round(self.script.due_s(0) * 1e9)
        if not self.streams or self.failure in ("reset", "notsse"):
            self._event = self.text.n_events - 1 if self.failure is None else 0
            self._schedule(self.script.due_s(self._event))
        else:
            self._schedule(0.0)

    def refuse(self, response: bytes) -> None:
        """Answer with an error instead, at once or, like any other reply, at the end of a stall."""
        self._refusal = response
        self._schedule(0.0)

    def step(self, due_ns: int) -> None:
        """Write the piece that is due and schedule the next, unless the client has disconnected."""
        if self.connection.reply is not self:
            return
        if self._refusal is not None:
            self.connection.finish(self._refusal)
        elif self.failure == "reset":
            self.connection.reset()
        elif self.failure == "notsse":
            self.connection.finish(wire.whole_response(200, _PAGE, "text/html"))
        elif not self.streams:
            self._count(self.text.tokens, due_ns)
            self.connection.finish(wire.whole_response(200, self.text.whole()))
        elif self._event < 0:
            self._write_head()
        else:
            self._write_event(due_ns)

    def _write_head(self) -> None:
        role = self._role() if self.script.role == "early" else b""
        self.connection.write(self.text.stream_head + role)
        self._event = 0
        self._schedule(self.script.due_s(0))

    def _write_event(self, due_ns: int) -> None:
        event = self._event
        if event == self.breaks_at and self._break():
            return
        out = b""
        if event == 0 and self.script.role == "first":
            out = self._role()
        body = self.text.broken_event() if event == self.breaks_at else self.text.event(event)
        self._count(self.text.tokens_in(event), due_ns)
        self._event += 1
        if self._event < self.text.n_events:
            self.connection.write(out + self.text.frame(body))
            self._schedule(self.script.due_s(self._event))
        else:
            tail = self.text.tail()
            tail = (self.text.frame(tail) if tail else b"") + self.text.last_frame
            self.connection.finish(out + self.text.frame(body) + tail)
            if not self.text.last_frame:
                self.connection.hang_up()

    def _role(self) -> bytes:
        """The role in its framing; empty for a reply without an event for it."""
        role = self.text.role() if self.text.is_chat else b""
        return self.text.frame(role) if role else b""

    def _break(self) -> bool:
        """End the reply half way as scripted; False for a failure of a single event, after which
        the reply continues."""
        if self.failure == "cut":
            self.connection.cut()
        elif self.failure == "short":
            sent = replace(self.text, tokens=self._event * self.script.coalesce, finish="stop")
            tail = sent.tail()
            self.connection.finish((sent.frame(tail) if tail else b"") + sent.last_frame)
            if not sent.last_frame:
                self.connection.hang_up()
        elif self.failure == "inband":
            error = self.text.error_event("scripted failure in mid-stream")
            self.connection.finish(wire.chunk(error) + wire.LAST_CHUNK)
        return self.failure != "utf8"

    def _schedule(self, offset_s: float) -> None:
        due_ns = self.row.read_ns + round(offset_s * 1e9)
        self.replies.push(self.replies.after_stalls_ns(due_ns, self.script), self)

    def _count(self, tokens: int, due_ns: int) -> None:
        now_ns = time.monotonic_ns()
        self.row.first_ns = self.row.first_ns or now_ns
        self.row.last_ns = now_ns
        self.row.sent_tokens += tokens
        self.row.late_max_ns = max(self.row.late_max_ns, now_ns - due_ns)


def write_log(rows: Sequence[LogRow], path: Path) -> None:
    """Write the log as CSV with a header, a line per request in order of arrival."""
    names = [f.name for f in fields(LogRow)]
    with path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)
