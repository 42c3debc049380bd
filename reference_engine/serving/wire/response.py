"""Response bodies: a JSON object, or server-sent events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from reference_engine.serving.wire.call import Call


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts as the model saw them, and times in seconds since arrival at the server, None
    until the response is complete."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None


# The JSON before and after the text in an event that carries text only.
_CHAT = (b'"delta":{"content":', b"}")
_COMPLETION = (b'"text":', b',"logprobs":null')
# `_usage` as templates around the numbers that change with each token: filling them takes a tenth
# of the time of encoding the object.
_COUNTS = (
    b',"usage":{"prompt_tokens": %d, "completion_tokens": ',
    b', "total_tokens": ',
    b', "prompt_tokens_details": {"cached_tokens": %d}}}\n\n',
)
_encode = msgspec.json.Encoder().encode

WriteText = Callable[[str, int], bytes]  # (text, output tokens so far) -> event


class Chosen(NamedTuple):
    """A generated token: its text, the offset of that text in the answer (characters), and the
    natural logarithm of the token's probability at temperature 1."""

    text: str
    offset: int
    logprob: float


class Encoder:
    """Encodes the answer to a call; the constant parts are encoded once."""

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
        """The first event of a chat stream; empty for completions."""
        if not self._call.is_chat:
            return b""
        return self._event(
            '{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}'
        )

    def text_writer(self, n_input: int, n_cached: int, has_counts: bool) -> WriteText:
        """A fast encoder of events that carry only text, as nearly all do. With `has_counts` the
        events carry the token counts of `continuous_usage_stats`."""
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
        """An event with a piece of text, possibly empty, and everything else an event may carry;
        `usage` is for `continuous_usage_stats`."""
        quoted = json.dumps(text)
        reason = f'"{finish_reason}"' if finish_reason else "null"
        if self._call.is_chat:
            delta = f'{{"content":{quoted}}}' if text else "{}"
            logprobs = f'"logprobs":{json.dumps(_chat_logprobs([chosen]))},' if chosen else ""
            choice = f'{{"index":0,"delta":{delta},{logprobs}"finish_reason":{reason}}}'
        else:
            logprobs = json.dumps(_completion_logprobs([chosen])) if chosen else "null"
            choice = f'{{"index":0,"text":{quoted},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return self._event(choice, usage)

    def end(self, usage: TokenUsage | None) -> bytes:
        """The usage event, unless `usage` is None, and the terminator."""
        done = b"data: [DONE]\n\n"
        if usage is None:
            return done
        tail = json.dumps({"choices": [], "usage": _usage(usage), "timings": _timings(usage)})
        return b"data: " + self._opening + b"," + tail[1:].encode() + b"\n\n" + done

    def whole(
        self, text: str, finish_reason: str, usage: TokenUsage, chosen: Sequence[Chosen] = ()
    ) -> bytes:
        """The body of a response that is not streamed."""
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._call.is_chat:
            kind, logprobs = "chat.completion", _chat_logprobs
            choice["message"] = {"role": "assistant", "content": text}
        else:
            kind, logprobs = "text_completion", _completion_logprobs
            choice["text"] = text
        if self._call.logprobs:
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
    except UnicodeEncodeError:  # a lone surrogate: valid in JSON (escaped), not in UTF-8
        return json.dumps(text).encode()


def _chat_logprobs(chosen: Sequence[Chosen]) -> dict[str, object]:
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


def _completion_logprobs(chosen: Sequence[Chosen]) -> dict[str, object]:
    return {
        "tokens": [token.text for token in chosen],
        "token_logprobs": [token.logprob for token in chosen],
        "top_logprobs": None,
        "text_offset": [token.offset for token in chosen],
    }


def _usage(usage: TokenUsage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _timings(usage: TokenUsage) -> dict[str, float | None]:
    return {"queue_s": usage.queue_s, "ttft_s": usage.ttft_s, "e2e_s": usage.e2e_s}
