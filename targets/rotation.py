"""The addresses behind a name, so that new connections spread over all of them.

DNS answers have a lifetime that getaddrinfo(3) does not tell. So: an answer younger than a second
is used as it is; an older one too, but it is asked for anew beside that, so that no request waits
for a resolver; only one older than ten seconds is waited for. Each new connection begins at the
next address; one that failed, or was slower than its rival, comes last for five seconds.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

from aiohappyeyeballs import AddrInfoType

AddressInfo = AddrInfoType  # as socket.getaddrinfo gives it
Lookup = Callable[[str, int], Awaitable[Sequence[AddressInfo]]]

FRESH_S = 1.0
STALE_S = 10.0
ASIDE_S = 5.0


class Rotation:
    """The addresses of `host`, in turn. `first` is where the first connection begins, so that
    several processes do not all begin at the same one."""

    def __init__(
        self,
        host: str,
        port: int,
        lookup: Lookup | None = None,
        first: int = 0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._port, self._now_s = host, port, now_s
        self._lookup = lookup or _getaddrinfo
        self._known: list[AddressInfo] = []
        self._asked_s = -STALE_S if not _is_literal(host) else float("inf")
        self._next = first
        self._aside_until_s: dict[AddressInfo, float] = {}
        self._asking: asyncio.Task[None] | None = None

    @property
    def known(self) -> list[str]:
        """Every address of the latest answer, as `host:port`."""
        return [show(info[4]) for info in self._known]

    async def order(self) -> list[AddressInfo]:
        """Every address in the order in which to try them now; never empty. Raises OSError
        (gaierror) where nothing is known and the name cannot be resolved."""
        age_s = self._now_s() - self._asked_s
        if not self._known or age_s >= STALE_S:
            await asyncio.shield(self._ask())
        elif age_s >= FRESH_S:
            self._ask()
        start, self._next = self._next % len(self._known), self._next + 1
        turned = self._known[start:] + self._known[:start]
        now_s = self._now_s()
        return sorted(turned, key=lambda info: self._aside_until_s.get(info, 0.0) > now_s)

    def put_aside(self, info: AddressInfo) -> None:
        """Try this address last for a while."""
        self._aside_until_s[info] = self._now_s() + ASIDE_S

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    def _ask(self) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._resolve())
            self._asking.add_done_callback(_note_error)
        return self._asking

    async def _resolve(self) -> None:
        try:
            found = await self._lookup(self._host, self._port)
        except OSError:
            if not self._known:
                raise
            found = self._known  # a resolver that fails for a moment takes no address away
        if not found:
            raise OSError(f"the name {self._host} has no address")
        self._known = list(dict.fromkeys(found))
        self._asked_s = max(self._asked_s, self._now_s())


def _note_error(asking: asyncio.Task[None]) -> None:
    """Whoever waited has been told; an error that nobody waited for is not the loop's business."""
    if not asking.cancelled():
        asking.exception()


def show(sockaddr: object) -> str:
    """`host:port` of a socket address, an IPv6 host in brackets; a Unix one is its path."""
    if not isinstance(sockaddr, tuple):
        text = sockaddr.decode("utf-8", "replace") if isinstance(sockaddr, bytes) else sockaddr
        return str(text or "")
    host, port = sockaddr[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _getaddrinfo(host: str, port: int) -> Sequence[AddressInfo]:
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
