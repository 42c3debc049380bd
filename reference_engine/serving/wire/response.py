"""Response bodies: a JSON object, or server-sent events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from reference_engine.serving.wire.call import Call
from reference_engine.serving.wire.wire_errors import WireError, error_body


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
    natural logarithm of the token's probability at temperature 1. `top` are text and
    log-probability of the most likely tokens."""

    text: str
    offset: int
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class WholeChoice(NamedTuple):
    """A choice of an answer that is not streamed; `chosen` is empty without logprobs."""

    text: str
    finish_reason: str
    chosen: Sequence[Chosen] = ()


def total_usage(usages: Sequence[TokenUsage], n: int) -> TokenUsage:
    """The usage of an answer from those of its choices, `n` per prompt: a prompt counts once, the
    outputs of all choices count. The times are those of the first start, the first token and the
    last end."""
    prompts = usages[::n]

    def times(values: Iterable[float | None]) -> list[float]:
        return [value for value in values if value is not None]

    return TokenUsage(
        sum(usage.input_tokens for usage in prompts),
        sum(usage.output_tokens for usage in usages),
        sum(usage.cached_tokens for usage in prompts),
        min(times(usage.queue_s for usage in usages), default=None),
        min(times(usage.ttft_s for usage in usages), default=None),
        max(times(usage.e2e_s for usage in usages), default=None),
    )


class AnswerEncoder(Protocol):
    """Encodes an answer in the form of an API."""

    def opening(self, n_input: int, n_cached: int) -> bytes: ...

    def text_writer(self, n_input: int, n_cached: int, has_counts: bool) -> WriteText: ...

    def event(
        self,
        text: str,
        finish_reason: str | None,
        usage: TokenUsage | None = None,
        chosen: Chosen | None = None,
    ) -> bytes: ...

    def end(self, usage: TokenUsage | None) -> bytes: ...

    def error(self, error: WireError) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: TokenUsage) -> bytes: ...


class Encoder:
    """Encodes a choice of the answer to a call; the constant parts are encoded once."""

    def __init__(
        self, call: Call, response_id: str, model: str, created: int, index: int = 0
    ) -> None:
        self._call, self._index = call, index
        self._head = {"id": response_id, "created": created, "model": model}
        kind = "chat.completion.chunk" if call.is_chat else "text_completion"
        head = json.dumps({**self._head, "object": kind}, ensure_ascii=False)
        self._opening = head[:-1].encode()
        before, after = _CHAT if call.is_chat else _COMPLETION
        self._before = b"data: " + self._opening + b',"choices":[{"index":%d,' % index + before
        self._closing = after + b',"finish_reason":null}]'

    def opening(self, n_input: int, n_cached: int) -> bytes:
        """The events before the first token: the role of a chat; empty for completions."""
        if not self._call.is_chat:
            return b""
        return self._event(
            f'{{"index":{self._index},"delta":{{"role":"assistant","content":""}},'
            '"finish_reason":null}'
        )

    def text_writer(self, n_input: int, n_cached: int, has_counts: bool) -> WriteText:
        """A fast encoder of events that carry only text, as nearly all do. With `has_counts` the
        events carry the token counts of `continuous_usage_stats`."""
        before, join = self._before, b"".join
        if not has_counts:
            after = self._closing + b"}\n\n"
            return lambda text, n_output: join((before, quoted(text), after))
        counts, total, end = _COUNTS
        after, end = self._closing + counts % n_input, end % n_cached

        def counted(text: str, n_output: int) -> bytes:
            n_total = b"%d" % (n_input + n_output)
            return join((before, quoted(text), after, b"%d" % n_output, total, n_total, end))

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
        index = f'"index":{self._index}'
        if self._call.is_chat:
            delta = f'{{"content":{quoted}}}' if text else "{}"
            logprobs = f'"logprobs":{json.dumps(_chat_logprobs([chosen]))},' if chosen else ""
            choice = f'{{{index},"delta":{delta},{logprobs}"finish_reason":{reason}}}'
        else:
            logprobs = json.dumps(self._completion_logprobs([chosen])) if chosen else "null"
            choice = f'{{{index},"text":{quoted},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return self._event(choice, usage)

    def end(self, usage: TokenUsage | None) -> bytes:
        """The usage event, unless `usage` is None, and the terminator."""
        done = b"data: [DONE]\n\n"
        if usage is None:
            return done
        tail = json.dumps({"choices": [], "usage": _usage(usage), "timings": timings_of(usage)})
        return b"data: " + self._opening + b"," + tail[1:].encode() + b"\n\n" + done

    def error(self, error: WireError) -> bytes:
        """The end of a stream that fails after its status line."""
        return b"data: " + error_body(error) + b"\n\n"

    def whole(self, choices: Sequence[WholeChoice], usage: TokenUsage) -> bytes:
        """The body of a response that is not streamed."""
        kind = "chat.completion" if self._call.is_chat else "text_completion"
        return json.dumps(
            {
                **self._head,
                "object": kind,
                "choices": [self._whole_choice(*numbered) for numbered in enumerate(choices)],
                "usage": _usage(usage),
                "timings": timings_of(usage),
            }
        ).encode()

    def _whole_choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        text, finish_reason, chosen = choice
        content: dict[str, object] = {"text": text}
        logprobs = self._completion_logprobs
        if self._call.is_chat:
            content = {"message": {"role": "assistant", "content": text}}
            logprobs = _chat_logprobs
        return {
            "index": index,
            "logprobs": logprobs(chosen) if self._call.logprobs else None,
            "finish_reason": finish_reason,
            **content,
        }

    def _completion_logprobs(self, chosen: Sequence[Chosen]) -> dict[str, object]:
        """As with OpenAI, the chosen token is among `top_logprobs` also where it is not among the
        most likely. Of two tokens with the same text, the more likely has the entry."""
        has_top = self._call.sampling is not None and self._call.sampling.top_logprobs > 0
        tops = [dict([(token.text, token.logprob), *reversed(token.top)]) for token in chosen]
        return {
            "tokens": [token.text for token in chosen],
            "token_logprobs": [token.logprob for token in chosen],
            "top_logprobs": tops if has_top else None,
            "text_offset": [token.offset for token in chosen],
        }

    def _event(self, choice: str, usage: TokenUsage | None = None) -> bytes:
        counts = f',"usage":{json.dumps(_usage(usage))}' if usage is not None else ""
        return b"data: " + self._opening + f',"choices":[{choice}]{counts}}}\n\n'.encode()


def quoted(text: str) -> bytes:
    """The text as a JSON string."""
    try:
        return _encode(text)
    except UnicodeEncodeError:  # a lone surrogate: valid in JSON (escaped), not in UTF-8
        return json.dumps(text).encode()


def _chat_logprobs(chosen: Sequence[Chosen]) -> dict[str, object]:
    content = [
        {
            **_chat_token(token.text, token.logprob),
            "top_logprobs": [_chat_token(*pair) for pair in token.top],
        }
        for token in chosen
    ]
    return {"content": content, "refusal": None}


def _chat_token(text: str, logprob: float) -> dict[str, object]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _usage(usage: TokenUsage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timings_of(usage: TokenUsage) -> dict[str, float | None]:
    """The times of a response, in seconds since its arrival."""
    return {"queue_s": usage.queue_s, "ttft_s": usage.ttft_s, "e2e_s": usage.e2e_s}
