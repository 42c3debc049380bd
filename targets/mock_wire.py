"""The bytes that the mock server reads and writes: request bodies, replies in vLLM's form, refusals
in OpenAI's form, HTTP chunk framing.

Independent of the codecs on purpose: a mistake in shared code would hide itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import msgspec

from loadgen.manifest.json_section import JsonObject
from targets.mock_personas import PERSONAS, Fields, Wire
from targets.mock_script import WRONG_USAGE, Script

_WORDS = " the model of latency token and server time is stream a batch to request value cache"
WORDS = tuple(" " + word for word in _WORDS.split())
_COMMON = 6  # words with which every reply begins
WITHOUT_TOKENS = ("embeddings", "rerank")
"""APIs whose answers have no tokens."""
WITHOUT_TEMPLATE = ("completions", *WITHOUT_TOKENS)
"""APIs whose prompts no chat template surrounds."""
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
_SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    503: "Service Unavailable",
}


class RequestFields(msgspec.Struct):
    """The fields of a request body that the mock reads."""

    model: str = ""
    prompt: str = ""
    messages: list[JsonObject] = []
    input: str | list[JsonObject | str] = ""  # Responses, embeddings
    query: str = ""  # of a reranking, with the next two
    documents: list[str] = []
    texts: list[str] = []  # the documents for Text Embeddings Inference
    system: str | list[JsonObject] = ""  # Messages
    stream: bool = False
    stream_options: JsonObject | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    ignore_eos: bool = False
    min_tokens: int | None = None
    priority: int | None = None
    temperature: float | None = None

    def uses(self, key: str) -> bool:
        """Whether the body sets a field of REJECTABLE."""
        if key == "continuous_usage_stats":
            return key in (self.stream_options or {})
        if key == "temperature!=1":  # hosted reasoning models accept the default only
            return self.temperature not in (None, 1)
        value = getattr(self, key)
        return value is not None and value is not False and value != []

    @property
    def limit(self) -> int | None:
        named = (self.max_output_tokens, self.max_completion_tokens, self.max_tokens)
        return next((limit for limit in named if limit is not None), None)

    @property
    def n_texts(self) -> int:
        """The texts of a request for embeddings, or the documents of a reranking."""
        documents = self.documents or self.texts
        return len(documents or self.input) if documents or isinstance(self.input, list) else 1

    @property
    def text(self) -> str:
        """All text that the model reads: of a reranking the query with each document."""
        if documents := self.documents or self.texts:
            return "".join(self.query + document for document in documents)
        contents = [m.get(key) for m in self.messages for key in ("reasoning_content", "content")]
        items = self.input if isinstance(self.input, list) else [self.input]
        contents += [self.system]
        contents += [item if isinstance(item, str) else item.get("content") for item in items]
        return "".join(str(content) for content in contents if content) or self.prompt


_DECODER = msgspec.json.Decoder(RequestFields)


def read_request(body: bytes) -> RequestFields:
    """The fields of a request body. Raises ValueError for a body that is not JSON or has fields of
    a wrong type."""
    return _DECODER.decode(body)


def refuse(
    script: Script, fields: RequestFields, headers: dict[str, str], api: str
) -> tuple[int, bytes] | None:
    """The (status, body) of a refusal before anything is generated, as vLLM refuses; None for an
    acceptable request.
    """
    key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    if script.api_key is not None and key != script.api_key:
        return 401, error_body(401, "Incorrect API key provided", code="invalid_api_key")
    if script.request_id == "uuid" and not _is_uuid(headers.get("x-request-id")):
        return 400, error_body(400, "Invalid UUID in request header X-Request-ID")
    for key in script.rejects:
        if fields.uses(key):
            if script.refusal == "silent":
                return 400, error_body(400, "Bad request")
            message = f"Unrecognized request argument supplied: {key}"
            if key == "documents":  # the message of Text Embeddings Inference
                message = "Failed to deserialize the JSON body: missing field `texts`"
            if key == "max_tokens":  # the message of hosted reasoning models
                message = "'max_tokens' is not supported; use 'max_completion_tokens' instead."
            return 400, error_body(400, message, param=key.partition("!")[0])
    if fields.model and fields.model not in script.models:
        return 404, error_body(404, f"The model `{fields.model}` does not exist.", "model")
    if (fields.model or script.models[0]) in script.mute_models:
        return 400, error_body(400, f'"{fields.model}" does not support chat')
    limit = fields.limit
    if limit is not None and limit < 1:
        return 400, error_body(400, f"max_tokens is {limit}; at least 1", "max_tokens")
    answer_tokens = 0 if api in WITHOUT_TOKENS else limit or script.tokens
    total = script.prompt_tokens(fields.text, api not in WITHOUT_TEMPLATE) + answer_tokens
    if script.max_model_len is not None and total > script.max_model_len:
        message = f"maximum context length is {script.max_model_len} tokens, asked for {total}"
        return 400, error_body(400, message, code="context_length_exceeded")
    return None


def _is_uuid(text: str | None) -> bool:
    """Whether a header is absent or a UUID, as starlette-context's RequestIdPlugin decides for
    llama-cpp-python's server."""
    try:
        return text is None or bool(UUID(text))
    except ValueError:
        return False


@dataclass(frozen=True)
class ReplyText:
    """The events of a reply. `number` is part of its id; the bits of `key` decide which words are
    capitals, so that different prompts have different answers. `continuous` adds running usage to
    every event.
    """

    script: Script
    number: int
    key: int
    is_chat: bool
    model: str
    prompt_tokens: int
    tokens: int
    finish: str
    has_usage: bool
    continuous: bool
    head: str = field(init=False)

    def __post_init__(self) -> None:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        head = (
            f'data: {{"id":"{prefix}-mock{self.number:08x}","object":"{kind}",'
            f'"created":1760000000,"model":{json.dumps(self.model)},"choices":['
        )
        object.__setattr__(self, "head", head)  # the frozen dataclass's own field

    @property
    def stream_head(self) -> bytes:
        """The HTTP head of the stream, and what comes before its first event."""
        return _SSE_HEAD

    def frame(self, body: bytes) -> bytes:
        """A part of the body in the framing that `stream_head` states."""
        return chunk(body)

    @property
    def last_frame(self) -> bytes:
        """The end of the body; empty if the connection ends it."""
        return LAST_CHUNK

    @property
    def n_events(self) -> int:
        return -(-self.tokens // self.script.coalesce)

    def words(self, first: int, after: int) -> str:
        """The text of the tokens [first, after); of the same length for every key."""
        return "".join(map(self._word, range(first, after)))

    def _word(self, k: int) -> str:
        word = WORDS[k % len(WORDS)]
        return word.upper() if k >= _COMMON and self.key >> (k - _COMMON) & 1 else word

    def role(self) -> bytes:
        delta = '"delta":{"role":"assistant","content":""}'
        return self._event(f'{{"index":0,{delta},"logprobs":null,"finish_reason":null}}', 0)

    def tokens_in(self, event: int) -> int:
        """The number of tokens in event number `event`; the last event may hold fewer."""
        return min(self.script.coalesce, self.tokens - event * self.script.coalesce)

    def event(self, event: int) -> bytes:
        first = event * self.script.coalesce
        after = first + self.tokens_in(event)
        text = self.words(first, after)
        return self._event(self._choice(text, first, "null"), after)

    def broken_event(self) -> bytes:
        """An event whose text is not UTF-8."""
        return self._event(self._choice("@", self.script.reasoning, "null"), 0).replace(
            b"@", b"\xff\xfe"
        )

    def tail(self) -> bytes:
        """The finish reason, the usage if requested, and [DONE]."""
        end = self._event(self._choice("", self.tokens, f'"{self.finish}"'), self.tokens)
        if self.has_usage:
            end += f'{self.head}],"usage":{self._usage(self.tokens)}}}\n\n'.encode()
        return end + (DONE if self.script.done == "on" else b"")

    def refusal(self, body: bytes) -> bytes:
        """The body of a refusal in the API's form, from that in OpenAI's."""
        return body

    def error_event(self, message: str) -> bytes:
        """The end of a stream that fails after its status line."""
        return b"data: " + error_body(500, message) + b"\n\n" + DONE

    def whole(self) -> bytes:
        """The body of a reply that is not streamed."""
        text = self.words(0, self.tokens)
        content: JsonObject = {"text": text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": text}}
        body = {
            "id": f"mock{self.number:08x}",
            "object": "chat.completion" if self.is_chat else "text_completion",
            "model": self.model,
            "choices": [{"index": 0, **content, "finish_reason": self.finish}],
            "usage": json.loads(self._usage(self.tokens)),
        }
        return json.dumps(body).encode()

    def _choice(self, text: str, first: int, finish: str) -> str:
        if self.is_chat:
            key = "reasoning_content" if first < self.script.reasoning else "content"
            content = f'"delta":{{"{key}":"{text}"}}' if text else '"delta":{}'
        else:
            content = f'"text":"{text}"'
        rest = f'"logprobs":null,"finish_reason":{finish},"stop_reason":null'
        return f'{{"index":0,{content},{rest}}}'

    def _event(self, choice: str, tokens_so_far: int) -> bytes:
        usage = f',"usage":{self._usage(tokens_so_far)}' if self.continuous else ""
        return f"{self.head}{choice}]{usage}}}\n\n".encode()

    def _usage(self, tokens: int) -> str:
        tokens = int(tokens * WRONG_USAGE.get(self.script.usage, 1))
        return (
            f'{{"prompt_tokens":{self.prompt_tokens},"total_tokens":{self.prompt_tokens + tokens},'
            f'"completion_tokens":{tokens},'
            f'"prompt_tokens_details":{{"cached_tokens":{self.script.cached_tokens}}}}}'
        )


@dataclass(frozen=True)
class PersonaText(ReplyText):
    """The events of a chat reply in the form of the script's persona."""

    @property
    def wire(self) -> Wire:
        return PERSONAS[self.script.persona].wire

    @property
    def stream_head(self) -> bytes:
        status, framing = {
            "chunked": ("HTTP/1.1 200 OK", ["transfer-encoding: chunked"]),
            "close": ("HTTP/1.1 200 OK", ["connection: close"]),
            "http1.0": ("HTTP/1.0 200 OK", []),
        }[self.wire.framing]
        lines = [status, f"content-type: {self.wire.content_type}", *framing]
        head = "\r\n".join([*lines, "", ""]).encode()
        return head + (self.frame(self.wire.opening.encode()) if self.wire.opening else b"")

    def frame(self, body: bytes) -> bytes:
        return chunk(body) if self.wire.framing == "chunked" else body

    @property
    def last_frame(self) -> bytes:
        return LAST_CHUNK if self.wire.framing == "chunked" else b""

    def role(self) -> bytes:
        wire, first = self.wire, b""
        if wire.no_choices_first is not None:
            first = self._write([], 0, wire.no_choices_first)
        if wire.role != "own":
            return first
        return first + self._write([self._choice_of(wire.role_delta, None)], 0)

    def event(self, event: int) -> bytes:
        wire, first = self.wire, event * self.script.coalesce
        after = first + self.tokens_in(event)
        text: Any = self.words(first, after)
        is_reasoning = first < wire.reasoning
        if wire.is_parts:
            text = [{"type": "text", "text": text}]
        if is_reasoning and wire.reasoning_key == "reasoning_details":
            text = [{"type": "reasoning.text", "text": text}]
        delta = {**wire.delta, wire.reasoning_key if is_reasoning else wire.text_key: text}
        if wire.role == "each":
            delta = {"role": "assistant", **delta}
        is_end = wire.finish == "last" and event == self.n_events - 1
        choice = self._choice_of(delta, self._finish if is_end else wire.finish_before)
        return self._write([choice], after, wire.end_top if is_end else None, is_end=is_end)

    def tail(self) -> bytes:
        wire, out = self.wire, b""
        if wire.finish == "own":
            choice, end_top = self._choice_of(wire.end_delta, self._finish), wire.end_top
            if self._sends_usage and wire.usage == "choice":
                choice["usage"] = self._usage_of(self.tokens)
            elif self._sends_usage and wire.usage == "x_groq":
                end_top = {"x_groq": {"id": "req_1", "usage": self._usage_of(self.tokens)}}
            out = self._write([choice], self.tokens, end_top, is_end=True)
        if wire.usage == "own" and self._sends_usage:
            out += self._write([], self.tokens, {"usage": self._usage_of(self.tokens)})
        return out + (DONE if wire.has_done and self.script.done == "on" else b"")

    @property
    def _finish(self) -> str:
        return self.wire.finish_word or self.finish

    @property
    def _sends_usage(self) -> bool:
        return self.wire.usage != "never" and (self.has_usage or self.wire.usage_always)

    def _choice_of(self, delta: JsonObject | Fields, finish: str | None) -> JsonObject:
        return {"index": 0, "delta": delta, **self.wire.choice, "finish_reason": finish}

    def _write(
        self,
        choices: list[JsonObject],
        tokens: int,
        more: Fields | None = None,
        *,
        is_end: bool = False,
    ) -> bytes:
        wire = self.wire
        content: JsonObject = {
            "id": f"chatcmpl-mock{self.number:08x}",
            "object": "chat.completion.chunk",
            "created": 1760000000,
            "model": self.model,
            **wire.top,
            "choices": choices,
        }
        has_usage = wire.usage == "every" or (wire.usage == "end" and is_end)
        if self._sends_usage and has_usage:
            content["usage"] = self._usage_of(tokens)
        elif wire.usage_null:
            content["usage"] = None
        return wire.event(content | dict(more or {}))

    def _usage_of(self, tokens: int) -> JsonObject:
        usage: JsonObject = json.loads(self._usage(tokens))
        return usage | dict(self.wire.usage_more)


def chunk(body: bytes) -> bytes:
    """A chunk of a chunked body (RFC 9112 §7.1)."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def whole_response(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    """A response with a content length."""
    head = f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\ncontent-type: {content_type}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return json.dumps(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}
    ).encode()


def models_body(script: Script) -> bytes:
    """The body of `GET /v1/models` in vLLM's form."""
    length = {} if script.max_model_len is None else {"max_model_len": script.max_model_len}
    data = [
        {"id": name, "object": "model", "created": 1760000000, "owned_by": "slobench", **length}
        for name in script.models
    ]
    return json.dumps({"object": "list", "data": data}).encode()
