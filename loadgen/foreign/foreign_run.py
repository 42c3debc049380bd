"""A result of another load generator, as the readers of this folder return it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from loadgen.errors import RunInvalid, UsageError
from loadgen.manifest.json_section import JsonSection, read_section
from loadgen.records import Status, TokenSource

S = TypeVar("S", bound=JsonSection)
MOST_TOKENS = 1_000_000_000
MOST_PER_S = 1e9
NO_SCHEDULE = (
    "no scheduled time: latency counts from the send, and queueing in the client is invisible"
)
NO_SEND_TIMES = "no send times: they are those of the requested load at equal gaps"
NO_CLIENT = "no measurement of the client: its own delays are not known"
NO_READS = "no reads: chunks that arrived together count one by one"
NO_LENGTHS = "no requested lengths: an answer that ended too early is not noticed"


@dataclass(frozen=True, slots=True)
class ForeignRequest:
    """A request; seconds on the tool's clock, NaN where it was not recorded or never happened.

    `due_s` is when it should have been sent. `gaps_s` are the gaps between its chunks, None where
    the tool does not record them. Numbers of tokens are 0 where unknown; `requested_tokens` is the
    length of the answer that was requested. `error` is "" for a successful request.
    """

    sent_s: float
    due_s: float = math.nan
    first_token_s: float = math.nan
    first_answer_s: float = math.nan
    last_token_s: float = math.nan
    done_s: float = math.nan
    gaps_s: Sequence[float] | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requested_tokens: int = 0
    first_chunk_tokens: int = 0
    token_source: TokenSource = TokenSource.usage
    status: Status = Status.ok
    http_status: int = 200
    error: str = ""
    is_warmup: bool = False


@dataclass(frozen=True, slots=True)
class ForeignRun:
    """A result: its requests, its load and its origin.

    `rate_per_s` is the mean rate requested, `users` the number of requests in flight of a closed
    loop; both are None where neither is stated, as with all requests at once. `arrivals` and
    `limits` are those keys of a scenario, `settings` further keys of the load that two runs must
    share to be compared. `missing` are clauses (`ImportedSection`). `started` is the start as an
    ISO 8601 time, "" where it is not recorded. `part` is the number of the result in its file, and
    `duration_s` the length of the run that the tool's rates count, None where it is not stated.
    Without `has_send_times` the times of the requests are those of the load.
    """

    tool: str
    requests: Sequence[ForeignRequest]
    missing: tuple[str, ...]
    version: str = ""
    part: int = 0
    duration_s: float | None = None
    has_send_times: bool = True
    model: str = ""
    url: str = ""
    api: str | None = None
    is_streamed: bool = True
    started: str = ""
    rate_per_s: float | None = None
    users: int | None = None
    arrivals: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


class JsonValue(NamedTuple):
    """A decoded JSON value of a file, and the number of its first line."""

    content: Any
    line: int

    def place(self, where: str) -> str:
        """The file, with the line unless it is the first."""
        return f"{where}:{self.line}" if self.line > 1 else where


def json_values(text: str, where: str) -> list[JsonValue]:
    """The JSON values of a text, one after the other. Raises UsageError with file, line and
    character for malformed or truncated JSON."""
    decoder, at, line, counted = json.JSONDecoder(), 0, 1, 0
    values: list[JsonValue] = []
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        line += text.count("\n", counted, at)
        counted = at
        if at == len(text):
            return values
        try:
            content, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise UsageError(_damage(error, text, where)) from None
        except RecursionError:
            raise UsageError(f"{where}:{line}: too deeply nested JSON") from None
        values.append(JsonValue(content, line))


def _damage(error: json.JSONDecodeError, text: str, where: str) -> str:
    is_cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
    what = "the file ends within a JSON value" if is_cut else error.msg
    return f"{where}:{error.lineno}: damaged JSON at character {error.colno}: {what}"


def as_section(content: object, section: type[S], where: str) -> S:
    """A JSON object of a tool as a typed section. Raises UsageError with the file, the key and its
    value for another form."""
    try:
        return read_section(content, section, where)
    except RunInvalid as error:
        raise UsageError(str(error)) from None


def check_tokens(value: float, where: str, key: str) -> int:
    """A number of tokens. Raises UsageError for a negative number or one beyond any answer."""
    if not 0 <= value <= MOST_TOKENS:
        raise UsageError(f"{where}: {key}: expected 0 to {MOST_TOKENS} tokens, found {value}")
    return round(value)


def check_rate(value: float, where: str, key: str) -> float:
    """A rate per second. Raises UsageError for a number that is none."""
    if not 0 < value <= MOST_PER_S:
        raise UsageError(f"{where}: {key}: expected a rate per second, found {value}")
    return value


def check_users(value: int | None, where: str, key: str) -> int | None:
    """The number of requests in flight, None: unlimited. Raises UsageError for none at all."""
    if value is not None and value < 1:
        raise UsageError(f"{where}: {key}: expected 1 request or more, found {value}")
    return value


def check_time(value: float, where: str, key: str) -> float:
    """A duration, seconds. Raises UsageError for a negative, infinite or undefined number."""
    if not 0 <= value < math.inf:
        raise UsageError(f"{where}: {key}: expected a time of 0 s or more, found {value}")
    return value
