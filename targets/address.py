"""The base URL of a server, parsed and checked. The forms that users paste (with or without `/v1`,
with the whole endpoint path) yield the same base. An unusable URL is rejected in a single line,
which never repeats a password.

A server on a Unix domain socket is `unix:/run/server.sock` or, with a path prefix of its API,
`http+unix://%2Frun%2Fserver.sock/prefix` (the socket's path, percent-encoded, as the host).
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from loadgen.errors import TargetFileError

_ENDPOINTS = ("/chat/completions", "/completions", "/models", "/v1")
DEFAULT_PORTS = {"http": 80, "https": 443}
_UNIX, _HTTP_UNIX = "unix:", "http+unix://"
_LONGEST_UNIX_PATH = 107  # bytes that sockaddr_un holds on Linux, unix(7)


class Address(NamedTuple):
    """The place to connect to and the prefix of every API path. `base_path` is empty or starts with
    `/`, without `/v1`. With a `unix_path`, host and port are localhost's and only fill the `Host`
    header.
    """

    scheme: str
    host: str
    port: int
    base_path: str
    unix_path: str = ""

    @property
    def ssl(self) -> bool:
        return self.scheme == "https"

    @property
    def host_header(self) -> str:
        """RFC 9110 §7.2: the default port is left out, an IPv6 literal keeps its brackets."""
        host = bracketed(self.host)
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address in the form that a user writes."""
        if not self.unix_path:
            return self.http_url
        if not self.base_path:
            return _UNIX + self.unix_path
        return f"{_HTTP_UNIX}{quote(self.unix_path, safe='')}{self.base_path}"

    @property
    def http_url(self) -> str:
        """The base of request URLs, also for a Unix socket."""
        return f"{self.scheme}://{self.host_header}{self.base_path}"

    def path(self, api_path: str) -> str:
        """The request target of an API path such as `/v1/models`."""
        return self.base_path + api_path


def bracketed(host: str) -> str:
    """The host as a URL holds it: an IPv6 literal in brackets."""
    return f"[{host}]" if ":" in host else host


def is_url(text: str) -> bool:
    """Whether a text has the form of a URL, so that it cannot be the name of a file."""
    return "://" in text or text.lower().startswith(_UNIX)


def parse_url(text: str) -> Address:
    """The address of a base URL. Raises TargetFileError for an unusable URL."""
    shown = f"target URL {_shown(text)!r}"
    if any(c.isspace() or not c.isprintable() for c in text):
        raise TargetFileError(f"{shown}: contains white space; write e.g. http://localhost:8000")
    if text.lower().startswith((_UNIX, _HTTP_UNIX)):
        return _parse_unix(text, shown)
    # Before urlsplit: it may take a part of a password for the port or the path, and quote it.
    if re.search("[^/]@|//@", text):
        raise TargetFileError(
            f"{shown}: holds a user name or password; put the key in an environment variable "
            "and name it in a target file (api_key_env)"
        )
    if "://" not in text:
        raise TargetFileError(f"{shown}: has no scheme; write http://{_shown(text) or 'localhost'}")
    try:
        parts = urlsplit(text)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode()
    except UnicodeError:
        raise TargetFileError(f"{shown}: its host is not a valid name") from None
    except ValueError as error:  # a bad port, a half-open [IPv6]
        raise TargetFileError(f"{shown}: {error}; write e.g. http://localhost:8000") from None
    _reject_unusable(shown, parts.scheme, host, port, parts.query or parts.fragment)
    return Address(parts.scheme, host, port or DEFAULT_PORTS[parts.scheme], _base_path(parts.path))


def parse_metrics_url(text: str) -> Address:
    """The address of a metrics URL, with its whole path as the base. Raises TargetFileError,
    whose message repeats neither user information nor a query."""
    parts = urlsplit(text)
    shown = f"{parts.scheme}://{parts.hostname or ''}"
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise TargetFileError(f"{shown} is no http URL; write http://localhost:8000/metrics or off")
    if "@" in parts.netloc:
        raise TargetFileError(f"{shown} holds a user name or password; remove it from the file")
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    return Address(parts.scheme, parts.hostname, port, parts.path)


def _parse_unix(text: str, shown: str) -> Address:
    """`unix:/path`, `unix:///path` or `http+unix://%2Fpath/base`."""
    base_path = ""
    if text.lower().startswith(_HTTP_UNIX):
        encoded, slash, rest = text[len(_HTTP_UNIX) :].partition("/")
        path, base_path = unquote(encoded), _base_path(slash + rest)
    else:
        path = re.sub("^//(?=/)", "", text[len(_UNIX) :])
    is_odd = path.startswith("//") or " " in path or not path.isprintable()
    if not path or is_odd or re.search("[?#]", base_path):
        raise TargetFileError(
            f"{shown}: names no socket; write unix:/run/server.sock, or with a path prefix "
            "http+unix://%2Frun%2Fserver.sock/prefix"
        )
    if len(path.encode()) > _LONGEST_UNIX_PATH:
        raise TargetFileError(
            f"{shown}: the path of a socket holds at most {_LONGEST_UNIX_PATH} bytes"
        )
    return Address("http", "localhost", DEFAULT_PORTS["http"], base_path, path)


def _base_path(path: str) -> str:
    path = path.rstrip("/")
    for ending in _ENDPOINTS:
        path = path.removesuffix(ending).rstrip("/")
    return path


def _reject_unusable(shown: str, scheme: str, host: str, port: int | None, extra: str) -> None:
    if scheme not in DEFAULT_PORTS:
        raise TargetFileError(f"{shown}: scheme '{scheme}' is neither http nor https")
    if not host:
        raise TargetFileError(f"{shown}: has no host; write e.g. {scheme}://localhost:8000")
    if port == 0:
        raise TargetFileError(f"{shown}: port 0 cannot be connected to; ports are 1 to 65535")
    if extra:
        raise TargetFileError(
            f"{shown}: has a query or fragment, which API paths cannot follow; remove it"
        )


def _shown(text: str) -> str:
    """The URL as messages may repeat it: without user information, query and fragment."""
    return re.sub(r"[?#].*", "?…", re.sub(r"(//|^).*@", r"\1…@", text), flags=re.DOTALL)[:200]
