"""Rotation over the addresses of a host name: each new connection begins at the next address.

getaddrinfo(3) does not return the lifetime of a DNS answer. An answer is therefore used as it is
for a second; for ten seconds it is used while a new lookup runs in the background, so that no
request waits for a resolver; only an older answer is waited for. An address that failed, or was
slower than its rival, is tried last for five seconds.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

from aiohappyeyeballs import AddrInfoType

from targets.address import bracketed

AddressInfo = AddrInfoType  # an entry of socket.getaddrinfo
Lookup = Callable[[str, int], Awaitable[Sequence[AddressInfo]]]

FRESH_S = 1.0
STALE_S = 10.0
ASIDE_S = 5.0


class Rotation:
    """The addresses of `host`, in turn. The first connection begins at address number `first`, so
    that several processes begin at different addresses."""

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
        self._infos: list[AddressInfo] = []
        self._resolved_s = -STALE_S if not _is_literal(host) else float("inf")
        self._next = first
        self._aside_until_s: dict[AddressInfo, float] = {}
        self._resolving: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> list[str]:
        """Every address of the latest answer, as `host:port`."""
        return [format_address(info[4]) for info in self._infos]

    async def order(self) -> list[AddressInfo]:
        """Every address, in the order in which to try them; never empty. Raises OSError (gaierror)
        if the name was never resolved and cannot be resolved now."""
        age_s = self._now_s() - self._resolved_s
        if not self._infos or age_s >= STALE_S:
            await asyncio.shield(self._refresh())
        elif age_s >= FRESH_S:
            self._refresh()
        start, self._next = self._next % len(self._infos), self._next + 1
        rotated = self._infos[start:] + self._infos[:start]
        now_s = self._now_s()
        return sorted(rotated, key=lambda info: self._aside_until_s.get(info, 0.0) > now_s)

    def put_aside(self, info: AddressInfo) -> None:
        """Try this address last for five seconds."""
        self._aside_until_s[info] = self._now_s() + ASIDE_S

    def close(self) -> None:
        if self._resolving is not None:
            self._resolving.cancel()

    def _refresh(self) -> asyncio.Task[None]:
        """The lookup in progress, started if there is none."""
        if self._resolving is None or self._resolving.done():
            self._resolving = asyncio.ensure_future(self._resolve())
            self._resolving.add_done_callback(_retrieve_error)
        return self._resolving

    async def _resolve(self) -> None:
        try:
            infos = await self._lookup(self._host, self._port)
        except OSError:
            if not self._infos:
                raise
            infos = self._infos  # a resolver that fails for a moment removes no address
        if not infos:
            raise OSError(f"the name {self._host} has no address")
        self._infos = list(dict.fromkeys(infos))
        self._resolved_s = max(self._resolved_s, self._now_s())


def _retrieve_error(lookup: asyncio.Task[None]) -> None:
    """Mark the task's error as retrieved: waiting tasks receive it through `order`, and the loop
    must not log it if no task waits."""
    if not lookup.cancelled():
        lookup.exception()


def format_address(sockaddr: object) -> str:
    """`host:port` of a socket address, an IPv6 host in brackets; the path of a Unix socket."""
    if not isinstance(sockaddr, tuple):
        text = sockaddr.decode("utf-8", "replace") if isinstance(sockaddr, bytes) else sockaddr
        return str(text or "")
    host, port = sockaddr[:2]
    return f"{bracketed(str(host))}:{port}"


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _getaddrinfo(host: str, port: int) -> Sequence[AddressInfo]:
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
