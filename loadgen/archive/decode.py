"""Decodes recorded bytes into tokens, usage and errors; runs after the request."""

from __future__ import annotations

import math
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import NamedTuple

import httptools
import msgspec

from loadgen.archive.exchange import Exchange
from loadgen.archive.sse import (
    BEFORE,
    BEHIND,
    BOM,
    HEARTBEATS,
    N_FRAMING,
    SseDecoder,
    SseEvent,
    plain_events,
    without_names,
)
from loadgen.records import (
    IN_ANSWER,
    IN_PLACE,
    IN_STREAM,
    OTHER_MODEL,
    FinishReason,
    Status,
    TokenSource,
)
from targets.base import Adapter, Delta, Shape, Usage, is_possible_count

_OK = Status.ok  # looking up an enum member takes 0.2 µs in Python 3.11
_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_EXCERPT = 200
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")  # no JSON or HTML begins so
_DATA_NAMES = (b"", b"message", b"data")  # events of another name need not be of the API
_LINE_START = 20
_ERROR_OBJECT = re.compile(rb'"error": ?["{]')
_COUNTS = (b'"completion_tokens":', b'"output_tokens":')
_NUMBER = re.compile(rb" ?(\d{1,9})\b")
_RETRY_AFTER = re.compile(r"^retry-after(-ms)?: *(\d{1,9}(?:\.\d*)?)$", re.MULTILINE)
# The limit itself, not what is left of it, which differs in every answer.
_LIMIT = re.compile(r"(?!.*(?:remaining|reset|used))[^:]*rate-?limit-?[^:]*(?:limit|policy)[^:]*:")
SEVERAL_CHOICES = "the stream has several choices, which cannot be told apart in time"
_SHAPED_PARTS = 32  # below it, to decode every event takes less time than to find their shape
_TEXT_BYTES = 128  # of an answer, by which it is compared with others
_MODEL_PARTS = 4  # first parts in which the model is looked for
_SHAPE_PARTS = 4  # first parts compared: perhaps a role chunk, and two tokens of different text


class EventRun(NamedTuple):
    """Consecutive events that differ only in their text and perhaps in their running token count.

    `received_ns` has a time per event; `delta` is the content of the last event; `running` has
    each event's running token count, None if the events have no such count. `first_bytes` and
    `n_bytes` are the bytes of text in the first event and in all, and `texts` the text of each, in
    UTF-8; None: those of `delta`.
    """

    received_ns: list[int]
    delta: Delta
    running: list[int] | None = None
    first_bytes: int | None = None
    n_bytes: int = 0
    texts: Iterable[bytes] | None = None


@dataclass(slots=True)
class _Text:
    """Bytes of text in the first token chunk and in all of an answer; unknown if a token has no
    text (a tool call). The events with reasoning, and the bytes of their text. `start`: the first
    `_TEXT_BYTES` of all text, or more."""

    first_bytes: int = 0
    n_bytes: int = 0
    is_known: bool = True
    reasoning_events: int = 0
    reasoning_bytes: int = 0
    start: bytes = b""

    def add(self, run: EventRun) -> None:
        first, n_bytes, texts = run.first_bytes, run.n_bytes, run.texts
        if first is None or texts is None:
            text = run.delta.text.encode("utf-8", "surrogatepass")
            first, n_bytes, texts = len(text), len(text), (text,)
        if len(self.start) < _TEXT_BYTES:
            self._begin(texts)
        self.is_known = self.is_known and n_bytes > 0
        self.first_bytes = self.first_bytes or first
        self.n_bytes += n_bytes
        if run.delta.text and not run.delta.is_answer:
            self.reasoning_events += len(run.received_ns)
            self.reasoning_bytes += n_bytes

    def _begin(self, texts: Iterable[bytes]) -> None:
        for text in texts:
            self.start += text
            if len(self.start) >= _TEXT_BYTES:
                return

    @property
    def crc32(self) -> int:
        return zlib.crc32(self.start[:_TEXT_BYTES]) if self.start else 0


@dataclass(slots=True)
class _Choices:
    """The choices that the tokens of a stream belong to. Some servers number the tokens in the
    place of the choice's index; of several choices an index comes back after another."""

    last: int | None = None
    earlier: set[int] = field(default_factory=set)

    def returns_to(self, index: int) -> bool:
        """Whether an event has tokens of several choices, or of a choice before the last."""
        if index == self.last:
            return False
        if self.last is not None:
            self.earlier.add(self.last)
        self.last = index
        return index < 0 or index in self.earlier


@dataclass(slots=True)
class Decoded:
    """Content of a response. Times as in Exchange; `chunk_*` have an entry per token chunk."""

    status: Status = Status.ok
    error: str = ""  # of a successful answer: a note on its connection
    n_bytes: int = 0
    first_chunk_ns: int = 0
    first_token_ns: int = 0
    first_answer_ns: int = 0
    last_token_ns: int = 0
    finish_ns: int = 0
    chunk_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    first_chunk_tokens: int = 0  # estimated, if `chunk_tokens` are unknown
    output_tokens: int = 0
    token_source: TokenSource = TokenSource.none
    input_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason = FinishReason.none
    server: dict[str, float] = field(default_factory=dict)
    hidden_tokens: int = 0
    unknown_events: int = 0
    retry_after_s: float = math.nan
    answer_crc32: int = 0
    results: int = 0
    reasoning_tokens: int = 0

    def fail(self, status: Status, error: str) -> None:
        """Records a failure, unless an earlier failure is recorded."""
        if self.status is Status.ok:
            self.status, self.error = status, error


def quick_status(exchange: Exchange) -> Status:
    """The status without decoding, for live views, stop rules and the release of child rows. An
    error inside a 200 response counts as `ok` here, and a 200 response in which no token was seen
    as `stream_error`: only decoding finds a token in a form that the quick search misses."""
    if exchange.outcome is not None:
        return exchange.outcome
    if exchange.http_status != 200:
        return Status.http_error
    return _OK if exchange.first_guess_ns else Status.stream_error


def ends_suspiciously(exchange: Exchange, least_tokens: int = 0) -> bool:
    """Whether the end of an answer looks like an error, or states fewer output tokens than
    `least_tokens`: only decoding shows whether it is so. A search of the last bytes, because it is
    made for every answer during the run."""
    end = exchange.end_bytes()
    if b'"error":' in end and _ERROR_OBJECT.search(end):
        return True
    if b"event: error" in end or b"event:error" in end:
        return True
    if not least_tokens:
        return False
    at = max(end.rfind(name) for name in _COUNTS)
    count = _NUMBER.match(end, end.find(b":", at) + 1) if at >= 0 else None
    return count is not None and int(count[1]) < least_tokens


def decode(exchange: Exchange, adapter: Adapter) -> Decoded:
    """Decodes a response. Never raises for a malformed body: its status is `stream_error` with an
    excerpt, and the tokens before the fault are kept."""
    body = Body(exchange)
    result = Decoded(n_bytes=body.n_bytes, first_chunk_ns=body.times[0] if body.times else 0)
    if exchange.outcome is not None:
        result.fail(exchange.outcome, exchange.error)
    if exchange.http_status not in (0, 200):
        result.fail(Status.http_error, _http_error(exchange, body.data, adapter))
        result.retry_after_s = retry_after_s(exchange.limits)
        return result
    if not exchange.headers_ns:
        return result
    if exchange.content_encoding not in ("", "identity"):
        encoding = exchange.content_encoding
        result.fail(
            Status.stream_error,
            f"content-encoding {encoding}, but the request accepts identity only",
        )
        return result
    if not adapter.stream:
        _read_whole(body, adapter, result)
        if result.status is Status.ok:
            result.error = _other_model(body, adapter)
        return result
    if "text/event-stream" not in exchange.content_type.lower() and not _has_events(body.data):
        message = _message(body.data, adapter)
        if message:
            result.fail(Status.stream_error, f"{IN_PLACE}{message}")
            return result
        kind = exchange.content_type or "no content-type"
        result.fail(Status.stream_error, f"not an event stream ({kind}): {_excerpt(body.data)}")
        return result
    _read_stream(body, adapter, result)
    if result.status is Status.ok:
        # a note: the answer was complete (`AFTER_DONE`), or is that of another model
        result.error = exchange.error or _other_model(body, adapter)
    return result


def _other_model(body: Body, adapter: Adapter) -> str:
    """The note on an answer that states another model than requested; "" for none. The first part
    that states a model counts: a search in every event would cost as much as decoding it."""
    stated = filter(None, map(adapter.stated_model, body.parts[:_MODEL_PARTS]))
    model, requested = next(stated, ""), adapter.requested_model
    return f"{OTHER_MODEL}{model}" if model and requested and model != requested else ""


def _read_whole(body: Body, adapter: Adapter, result: Decoded) -> None:
    """Reads an answer that is not streamed. It has no first token in time."""
    result.first_chunk_ns = 0
    try:
        delta = adapter.decode(body.data)
    except ValueError:
        delta = Delta(is_unknown=True)
    if delta.error is not None:
        result.fail(Status.stream_error, f"{IN_ANSWER}{delta.error}")
    elif delta.is_unknown:
        result.fail(Status.stream_error, f"not a whole answer: {_excerpt(body.data)}")
    elif not delta.is_token and not delta.results:
        result.fail(Status.stream_error, "answered without a single token")
    result.finish_reason = delta.finish_reason
    result.server.update(delta.server)
    usage = delta.usage or Usage()
    result.input_tokens, result.cached_tokens = usage.input_tokens or 0, usage.cached_tokens or 0
    result.results = delta.results
    if not delta.is_token and not delta.results:
        return
    result.last_token_ns = body.times[-1]
    if delta.results:
        result.answer_crc32 = zlib.crc32(delta.text.encode()[:_TEXT_BYTES])
        return
    result.chunk_ns = [body.times[-1]]
    text = _Text(is_known=False)  # reasoning, too, came with the answer
    text.add(EventRun([], delta))
    result.answer_crc32 = text.crc32
    _count(result, usage.output_tokens, 0, [0], text)
    result.reasoning_tokens = min(usage.reasoning_tokens or 0, result.output_tokens)


def _has_events(body: bytes) -> bool:
    """Whether a body of another content type begins like an event stream: some servers and
    gateways state `text/plain` or nothing."""
    return body[:_LINE_START].removeprefix(BOM).lstrip(b"\r\n").startswith(_FIELDS)


def answer_texts(exchange: Exchange, adapter: Adapter) -> tuple[str, str]:
    """The answer and the reasoning of a successful response, for the prompt of a later turn. Of a
    whole answer the reasoning is unknown; unreadable events are skipped."""
    if not adapter.stream:
        try:
            delta = adapter.decode(Body(exchange).data)
        except ValueError:
            return "", ""
        return (delta.text if delta.is_answer else ""), ""
    answer = reasoning = ""
    for run in _one_by_one(Body(exchange), adapter, Decoded()):
        if run.delta.is_answer:
            answer += run.delta.text
        else:
            reasoning += run.delta.text
    return answer, reasoning


def _read_stream(body: Body, adapter: Adapter, result: Decoded) -> None:
    running_tokens: list[int] = []  # usage.completion_tokens after each token chunk, if stated
    usage_tokens: int | None = None
    reasoning_tokens = 0
    is_done, text, choices = False, _Text(), _Choices()
    forms = (_at_once, _by_shape) if len(body.parts) < _SHAPED_PARTS else (_by_shape, _at_once)
    plain = body.without_names() if adapter.names_events else body
    runs = next(filter(None, (form(plain, adapter) for form in forms)), None)
    for run in runs or _one_by_one(body, adapter, result):
        received_ns, delta, running = run.received_ns, run.delta, run.running
        if delta.is_unknown:
            result.unknown_events += 1
            continue
        if delta.usage is not None:
            usage = delta.usage
            result.input_tokens = usage.input_tokens or result.input_tokens
            result.cached_tokens = usage.cached_tokens or result.cached_tokens
            reasoning_tokens = usage.reasoning_tokens or reasoning_tokens
            if usage.output_tokens is not None:
                usage_tokens = usage.output_tokens
        if delta.is_token:
            if choices.returns_to(delta.choice):
                result.fail(Status.stream_error, SEVERAL_CHOICES)
            if delta.is_answer and not result.first_answer_ns:
                result.first_answer_ns = received_ns[0]
            result.chunk_ns += received_ns
            stated = usage_tokens if delta.usage and usage_tokens else 0
            running_tokens += running or [stated] * len(received_ns)
            text.add(run)
        else:
            is_done = is_done or delta.is_done
            result.finish_ns = received_ns[-1] if delta.finish_reason else result.finish_ns
        if delta.error is not None:
            result.fail(Status.stream_error, f"{IN_STREAM}{delta.error}")
        if delta.finish_reason:
            result.finish_reason = delta.finish_reason
        if delta.server:
            result.server.update(delta.server)
    if result.chunk_ns:
        result.first_token_ns, result.last_token_ns = result.chunk_ns[0], result.chunk_ns[-1]
    result.answer_crc32 = text.crc32
    _count(result, usage_tokens, reasoning_tokens, running_tokens, text)
    result.reasoning_tokens = _reasoning(result, reasoning_tokens, text)
    _check_end(result, is_done)


def _by_shape(body: Body, adapter: Adapter) -> list[EventRun] | None:
    """The events of a body in the form that most servers send: an event per part, nearly all of
    the same shape. Only events of other shapes are decoded. None for a body of any other form."""
    shape = _shape(body.parts[:_SHAPE_PARTS], adapter)
    if shape is None:
        return None
    counts = shape.read(body.parts)
    others = [index for index, count in enumerate(counts) if count is None]
    other_events = [plain_events(body.parts[index]) for index in others]
    try:
        events_to_decode = [event for events in other_events for event in events or ()]
        deltas = iter(adapter.decode_all(events_to_decode))
    except ValueError:
        return None
    runs: list[EventRun] = []
    start = 0
    for index, events in zip(others, other_events, strict=True):
        if events is None:
            return None
        if index > start:
            runs.append(_shaped_run(shape, body, slice(start, index), counts[start:index]))
        runs += [EventRun([body.times[index]], next(deltas)) for _ in events]
        start = index + 1
    if start < len(counts):
        end = len(counts)
        runs.append(_shaped_run(shape, body, slice(start, end), counts[start:]))
    return runs


def _shaped_run(shape: Shape, body: Body, at: slice, counts: Sequence[int | None]) -> EventRun:
    """The parts `at` of a body as a run. Digits after the text count as bytes of text, so `n_bytes`
    may be a few too high."""
    delta, running = shape.delta, [count or 0 for count in counts]
    received_ns, parts = body.times[at], body.parts[at]
    frame = len(shape.before) + sum(map(len, shape.after))
    begin = len(shape.before)
    texts = (part[begin : part.find(b'"', begin)] for part in parts)  # lazy: few are read
    more = len(parts[0]) - frame, sum(map(len, parts)) - frame * len(parts), texts
    if shape.count_index is None or delta.usage is None:
        return EventRun(received_ns, delta, None, *more)
    usage = msgspec.structs.replace(delta.usage, output_tokens=running[-1])
    return EventRun(received_ns, msgspec.structs.replace(delta, usage=usage), running, *more)


def _shape(parts: list[bytes], adapter: Adapter) -> Shape | None:
    """The shape shared by two consecutive parts, each a single event of the plain form; None
    without such a pair."""
    for first, second in pairwise(map(plain_events, parts)):
        if first is not None and second is not None and len(first) == len(second) == 1:
            shape = adapter.shape(first[0], second[0])
            if shape is not None:
                *behind, last = shape.after
                return replace(shape, before=BEFORE + shape.before, after=(*behind, last + BEHIND))
    return None


def _at_once(body: Body, adapter: Adapter) -> list[EventRun] | None:
    """The events of a body in the plain form without a fault, each with the time of the read that
    completed it; None for any other body. Takes a quarter of the time of `_one_by_one`."""
    events = plain_events(body.data)
    if events is None:
        return None
    try:
        deltas = adapter.decode_all(events)
    except ValueError:
        return None
    part_ends = list(accumulate(map(len, body.parts)))
    ends = accumulate(len(event) + N_FRAMING for event in events)
    parts = (bisect_left(part_ends, end) for end in ends)
    return [EventRun([body.times[part]], delta) for part, delta in zip(parts, deltas, strict=True)]


def _one_by_one(body: Body, adapter: Adapter, result: Decoded) -> Iterator[EventRun]:
    """The events of any body, each with the time of the read that completed it. An event that
    cannot be decoded becomes the failure of `result`."""
    sse = SseDecoder()
    for received_ns, part in zip(body.times, body.parts, strict=True):
        for event in sse.feed(part):
            if (delta := _delta(event, adapter, result)) is not None:
                yield EventRun([received_ns], delta)
    last = sse.flush() if body.times else None
    if last is not None and (delta := _delta(last, adapter, result)) is not None:
        yield EventRun([body.times[-1]], delta)


def _delta(event: SseEvent, adapter: Adapter, result: Decoded) -> Delta | None:
    is_error = b"error" in event.name.lower()
    if not (event.data.strip() or is_error):
        return None  # keeps the connection alive
    if event.name in HEARTBEATS and not adapter.names_events:
        return Delta(is_unknown=True)
    failure = f"{IN_STREAM}{_excerpt(event.data)}" if is_error else ""
    try:
        delta = adapter.decode(event.data)
    except ValueError as error:
        is_named = adapter.names_events and event.name not in HEARTBEATS
        if not is_named and event.name.lower() not in _DATA_NAMES and not is_error:
            return Delta(is_unknown=True)
        result.fail(Status.stream_error, failure or f"event not understood: {error}")
        return None
    if failure and delta.error is None:
        result.fail(Status.stream_error, failure)
    return delta


def _hidden(usage_tokens: int, reasoning_tokens: int, n_chunks: int, text: _Text) -> int:
    """The reasoning tokens in a usage that were not streamed: all, if no reasoning came and the
    other tokens are enough for the chunks. Of a streamed summary, too short to hold the reasoning,
    each event counts as a token."""
    if not n_chunks:
        return 0
    if not text.reasoning_events:  # else it came as content, between <think> and </think>
        return reasoning_tokens if usage_tokens - reasoning_tokens >= n_chunks else 0
    n_shown = min(reasoning_tokens, text.reasoning_events)
    is_shown = is_possible_count(reasoning_tokens, n_shown, text.reasoning_bytes)
    return 0 if is_shown or not text.is_known else reasoning_tokens - n_shown


def _reasoning(result: Decoded, stated: int, text: _Text) -> int:
    """The reasoning tokens of a stream: as `stated`, else the events with reasoning where each
    event is a token, else their share of the text."""
    tokens = result.output_tokens
    if stated or not text.reasoning_events:
        return min(stated, tokens)
    if tokens == len(result.chunk_ns) or not text.n_bytes:
        return min(text.reasoning_events, tokens)
    return min(round(tokens * text.reasoning_bytes / text.n_bytes), tokens)


def _count(
    result: Decoded, usage_tokens: int | None, reasoning: int, running: list[int], text: _Text
) -> None:
    """Sets the output tokens, from `usage` if stated and possible, else by counting chunks, and the
    tokens of each chunk: from running counts, else 1 if there are as many chunks as tokens, else 0
    (unknown). If usage gives only the total, the tokens of the first chunk are estimated from its
    share of the text, because TPOT depends on them. A usage below its `reasoning` tokens leaves
    them out, and is completed.
    """
    n_chunks, hidden = len(result.chunk_ns), 0
    text_bytes = text.n_bytes if text.is_known else None
    streamed = usage_tokens
    if usage_tokens is not None and streamed is not None:
        usage_tokens += reasoning if reasoning > usage_tokens else 0
        hidden = _hidden(usage_tokens, reasoning, n_chunks, text)
        streamed = usage_tokens - hidden
    is_usable = streamed is not None and is_possible_count(streamed, n_chunks, text_bytes)
    if usage_tokens is not None and (is_usable or not n_chunks):
        result.output_tokens, result.token_source = usage_tokens, TokenSource.usage
        result.hidden_tokens = hidden
    elif n_chunks:
        source = TokenSource.chunks if usage_tokens is None else TokenSource.distrusted
        result.output_tokens, result.token_source = n_chunks, source
    grows = n_chunks == 1 or (bool(running) and running[0] < running[-1])  # no repeated total
    if is_usable and grows and all(running) and running == sorted(running):
        shown = [tokens - hidden for tokens in running] if running[0] > hidden else running
        result.chunk_tokens = [now - before for before, now in pairwise([0, *shown])]
        return
    if streamed is not None and is_usable and n_chunks == 1:
        result.chunk_tokens = [streamed]
        return
    result.chunk_tokens = [int(streamed == n_chunks)] * n_chunks
    if streamed is not None and is_usable and streamed > n_chunks > 1 and text_bytes:
        most = streamed - (n_chunks - 1)
        share = round(streamed * text.first_bytes / text_bytes)
        result.first_chunk_tokens = max(1, min(most, share))


def _check_end(result: Decoded, is_done: bool) -> None:
    n_chunks = len(result.chunk_ns)
    if not is_done and result.finish_reason is FinishReason.none:
        reason = f"stream ended after {n_chunks} token chunks, without finish_reason and [DONE]"
        result.fail(Status.stream_error, reason)
    elif not n_chunks:
        result.fail(Status.stream_error, "stream ended without a single token")


def _http_error(exchange: Exchange, body: bytes, adapter: Adapter) -> str:
    """The server's message if the body is in OpenAI's error format, else the start of the body."""
    message = _message(body, adapter)
    text = f"HTTP {exchange.http_status}: {message or _excerpt(body) or 'empty body'}"
    stated = [line for line in exchange.limits.splitlines() if _LIMIT.match(line)]
    return f"{text} ({'; '.join(stated)})" if stated else text


def retry_after_s(limits: str) -> float:
    """Seconds to wait by the headers of a failed answer (`Exchange.limits`), NaN without a number.
    RFC 9110 section 10.2.3; `retry-after-ms` is OpenAI's and Azure's."""
    found = _RETRY_AFTER.search(limits)
    if found is None:
        return math.nan
    return float(found[2]) * (1e-3 if found[1] else 1.0)


def _message(body: bytes, adapter: Adapter) -> str | None:
    """The message of a body that is an error in a known form."""
    try:
        return adapter.decode(body).error
    except ValueError:
        return None


def _excerpt(data: bytes) -> str:
    text = " ".join(data[:_EXCERPT].decode("utf-8", "replace").split())
    return text + ("…" if len(data) > _EXCERPT else "")


class Body:
    """A response body without its HTTP framing.

    `parts[i]` arrived with the read that returned at `times[i]` (ns). Of a chunked body each
    chunk's data is a part, or several if it came in several reads. The body ends where the
    framing is invalid; the transport has recorded that error.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.times: list[int] = exchange.times
        self.parts: list[bytes] = exchange.parts
        if exchange.is_chunked:
            self.times, self.parts = _unchunked(exchange.times, exchange.parts)
        elif exchange.length is not None and exchange.n_bytes > exchange.length:
            self.times, self.parts = _cut(exchange.times, exchange.parts, exchange.length)

    def without_names(self) -> Body:
        """The body without the names of its events, with the same times."""
        body = copy(self)
        body.parts = [without_names(part) for part in self.parts]
        return body

    @property
    def data(self) -> bytes:
        return b"".join(self.parts)

    @property
    def n_bytes(self) -> int:
        return sum(map(len, self.parts))


def _unchunked(times: list[int], reads: list[bytes]) -> tuple[list[int], list[bytes]]:
    """Removes the chunked framing with llhttp. Bytes behind the end of the message are left out."""
    part_times: list[int] = []
    parts: list[bytes] = []
    following: list[bytes] = []
    ends: list[None] = []

    def on_body(data: bytes) -> None:
        (following if ends else parts).append(data)

    parser = httptools.HttpResponseParser(
        SimpleNamespace(on_body=on_body, on_message_complete=lambda: ends.append(None))
    )
    parser.feed_data(_HEAD)
    try:
        for time, read in zip(times, reads, strict=True):
            parser.feed_data(read)
            part_times += [time] * (len(parts) - len(part_times))
    except httptools.HttpParserError:
        part_times += [time] * (len(parts) - len(part_times))
    return part_times, parts


def _cut(times: list[int], reads: list[bytes], length: int) -> tuple[list[int], list[bytes]]:
    """The first `length` bytes of the reads."""
    part_times: list[int] = []
    parts: list[bytes] = []
    for time, read in zip(times, reads, strict=True):
        if length > 0:
            part_times.append(time)
            parts.append(read[:length])
            length -= len(read)
    return part_times, parts
