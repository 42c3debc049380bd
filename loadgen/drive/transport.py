"""Contract between a shard and its two transports (`client`, `aiohttp_client`)."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from loadgen.archive.exchange import Exchange
from loadgen.records import CLIENT_LIMIT, Status
from loadgen.system.timer import Alarm

Connections = Literal["reuse", "per_session", "never"]
MAX_BODY_BYTES = 256 << 20  # a runaway response ends here, before it fills the memory of the run
_CLIENT_LIMITS = (
    errno.EADDRNOTAVAIL,  # no free local port, or no local address of the peer's family
    errno.EMFILE,  # open files of the process
    errno.ENFILE,  # open files of the machine
    errno.ENOBUFS,
    errno.ENOMEM,
)


DONE_S = 0.05
"""From [DONE] to the end of the response; a connection that stays open for longer is dropped. Many
servers send the end in a packet of its own, within a millisecond."""
HELD_OPEN = f"the response was held open for over {DONE_S * 1e3:.0f} ms"

BYTES_BEHIND = "the server sent bytes behind the end of its response"
"""The error of a response that is followed by further bytes in the same read."""


OnEnd = Callable[[Exchange], None]


class Transport(Protocol):
    """Sends encoded requests and reports the end of each.

    The shard sets `on_end` before the first `send`; it is called exactly once per sent request, on
    the loop's thread. The shard may set `alarm`, too: an overdue alarm rings between two socket
    reads, because the loop itself would run it only after all sockets that are readable by then.
    """

    on_end: OnEnd
    alarm: Alarm
    n_opened: int
    n_reused: int

    @property
    def addresses(self) -> list[str]:
        """Addresses that the target's name resolved to; empty without a lookup."""

    async def open(self, n: int) -> int:
        """Opens up to `n` connections before the run starts; returns the number opened."""

    def send(self, row: int, payload: bytes, session: int = 0, is_last: bool = True) -> None:
        """Sends a request now. `is_last`: the session sends no later request."""

    def sent_ns(self, row: int) -> int:
        """Send time of a request in flight (monotonic). It may still grow while the request waits
        for a connection."""

    def abort(self, row: int, outcome: Status, reason: str) -> None:
        """Ends a request from the client's side; does nothing if it is over."""

    def in_flight(self, most: int) -> tuple[int, Sequence[int]]:
        """Number of connections with a request in flight, and the file descriptors of at most
        `most` of them. Successive calls return different ones. No descriptors where the transport
        cannot access its sockets."""

    def has_read_since(self, at_ns: int) -> bool:
        """Whether a byte for a request in flight came after `at_ns` (monotonic)."""

    async def close(self) -> None:
        """Closes every connection."""


def connect_reason(to: object, error: OSError) -> str:
    """The error text of a failed connection; ends in `CLIENT_LIMIT` if this machine ran out of
    ports, files or memory, so that the failure is not the server's."""
    reason = f"connect to {to}: {error.strerror or str(error) or type(error).__name__}"
    return reason + CLIENT_LIMIT if error.errno in _CLIENT_LIMITS else reason
