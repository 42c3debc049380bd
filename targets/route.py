"""The way to a server: its host and port, or a socket file, directly or through an HTTP proxy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy. `authorization` is the value of `Proxy-Authorization`, "" for none; it is a
    secret and in no repr."""

    host: str
    port: int
    authorization: str = field(default="", repr=False)

    @property
    def url(self) -> str:
        """As it may be shown: without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Route:
    """Where connections go. With `unix_path` host and port are only what the `Host` header says;
    with `is_tls` and a proxy they are what the proxy is asked to connect to."""

    host: str
    port: int
    unix_path: str = ""
    is_tls: bool = False
    ca_cert: Path | None = None
    proxy: Proxy | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        where = self.unix_path or f"{host}:{self.port}"
        return f"{where} through {self.proxy.url}" if self.proxy else where

    @property
    def is_tunnelled(self) -> bool:
        """Whether the proxy only passes bytes on (CONNECT); else it reads and forwards requests."""
        return self.proxy is not None and self.is_tls

    @property
    def forwarding_headers(self) -> tuple[tuple[str, str], ...]:
        """What every request says to a proxy that forwards it; nothing where there is none.
        **The secret in clear**: for the socket only."""
        if self.proxy is None or self.is_tunnelled or not self.proxy.authorization:
            return ()
        return (("proxy-authorization", self.proxy.authorization),)

    @property
    def peer(self) -> tuple[str, int]:
        """(host, port) that TCP connections are made to."""
        return (self.proxy.host, self.proxy.port) if self.proxy else (self.host, self.port)
