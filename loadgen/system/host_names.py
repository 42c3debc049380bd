"""The names under which a server may be addressed.

A page of another site can send requests to a server on this machine or in its network (CSRF). It
can also use a name of its own that resolves to this machine (DNS rebinding). The headers Origin and
Host show the two.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

_LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))
_EVERY = ("", "*", "0.0.0.0", "::")


@dataclass(frozen=True)
class HostNames:
    """The accepted hosts, in lower case. A server on every interface has all addresses of its
    machine: `has_every_address` accepts any IP literal, which no DNS name can forge."""

    names: frozenset[str] = _LOOPBACK
    has_every_address: bool = False

    def accepts(self, header: str | None) -> bool:
        """Whether a `Host` header (RFC 9110 section 7.2) names this server."""
        host = _host_of(f"//{header}") if header else None
        if host is None:
            return False
        return host in self.names or (self.has_every_address and _is_address(host))

    def is_other_site(self, origin: str | None, header: str | None) -> bool:
        """Whether an `Origin` header (RFC 6454) is of a page that this server did not serve."""
        if not origin:
            return False
        netloc = _netloc(origin)
        return not netloc or netloc != (header or "").lower()


def host_names(bound: str, allowed: Sequence[str] = (), machine: str = "") -> HostNames:
    """The names of a server that is bound to an address: that address, those of loopback, and
    `allowed`; on every interface the `machine`'s name as well."""
    is_everywhere = bound in _EVERY
    own = [machine] if is_everywhere else [bound]
    names = {_host_of(f"//{name}") or name.lower() for name in (*own, *allowed) if name}
    bare = {name.lower().strip("[]") for name in own if name}
    return HostNames(_LOOPBACK | names | bare, is_everywhere)


def _host_of(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
        host = parts.hostname
    except ValueError:
        return None
    return host.lower().rstrip(".") if host and "@" not in parts.netloc else None


def _netloc(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
