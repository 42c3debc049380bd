"""The OpenAI bodies the server reads and writes: chat and completions, whole and streamed.

Written apart from the client's codecs on purpose, so that a misunderstanding cannot cancel itself
out. Fields that would change the answer and are not supported are refused by name; unknown fields
are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reference_engine.sequence import Sampling


class WireError(Exception):
    """An answer to a request that cannot be served; `param` is the field at fault."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        type_: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status, self.type = (
            message,
            param,
            code,
            status,
            type_,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed body. Exactly one of `messages` (chat), `prompt`, `prompt_ids` is set.

    `max_tokens` None means as many as fit.
    """

    model: str | None
    messages: tuple[tuple[str, str], ...] | None = None
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    sampling: Sampling | None = None  # without a seed the service draws one
    has_seed: bool = False
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tenant: str = "default"
    priority: int = 0

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the model saw them, and seconds since arrival at the server."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None


# Fields that change what is generated, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None, False, 0),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "use_beam_search": (None, False),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "guided_json": (None,),
    "guided_regex": (None,),
    "structured_outputs": (None,),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_STOPS = 4


def parse_chat(body: bytes) -> Call:
    """A `/v1/chat/completions` body. Raises WireError naming the field."""
    data = _object(body)
    return _call(
        data,
        messages=_messages(data),
        max_tokens=_integer(data, "max_completion_tokens", 1) or _integer(data, "max_tokens", 1),
    )


def parse_completion(body: bytes) -> Call:
    """A `/v1/completions` body: a string, a list of token ids, or a list of one string."""
    data = _object(body)
    text, ids = _prompt(data)
    return _call(
        data, prompt=text, prompt_ids=ids, max_tokens=_integer(data, "max_tokens", 1) or 16
    )


def _call(data: Mapping[str, Any], max_tokens: int | None, **prompt: Any) -> Call:
    for field, neutral in _NEUTRAL.items():
        if data.get(field) not in neutral:
            raise WireError(
                f"{field}: {data[field]!r} is not supported by this engine", param=field
            )
    options = data.get("stream_options") or {}
    if not isinstance(options, dict):
        raise WireError("stream_options must be an object", param="stream_options")
    min_tokens = _integer(data, "min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise WireError(
            f"min_tokens {min_tokens} is above max_tokens {max_tokens}", param="min_tokens"
        )
    seed = _integer(data, "seed", -(1 << 63))
    return Call(
        model=_text(data, "model"),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        sampling=_sampling(data, seed or 0),
        has_seed=seed is not None,
        stop=_stop(data),
        ignore_eos=_flag(data, "ignore_eos"),
        stream=_flag(data, "stream"),
        include_usage=_flag(options, "include_usage", "stream_options."),
        continuous_usage=_flag(options, "continuous_usage_stats", "stream_options."),
        tenant=_text(data, "tenant") or _text(data, "user") or "default",
        priority=_integer(data, "priority", -(1 << 31)) or 0,
        **prompt,
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise WireError(f"the body must be a JSON object, got {type(data).__name__}")
    return data


def _messages(data: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise WireError("messages must be a non-empty list", param="messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: object, at: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise WireError(f"{at} must be an object", param=at)
    role = message.get("role")
    if role not in _ROLES:
        raise WireError(
            f"{at}.role must be one of {', '.join(_ROLES)}, got {role!r}", param=f"{at}.role"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(content))
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise WireError(f"{at}.content must be text", param=f"{at}.content")
    return role, content


def _part(part: object, at: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise WireError(f"{at}: only {{'type': 'text', 'text': …}} parts are supported", param=at)


def _prompt(data: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...] | None]:
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and prompt and all(_is_int(token) for token in prompt):
        return None, tuple(prompt)
    raise WireError(
        "prompt must be one string or one non-empty list of token ids (no batches)", param="prompt"
    )


def _sampling(data: Mapping[str, Any], seed: int) -> Sampling:
    top_k = _integer(data, "top_k", -1)
    return Sampling(
        temperature=_number(data, "temperature", 0.0, 2.0, 1.0),
        top_p=_number(data, "top_p", 0.0, 1.0, 1.0, above=True),
        top_k=max(0, top_k or 0),
        seed=seed,
    )


def _stop(data: Mapping[str, Any]) -> tuple[str, ...]:
    stop = data.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise WireError(f"stop must be up to {_MOST_STOPS} non-empty strings", param="stop")
    return tuple(stops)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(data: Mapping[str, Any], field: str, least: int) -> int | None:
    value = data.get(field)
    if value is None:
        return None
    if not _is_int(value) or value < least or value >= 1 << 63:
        expected = f"an integer of at least {least}" if least > -2 else "an integer of 64 bits"
        raise WireError(f"{field} must be {expected}, got {value!r}", param=field)
    return int(value)


def _number(
    data: Mapping[str, Any],
    field: str,
    low: float,
    high: float,
    default: float,
    above: bool = False,
) -> float:
    value = data.get(field)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above and value == low):
        interval = f"{'(' if above else '['}{low:g}, {high:g}]"
        raise WireError(f"{field} must be a number in {interval}, got {value!r}", param=field)
    return float(value)


def _flag(data: Mapping[str, Any], field: str, path: str = "") -> bool:
    value = data.get(field)
    if value is not None and not isinstance(value, bool):
        raise WireError(f"{path}{field} must be true or false, got {value!r}", param=path + field)
    return bool(value)


def _text(data: Mapping[str, Any], field: str) -> str | None:
    value = data.get(field)
    if value is not None and not isinstance(value, str):
        raise WireError(f"{field} must be a string, got {value!r}", param=field)
    return value


class Encoder:
    """Writes the answer to one call; everything that does not change is encoded once."""

    def __init__(self, call: Call, response_id: str, model: str, created: int) -> None:
        self._call = call
        self._head = {"id": response_id, "created": created, "model": model}
        kind = "chat.completion.chunk" if call.is_chat else "text_completion"
        head = json.dumps({**self._head, "object": kind}, ensure_ascii=False)
        self._opening = head[:-1].encode()

    def role(self) -> bytes:
        """The event that opens a chat stream; nothing for completions."""
        if not self._call.is_chat:
            return b""
        return self._event(
            '{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}'
        )

    def text(self, text: str, finish_reason: str | None, usage: Usage | None = None) -> bytes:
        """The event of a piece of text; `usage` rides along for `continuous_usage_stats`."""
        quoted = json.dumps(text)
        reason = f'"{finish_reason}"' if finish_reason else "null"
        if self._call.is_chat:
            delta = f'{{"content":{quoted}}}' if text else "{}"
            choice = f'{{"index":0,"delta":{delta},"finish_reason":{reason}}}'
        else:
            choice = f'{{"index":0,"text":{quoted},"logprobs":null,"finish_reason":{reason}}}'
        return self._event(choice, usage)

    def end(self, usage: Usage | None) -> bytes:
        """The usage event, if asked for, and the terminator."""
        closing = b"data: [DONE]\n\n"
        if usage is None:
            return closing
        tail = json.dumps({"choices": [], "usage": _usage(usage), "timings": _timings(usage)})
        return b"data: " + self._opening + b"," + tail[1:].encode() + b"\n\n" + closing

    def whole(self, text: str, finish_reason: str, usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._call.is_chat:
            kind = "chat.completion"
            choice["message"] = {"role": "assistant", "content": text}
        else:
            kind = "text_completion"
            choice["text"] = text
        return json.dumps(
            {
                **self._head,
                "object": kind,
                "choices": [choice],
                "usage": _usage(usage),
                "timings": _timings(usage),
            }
        ).encode()

    def _event(self, choice: str, usage: Usage | None = None) -> bytes:
        counts = f',"usage":{json.dumps(_usage(usage))}' if usage is not None else ""
        return b"data: " + self._opening + f',"choices":[{choice}]{counts}}}\n\n'.encode()


def error_body(error: WireError) -> bytes:
    """The OpenAI error object."""
    return json.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    ).encode()


def error_event(error: WireError) -> bytes:
    """An error after the stream began: in band, since the status line is gone."""
    return b"data: " + error_body(error) + b"\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _timings(usage: Usage) -> dict[str, float | None]:
    return {"queue_s": usage.queue_s, "ttft_s": usage.ttft_s, "e2e_s": usage.e2e_s}
