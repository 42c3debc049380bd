"""The opening of connections, shared by the preflight and the load generator: a server that passed
the preflight is reached in the same way during the run.
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
from loadgen.system.whole_file import opened_regular
from targets.address import bracketed
from targets.rotation import AddressInfo, Lookup, Rotation
from targets.route import Proxy, Route

_HEAD_START_S = 0.25  # RFC 8305 section 5, "Connection Attempt Delay"
_LONGEST_HEAD = 65536

P = TypeVar("P", bound=asyncio.BaseProtocol)


class ProxyRefused(OSError):
    """A proxy did not connect to the target; the message holds its answer."""


class Dialer:
    """Opens connections along a route: to a socket file; to the addresses of a host in turn
    (`Rotation`), where the next address joins in after 250 ms without an answer; or through
    the tunnel of a proxy. Raises OSError, the base of TLS and resolver errors too."""

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
    def addresses(self) -> list[str]:
        """The resolved addresses of the host, as `host:port`; empty before the first connection and
        for a socket file."""
        return self._rotation.addresses

    async def dial(self, factory: Callable[[], P]) -> P:
        """Open a connection and return its protocol, made by `factory`; the TLS handshake is
        complete."""
        route = self._route
        if route.unix_path:
            _, protocol = await self._loop.create_unix_connection(factory, route.unix_path)
            return protocol
        sock = await self._connect()
        try:
            if route.proxy is not None and route.is_tunnelled:
                await self._open_tunnel(sock, route.proxy)
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

    async def _connect(self) -> socket.socket:
        """A TCP connection to the first address that answers; the addresses tried before it are
        put aside."""
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

    async def _open_tunnel(self, sock: socket.socket, proxy: Proxy) -> None:
        """Source: RFC 9110 section 9.3.6 (CONNECT)."""
        target = f"{bracketed(self._route.host)}:{self._route.port}"
        lines = [f"CONNECT {target} HTTP/1.1", f"host: {target}"]
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
    """The TLS settings of a client that trusts the system's authorities and those in the PEM file
    `ca_cert`.

    `create_default_context(cafile=…)` would trust that file alone. Raises TargetFileError if the
    file cannot be read or holds no certificate.
    """
    context = ssl.create_default_context()
    if ca_cert is None:
        return context
    try:
        with opened_regular(ca_cert):
            context.load_verify_locations(ca_cert)
    except ssl.SSLError:
        raise TargetFileError(
            f"ca_cert: {ca_cert}: holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)"
        ) from None
    except OSError as error:
        raise TargetFileError(f"ca_cert: {ca_cert}: {error.strerror}") from None
    return context
