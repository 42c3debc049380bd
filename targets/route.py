"""The route to a server: host and port or a socket file, directly or through an HTTP proxy.

The proxy follows the conventions that curl and Python's requests share. The variable is
`http_proxy` for http targets, `https_proxy` for https targets, else `all_proxy`; a lower-case name
wins over its upper-case form. `no_proxy` lists the exceptions: `*`, host names (with their
subdomains; a leading dot changes nothing), addresses and networks (`10.0.0.0/8`), each with an
optional `:port`. A loopback target is no exception unless it is listed. Sources: curl(1)
"Environment"; requests, "Proxies".
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from loadgen.errors import UsageError
from targets.address import Address, bracketed

_FORM = "write http://host:3128, and / ? # @ in a password as %2F %3F %23 %40"


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy. `authorization` is the value of `Proxy-Authorization`, "" for none; it is a
    secret and in no repr."""

    host: str
    port: int
    authorization: str = field(default="", repr=False)

    @property
    def url(self) -> str:
        """The URL without credentials."""
        return f"http://{bracketed(self.host)}:{self.port}"


@dataclass(frozen=True)
class Route:
    """The destination of connections. With `unix_path`, host and port only fill the `Host` header;
    with `is_tls` and a proxy, they are the destination of the proxy's tunnel."""

    host: str
    port: int
    unix_path: str = ""
    is_tls: bool = False
    ca_cert: Path | None = None
    proxy: Proxy | None = None

    def __str__(self) -> str:
        where = self.unix_path or f"{bracketed(self.host)}:{self.port}"
        return f"{where} through {self.proxy.url}" if self.proxy else where

    @property
    def is_tunnelled(self) -> bool:
        """Whether the proxy only forwards bytes (CONNECT); otherwise it reads and forwards
        requests."""
        return self.proxy is not None and self.is_tls

    @property
    def forwarding_headers(self) -> tuple[tuple[str, str], ...]:
        """The headers that a proxy needs with every request that it forwards; empty without such a
        proxy. **The secret in clear**: for the socket only."""
        if self.proxy is None or self.is_tunnelled or not self.proxy.authorization:
            return ()
        return (("proxy-authorization", self.proxy.authorization),)

    @property
    def peer(self) -> tuple[str, int]:
        """(host, port) of the TCP connections."""
        return (self.proxy.host, self.proxy.port) if self.proxy else (self.host, self.port)


def chosen_proxy(address: Address, environ: Mapping[str, str]) -> Proxy | None:
    """The environment's proxy for an address; None for a direct connection. Raises UsageError,
    which never repeats a password, for an unusable proxy URL."""
    if address.unix_path:
        return None
    variable, text = _variable(address.scheme, environ)
    if not text or _is_exempt(address, _either("no_proxy", environ)[1]):
        return None
    return _parsed(variable, text)


def _variable(scheme: str, environ: Mapping[str, str]) -> tuple[str, str]:
    for name in (f"{scheme}_proxy", "all_proxy"):
        variable, text = _either(name, environ)
        # A CGI server sets HTTP_PROXY from a request's `Proxy:` header (CVE-2016-5385).
        if text and not (variable == "HTTP_PROXY" and "REQUEST_METHOD" in environ):
            return variable, text
    return "", ""


def _either(name: str, environ: Mapping[str, str]) -> tuple[str, str]:
    for variable in (name, name.upper()):
        if variable in environ:
            return variable, environ[variable].strip()
    return name, ""


def _parsed(variable: str, text: str) -> Proxy:
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:  # its message may quote a password: the port of user:pa/ss@host is `pa`
        raise UsageError(f"{variable}: no proxy URL; {_FORM}") from None
    if "@" in text and "@" not in parts.netloc:
        raise UsageError(f"{variable}: no proxy URL; {_FORM}")
    if parts.scheme != "http":
        raise UsageError(
            f"{variable}: a proxy of kind '{parts.scheme}' is not supported, only http://; "
            "unset it, or name the target in no_proxy"
        )
    if not host or not port:  # curl would take port 1080, requests port 80
        missing = "port" if host else "host"
        raise UsageError(f"{variable}: has no {missing}; write http://host:3128")
    try:
        host = host if ":" in host else host.encode("idna").decode()
    except UnicodeError:  # a label without letters, or of more than 63
        raise UsageError(f"{variable}: its host is not a valid name; {_FORM}") from None
    return Proxy(host, port, _authorization(parts))


def _authorization(parts: SplitResult) -> str:
    """Source: RFC 7617 (Basic)."""
    if parts.username is None:
        return ""
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _is_exempt(address: Address, no_proxy: str) -> bool:
    entries = (entry.strip().lower() for entry in no_proxy.replace(" ", ",").split(","))
    return any(_matches(entry, address) for entry in entries if entry)


def _matches(entry: str, address: Address) -> bool:
    if entry == "*":
        return True
    host, port = _split_port(entry)
    if port is not None and port != address.port:
        return False
    try:
        return ipaddress.ip_address(address.host) in ipaddress.ip_network(host, strict=False)
    except ValueError:  # the entry or the address is a name
        name = host.strip(".")
        return address.host == name or address.host.endswith(f".{name}")


def _split_port(entry: str) -> tuple[str, int | None]:
    """`host:port`, where the host may be an IPv6 address in brackets or bare."""
    if entry.startswith("["):
        host, _, rest = entry[1:].partition("]")
        port = rest.removeprefix(":")
    elif entry.count(":") == 1:
        host, _, port = entry.partition(":")
    else:
        host, port = entry, ""
    return host, int(port) if port.isdecimal() else None
