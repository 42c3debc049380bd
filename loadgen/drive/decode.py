"""From raw bytes with stamps to what they say: tokens, usage, errors. Runs after the request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from loadgen.drive.body import Body
from loadgen.drive.exchange import Exchange
from loadgen.drive.sse import BEFORE, BEHIND, N_FRAMING, SseDecoder, SseEvent, plain_events
from loadgen.records import FinishReason, Status, TokenSource
from targets.base import Adapter, Delta, Shape

_OK = Status.ok  # Python 3.11 takes 0.2 µs to look a member up
_EXCERPT = 200
_SHAPED_BY = 4  # parts at the beginning: a role, perhaps, and two tokens with different texts


class Said(NamedTuple):
    """Events that follow each other and say the same but for their text: when each came, what the
    last of them says, and of each the tokens so far, where they say the same but for that, too."""

    received_ns: list[int]
    delta: Delta
    running: list[int] | None = None


@dataclass(slots=True)
class Decoded:
    """One request, understood. Instants as in Exchange; `chunk_*`: one entry per token chunk."""

    status: Status = Status.ok
    error: str = ""
    n_bytes: int = 0
    first_chunk_ns: int = 0
    first_token_ns: int = 0
    first_answer_ns: int = 0
    last_token_ns: int = 0
    chunk_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    output_tokens: int = 0
    token_source: TokenSource = TokenSource.none
    input_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason = FinishReason.none
    server: dict[str, float] = field(default_factory=dict)

    def fail(self, status: Status, error: str) -> None:
        """The first failure is the one that is told."""
        if self.status is Status.ok:
            self.status, self.error = status, error


def quick_status(exchange: Exchange) -> Status:
    """The status as far as the transport can tell, without decoding: for live views, stop rules
    and children that must be released now."""
    if exchange.outcome is not None:
        return exchange.outcome
    if exchange.http_status != 200:
        return Status.http_error
    return _OK if exchange.first_guess_ns else Status.stream_error


def decode(exchange: Exchange, adapter: Adapter) -> Decoded:
    """Everything the bytes say. Never raises: a body that is not what the API promises is a
    `stream_error` with an excerpt, and tokens that came before it are kept."""
    body = Body(exchange)
    result = Decoded(n_bytes=body.n_bytes, first_chunk_ns=body.times[0] if body.times else 0)
    if exchange.outcome is not None:
        result.fail(exchange.outcome, exchange.error)
    if exchange.http_status not in (0, 200):
        result.fail(Status.http_error, _http_error(exchange, body.data, adapter))
        return result
    if not exchange.headers_ns:
        return result
    if exchange.content_encoding not in ("", "identity"):
        encoding = exchange.content_encoding
        result.fail(Status.stream_error, f"content-encoding {encoding}, though identity was asked")
        return result
    if "text/event-stream" not in exchange.content_type.lower():
        kind = exchange.content_type or "no content-type"
        result.fail(Status.stream_error, f"not an event stream ({kind}): {_excerpt(body.data)}")
        return result
    _read_stream(body, adapter, result)
    return result


def _read_stream(body: Body, adapter: Adapter, result: Decoded) -> None:
    running_tokens: list[int] = []  # usage.completion_tokens after each token chunk, if stated
    usage_tokens: int | None = None
    is_done = False
    said = _by_shape(body, adapter) or _at_once(body, adapter) or _one_by_one(body, adapter, result)
    for received_ns, delta, running in said:
        if delta.usage is not None:
            usage = delta.usage
            result.input_tokens = usage.input_tokens or result.input_tokens
            result.cached_tokens = usage.cached_tokens or result.cached_tokens
            if usage.output_tokens is not None:
                usage_tokens = usage.output_tokens
        if delta.is_token:
            if delta.is_answer and not result.first_answer_ns:
                result.first_answer_ns = received_ns[0]
            result.chunk_ns += received_ns
            stated = usage_tokens if delta.usage and usage_tokens else 0
            running_tokens += running or [stated] * len(received_ns)
        else:
            is_done = is_done or delta.is_done
        if delta.error is not None:
            result.fail(Status.stream_error, f"error in the stream: {delta.error}")
        if delta.finish_reason:
            result.finish_reason = delta.finish_reason
        if delta.server:
            result.server.update(delta.server)
    if result.chunk_ns:
        result.first_token_ns, result.last_token_ns = result.chunk_ns[0], result.chunk_ns[-1]
    _count(result, usage_tokens, running_tokens)
    _judge_end(result, is_done)


def _by_shape(body: Body, adapter: Adapter) -> list[Said] | None:
    """What each event says, where they come as most servers send them: each in a part of its own,
    and nearly all of one shape, which need not be decoded. None for any other body."""
    shape = _shape(body.parts[:_SHAPED_BY], adapter)
    if shape is None:
        return None
    counts = shape.read(body.parts)
    others = [place for place, count in enumerate(counts) if count is None]
    asked = [plain_events(body.parts[place]) for place in others]
    try:
        deltas = iter(adapter.decode_all([event for events in asked for event in events or ()]))
    except ValueError:
        return None
    said: list[Said] = []
    start = 0
    for place, events in zip(others, asked, strict=True):
        if events is None:
            return None
        if place > start:
            said.append(_alike(shape, body.times[start:place], counts[start:place]))
        said += [Said([body.times[place]], next(deltas)) for _ in events]
        start = place + 1
    if start < len(counts):
        said.append(_alike(shape, body.times[start:], counts[start:]))
    return said


def _alike(shape: Shape, received_ns: list[int], counts: Sequence[int | None]) -> Said:
    """A run of events of one shape."""
    says, running = shape.delta, [count or 0 for count in counts]
    if shape.count_index is None or says.usage is None:
        return Said(received_ns, says)
    usage = msgspec.structs.replace(says.usage, output_tokens=running[-1])
    return Said(received_ns, msgspec.structs.replace(says, usage=usage), running)


def _shape(parts: list[bytes], adapter: Adapter) -> Shape | None:
    """The shape that two of these parts have, each an event of the plain form."""
    for first, second in pairwise(parts):
        one, other = plain_events(first), plain_events(second)
        if one is not None and other is not None and len(one) == len(other) == 1:
            shape = adapter.shape(one[0], other[0])
            if shape is not None:
                *behind, last = shape.after
                return replace(shape, before=BEFORE + shape.before, after=(*behind, last + BEHIND))
    return None


def _at_once(body: Body, adapter: Adapter) -> list[Said] | None:
    """What each event says and when the read that completed it returned, for a body of the plain
    form without a fault; None for any other. Takes a quarter of the time of `_one_by_one`, which
    decides what a fault is."""
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
    return [Said([body.times[part]], delta) for part, delta in zip(parts, deltas, strict=True)]


def _one_by_one(body: Body, adapter: Adapter, result: Decoded) -> Iterator[Said]:
    """The same for any body; events that cannot be understood become the failure of `result`."""
    sse = SseDecoder()
    for received_ns, part in zip(body.times, body.parts, strict=True):
        for event in sse.feed(part):
            if (delta := _delta(event, adapter, result)) is not None:
                yield Said([received_ns], delta)
    last = sse.flush() if body.times else None
    if last is not None and (delta := _delta(last, adapter, result)) is not None:
        yield Said([body.times[-1]], delta)


def _delta(event: SseEvent, adapter: Adapter, result: Decoded) -> Delta | None:
    is_error = event.name == b"error"
    try:
        delta = adapter.decode(event.data)
    except ValueError as error:
        what = f"error in the stream: {_excerpt(event.data)}" if is_error else None
        result.fail(Status.stream_error, what or f"event not understood: {error}")
        return None
    if is_error and delta.error is None:
        result.fail(Status.stream_error, f"error in the stream: {_excerpt(event.data)}")
    return delta


def _count(result: Decoded, usage_tokens: int | None, running: list[int]) -> None:
    """Output tokens, from usage before chunks; tokens per chunk where they are known, else 0."""
    n_chunks = len(result.chunk_ns)
    if usage_tokens is not None:
        result.output_tokens, result.token_source = usage_tokens, TokenSource.usage
    elif n_chunks:
        result.output_tokens, result.token_source = n_chunks, TokenSource.chunks
    if running and all(running) and running == sorted(running):
        before = [0, *running[:-1]]
        result.chunk_tokens = [now - then for now, then in zip(running, before, strict=True)]
    else:
        known = usage_tokens == n_chunks
        result.chunk_tokens = [1 if known else 0] * n_chunks


def _judge_end(result: Decoded, is_done: bool) -> None:
    ended_properly = is_done or result.finish_reason is not FinishReason.none
    if not ended_properly:
        n = len(result.chunk_ns)
        result.fail(
            Status.stream_error,
            f"stream ended after {n} token chunks, without finish_reason and [DONE]",
        )
    elif not result.chunk_ns:
        result.fail(Status.stream_error, "stream ended without a single token")


def _http_error(exchange: Exchange, body: bytes, adapter: Adapter) -> str:
    """The server's own message where its body has one in OpenAI's shape, else the body's head."""
    try:
        message = adapter.decode(body).error
    except ValueError:
        message = None
    return f"HTTP {exchange.http_status}: {message or _excerpt(body) or 'empty body'}"


def _excerpt(data: bytes) -> str:
    text = " ".join(data[:_EXCERPT].decode("utf-8", "replace").split())
    return text + ("…" if len(data) > _EXCERPT else "")
