"""What a shard needs of whatever carries its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from loadgen.drive.exchange import Exchange
from loadgen.records import Status
from loadgen.timer import Alarm

OnEnd = Callable[[Exchange], None]
Connections = Literal["reuse", "per_session", "never"]
MAX_BODY_BYTES = 256 << 20  # a runaway response is cut here, so that one request cannot eat the run


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
