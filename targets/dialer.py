"""Opening connections, one way for the preflight and the load generator: what the one found
reachable must be so for the other.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from aiohappyeyeballs import start_connection

from loadgen.errors import TargetFileError
from targets.rotation import AddressInfo, Lookup, Rotation
from targets.route import Proxy, Route

_HEAD_START_S = 0.25  # RFC 8305 section 5, "Connection Attempt Delay"
_LONGEST_HEAD = 65536

P = TypeVar("P", bound=asyncio.BaseProtocol)


class ProxyRefused(OSError):
    """A proxy did not connect us to the target; says what it answered."""


class Dialer:
    """Opens connections along one route: to its socket file; to the addresses of its host in turn
    (`Rotation`), the next one joining in when one has not answered within 250 ms; through the
    proxy's tunnel. Raises OSError, of which TLS's and the resolver's errors are kinds."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        route: Route,
        *,
        lookup: Lookup | None = None,
        first: int = 0,
    ) -> None:
        self._loop, self._route = loop, route
        self._rotation = Rotation(*route.peer, lookup, first)
        self._tls = tls_context(route.ca_cert) if route.is_tls else None

    def __str__(self) -> str:
        return str(self._route)

    @property
    def known(self) -> list[str]:
        """The addresses that the host is known to have, as `host:port`; none before the first
        connection, and for a socket file."""
        return self._rotation.known

    async def dial(self, factory: Callable[[], P]) -> P:
        """A new connection's protocol, made by `factory`; TLS has been agreed on."""
        route = self._route
        if route.unix_path:
            _, protocol = await self._loop.create_unix_connection(factory, route.unix_path)
            return protocol
        sock = await self._connected()
        try:
            if route.proxy is not None and route.is_tunnelled:
                await self._ask_for_tunnel(sock, route.proxy)
            name = route.host if self._tls is not None else None
            _, protocol = await self._loop.create_connection(
                factory, sock=sock, ssl=self._tls, server_hostname=name
            )
        except BaseException:
            sock.close()
            raise
        return protocol

    def close(self) -> None:
        self._rotation.close()

    async def _connected(self) -> socket.socket:
        infos = await self._rotation.order()
        tried: list[AddressInfo] = []

        def make(info: AddressInfo) -> socket.socket:
            tried.append(info)
            family, kind, protocol, _, _ = info
            return socket.socket(family, kind, protocol)

        try:
            sock = await start_connection(
                infos,
                happy_eyeballs_delay=_HEAD_START_S,
                interleave=1,
                loop=self._loop,
                socket_factory=make,
            )
        except OSError:
            for info in tried:
                self._rotation.put_aside(info)
            raise
        try:
            peer = sock.getpeername()
        except OSError:  # reset as soon as it was accepted
            sock.close()
            raise
        for info in tried:
            if info[4][:2] == peer[:2]:
                break
            self._rotation.put_aside(info)
        return sock

    async def _ask_for_tunnel(self, sock: socket.socket, proxy: Proxy) -> None:
        """Source: RFC 9110 section 9.3.6 (CONNECT)."""
        route = self._route
        host = f"[{route.host}]" if ":" in route.host else route.host
        lines = [f"CONNECT {host}:{route.port} HTTP/1.1", f"host: {host}:{route.port}"]
        if proxy.authorization:
            lines.append(f"proxy-authorization: {proxy.authorization}")
        await self._loop.sock_sendall(sock, "\r\n".join([*lines, "", ""]).encode("latin-1"))
        head = b""
        while b"\r\n\r\n" not in head:
            piece = await self._loop.sock_recv(sock, 4096)
            head += piece
            if not piece or len(head) > _LONGEST_HEAD:
                raise ProxyRefused(f"proxy {proxy.url} closed the connection instead of answering")
        version, _, status = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        if not version.startswith("HTTP/1.") or not status.startswith("2"):
            raise ProxyRefused(f"proxy {proxy.url} answered {status or version} to CONNECT")


def tls_context(ca_cert: Path | None) -> ssl.SSLContext:
    """Trusts the system's authorities and, besides them, those in the PEM file `ca_cert`.

    Not `create_default_context(cafile=…)`, which trusts that file alone. Raises TargetFileError
    when the file cannot be read or holds no certificate.
    """
    context = ssl.create_default_context()
    if ca_cert is None:
        return context
    try:
        context.load_verify_locations(ca_cert)
    except ssl.SSLError:
        raise TargetFileError(
            f"ca_cert: {ca_cert}: holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)"
        ) from None
    except OSError as error:
        raise TargetFileError(f"ca_cert: {ca_cert}: {error.strerror}") from None
    return context
