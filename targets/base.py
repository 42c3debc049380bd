"""What a target is to the load generator: a codec between our requests and somebody's HTTP bodies.
No sockets here.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import Field

from loadgen.records import FinishReason
from loadgen.registry import Plugin, Registry

_SPECIAL = re.compile(rb'["\\\x00-\x1f]')
_MOST_DIGITS = 9
_ZERO = ord("0")


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the workload means it: text in, a number of tokens out.

    `output_tokens` is exact where the server accepts `ignore_eos`, at most otherwise. `messages`,
    when given, replaces `prompt` (multi-turn); each is (role, content). `priority` 0 and an empty
    `tenant` are not sent: not every server knows these words. `…_slo_s` is what this request was
    promised, by itself or as one of its class, None for nothing.
    """

    prompt: str
    output_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    messages: tuple[tuple[str, str], ...] = ()
    priority: int = 0
    tenant: str = ""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    e2e_slo_s: float | None = None


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """Method, path (relative to the base URL, e.g. `/v1/chat/completions`), headers of its own,
    body.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the server states them; `None` where it does not. On a chunk in mid-stream
    they are running totals.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Delta(msgspec.Struct, frozen=True):
    """What one server-sent event says.

    `is_token`: it carries at least one generated token (content, reasoning or a tool call).
    `is_answer`: content, not reasoning. `usage` may ride on any event; `error` is an in-band
    error's message.

    A msgspec struct because one is made per event: a frozen dataclass of eight fields takes 11
    times as long to build (4.4 µs against 0.4 µs, measured together), more than the JSON decoding
    itself.
    """

    is_token: bool = False
    is_answer: bool = False
    text: str = ""
    finish_reason: FinishReason = FinishReason.none
    usage: Usage | None = None
    error: str | None = None
    is_done: bool = False
    server: Mapping[str, float] = {}  # timings the server states, seconds


@dataclass(frozen=True, slots=True)
class Shape:
    """What most events of one answer look like: `before`, a text, and `behind` it pieces with a
    whole number between each two. Every event with a text of characters that stand for themselves
    in JSON, and with numbers up to 999 999 999, says what `says` says, but for the text and, where
    `counts` tells which of the numbers it is (from 0), the output tokens so far.
    """

    before: bytes
    behind: tuple[bytes, ...]
    says: Delta
    counts: int | None = None

    def read(self, events: Sequence[bytes]) -> list[int | None]:
        """Of each event the output tokens it counts, 0 where it counts none; None for an event that
        is not of this shape."""
        texts, counts = self._counted(events) if self.behind[1:] else self._uncounted(events)
        joined = b",".join(texts)  # nearly always there is no special character in any of them
        try:
            joined.decode()
            is_literal_all = not _SPECIAL.search(joined)
        except UnicodeDecodeError:
            is_literal_all = False
        good = texts if is_literal_all else [text if is_literal(text) else b"" for text in texts]
        return [count if text else None for text, count in zip(good, counts, strict=True)]

    def _uncounted(self, events: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """The text of each event, empty where it is not of this shape, and no counts."""
        before, after = self.before, self.behind[0]
        start, stop = len(before), -len(after)
        texts = [
            event[start:stop] if event.startswith(before) and event.endswith(after) else b""
            for event in events
        ]
        return texts, [0] * len(texts)

    def _counted(self, events: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """The same with counts. Nearly always every number is one more than in the event before:
        what is behind the text is then compared, and not taken apart."""
        before, start = self.before, len(self.before)
        form = b"%d".join(piece.replace(b"%", b"%%") for piece in self.behind)
        numbers: tuple[int, ...] = ()
        texts, counts = [], []
        for event in events:
            text, count = b"", 0
            if event.startswith(before):
                numbers = tuple([number + 1 for number in numbers])
                if numbers and event.endswith(after := form % numbers):
                    text = event[start : -len(after)]
                else:
                    text, numbers = self._apart(event)
                if numbers and self.counts is not None:
                    count = numbers[self.counts]
            texts.append(text)
            counts.append(count)
        return texts, counts

    def _apart(self, event: bytes) -> tuple[bytes, tuple[int, ...]]:
        """The text and the numbers of an event; nothing where it is not of this shape."""
        end = event.find(b'"', len(self.before))
        rest, numbers = event[end:], []
        if not rest.startswith(self.behind[0]):
            return b"", ()
        rest = rest[len(self.behind[0]) :]
        for piece in self.behind[1:]:
            number, _, rest = rest.partition(piece)
            if not _is_number(number):
                return b"", ()
            numbers.append(int(number))
        return (b"", ()) if rest else (event[len(self.before) : end], tuple(numbers))


def _is_number(text: bytes) -> bool:
    """Whether it is a whole number as JSON writes them (RFC 8259 section 6), and not too long."""
    return text.isdigit() and len(text) <= _MOST_DIGITS and (text[0] != _ZERO or len(text) == 1)


def is_literal(text: bytes) -> bool:
    """Whether every character stands for itself in a string of JSON (RFC 8259 section 7), and
    there is one at least."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and not _SPECIAL.search(text)


class Adapter(Plugin, ABC):
    """A codec. The fields are what is asked of the server; the probe switches off what it refuses.

    `model` is the API's model field. `ignore_eos` asks for exact output lengths, `include_usage`
    for token counts at the end of the stream, `continuous_usage` for running counts on every chunk.
    `sends_promises` tells the server what a request was promised (the bundled engine
    schedules by it; others may refuse the words). `extra_body` is merged last (`merge_body`).
    """

    model: str = ""
    ignore_eos: bool = True
    include_usage: bool = True
    continuous_usage: bool = False
    sends_promises: bool = False
    extra_body: dict[str, Any] = Field(default_factory=dict)

    @abstractmethod
    def encode(self, request: Request) -> HttpRequest: ...

    @abstractmethod
    def decode(self, event: bytes) -> Delta:
        """One event's data (without `data:`, undecoded). Raises ValueError when it is not what the
        API promises.
        """

    def decode_all(self, events: Sequence[bytes]) -> list[Delta]:
        """`decode` of each, for codecs that read many at once in less time. Raises ValueError when
        any of them is not what the API promises; which one, `decode` tells.
        """
        return [self.decode(event) for event in events]

    def shape(self, first: bytes, second: bytes) -> Shape | None:
        """The shape of two events that say the same but for their text; None where they do not, or
        where a codec cannot promise what a shape says."""
        return None

    @abstractmethod
    def looks_like_token(self, fragment: bytes) -> bool:
        """A cheap guess on raw stream bytes, for the live view only: does this read carry a
        generated token?
        """


TARGETS: Registry[Adapter] = Registry("slobench.targets", "API")
