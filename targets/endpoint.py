"""The endpoint under test: a URL or a target file, checked once, with its secrets kept apart.

A target file says where the server is and what it runs on; the scenario says what is asked of it.
The API key is read from the environment variable the file names; it and the values of extra headers
are in no dump or repr, and `Endpoint.redact` takes them out of what a server says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from loadgen.errors import TargetFileError
from loadgen.manifest import LabelsSection, TargetSection
from loadgen.registry import Block
from loadgen.yaml_document import Document, override, parse_document, write_document
from targets.address import DEFAULT_PORTS, Address, is_url, parse_metrics_url, parse_url
from targets.base import TARGETS, Adapter
from targets.launch_plan import Launch
from targets.proxies import chosen_proxy
from targets.route import Proxy, Route
from targets.server_text import redact

SETTING = "target setting"  # what messages call a key that is set on top of a file
DEFAULT_KEY_ENV = "OPENAI_API_KEY"
_SUFFIXES = (".yaml", ".yml")
_NO_KEY_HERE = "a key is not written to a file: export it and name its variable in api_key_env"


class Labels(Block):
    """What the endpoint runs on, as declared: a client cannot see a remote GPU. Baselines are keyed
    by it.
    """

    gpu: str | None = None
    gpus: int | None = Field(default=None, ge=1)
    engine: str | None = None
    version: str | None = None
    flags: str | None = None


class Endpoint(Block):
    """Where requests go and how. `url` is the base without `/v1`; build one with `load_target`.

    With `launch` there is no URL before the server runs (`targets.launch`).
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    url: str = ""
    api: str = "chat"
    model: str = ""
    api_key_env: str | None = None
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    extra_body: dict[str, Any] = Field(default_factory=dict)
    ca_cert: Path | None = None
    connections: Literal["reuse", "per_session", "never"] = "reuse"
    labels: Labels = Labels()
    launch: Launch | None = None
    metrics_url: tuple[str, ...] | None = None  # None: where it usually is; (): nowhere
    _api_key: SecretStr | None = PrivateAttr(default=None)  # no field: in no dump, repr or file
    _proxy: Proxy | None = PrivateAttr(default=None)

    @field_validator("url")
    @classmethod
    def _normalise(cls, url: str) -> str:
        try:
            return parse_url(url).url
        except TargetFileError as error:
            raise ValueError(str(error)) from None  # pydantic attaches the key to a ValueError

    @field_validator("api")
    @classmethod
    def _known_api(cls, api: str) -> str:
        TARGETS.get(api)
        return api

    @field_validator("headers")
    @classmethod
    def _printable(cls, headers: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, value in headers.items():
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
                raise ValueError(f"{name!r} is not a header name")
            _check_header(f"header {name}", value.get_secret_value())
        return headers

    @field_validator("metrics_url", mode="before")
    @classmethod
    def _several_or_off(cls, value: Any) -> Any:
        if value == "off":
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("metrics_url")
    @classmethod
    def _metrics_urls(cls, urls: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for url in urls or ():
            try:
                parse_metrics_url(url)
            except TargetFileError as error:
                raise ValueError(str(error)) from None
        return urls

    @model_validator(mode="after")
    def _has_one_place(self) -> Endpoint:
        if not self.url and self.launch is None:
            raise ValueError(
                "url: this key is required, e.g. url: http://localhost:8000, or launch: to start "
                "a server"
            )
        return self

    def at(self, url: str, engine: str | None) -> Endpoint:
        """This endpoint once its server runs at `url`; `engine` labels it if the file does not."""
        labels = self.labels.model_copy(update={"engine": self.labels.engine or engine})
        return self.model_copy(update={"url": parse_url(url).url, "labels": labels})

    @property
    def has_key(self) -> bool:
        return self._api_key is not None

    @property
    def address(self) -> Address:
        return parse_url(self.url)

    @property
    def route(self) -> Route:
        """How connections are made: to the address, or through the environment's proxy."""
        to = self.address
        return Route(to.host, to.port, to.unix_path, to.ssl, self.ca_cert, self._proxy)

    def adapter(self, **changes: Any) -> Adapter:
        """The codec of this endpoint's API with its model and extra body; `changes` are the codec's
        other fields.
        """
        fields = {"model": self.model, "extra_body": self.extra_body, **changes}
        return TARGETS.get(self.api).model_validate(fields)

    def request_headers(self) -> tuple[tuple[str, str], ...]:
        """The headers every request carries besides the codec's own, **secrets in clear**: for the
        socket only.
        """
        named = [(name, value.get_secret_value()) for name, value in self.headers.items()]
        if self._api_key is not None and not any(n.lower() == "authorization" for n, _ in named):
            named.append(("authorization", f"Bearer {self._api_key.get_secret_value()}"))
        if self._proxy is not None:
            named += self.route.forwarding_headers
        return tuple(named)

    def metrics_urls(self) -> tuple[str, ...]:
        """Where the server tells its metrics, or may."""
        usual = f"{self.address.http_url}/metrics"
        return (usual,) if self.metrics_url is None else self.metrics_url

    def is_own(self, url: str) -> bool:
        """Whether a URL is of this endpoint's origin: its headers and its way are for that."""
        own, parts = self.address, urlsplit(url)
        port = parts.port or DEFAULT_PORTS.get(parts.scheme)
        return (parts.scheme, parts.hostname, port) == (own.scheme, own.host, own.port)

    def redact(self, text: str) -> str:
        """`text` without the secrets of the requests (`server_text.redact`): for whatever a server
        wrote, before it is shown or kept. A server may repeat the key it was sent.
        """
        return redact(text, self.secrets())

    def secrets(self) -> tuple[str, ...]:
        """The API key, the proxy's credentials and the values of extra headers, **in clear**: to be
        looked for and taken out."""
        key = (self._api_key,) if self._api_key is not None else ()  # also if a header replaces it
        named = [value.get_secret_value() for value in (*self.headers.values(), *key)]
        proxy = self._proxy.authorization.partition(" ")[2] if self._proxy is not None else ""
        return (*named, proxy) if proxy else tuple(named)

    def to_manifest(self) -> TargetSection:
        """What a run records about its target: header names without values, the key's variable
        without its value, a proxy without its credentials.
        """
        return TargetSection(
            kind="url",
            url=self.url,
            api=self.api,
            model=self.model,
            api_key_env=self.api_key_env,
            extra_body=self.extra_body,
            connections=self.connections,
            headers=tuple(sorted(self.headers)),
            labels=LabelsSection(**self.labels.model_dump()),
            launch=None if self.launch is None else self.launch.to_manifest(),
            proxy=None if self._proxy is None else self._proxy.url,
        )


def load_target(spec: str, environ: Mapping[str, str], settings: Sequence[str] = ()) -> Endpoint:
    """The endpoint a user names: a URL, or the path of a YAML target file; `settings` are keys of
    such a file to be set on top, `labels.gpus=8`.

    `environ` is where the API key is looked up (under the file's `api_key_env`, else under
    OPENAI_API_KEY if that is set), and the proxy. Raises TargetFileError with one line per mistake,
    UsageError for a proxy that cannot be used.
    """
    path = Path(spec)
    if is_url(spec) or not (path.suffix in _SUFFIXES or path.is_file()):
        url = parse_url(spec).url
        if settings:
            return read_target(write_document({"url": url}), spec, environ, settings=settings)
        try:
            return _with_environment(Endpoint(url=url), environ)
        except _BadKey as problem:
            raise TargetFileError(str(problem)) from None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise TargetFileError(f"target file {spec}: {reason}") from None
    return read_target(text, spec, environ, folder=path.parent, settings=settings)


def read_target(
    text: str,
    name: str,
    environ: Mapping[str, str],
    folder: Path = Path(),
    settings: Sequence[str] = (),
) -> Endpoint:
    """The endpoint of a target file's text, with `settings` on top; `name` is for messages;
    `ca_cert` and `launch.cwd` are relative to `folder`.
    """
    file = parse_document(text, name, TargetFileError)
    override(file, settings, SETTING)
    if file.values.pop("api_key", None) is not None:
        file.note(("api_key",), _NO_KEY_HERE)
    try:
        endpoint = Endpoint.model_validate(file.values)
    except ValidationError as error:
        file.note_validation(error, quotes_values=False)
        file.raise_mistakes()
        raise
    if endpoint.ca_cert is not None:
        found = folder / endpoint.ca_cert
        endpoint = endpoint.model_copy(update={"ca_cert": found})
        if not found.is_file():
            file.note(("ca_cert",), f"no such file: {found}")
    if endpoint.launch is not None:
        endpoint = endpoint.model_copy(update={"launch": _placed(endpoint.launch, file, folder)})
    try:
        endpoint = _with_environment(endpoint, environ)
    except _BadKey as problem:
        file.note(("api_key_env",), str(problem))
    file.raise_mistakes()
    return endpoint


def _placed(launch: Launch, file: Document, folder: Path) -> Launch:
    """A launch with its working directory found; what speaks against it is noted in the file."""
    if "url" in file.values:
        file.note(
            ("url",),
            "a launched server's URL follows from launch.host and launch.port; remove one of url "
            "and launch",
        )
    if launch.cwd is None:
        return launch
    cwd = folder / launch.cwd
    if not cwd.is_dir():
        file.note(("launch", "cwd"), f"no such directory: {cwd}")
    return launch.model_copy(update={"cwd": cwd})


class _BadKey(Exception):
    """The environment has no usable key; the message never holds it."""


def _with_environment(endpoint: Endpoint, environ: Mapping[str, str]) -> Endpoint:
    """The endpoint with its API key and its proxy, if the environment has them; a variable the file
    names must be set.
    """
    found = _with_key(endpoint, environ)
    if endpoint.launch is None:  # a server of ours is on this machine
        found._proxy = chosen_proxy(endpoint.address, environ)
    return found


def _with_key(endpoint: Endpoint, environ: Mapping[str, str]) -> Endpoint:
    variable = endpoint.api_key_env or DEFAULT_KEY_ENV
    key = environ.get(variable, "").strip()
    if not key:
        if endpoint.api_key_env is None:
            return endpoint.model_copy()
        raise _BadKey(
            f"environment variable {variable} is not set; export {variable}=… or remove the line"
        )
    try:
        _check_header(f"the value of {variable}", key)
    except ValueError as error:
        raise _BadKey(str(error)) from None
    keyed = endpoint.model_copy(update={"api_key_env": variable})
    keyed._api_key = SecretStr(key)
    return keyed


def _check_header(name: str, value: str) -> None:
    """Raises ValueError, which never quotes the value, for what no header holds (RFC 9110 §5.5)."""
    if not value.isascii() or not value.isprintable():
        raise ValueError(f"{name} has characters that an HTTP header cannot carry")
