"""The codec between the workload's requests and the HTTP bodies of an API. Opens no socket."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
from pydantic import Field

from loadgen.manifest.json_section import JsonObject
from loadgen.records import FinishReason
from loadgen.registry import Plugin, Registry

_SPECIAL = re.compile(rb'["\\\x00-\x1f]')
_MAX_DIGITS = 9
_ZERO = ord("0")


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the workload: a prompt and a number of output tokens.

    `output_tokens` is exact where the server accepts `ignore_eos`, and an upper limit otherwise.
    `messages`, if not empty, replaces `prompt` (multi-turn); each is (role, content), and the role
    `REASONING` holds the reasoning of the answer after it. `fields` are further fields of the body,
    e.g. `tools`; `messages` among them replace both. `priority` 0 and an empty `tenant` are not
    sent, because not every server accepts these fields. `…_slo_s` are the limits of this request,
    its own or those of its class; None: no limit.
    """

    prompt: str
    output_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    messages: tuple[tuple[str, str], ...] = ()
    fields: JsonObject = field(default_factory=dict)
    priority: int = 0
    tenant: str = ""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    e2e_slo_s: float | None = None


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """Method, path (relative to the base URL, e.g. `/v1/chat/completions`), the headers that the
    codec adds, and the body.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Usage(msgspec.Struct, frozen=True):
    """Token counts stated by the server; None: not stated. On a chunk before the last they are
    running totals.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Delta(msgspec.Struct, frozen=True):
    """The content of a server-sent event.

    `is_token`: the event carries at least one generated token (content, reasoning or a tool call).
    `is_answer`: content, not reasoning. `usage` may come with any event; `error` is the message of
    an in-band error. `is_unknown`: an event that is none of the API's, to be skipped. `choice`: the
    index of the choice that the tokens belong to, -1 for tokens of several choices.

    A msgspec struct, because it is built for each event: a frozen dataclass of eight fields takes
    11 times as long to build (4.4 µs against 0.4 µs, measured together), more than decoding the
    JSON.
    """

    is_token: bool = False
    is_answer: bool = False
    text: str = ""
    finish_reason: FinishReason = FinishReason.none
    usage: Usage | None = None
    error: str | None = None
    is_done: bool = False
    server: Mapping[str, float] = {}  # timings stated by the server, seconds
    is_unknown: bool = False
    choice: int = 0
    results: int = 0  # vectors or scores of a whole answer without tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """The bytes that most events of an answer share, so that those events need no JSON decoding.

    An event of this shape is `before`, a text, and the pieces of `after` with a whole number
    between each two. The text holds only characters that stand for themselves in JSON, and the
    numbers are at most 999 999 999. Such an event decodes to `delta`, except for the text and for
    number `count_index` (from 0), if it is not None: the output tokens so far.
    """

    before: bytes
    after: tuple[bytes, ...]
    delta: Delta
    count_index: int | None = None

    def read(self, events: Sequence[bytes]) -> list[int | None]:
        """The output tokens so far of each event, 0 where the shape has no such number; None for an
        event of another shape."""
        texts, counts = self._counted(events) if self.after[1:] else self._uncounted(events)
        joined = b",".join(texts)  # a special character is rare: search all texts at once
        try:
            joined.decode()
            all_literal = not _SPECIAL.search(joined)
        except UnicodeDecodeError:
            all_literal = False
        good = texts if all_literal else [text if is_literal(text) else b"" for text in texts]
        return [count if text else None for text, count in zip(good, counts, strict=True)]

    def _uncounted(self, events: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """The text of each event, empty for an event of another shape, and zeros as counts."""
        before, after = self.before, self.after[0]
        start, stop = len(before), -len(after)
        texts = [
            event[start:stop] if event.startswith(before) and event.endswith(after) else b""
            for event in events
        ]
        return texts, [0] * len(texts)

    def _counted(self, events: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """The text and the count of each event.

        In nearly every event each number grows by 1. The bytes after the
        text are therefore predicted and compared, and parsed only where the prediction fails."""
        before, start = self.before, len(self.before)
        form = b"%d".join(piece.replace(b"%", b"%%") for piece in self.after)
        numbers: tuple[int, ...] = ()
        texts, counts = [], []
        for event in events:
            text, count = b"", 0
            if event.startswith(before):
                numbers = tuple([number + 1 for number in numbers])
                if numbers and event.endswith(after := form % numbers):
                    text = event[start : -len(after)]
                else:
                    text, numbers = self._parsed(event)
                if numbers and self.count_index is not None:
                    count = numbers[self.count_index]
            texts.append(text)
            counts.append(count)
        return texts, counts

    def _parsed(self, event: bytes) -> tuple[bytes, tuple[int, ...]]:
        """The text and the numbers of an event that starts with `before`; both empty for an event
        of another shape."""
        end = event.find(b'"', len(self.before))
        rest, numbers = event[end:], []
        if not rest.startswith(self.after[0]):
            return b"", ()
        rest = rest[len(self.after[0]) :]
        for piece in self.after[1:]:
            number, _, rest = rest.partition(piece)
            if not _is_number(number):
                return b"", ()
            numbers.append(int(number))
        return (b"", ()) if rest else (event[len(self.before) : end], tuple(numbers))


def _is_number(text: bytes) -> bool:
    """Whether a text is a whole number in JSON (RFC 8259 section 6) of at most nine digits."""
    return text.isdigit() and len(text) <= _MAX_DIGITS and (text[0] != _ZERO or len(text) == 1)


def is_literal(text: bytes) -> bool:
    """Whether a text is not empty and each of its characters stands for itself in a JSON string
    (RFC 8259 section 7)."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and not _SPECIAL.search(text)


_TOKENS_WITHOUT_TEXT = 16  # the end of the answer, and the marks around reasoning and channels


def is_possible_count(tokens: int, n_chunks: int, text_bytes: int | None) -> bool:
    """Whether an answer in `n_chunks` chunks with `text_bytes` bytes of text in UTF-8 (None:
    unknown) can have so many tokens: at least as many as chunks, and at most as many as bytes plus
    a few tokens without text."""
    most = tokens if text_bytes is None else text_bytes + _TOKENS_WITHOUT_TEXT
    return n_chunks <= tokens <= most


def is_refusal(status: int) -> bool:
    """Whether a status refuses the request itself (RFC 9110 section 15.5), rather than its time
    (408, 425) or the load (429)."""
    return 400 <= status < 500 and status not in (408, 425, 429)


class Adapter(Plugin, ABC):
    """A codec. Its fields are optional features of a request; the preflight switches off those
    that the server rejects.

    `model` is the API's model field. `ignore_eos` and `min_tokens` request exact output lengths,
    `include_usage` token counts at the end of the stream, `continuous_usage` running counts on
    every chunk. Without `sends_temperature` the server's default temperature applies. Without
    `stream` answers are requested as a whole. `sends_slos` sends the limits of each request (the
    bundled engine schedules by them; other servers may reject the fields). `extra_body` is merged
    last (`merge_body`).
    """

    names_events: ClassVar[bool] = False
    """Whether the events of the API have names (`event:`): an event that cannot be decoded is then
    a fault of the stream under any name."""
    has_exact_lengths: ClassVar[bool] = True
    """Whether servers of the API document a field that makes answers as long as requested."""
    results: ClassVar[str] = ""
    """What answers hold in place of tokens, as a plural noun; "" for tokens. Such answers come
    whole."""

    model: str = ""
    ignore_eos: bool = True
    min_tokens: bool = True
    sends_temperature: bool = True
    include_usage: bool = True
    continuous_usage: bool = False
    sends_slos: bool = False
    stream: bool = True
    extra_body: JsonObject = Field(default_factory=dict)

    @abstractmethod
    def encode(self, request: Request) -> HttpRequest: ...

    def sequence_tokens(self, input_tokens: int, output_tokens: int) -> int:
        """The tokens of the longest sequence of a request, which the model's maximum limits."""
        return input_tokens + output_tokens

    @property
    def requests_exact_lengths(self) -> bool:
        """Whether requests, as they are sent, ask for answers of exactly `output_tokens`."""
        return self.ignore_eos

    @property
    def requested_model(self) -> str:
        """The model that requests name as they are sent; "" for none."""
        return self.model

    def stated_model(self, event: bytes) -> str:
        """The model that an event states; "" if it states none. Called for the first events of an
        answer only."""
        return ""

    @abstractmethod
    def decode(self, event: bytes) -> Delta:
        """Decode the data of an event (undecoded bytes, without `data:`). Raises ValueError for
        data that violates the API.
        """

    def decode_all(self, events: Sequence[bytes]) -> list[Delta]:
        """Decode many events; a codec may override this with a faster way. Raises ValueError if any
        event violates the API; `decode` then finds the event.
        """
        return [self.decode(event) for event in events]

    def shape(self, first: bytes, second: bytes) -> Shape | None:
        """The shape of two events that differ only in their text (and in counts). None for other
        events, and in a codec that cannot guarantee the rule of `Shape`."""
        return None

    @abstractmethod
    def looks_like_token(self, fragment: bytes) -> bool:
        """Guess, by a cheap search, whether raw stream bytes carry a generated token. Used during
        the run (live view, stop rules); results come from `decode`.
        """

    def looks_like_answer(self, fragment: bytes) -> bool:
        """Guess likewise whether raw stream bytes carry a token of the answer, not of reasoning. In
        an API without reasoning every token is."""
        return self.looks_like_token(fragment)


TARGETS: Registry[Adapter] = Registry("slobench.targets", "API")
