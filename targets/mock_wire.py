"""The mock server's bytes: replies in the shape vLLM gives them, error bodies in OpenAI's shape,
HTTP chunk framing.

Written apart from the codecs on purpose: a mistake mirrored in both could not be seen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from targets.mock_script import Script

_WORDS = " the model of latency token and server time is stream a batch to request value cache"
WORDS = tuple(" " + word for word in _WORDS.split())
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
SSE_HEAD = (
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


@dataclass(frozen=True)
class ReplyText:
    """The events of one reply. `number` makes its id; `continuous` puts running usage on every
    event.
    """

    script: Script
    number: int
    is_chat: bool
    model: str
    prompt_tokens: int
    tokens: int
    finish: str
    wants_usage: bool
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
    def n_events(self) -> int:
        return -(-self.tokens // self.script.coalesce)

    def role(self) -> bytes:
        said = '"delta":{"role":"assistant","content":""}'
        return self._event(f'{{"index":0,{said},"logprobs":null,"finish_reason":null}}', 0)

    def tokens_in(self, event: int) -> int:
        """How many tokens event number `event` carries; the last may carry fewer."""
        return min(self.script.coalesce, self.tokens - event * self.script.coalesce)

    def event(self, event: int) -> bytes:
        first = event * self.script.coalesce
        after = first + self.tokens_in(event)
        text = "".join(WORDS[k % len(WORDS)] for k in range(first, after))
        return self._event(self._choice(text, first, "null"), after)

    def broken_event(self) -> bytes:
        """An event whose text is not UTF-8."""
        return self._event(self._choice("@", self.script.reasoning, "null"), 0).replace(
            b"@", b"\xff\xfe"
        )

    def tail(self) -> bytes:
        """The finish reason, the usage if asked for, and [DONE]."""
        end = self._event(self._choice("", self.tokens, f'"{self.finish}"'), self.tokens)
        if self.wants_usage:
            end += f'{self.head}],"usage":{self._usage(self.tokens)}}}\n\n'.encode()
        return end + (DONE if self.script.done == "on" else b"")

    def whole(self) -> bytes:
        """The body of a reply that is not streamed."""
        text = "".join(WORDS[k % len(WORDS)] for k in range(self.tokens))
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            said = {"message": {"role": "assistant", "content": text}}
        body = {
            "id": f"mock{self.number:08x}",
            "object": "chat.completion" if self.is_chat else "text_completion",
            "model": self.model,
            "choices": [{"index": 0, **said, "finish_reason": self.finish}],
            "usage": json.loads(self._usage(self.tokens)),
        }
        return json.dumps(body).encode()

    def _choice(self, text: str, first: int, finish: str) -> str:
        if self.is_chat:
            key = "reasoning_content" if first < self.script.reasoning else "content"
            said = f'"delta":{{"{key}":"{text}"}}' if text else '"delta":{}'
        else:
            said = f'"text":"{text}"'
        return f'{{"index":0,{said},"logprobs":null,"finish_reason":{finish},"stop_reason":null}}'

    def _event(self, choice: str, tokens_so_far: int) -> bytes:
        usage = f',"usage":{self._usage(tokens_so_far)}' if self.continuous else ""
        return f"{self.head}{choice}]{usage}}}\n\n".encode()

    def _usage(self, tokens: int) -> str:
        return (
            f'{{"prompt_tokens":{self.prompt_tokens},"total_tokens":{self.prompt_tokens + tokens},'
            f'"completion_tokens":{tokens},'
            f'"prompt_tokens_details":{{"cached_tokens":{self.script.cached_tokens}}}}}'
        )


def chunk(body: bytes) -> bytes:
    """One chunk of a chunked body (RFC 9112 §7.1)."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def whole_response(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    """A response with a content length."""
    head = f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\ncontent-type: {content_type}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    """An error in OpenAI's shape."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return json.dumps(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}
    ).encode()


def models_body(script: Script) -> bytes:
    """`GET /v1/models` as vLLM answers it."""
    data: list[dict[str, Any]] = [
        {"id": name, "object": "model", "created": 1760000000, "owned_by": "slobench"}
        for name in script.models
    ]
    for model in data:
        if script.max_model_len is not None:
            model["max_model_len"] = script.max_model_len
    return json.dumps({"object": "list", "data": data}).encode()
