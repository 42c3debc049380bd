"""A `Route` in aiohttp's words: the connector, and what each request must say besides."""

from __future__ import annotations

from typing import Any

import aiohttp

from targets.dialer import tls_context
from targets.route import Route


def connector(route: Route, **options: Any) -> aiohttp.BaseConnector:
    """Connections of one session; `options` are the connector's own."""
    if route.unix_path:
        return aiohttp.UnixConnector(route.unix_path, **options)
    tls = tls_context(route.ca_cert) if route.is_tls else True
    return aiohttp.TCPConnector(ssl=tls, **options)


def request_options(route: Route) -> dict[str, Any]:
    """Keywords for `session.request`. A proxy that forwards requests gets its credentials with each
    of them (`Route.forwarding_headers`), one that opens a tunnel from here, with CONNECT."""
    if route.proxy is None:
        return {}
    options: dict[str, Any] = {"proxy": route.proxy.url}
    if route.is_tunnelled and route.proxy.authorization:
        options["proxy_headers"] = {"proxy-authorization": route.proxy.authorization}
    return options
