"""The common part of the two OpenAI codecs: the typed form of a stream's events, the fields of a
request body, and the codec around them.

The types are liberal where servers differ (vLLM, SGLang, llama.cpp, TGI, gateways): an absent field
and null mean the same, and an unknown field is skipped without being built. They are strict where a
wrong value would corrupt a measurement: a token count is an integer that fits the request table,
and text is valid UTF-8.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from loadgen.manifest.json_section import JsonObject
from loadgen.records import FinishReason
from targets.base import Adapter, Delta, HttpRequest, Request, Shape, Usage, is_literal
from targets.lenient_json import decode_usable
from targets.openai_errors import bare_error, base_response_error, stated_error
from targets.openai_usage import MOST_TOKENS, UsageWire

Choice = TypeVar("Choice", bound=msgspec.Struct)

_DONE = Delta(is_done=True)
_UNKNOWN = Delta(is_unknown=True)
_STREAM_HEADERS = (("content-type", "application/json"), ("accept", "text/event-stream"))
_WHOLE_HEADERS = (("content-type", "application/json"), ("accept", "application/json"))
_FINISH = {
    "": FinishReason.none,
    "null": FinishReason.none,  # written as a string in every event before the last
    "none": FinishReason.none,
    "stop": FinishReason.stop,
    "eos_token": FinishReason.stop,  # TGI
    "stop_sequence": FinishReason.stop,  # TGI
    "length": FinishReason.length,
    "max_tokens": FinishReason.length,  # Gemini, Anthropic, through gateways
    "tool_calls": FinishReason.tool_calls,
    "function_call": FinishReason.tool_calls,
    "content_filter": FinishReason.content_filter,
}
FAILED_FINISHES = (
    "abort",  # vLLM, SGLang, LMDeploy
    "aborted",
    "cancelled",  # TensorRT-LLM
    "canceled",
    "error",  # vLLM, LMDeploy, Mistral, gateways
    "insufficient_system_resource",  # DeepSeek
    "timeout",  # TensorRT-LLM
)
"""Finish reasons of an answer that the server gave up. The table with all sources is in
docs/metrics.md."""


class ExtensionWire(msgspec.Struct):
    """An extension of Groq, which states the usage also there, and an error only there."""

    usage: UsageWire | None = None
    error: Any = None


class StreamEvent(msgspec.Struct, Generic[Choice]):
    """An event of a stream. Some vLLM versions report an error by `object` and `message`, without
    an `error` key; MiniMax by `base_resp`.
    """

    choices: list[Choice] | None = None
    usage: UsageWire | None = None
    x_groq: ExtensionWire | None = None
    error: Any = None  # an object or a bare string
    timings: JsonObject | None = None
    object: Any = None
    message: Any = None
    base_resp: Any = None


_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape in JSON: a surrogate pair, half of a pair, or any other."""

HEARTBEAT_WORDS = (b"ping", b"heartbeat", b"keepalive", b"keep-alive")

_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)+")')
"""The model of an event. In a text the quotes around the key would be escaped."""

_CHUNK_OBJECTS = ("chat.completion.chunk", "text_completion")

_WHOLE_NUMBER = re.compile(rb"(?<=[:,\[ ])(0|[1-9][0-9]{0,8})(?=[,\]} ])")
_TRIAL_NUMBER = 987_654_321
_TRIAL_TOKENS = 37

EventT = TypeVar("EventT", bound=msgspec.Struct)


class OpenAICodec(Adapter):
    """The parts of a codec that do not depend on the API: request encoding and event decoding.
    `version` stands between the base URL and the path; "" for a base with a version of its own.
    `texts` are the members that are never absent: without its text an event would be no token.
    """

    path: ClassVar[str]  # after the version
    texts: ClassVar[frozenset[str]] = frozenset(("content", "text"))
    version: str = "/v1"
    decoder: ClassVar[msgspec.json.Decoder[Any]]

    @abstractmethod
    def prompt_fields(self, request: Request) -> JsonObject:
        """The body fields of the prompt and of the output limit."""

    def common_fields(self, request: Request) -> JsonObject:
        """The body fields that do not depend on the prompt, before `extra_body`."""
        return _common_fields(self, request)

    @staticmethod
    @abstractmethod
    def to_delta(event: Any) -> Delta:
        """The content of an event of type `decoder.type`."""

    def encode(self, request: Request) -> HttpRequest:
        body = {"model": self.model, **self.prompt_fields(request), **self.common_fields(request)}
        encoded = msgspec.json.encode(merge_body(body, self.extra_body))
        headers = _STREAM_HEADERS if self.stream else _WHOLE_HEADERS
        return HttpRequest("POST", self.version + self.path, headers, encoded)

    @property
    def requests_exact_lengths(self) -> bool:
        """By the body, because `extra_body` may remove the fields."""
        body = msgspec.json.decode(self.encode(Request("", _TRIAL_TOKENS)).body)
        return body.get("ignore_eos") is True or body.get("min_tokens") == _TRIAL_TOKENS

    @property
    def requested_model(self) -> str:
        return str(merge_body({"model": self.model}, self.extra_body).get("model", ""))

    def stated_model(self, event: bytes) -> str:
        match = _MODEL.search(event)
        if match is None:
            return ""
        try:
            return msgspec.json.decode(match[1], type=str)
        except ValueError:
            return ""

    def decode(self, event: bytes) -> Delta:
        if event.strip() == b"[DONE]":
            return _DONE
        if _is_foreign(event):
            return _UNKNOWN
        delta = self.to_delta(_parse_event(self.decoder, event, self.texts))
        return _unknown(event) if delta.is_unknown else delta

    def decode_all(self, events: Sequence[bytes]) -> list[Delta]:
        if type(self).decode is not OpenAICodec.decode:  # a subclass reads events its own way
            return super().decode_all(events)
        has_done = bool(events) and events[-1] == b"[DONE]"
        chunks = _parse_events(self.decoder, events[:-1] if has_done else events)
        deltas = [
            _unknown(event) if delta.is_unknown else delta
            for event, delta in zip(events, map(self.to_delta, chunks), strict=False)
        ]
        return [*deltas, _DONE] if has_done else deltas

    def shape(self, first: bytes, second: bytes) -> Shape | None:
        if type(self).decode is not OpenAICodec.decode:
            return None
        try:
            return _shape_of(self.decode, first, second)
        except ValueError:
            return None


def _parse_event(
    decoder: msgspec.json.Decoder[EventT], event: bytes, texts: frozenset[str]
) -> EventT:
    """Decode the JSON of an event. Half of a surrogate pair, which JSON's grammar allows (RFC 8259
    section 8.2) and the decoder does not, becomes U+FFFD: some servers cut an emoji in two. An
    optional member of another form is absent. Raises ValueError with a short message that quotes at
    most the start of the event.
    """
    try:
        return decoder.decode(event)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        whole = _ESCAPE.sub(lambda escape: rb"\ufffd" if escape["half"] else escape[0], event)
    if whole != event:
        return _parse_event(decoder, whole, texts)
    try:
        return decode_usable(event, decoder.type, texts)
    except (ValueError, RecursionError) as error:
        head = event[:60].decode("utf-8", "replace")
        raise ValueError(f"not an event of this API: {error}; it starts {head!r}") from None


def _is_foreign(event: bytes) -> bool:
    """Whether data is the bare name of a heartbeat, or JSON that is no object."""
    bare = event.strip()
    if bare[:1] == b"{":
        return False
    if bare.strip(b'[]"').lower() in HEARTBEAT_WORDS:
        return True
    try:
        msgspec.json.decode(event)
    except (ValueError, RecursionError):
        return False
    return True


def _unknown(event: bytes) -> Delta:
    """An event without any known member: skipped, unless it reports an error."""
    message = bare_error(event)
    return _UNKNOWN if message is None else Delta(error=message)


def _parse_events(decoder: msgspec.json.Decoder[EventT], events: Sequence[bytes]) -> list[EventT]:
    """Decode the JSON objects of many events at once; no event holds a line end. Raises
    ValueError if any of them is not of this API.
    """
    if not events:
        return []
    lines = b"\n".join(events)
    # JSON never has `}` before `{`, so with this pair at every line end no object spans two
    # lines, and with as many objects as lines each line is an object.
    if lines.count(b"}\n{") != len(events) - 1:
        raise ValueError("not an event of this API: no object")
    try:
        parsed = decoder.decode_lines(lines)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if len(parsed) != len(events):
        raise ValueError("not an event of this API: two objects")
    return parsed


def _shape_of(decode: Callable[[bytes], Delta], first: bytes, second: bytes) -> Shape | None:
    """The shape of two events that differ in a single string, which is their text, and possibly in
    whole numbers after it, among which may be the output tokens so far.

    The conclusion from two events to all others is sound. Bytes between two quotes that can be
    replaced by another text, with the event still valid JSON, are a whole string of it; a codec
    that returns both texts for otherwise equal events copies that string. The meaning of the
    numbers is tested: an event with different numbers must decode to the same Delta, except for the
    count.
    """
    delta = decode(first)
    if not delta.is_token or (other := decode(second)).text == delta.text:
        return None
    text, other_text = delta.text.encode(), other.text.encode()
    if not is_literal(text) or not is_literal(other_text):
        return None
    at = first.find(b'"' + text + b'"')
    while at >= 0:
        start, end = at + 1, at + 1 + len(text)
        if second.startswith(first[:start] + other_text + b'"'):
            after = _around_numbers(first[end:], second[start + len(other_text) :])
            if after is not None:
                return _verified(decode, Shape(first[:start], after, delta), text, other)
        at = first.find(b'"' + text + b'"', at + 1)
    return None


def _around_numbers(first: bytes, second: bytes) -> tuple[bytes, ...] | None:
    """The pieces between the numbers in which two texts differ; None if they differ elsewhere."""
    if first == second:
        return (first,)
    pieces, second_pieces = _WHOLE_NUMBER.split(first), _WHOLE_NUMBER.split(second)
    if len(pieces) != len(second_pieces):
        return None
    around = [b""]
    for place, (piece, second_piece) in enumerate(zip(pieces, second_pieces, strict=True)):
        if piece == second_piece:
            around[-1] += piece
        elif place % 2:  # a number
            around.append(b"")
        else:
            return None
    return tuple(around)


def _verified(
    decode: Callable[[bytes], Delta], shape: Shape, text: bytes, other: Delta
) -> Shape | None:
    """The shape with its `count_index`, if an event with trial numbers decodes to the same Delta
    except for the count. Without numbers, `other` must be the same Delta except for the text.
    """
    delta, n_numbers = shape.delta, len(shape.after) - 1
    if n_numbers == 0:
        return shape if msgspec.structs.replace(other, text=delta.text) == delta else None
    numbers = [_TRIAL_NUMBER - place for place in range(n_numbers)]
    written = (b"%d%b" % pair for pair in zip(numbers, shape.after[1:], strict=True))
    trial = decode(b"".join([shape.before, text, shape.after[0], *written]))
    count = None if trial.usage is None else trial.usage.output_tokens
    if count not in numbers or delta.usage is None:
        return shape if trial == delta else None
    usage = msgspec.structs.replace(delta.usage, output_tokens=count)
    if msgspec.structs.replace(delta, usage=usage) != trial:
        return None
    return replace(shape, delta=trial, count_index=numbers.index(count))


def finish_reason(word: str | None) -> FinishReason:
    """The enum member of a server's word; `other` for an undocumented word."""
    return FinishReason.none if word is None else _FINISH.get(word.lower(), FinishReason.other)


def failed_finish(word: str | None) -> str | None:
    """The error message of an answer that the server gave up; None for another finish reason."""
    if word is None or word.lower() not in FAILED_FINISHES:
        return None
    return f"finish_reason {word}"


def _error_message(event: StreamEvent[Any]) -> str | None:
    """The message of an in-band error outside of `choices`; None without one."""
    return (
        stated_error(event.error, event.message)
        or (stated_error(event.x_groq.error) if event.x_groq is not None else None)
        or base_response_error(event.base_resp)
    )


def server_timings(timings: Mapping[str, Any]) -> dict[str, float]:
    """Stated timings in seconds: `*_s` keys unchanged (the bundled engine), `*_ms` keys converted
    (llama.cpp). Other keys, and values that are no finite number, are skipped.
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


def _finite(stated: Any) -> float | None:
    if isinstance(stated, bool) or not isinstance(stated, int | float):
        return None
    try:
        value = float(stated)
    except OverflowError:  # JSON's integers have no limit
        return None
    return value if math.isfinite(value) else None


def is_plain(event: StreamEvent[Any]) -> bool:
    """Whether an event has no usage, error or timings outside `choices`."""
    return (
        event.usage is None
        and event.error is None
        and event.timings is None
        and event.x_groq is None
        and event.base_resp is None
    )


def joined_index(index: int | None, other: int | None) -> int:
    """The index of the choices in an event: of its only choice, -1 for several."""
    return (other or 0) if index is None else -1


def tail(
    event: StreamEvent[Any],
    finish: str | None,
    usage_in_choice: UsageWire | None = None,
    error_in_choice: str | None = None,
) -> JsonObject:
    """The Delta fields that are outside `choices`: usage, error, timings. `finish`,
    `usage_in_choice` (Moonshot's place for it) and `error_in_choice` are inside them; a finish
    reason may be an error. An object with none of them and without choices is unknown.
    """
    message, usage = _error_message(event) or error_in_choice, event.usage or usage_in_choice
    if usage is None and event.x_groq is not None:
        usage = event.x_groq.usage
    is_empty = event.choices is None and usage is None and message is None and not event.timings
    return {
        "usage": _usage_of(usage, event.timings),
        "error": message or failed_finish(finish),
        "server": server_timings(event.timings) if event.timings else {},
        # a chunk without choices keeps the connection alive
        "is_unknown": is_empty and event.object not in _CHUNK_OBJECTS,
    }


def _usage_of(stated: UsageWire | None, timings: JsonObject | None) -> Usage | None:
    """The usage. llama.cpp states cached prompt tokens as `timings.cache_n`."""
    usage = None if stated is None else stated.read()
    cached = timings.get("cache_n") if timings else None
    if type(cached) is not int or not 0 <= cached <= MOST_TOKENS:
        return usage
    usage = usage or Usage()
    if usage.cached_tokens is not None:
        return usage
    return msgspec.structs.replace(usage, cached_tokens=cached)


def _common_fields(adapter: Adapter, request: Request) -> JsonObject:
    """The body fields that chat and completions share, before `extra_body`."""
    fields: JsonObject = {"stream": adapter.stream}
    if adapter.sends_temperature:
        fields["temperature"] = request.temperature
    if request.seed is not None:
        fields["seed"] = request.seed
    if request.priority:
        fields["priority"] = request.priority
    if request.tenant:
        fields["tenant"] = request.tenant
    if adapter.sends_slos:
        fields |= _slos_ms(request)
    if adapter.include_usage and adapter.stream:
        options = {"include_usage": True}
        if adapter.continuous_usage:
            options["continuous_usage_stats"] = True
        fields["stream_options"] = options
    if adapter.ignore_eos:
        fields["ignore_eos"] = True
        if adapter.min_tokens:
            fields["min_tokens"] = request.output_tokens
    return fields


def _slos_ms(request: Request) -> dict[str, float]:
    """The limits of a request under the bundled engine's field names."""
    limits_s = {
        "ttft_slo_ms": request.ttft_slo_s,
        "tpot_slo_ms": request.tpot_slo_s,
        "deadline_ms": request.e2e_slo_s,
    }
    return {name: round(limit * 1e3, 6) for name, limit in limits_s.items() if limit is not None}


def merge_body(body: Mapping[str, Any], extra: Mapping[str, Any]) -> JsonObject:
    """`body` with `extra` merged into it: mappings merge key by key, null removes the key, and any
    other value replaces.
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
    """Whether raw bytes hold `key` (with its colon) followed by a string that is not empty."""
    at = fragment.find(key)
    while at >= 0:
        value = fragment[at + len(key) : at + len(key) + 3].lstrip()
        if value[:1] == b'"' and value[1:2] not in (b'"', b""):
            return True
        at = fragment.find(key, at + 1)
    return False
