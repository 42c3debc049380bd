"""The answer to a call: whole, or as server-sent events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from reference_engine.serving.wire.call import Call


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts as the model saw them, and seconds since arrival at the server."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None


# What stands around the text in an event of text alone.
_CHAT = (b'"delta":{"content":', b"}")
_COMPLETION = (b'"text":', b',"logprobs":null')
# `_usage` in the parts between what changes from token to token: a tenth of the time that writing
# it as JSON takes.
_COUNTS = (
    b',"usage":{"prompt_tokens": %d, "completion_tokens": ',
    b', "total_tokens": ',
    b', "prompt_tokens_details": {"cached_tokens": %d}}}\n\n',
)
_encode = msgspec.json.Encoder().encode

Piece = Callable[[str, int], bytes]  # the event of a text, and of how many tokens there are with it


class Chosen(NamedTuple):
    """A generated token: its text, where in the answer that begins (characters), and the natural
    logarithm of the probability it was chosen with at temperature 1."""

    text: str
    offset: int
    logprob: float


class Encoder:
    """Writes the answer to one call; everything that does not change is encoded once."""

    def __init__(self, call: Call, response_id: str, model: str, created: int) -> None:
        self._call = call
        self._head = {"id": response_id, "created": created, "model": model}
        kind = "chat.completion.chunk" if call.is_chat else "text_completion"
        head = json.dumps({**self._head, "object": kind}, ensure_ascii=False)
        self._opening = head[:-1].encode()
        before, after = _CHAT if call.is_chat else _COMPLETION
        self._before = b"data: " + self._opening + b',"choices":[{"index":0,' + before
        self._closing = after + b',"finish_reason":null}]'

    def role(self) -> bytes:
        """The event that opens a chat stream; nothing for completions."""
        if not self._call.is_chat:
            return b""
        return self._event(
            '{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}'
        )

    def pieces(self, n_input: int, n_cached: int, has_counts: bool) -> Piece:
        """Writes the events of a piece of text and nothing else, nearly all of them; `has_counts`
        with the counts that `continuous_usage_stats` asks for."""
        before, join = self._before, b"".join
        if not has_counts:
            after = self._closing + b"}\n\n"
            return lambda text, n_output: join((before, _quoted(text), after))
        counts, total, end = _COUNTS
        after, end = self._closing + counts % n_input, end % n_cached

        def counted(text: str, n_output: int) -> bytes:
            n_total = b"%d" % (n_input + n_output)
            return join((before, _quoted(text), after, b"%d" % n_output, total, n_total, end))

        return counted

    def event(
        self,
        text: str,
        finish_reason: str | None,
        usage: TokenUsage | None = None,
        chosen: Chosen | None = None,
    ) -> bytes:
        """The event of a piece of text, possibly empty, with all that may come with it; `usage`
        rides along for `continuous_usage_stats`."""
        quoted = json.dumps(text)
        reason = f'"{finish_reason}"' if finish_reason else "null"
        if self._call.is_chat:
            delta = f'{{"content":{quoted}}}' if text else "{}"
            more = f'"logprobs":{json.dumps(_chat_logprobs([chosen]))},' if chosen else ""
            choice = f'{{"index":0,"delta":{delta},{more}"finish_reason":{reason}}}'
        else:
            logprobs = json.dumps(_completion_logprobs([chosen])) if chosen else "null"
            choice = f'{{"index":0,"text":{quoted},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return self._event(choice, usage)

    def end(self, usage: TokenUsage | None) -> bytes:
        """The usage event, if asked for, and the terminator."""
        closing = b"data: [DONE]\n\n"
        if usage is None:
            return closing
        tail = json.dumps({"choices": [], "usage": _usage(usage), "timings": _timings(usage)})
        return b"data: " + self._opening + b"," + tail[1:].encode() + b"\n\n" + closing

    def whole(
        self, text: str, finish_reason: str, usage: TokenUsage, chosen: Sequence[Chosen] = ()
    ) -> bytes:
        """The body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._call.is_chat:
            kind = "chat.completion"
            choice["message"] = {"role": "assistant", "content": text}
        else:
            kind = "text_completion"
            choice["text"] = text
        if self._call.logprobs:
            logprobs = _chat_logprobs if self._call.is_chat else _completion_logprobs
            choice["logprobs"] = logprobs(chosen)
        return json.dumps(
            {
                **self._head,
                "object": kind,
                "choices": [choice],
                "usage": _usage(usage),
                "timings": _timings(usage),
            }
        ).encode()

    def _event(self, choice: str, usage: TokenUsage | None = None) -> bytes:
        counts = f',"usage":{json.dumps(_usage(usage))}' if usage is not None else ""
        return b"data: " + self._opening + f',"choices":[{choice}]{counts}}}\n\n'.encode()


def _quoted(text: str) -> bytes:
    try:
        return _encode(text)
    except UnicodeEncodeError:  # a lone surrogate is a JSON string and no UTF-8
        return json.dumps(text).encode()


def _chat_logprobs(chosen: Sequence[Chosen]) -> dict[str, Any]:
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in chosen
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(chosen: Sequence[Chosen]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in chosen],
        "token_logprobs": [token.logprob for token in chosen],
        "top_logprobs": None,
        "text_offset": [token.offset for token in chosen],
    }


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _timings(usage: TokenUsage) -> dict[str, float | None]:
    return {"queue_s": usage.queue_s, "ttft_s": usage.ttft_s, "e2e_s": usage.e2e_s}
