"""The base URL of a server, parsed and checked. The forms that users paste (with or without `/v1`,
with the whole endpoint path) yield the same base. An unusable URL is rejected in a single line,
which never repeats a password.

The version of the API (`/v1`) follows a base that has no version of its own: `http://h:8000`. It
does not follow a base with one (`…/api/paas/v4`, `…/v1beta/openai`), an Azure deployment, or an
endpoint pasted without one (`https://h/chat/completions`). Where a server answers 404, the
preflight tries the other form. A query (`?api-version=…`) stays with every request of the API.

A server on a Unix domain socket is `unix:/run/server.sock` or, with a path prefix of its API,
`http+unix://%2Frun%2Fserver.sock/prefix` (the socket's path, percent-encoded, as the host).
"""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from loadgen.errors import TargetFileError

_VERSION = "/v1"
_UNVERSIONED = (_VERSION, "")
_RERANK_VERSIONS = ("", _VERSION)  # vLLM lists its models under the other only
_ENDPOINTS = {  # → api
    "/chat/completions": "chat",
    "/completions": "completions",
    "/responses": "responses",
    "/messages": "messages",
    "/embeddings": "embeddings",
    "/rerank": "rerank",
}
_OTHER_APIS = re.compile("/(images/generations|audio/speech)$")
_HAS_VERSION = re.compile(r"/v\d+((alpha|beta|p|\.)\d*)?(/|$)")
_DEPLOYMENT = re.compile(r"/deployments/([^/]+)$")
DEFAULT_PORTS = {"http": 80, "https": 443}
_UNIX, _HTTP_UNIX = "unix:", "http+unix://"
_IN_QUERY = "/%:@!$&'()*+,;=~?[]"  # besides letters and digits
_LONGEST_UNIX_PATH = 107  # bytes that sockaddr_un holds on Linux, unix(7)


class Address(NamedTuple):
    """The place to connect to and the prefix of every API path. `base_path` is empty or starts with
    `/`, without `/v1`. With a `unix_path`, host and port are localhost's and only fill the `Host`
    header. `versions` are the API versions that may follow the base, the likeliest first; "" is
    none. `query` is empty or starts with `?`.
    """

    scheme: str
    host: str
    port: int
    base_path: str
    unix_path: str = ""
    versions: tuple[str, ...] = _UNVERSIONED
    query: str = ""
    endpoint: str = ""  # as pasted, where no base yields `versions`

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
        base, parts = self.base_path, (self.base_path, self.versions, self.endpoint)
        forms = (base + ending for ending in ("", _VERSION, "/models", self.endpoint))
        path = next((form for form in forms if _split(form) == parts), base)
        if not self.unix_path:
            return f"{self.scheme}://{self.host_header}{path}{self.query}"
        if not path + self.query:
            return _UNIX + self.unix_path
        return f"{_HTTP_UNIX}{quote(self.unix_path, safe='')}{path}{self.query}"

    @property
    def http_url(self) -> str:
        """The base of request URLs, also for a Unix socket."""
        return f"{self.scheme}://{self.host_header}{self.base_path}"

    @property
    def deployment(self) -> str:
        """The name of an Azure deployment, which stands for the model; "" for other servers."""
        found = _DEPLOYMENT.search(self.base_path)
        return "" if found is None else found[1]

    def path(self, api_path: str) -> str:
        """The request target of a path of the API, e.g. `/v1/models`."""
        return self.base_path + api_path + self.query


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
        if literal := _bare_ipv6(text):
            raise TargetFileError(
                f"{shown}: an IPv6 address needs brackets; write {literal}"
            ) from None
        raise TargetFileError(f"{shown}: {error}; write e.g. http://localhost:8000") from None
    _reject_unusable(shown, parts.scheme, host, port, parts.fragment)
    base_path, versions, endpoint = _split(parts.path)
    if other := _OTHER_APIS.search(parts.path.rstrip("/")):
        raise TargetFileError(
            f"{shown}: {other[1]} is another API than {', '.join(e[1:] for e in _ENDPOINTS)}, "
            "which are measured; write the base, without it"
        )
    port = port or DEFAULT_PORTS[parts.scheme]
    query = f"?{quote(parts.query, _IN_QUERY)}" if parts.query else ""
    return Address(parts.scheme, host, port, base_path, "", versions, query, endpoint)


def pasted_api(url: str) -> str | None:
    """The API of a URL that ends in an endpoint; None for a base."""
    path = re.split("[?#]", url, maxsplit=1)[0].rstrip("/")
    return next((api for ending, api in _ENDPOINTS.items() if path.endswith(ending)), None)


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
        path, base_path = unquote(encoded), slash + rest
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
    base_path, versions, endpoint = _split(base_path)
    port = DEFAULT_PORTS["http"]
    return Address("http", "localhost", port, base_path, path, versions, "", endpoint)


def _split(path: str) -> tuple[str, tuple[str, ...], str]:
    """(base path, versions that may follow it, endpoint where it follows the base without a
    version) of the path of a URL."""
    path = path.rstrip("/")
    endpoint = next((ending for ending in _ENDPOINTS if path.endswith(ending)), "")
    base = path.removesuffix(endpoint or "/models").rstrip("/")
    if base.endswith(_VERSION):
        return base.removesuffix(_VERSION).rstrip("/"), _UNVERSIONED, ""
    versions = _versions(base)
    if endpoint and versions == _UNVERSIONED:
        return base, _RERANK_VERSIONS if endpoint == "/rerank" else ("",), endpoint
    return base, versions, ""


def _versions(base: str) -> tuple[str, ...]:
    """The versions that may follow a base, the likeliest first."""
    if _DEPLOYMENT.search(base):
        return ("",)
    return _UNVERSIONED[::-1] if _HAS_VERSION.search(base) else _UNVERSIONED


def _bare_ipv6(text: str) -> str:
    """The URL with brackets around an IPv6 address that lacks them; "" for another mistake."""
    found = re.match(r"(\w+://)([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)(?=$|[/?])", text)
    if found is None:
        return ""
    host, _, port = found[2].rpartition(":")
    for literal, ending in ((host, f":{port}"), (found[2], "")):
        with suppress(ValueError):
            ipaddress.IPv6Address(literal)
            return f"{found[1]}[{literal}]{ending}"
    return ""


def _reject_unusable(shown: str, scheme: str, host: str, port: int | None, fragment: str) -> None:
    if scheme not in DEFAULT_PORTS:
        raise TargetFileError(f"{shown}: scheme '{scheme}' is neither http nor https")
    if not host:
        raise TargetFileError(f"{shown}: has no host; write e.g. {scheme}://localhost:8000")
    if port == 0:
        raise TargetFileError(f"{shown}: port 0 cannot be connected to; ports are 1 to 65535")
    if fragment:
        raise TargetFileError(f"{shown}: has a fragment (#…), which no request holds; remove it")


def _shown(text: str) -> str:
    """The URL as messages may repeat it: without user information, query and fragment."""
    return re.sub(r"[?#].*", "?…", re.sub(r"(//|^).*@", r"\1…@", text), flags=re.DOTALL)[:200]
