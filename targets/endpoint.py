"""The endpoint under test, read from a URL or a target file and checked once.

A target file describes the server: its place, its API and its hardware. The load is described by
the scenario. The API key comes from an environment variable that the file names. The key and the
values of extra headers are in no dump or repr, and `Endpoint.redact` removes them from text that a
server wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self
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
from loadgen.manifest.json_section import JsonObject
from loadgen.manifest.sections import LabelsSection, TargetSection
from loadgen.registry import Block
from loadgen.yaml_document import Document, override, parse_document, read_file, write_document
from targets.address import (
    DEFAULT_PORTS,
    Address,
    is_url,
    parse_metrics_url,
    parse_url,
    pasted_api,
)
from targets.base import TARGETS, Adapter
from targets.choices import several_answers
from targets.launch_plan import Launch
from targets.route import Proxy, Route, chosen_proxy
from targets.safe_text import hide_named, hide_query, query_secrets, redact, strip_controls

SETTING = "target setting"  # the word in messages for a key set on top of a file
OPERATOR_TOKEN = "SLOBENCH_OPERATOR_TOKEN"
"""The variable with the token for requests that change the bundled engine."""
DEFAULT_KEY_ENV = "OPENAI_API_KEY"
MOST_TEXTS = 2048
"""Of a request for embeddings, by OpenAI's API reference."""
_SUFFIXES = (".yaml", ".yml")
_ANTHROPIC = "api.anthropic.com"
_NO_KEY_HERE = "a file holds no key: export the key and name its variable in api_key_env"


class Labels(Block):
    """The hardware and software of the endpoint, as declared, for a client cannot inspect a remote
    GPU. Baselines are keyed by them.
    """

    gpu: str | None = None
    gpus: int | None = Field(default=None, ge=1)
    engine: str | None = None
    version: str | None = None
    flags: str | None = None


_OWN_HEADERS = {
    *("host", "content-length", "content-type", "accept", "accept-encoding", "authorization"),
    *("x-request-id", "x-seq"),
}


class Endpoint(Block):
    """The destination and the form of requests. `url` is the base without `/v1`, or the URL of the
    endpoint, which also states the `api`; `load_target` builds an endpoint.

    Each header of `session_header` is sent with the name of the request's session, for routers.
    With `trace_context` each request of a run begins a trace (`traceparent`, sampled).

    An endpoint with `launch` has no URL before the server runs (`targets.launch`).
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    url: str = ""
    api: str = "chat"
    model: str = ""
    api_key_env: str | None = None
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    extra_body: JsonObject = Field(default_factory=dict)
    stream: bool = True
    texts_per_request: int | None = Field(default=None, ge=1, le=MOST_TEXTS)
    ca_cert: Path | None = None
    connections: Literal["reuse", "per_session", "never"] = "reuse"
    session_header: tuple[str, ...] = ()
    trace_context: bool = False
    labels: Labels = Labels()
    launch: Launch | None = None
    metrics_url: tuple[str, ...] | None = None  # None: the usual place; (): none
    _api_key: SecretStr | None = PrivateAttr(default=None)  # no field: in no dump, repr or file
    _proxy: Proxy | None = PrivateAttr(default=None)
    _operator_token: SecretStr | None = PrivateAttr(default=None)

    @field_validator("url")
    @classmethod
    def _normalise(cls, url: str) -> str:
        with _as_value_error():
            address = parse_url(url)
        return address.url

    @model_validator(mode="before")
    @classmethod
    def _pasted(cls, values: Any) -> Any:
        """The API of a pasted endpoint, in place of the default."""
        if not isinstance(values, dict) or not isinstance(values.get("url"), str):
            return values
        pasted = pasted_api(values["url"])
        if pasted is not None and values.get("api", pasted) != pasted:
            raise ValueError(
                f"api: {values['api']}, but the URL is that of api {pasted}; remove one of them"
            )
        return values if pasted is None else {"api": pasted, **values}

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

    @field_validator("session_header", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("session_header")
    @classmethod
    def _free_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        lower = tuple(name.lower() for name in names)
        for name in lower:
            if not re.fullmatch("[0-9a-z_-]+", name):
                raise ValueError(f"{name!r} is no name of letters, digits, - and _")
            if name in _OWN_HEADERS or lower.count(name) > 1:
                raise ValueError(f"{name}: this header is sent already")
        return lower

    @field_validator("extra_body")
    @classmethod
    def _one_answer(cls, extra_body: JsonObject) -> JsonObject:
        if (mistake := several_answers(extra_body)) is not None:
            raise ValueError(mistake.removeprefix("extra_body."))
        if "stream" in extra_body:
            raise ValueError("stream: write it as a key of its own, stream: false")
        return extra_body

    @field_validator("metrics_url", mode="before")
    @classmethod
    def _several_or_off(cls, value: Any) -> Any:
        if value == "off":
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("metrics_url")
    @classmethod
    def _metrics_urls(cls, urls: tuple[str, ...] | None) -> tuple[str, ...] | None:
        with _as_value_error():
            for url in urls or ():
                parse_metrics_url(url)
        return urls

    @model_validator(mode="after")
    def _has_url_or_launch(self) -> Endpoint:
        if not self.url and self.launch is None:
            raise ValueError(
                "url: this key is required, e.g. url: http://localhost:8000, or launch: to start "
                "a server"
            )
        return self

    @model_validator(mode="after")
    def _cuts_texts(self) -> Endpoint:
        if self.texts_per_request is not None and not TARGETS.get(self.api).results:
            raise ValueError(
                f"texts_per_request: a request of api {self.api} has one prompt; this key is for "
                "embeddings and rerank"
            )
        return self

    @property
    def streams(self) -> bool:
        """Whether answers are streamed: by `stream`, but never where they have no tokens."""
        return self.stream and not TARGETS.get(self.api).results

    def at(self, url: str, engine: str | None) -> Endpoint:
        """This endpoint with the URL of its launched server. `engine` is the engine's label if the
        file has none.
        """
        labels = self.labels.model_copy(update={"engine": self.labels.engine or engine})
        return self.model_copy(update={"url": parse_url(url).url, "labels": labels})

    def with_operator_token(self, token: str) -> Endpoint:
        """This endpoint with the token for requests that change the bundled engine."""
        endpoint = self.model_copy()
        endpoint._operator_token = SecretStr(token)
        return endpoint

    def operator_headers(self) -> tuple[tuple[str, str], ...]:
        """The header of requests that change the server. **A secret in clear**: for the socket
        only."""
        token = self._operator_token
        return () if token is None else (("x-operator-token", token.get_secret_value()),)

    @property
    def has_key(self) -> bool:
        return self._api_key is not None

    @property
    def shown_url(self) -> str:
        """The URL for messages and files: without the secrets of its query."""
        return hide_query(self.url)

    @property
    def address(self) -> Address:
        return parse_url(self.url)

    @property
    def route(self) -> Route:
        """The route of connections: direct, or through the environment's proxy."""
        to = self.address
        return Route(to.host, to.port, to.unix_path, to.ssl, self.ca_cert, self._proxy)

    def adapter(self, **changes: Any) -> Adapter:
        """The codec of this endpoint's API with its model, its extra body and, if it takes one, the
        version that follows the base; `changes` are other fields of the codec.
        """
        codec = TARGETS.get(self.api)
        fields = {"model": self.model, "extra_body": self.extra_body, "stream": self.streams}
        if self.texts_per_request is not None:
            fields["texts_per_request"] = self.texts_per_request
        if "version" in codec.model_fields:
            fields["version"] = self.address.versions[0]
        return codec.model_validate({**fields, **changes})

    def with_fields(self, fields: JsonObject) -> Self:
        """The endpoint for requests with further body fields; those of `extra_body` stay."""
        return self.model_copy(update={"extra_body": {**fields, **self.extra_body}})

    def request_headers(self) -> tuple[tuple[str, str], ...]:
        """The headers of every request in addition to the codec's. An Azure deployment takes the
        key as `api-key`, Anthropic's own API as `x-api-key`. **Secrets in clear**: for the socket
        only.
        """
        named = [(name, value.get_secret_value()) for name, value in self.headers.items()]
        if self._api_key is not None:
            key = self._api_key.get_secret_value()
            header = ("authorization", f"Bearer {key}")
            if self.address.deployment:
                header = ("api-key", key)
            elif self.address.host == _ANTHROPIC:
                header = ("x-api-key", key)
            if not any(name.lower() in ("authorization", header[0]) for name, _ in named):
                named.append(header)
        if self._proxy is not None:
            named += self.route.forwarding_headers
        return tuple(named)

    def metrics_urls(self) -> tuple[str, ...]:
        """The URLs of the server's metrics; by default the usual place, which may not exist."""
        usual = f"{self.address.http_url}/metrics"
        return (usual,) if self.metrics_url is None else self.metrics_url

    def is_own(self, url: str) -> bool:
        """Whether a URL has this endpoint's origin. Its headers and its route are for that origin
        only.
        """
        own, parts = self.address, urlsplit(url)
        port = parts.port or DEFAULT_PORTS.get(parts.scheme)
        return (parts.scheme, parts.hostname, port) == (own.scheme, own.host, own.port)

    def redact(self, text: str) -> str:
        """`text` without the secrets of the requests (`safe_text.redact`). For all text that a
        server wrote, before it is shown or stored, because a server may repeat the key it received.
        """
        return redact(text, self.secrets())

    def error_text(self, error: BaseException) -> str:
        """The message of an error in a short line without secrets. The message of some errors
        quotes the server (`NotHttp`).
        """
        words = self.redact(strip_controls(" ".join(str(error).split())))
        return words[:120] or type(error).__name__

    def secrets(self) -> tuple[str, ...]:
        """The API key, the proxy's credentials, the values of extra headers and those of the extra
        body and of the URL's query under names that look secret, **in clear**: to be searched for
        and removed."""
        key = (self._api_key,) if self._api_key is not None else ()  # also if a header replaces it
        named = [value.get_secret_value() for value in (*self.headers.values(), *key)]
        named += [*hide_named(self.extra_body)[1], *(value for _, value in self.operator_headers())]
        named += query_secrets(self.url)
        proxy = self._proxy.authorization.partition(" ")[2] if self._proxy is not None else ""
        return (*named, proxy) if proxy else tuple(named)

    def to_manifest(self) -> TargetSection:
        """The target as a run records it: JSON, with the names of headers and of the key's variable
        without their values, and a proxy without its credentials.
        """
        return TargetSection(
            kind="url",
            url=self.shown_url,
            api=self.api,
            model=self.redact(self.model),
            api_key_env=self.api_key_env,
            extra_body=hide_named(self.extra_body)[0],
            connections=self.connections,
            session_header=self.session_header,
            trace_context=self.trace_context,
            headers=tuple(sorted(self.headers)),
            labels=LabelsSection(**self.labels.model_dump()),
            launch=None if self.launch is None else self.launch.to_manifest(),
            proxy=None if self._proxy is None else self._proxy.url,
        )


def load_target(spec: str, environ: Mapping[str, str], settings: Sequence[str] = ()) -> Endpoint:
    """The endpoint of a URL or of a YAML target file. `settings` are keys of such a file set on top
    of it, e.g. `labels.gpus=8`.

    The API key (variable `api_key_env` of the file, else OPENAI_API_KEY if set) and the proxy come
    from `environ`. Raises TargetFileError with a line per mistake, UsageError for an unusable
    proxy.
    """
    path = Path(spec)
    if not spec or is_url(spec) or not (path.suffix in _SUFFIXES or path.exists()):
        parse_url(spec)  # raises
        if settings:
            return read_target(write_document({"url": spec}), spec, environ, settings=settings)
        try:
            return _with_environment(Endpoint(url=spec), environ)
        except ValueError as problem:
            raise TargetFileError(str(problem)) from None
    try:
        text = read_file(path).decode()
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
    """The endpoint of the text of a target file, with `settings` on top. `name` is for messages;
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
        ca_cert = folder / endpoint.ca_cert
        endpoint = endpoint.model_copy(update={"ca_cert": ca_cert})
        if not ca_cert.is_file():
            file.note(("ca_cert",), f"no such file: {ca_cert}")
    if endpoint.launch is not None:
        endpoint = endpoint.model_copy(update={"launch": _placed(endpoint.launch, file, folder)})
    try:
        endpoint = _with_environment(endpoint, environ)
    except ValueError as problem:
        file.note(("api_key_env",), str(problem))
    file.raise_mistakes()
    return endpoint


def _placed(launch: Launch, file: Document, folder: Path) -> Launch:
    """The launch with `cwd` relative to `folder` resolved; mistakes are noted in the file."""
    if "url" in file.values:
        file.note(
            ("url",),
            "a launched server's URL follows from launch.host and launch.port; remove url or "
            "launch",
        )
    if launch.cwd is None:
        return launch
    cwd = folder / launch.cwd
    if not cwd.is_dir():
        file.note(("launch", "cwd"), f"no such directory: {cwd}")
    return launch.model_copy(update={"cwd": cwd})


def _with_environment(endpoint: Endpoint, environ: Mapping[str, str]) -> Endpoint:
    """The endpoint with its API key and its proxy, if the environment has them. Raises
    ValueError, which never holds the key, for an unusable key or a named variable that is not set.
    """
    complete = _with_key(endpoint, environ)
    if token := environ.get(OPERATOR_TOKEN, "").strip():
        _check_header(f"the value of {OPERATOR_TOKEN}", token)
        complete = complete.with_operator_token(token)
    if endpoint.launch is None:  # a launched server is on this machine
        complete._proxy = chosen_proxy(endpoint.address, environ)
    return complete


def _with_key(endpoint: Endpoint, environ: Mapping[str, str]) -> Endpoint:
    variable = endpoint.api_key_env or DEFAULT_KEY_ENV
    key = environ.get(variable, "").strip()
    if not key:
        if endpoint.api_key_env is None:
            return endpoint.model_copy()
        raise ValueError(
            f"environment variable {variable} is not set; export {variable}=… or remove the line"
        )
    _check_header(f"the value of {variable}", key)
    keyed = endpoint.model_copy(update={"api_key_env": variable})
    keyed._api_key = SecretStr(key)
    return keyed


@contextmanager
def _as_value_error() -> Iterator[None]:
    """A TargetFileError as a ValueError, to which pydantic attaches the key."""
    try:
        yield
    except TargetFileError as error:
        raise ValueError(str(error)) from None


def _check_header(name: str, value: str) -> None:
    """Raises ValueError, which never quotes the value, for a value with characters that no header
    may hold (RFC 9110 §5.5).
    """
    if not value.isascii() or not value.isprintable():
        raise ValueError(f"{name} has characters that an HTTP header cannot carry")
