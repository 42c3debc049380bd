"""What the two OpenAI codecs share: the typed shapes of a stream's events and the merging of
request bodies.

The shapes are liberal where servers differ (vLLM, SGLang, llama.cpp, TGI, gateways): a field that
is absent or null means nothing, an unknown field is skipped without being built. They are strict
where a wrong value would corrupt a measurement: token counts are integers that fit the request
table, text is valid UTF-8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from loadgen.records import FinishReason
from targets.base import Adapter, Delta, Request, Shape, Usage, is_literal
from targets.safe_text import strip_controls

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # fits the request table and any sum
Choice = TypeVar("Choice", bound=msgspec.Struct)

DONE = Delta(is_done=True)
JSON_HEADERS = (("content-type", "application/json"), ("accept", "text/event-stream"))
_ERROR_CHARS = 300
_FINISH = {
    "": FinishReason.none,
    "stop": FinishReason.stop,
    "eos_token": FinishReason.stop,  # TGI
    "stop_sequence": FinishReason.stop,  # TGI
    "length": FinishReason.length,
    "tool_calls": FinishReason.tool_calls,
    "function_call": FinishReason.tool_calls,
    "content_filter": FinishReason.content_filter,
}


class PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: Count | None = None


class UsageWire(msgspec.Struct):
    """`reasoning_tokens` at the top is SGLang's place for it, in the details OpenAI's."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    reasoning_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    def read(self) -> Usage:
        details, made = self.prompt_tokens_details, self.completion_tokens_details
        reasoning = made.reasoning_tokens if made is not None else None
        return Usage(
            input_tokens=self.prompt_tokens,
            output_tokens=self.completion_tokens,
            cached_tokens=details.cached_tokens if details is not None else None,
            reasoning_tokens=self.reasoning_tokens if reasoning is None else reasoning,
        )


class StreamEvent(msgspec.Struct, Generic[Choice]):
    """One event of a stream. `object`/`message` are how some vLLM versions spell an error without
    an `error` key.
    """

    choices: list[Choice] | None = None
    usage: UsageWire | None = None
    error: Any = None  # an object or a bare string, built only when it is there
    timings: dict[str, Any] | None = None
    object: Any = None
    message: Any = None


_WHOLE_NUMBER = re.compile(rb"(?<=[:,\[ ])(0|[1-9][0-9]{0,8})(?=[,\]} ])")
_TRIED = 987_654_321

EventT = TypeVar("EventT")


def parse_event(decoder: msgspec.json.Decoder[EventT], event: bytes) -> EventT:
    """Decode one event's JSON. Raises ValueError with a short message that quotes at most the
    event's head.
    """
    try:
        return decoder.decode(event)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        head = event[:60].decode("utf-8", "replace")
        raise ValueError(f"not an event of this API: {error}; it starts {head!r}") from None


def parse_events(decoder: msgspec.json.Decoder[EventT], events: Sequence[bytes]) -> list[EventT]:
    """Decode many events' JSON objects, none of which holds a line end, in one call. Raises
    ValueError if any is not of this API.
    """
    if not events:
        return []
    lines = b"\n".join(events)
    # JSON never has `}` before `{`, so with one such pair at every line end no object spans two
    # lines, and with as many objects as lines each line is one.
    if lines.count(b"}\n{") != len(events) - 1:
        raise ValueError("not an event of this API: no object")
    try:
        parsed = decoder.decode_lines(lines)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if len(parsed) != len(events):
        raise ValueError("not an event of this API: two objects")
    return parsed


def shape_of(decode: Callable[[bytes], Delta], first: bytes, second: bytes) -> Shape | None:
    """The shape of two events that differ in one string alone, which is their text, and behind it
    perhaps in whole numbers, one of which may be the tokens so far.

    It is that for any other text, too: bytes between two quotes that may be either of two texts and
    stay JSON are a whole string of it, and a codec that tells both of them as the text of an event
    that is the same otherwise copies that string. What the numbers mean is tried: an event with
    quite other numbers in their places must say the same but for the count.
    """
    said = decode(first)
    if not said.is_token or (other := decode(second)).text == said.text:
        return None
    text, other_text = said.text.encode(), other.text.encode()
    if not is_literal(text) or not is_literal(other_text):
        return None
    at = first.find(b'"' + text + b'"')
    while at >= 0:
        start, end = at + 1, at + 1 + len(text)
        if second.startswith(first[:start] + other_text + b'"'):
            behind = _around_numbers(first[end:], second[start + len(other_text) :])
            if behind is not None:
                return _proven(decode, Shape(first[:start], behind, said), text, other)
        at = first.find(b'"' + text + b'"', at + 1)
    return None


def _around_numbers(one: bytes, other: bytes) -> tuple[bytes, ...] | None:
    """What is around the numbers in which two texts differ; None where they differ otherwise."""
    if one == other:
        return (one,)
    pieces, others = _WHOLE_NUMBER.split(one), _WHOLE_NUMBER.split(other)
    if len(pieces) != len(others):
        return None
    behind = [b""]
    for place, (piece, twin) in enumerate(zip(pieces, others, strict=True)):
        if piece == twin:
            behind[-1] += piece
        elif place % 2:  # a number
            behind.append(b"")
        else:
            return None
    return tuple(behind)


def _proven(
    decode: Callable[[bytes], Delta], shape: Shape, text: bytes, other: Delta
) -> Shape | None:
    """The shape with what it counts, if an event with quite other numbers says the same but for
    that count; where nothing but the text varies, if the other event does."""
    said, n_numbers = shape.says, len(shape.behind) - 1
    if n_numbers == 0:
        return shape if msgspec.structs.replace(other, text=said.text) == said else None
    numbers = [_TRIED - which for which in range(n_numbers)]
    written = (b"%d%b" % pair for pair in zip(numbers, shape.behind[1:], strict=True))
    found = decode(b"".join([shape.before, text, shape.behind[0], *written]))
    counted = None if found.usage is None else found.usage.output_tokens
    if counted not in numbers or said.usage is None:
        return shape if found == said else None
    usage = msgspec.structs.replace(said.usage, output_tokens=counted)
    if msgspec.structs.replace(said, usage=usage) != found:
        return None
    return replace(shape, says=found, counts=numbers.index(counted))


def split_done(events: Sequence[bytes]) -> tuple[Sequence[bytes], list[Delta]]:
    """Events without the mark that ends most streams, and what it says."""
    has_done = bool(events) and events[-1] == b"[DONE]"
    return (events[:-1], [DONE]) if has_done else (events, [])


def finish_reason(word: str | None) -> FinishReason:
    """The server's word as our enum; a word nobody documented is `other`."""
    return FinishReason.none if word is None else _FINISH.get(word, FinishReason.other)


def error_message(event: StreamEvent[Any]) -> str | None:
    """The message of an in-band error in one line of at most 300 characters, or None when the event
    is none.
    """
    if event.error is not None:
        return _one_line(event.error)
    if event.object == "error":
        return _one_line({"message": event.message})
    return None


def server_timings(timings: Mapping[str, Any]) -> dict[str, float]:
    """Stated timings in seconds: `*_s` keys as they are (our engine), `*_ms` keys converted
    (llama.cpp); others skipped, and so is what is no finite number.
    """
    seconds: dict[str, float] = {}
    for key, stated in timings.items():
        value = _finite(stated)
        if value is None:
            continue
        if key.endswith("_s"):
            seconds[key] = value
        elif key.endswith("_ms"):
            seconds[key.removesuffix("_ms") + "_s"] = value * 1e-3
    return seconds


def tail(event: StreamEvent[Any]) -> dict[str, Any]:
    """The Delta fields that live outside `choices`: usage, error, timings.

    Raises ValueError for an object that has none of them and no choices either: no chunk of this
    API looks so.
    """
    message = error_message(event)
    if event.choices is None and event.usage is None and message is None and not event.timings:
        raise ValueError("not an event of this API: it has neither choices nor usage nor error")
    return {
        "usage": event.usage.read() if event.usage is not None else None,
        "error": message,
        "server": server_timings(event.timings) if event.timings else {},
    }


def common_body(adapter: Adapter, request: Request, limit_field: str) -> dict[str, Any]:
    """The body fields chat and completions share, before `extra_body`. Streaming always: there is
    no TTFT without it.
    """
    body: dict[str, Any] = {
        limit_field: request.output_tokens,
        "temperature": request.temperature,
        "stream": True,
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if request.priority:
        body["priority"] = request.priority
    if request.tenant:
        body["tenant"] = request.tenant
    if adapter.sends_promises:
        body |= _promises_ms(request)
    if adapter.include_usage:
        options = {"include_usage": True}
        if adapter.continuous_usage:
            options["continuous_usage_stats"] = True
        body["stream_options"] = options
    if adapter.ignore_eos:
        body["ignore_eos"] = True
        body["min_tokens"] = request.output_tokens
    return body


def _promises_ms(request: Request) -> dict[str, float]:
    """What the request was promised, in the bundled engine's words."""
    named = {
        "ttft_slo_ms": request.ttft_slo_s,
        "tpot_slo_ms": request.tpot_slo_s,
        "deadline_ms": request.e2e_slo_s,
    }
    return {name: round(limit_s * 1e3, 6) for name, limit_s in named.items() if limit_s is not None}


def merge_body(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` laid over `body`: mappings merge key by key, anything else replaces, and null removes
    the key.
    """
    merged = dict(body)
    for key, value in extra.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = merge_body(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def has_text(fragment: bytes, key: bytes) -> bool:
    """Whether some occurrence of `key` (with its colon) in raw bytes is followed by a string that
    is not empty.
    """
    at = fragment.find(key)
    while at >= 0:
        value = fragment[at + len(key) : at + len(key) + 3].lstrip()
        if value[:1] == b'"' and value[1:2] not in (b'"', b""):
            return True
        at = fragment.find(key, at + 1)
    return False


def _finite(stated: Any) -> float | None:
    if isinstance(stated, bool) or not isinstance(stated, int | float):
        return None
    try:
        value = float(stated)
    except OverflowError:  # JSON's integers have no limit
        return None
    return value if math.isfinite(value) else None


def _one_line(error: Any) -> str:
    if isinstance(error, Mapping):
        inner = error.get("message")
        error = inner if isinstance(inner, str) and inner else msgspec.json.encode(error).decode()
    text = strip_controls(" ".join(str(error).split()))
    return text[:_ERROR_CHARS] or "an error without a message"
