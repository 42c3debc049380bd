"""What a shard needs of whatever carries its requests, and what one request looked like on it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from loadgen.records import CLIENT_LIMIT, Status
from loadgen.timer import Alarm

Connections = Literal["reuse", "per_session", "never"]
MAX_BODY_BYTES = 256 << 20  # a runaway response is cut here, so that one request cannot eat the run
_OURS = (
    errno.EADDRNOTAVAIL,  # no free local port, or no local address to reach that one from
    errno.EMFILE,  # open files of the process
    errno.ENFILE,  # of the machine
    errno.ENOBUFS,
    errno.ENOMEM,
)


@dataclass(slots=True, eq=False)
class Exchange:
    """Written on the hot path, read after it. Instants are CLOCK_MONOTONIC nanoseconds, 0 = never.

    `row` is the shard's row index. `times[i]` is when the socket read that brought `parts[i]` of
    the body returned. The parts are as they came: chunked where `is_chunked` says so, and perhaps
    longer than the `length` that the head stated (`Body` reads them). `outcome` is set only where
    the transport itself failed (connect, timeout, cancel, cut); what the body says is found out by
    `decode`.
    """

    row: int
    sent_ns: int = 0
    connected_ns: int = 0
    headers_ns: int = 0
    first_guess_ns: int = 0  # first read that looked like a token: for the live view only
    done_ns: int = 0
    reused: bool = False
    remote: str = ""
    http_status: int = 0
    content_type: str = ""
    content_encoding: str = ""
    n_bytes: int = 0  # of the parts
    is_chunked: bool = False
    length: int | None = None
    times: list[int] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    outcome: Status | None = None
    error: str = ""

    def fail(self, outcome: Status, error: str, now_ns: int) -> None:
        """Record how the transport ended it; the first reason stays."""
        if self.outcome is None:
            self.outcome, self.error = outcome, error
        if not self.done_ns:
            self.done_ns = now_ns


OnEnd = Callable[[Exchange], None]


class Transport(Protocol):
    """Sends requests that are written out already, and tells how each went.

    `on_end` is set before the first `send`; it is called once per sent exchange, on the loop.
    `alarm` may be set then, too: it is rung between two reads once it is due, for between them
    everything else waits.
    """

    on_end: OnEnd
    alarm: Alarm
    n_opened: int
    n_reused: int

    @property
    def known(self) -> list[str]:
        """The addresses that the target's name is known to have; empty where nobody asked."""

    async def open(self, n: int) -> int:
        """Open connections before the clock starts; returns how many it got."""

    def send(self, row: int, payload: bytes, session: int = 0, is_last: bool = True) -> None:
        """Send now. `is_last`: no later request of this session will want the connection."""

    def sent_ns(self, row: int) -> int:
        """When a request in flight was sent (monotonic), as its exchange will say unless it still
        waits for a connection."""

    def abort(self, row: int, outcome: Status, reason: str) -> None:
        """End a request from our side; one that is already over is left as it is."""

    def in_flight(self, most: int) -> tuple[int, Sequence[int]]:
        """How many connections wait for an answer or read one, and the file descriptors of at most
        so many of them, others each time; none where they are not known."""

    async def close(self) -> None:
        """Close every connection."""


def connect_reason(to: object, error: OSError) -> str:
    """Ends in `CLIENT_LIMIT` where no server was asked, for want of something on this machine."""
    why = f"connect to {to}: {error.strerror or str(error) or type(error).__name__}"
    return why + CLIENT_LIMIT if error.errno in _OURS else why
