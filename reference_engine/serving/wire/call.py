"""Request bodies of chats and completions, parsed and checked.

A field that would change the answer and is not supported is an error that names the field. Unknown
fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reference_engine.serving.wire import fields
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.sequence import Sampling


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request body. Exactly one of `messages` (chat), `prompt`, `prompt_ids` is set.

    `messages` are pairs of role and text; `max_tokens` None means as many as fit; `deadline_s`
    counts from arrival.
    """

    model: str | None
    messages: tuple[tuple[str, str], ...] | None = None
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    sampling: Sampling | None = None  # the service draws a seed if there is none
    has_seed: bool = False
    logprobs: bool = False
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tenant: str = "default"
    priority: int = 0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    deadline_s: float | None = None

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


# Unsupported fields, each with the values that have no effect and are therefore accepted.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
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
_MOST_STOPS = 4
_LEAST_TEMPERATURE = 1e-5  # greedy below, as in vLLM: logits divided by less overflow float32
_MOST_TENANT_CHARS = 128
_MOST_ID = 1 << 32  # above the ids of any vocabulary
_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_chat(body: bytes, tenant: str | None = None) -> Call:
    """Parse the body of `/v1/chat/completions`. `tenant` is the request header's and takes
    precedence over the body's. Raises WireError naming the field."""
    data = fields.parse_object(body)
    return _call(
        data,
        tenant,
        messages=_messages(data),
        max_tokens=fields.integer(data, "max_completion_tokens", 1)
        or fields.integer(data, "max_tokens", 1),
        logprobs=fields.flag(data, "logprobs"),
    )


def parse_completion(body: bytes, tenant: str | None = None) -> Call:
    """Parse the body of `/v1/completions`, whose prompt is a string, a list of token ids, or a
    list that holds only such a prompt. Raises WireError naming the field."""
    data = fields.parse_object(body)
    prompt, prompt_ids = _prompt(data)
    return _call(
        data,
        tenant,
        prompt=prompt,
        prompt_ids=prompt_ids,
        max_tokens=fields.integer(data, "max_tokens", 1) or 16,
        logprobs=_has_logprobs(data),
    )


def parse_either(body: bytes, tenant: str | None = None) -> Call:
    """Parse a chat body if it has `messages`, else a completion body."""
    parse = parse_chat if "messages" in fields.parse_object(body) else parse_completion
    return parse(body, tenant)


def _call(
    data: Mapping[str, Any],
    tenant: str | None,
    max_tokens: int | None,
    logprobs: bool,
    **prompt: Any,
) -> Call:
    for field, neutral in _NEUTRAL.items():
        if data.get(field) not in neutral:
            accepted = " or ".join(map(json.dumps, neutral))
            raise WireError(
                f"{field}: {data[field]!r:.100} is not supported by this engine, which accepts "
                f"only {accepted}",
                param=field,
            )
    options = data.get("stream_options") or {}
    if not isinstance(options, dict):
        raise fields.wrong_value("stream_options", "an object", options)
    if options and not fields.flag(data, "stream"):
        raise WireError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    min_tokens = fields.integer(data, "min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise WireError(
            f"min_tokens {min_tokens} is above max_tokens {max_tokens}", param="min_tokens"
        )
    seed = fields.integer(data, "seed", -(1 << 63))
    return Call(
        model=fields.text(data, "model"),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        sampling=_sampling(data, seed or 0, logprobs),
        has_seed=seed is not None,
        logprobs=logprobs,
        stop=_stop(data),
        ignore_eos=fields.flag(data, "ignore_eos"),
        stream=fields.flag(data, "stream"),
        include_usage=fields.flag(options, "include_usage", "stream_options."),
        continuous_usage=fields.flag(options, "continuous_usage_stats", "stream_options."),
        tenant=_tenant(
            tenant or fields.text(data, "tenant") or fields.text(data, "user") or "default"
        ),
        priority=fields.integer(data, "priority", -(1 << 31)) or 0,
        ttft_slo_s=fields.seconds(data, "ttft_slo_ms"),
        tpot_slo_s=fields.seconds(data, "tpot_slo_ms"),
        deadline_s=fields.seconds(data, "deadline_ms"),
        **prompt,
    )


def _sampling(data: Mapping[str, Any], seed: int, logprobs: bool) -> Sampling:
    top_k = fields.integer(data, "top_k", -1)
    temperature = fields.number(data, "temperature", 0.0, 2.0, 1.0)
    return Sampling(
        temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
        top_p=fields.number(data, "top_p", 0.0, 1.0, 1.0, above=True),
        top_k=max(0, top_k or 0),
        seed=seed,
        logprobs=logprobs,
    )


def _has_logprobs(data: Mapping[str, Any]) -> bool:
    """Whether a completion returns the log-probability of each chosen token.

    The field is the number of further tokens per position; the chosen token comes with 0 and 1
    alike, and more would be tokens that were not chosen.
    """
    value = data.get("logprobs")
    if value is not None and (not fields.is_int(value) or value not in (0, 1)):
        raise fields.wrong_value("logprobs", "0 or 1 (of the chosen token)", value)
    return value is not None


def _stop(data: Mapping[str, Any]) -> tuple[str, ...]:
    stop = data.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise fields.wrong_value("stop", f"up to {_MOST_STOPS} non-empty strings", stop)
    # Generated text is valid Unicode, so a stop string that is not can never occur in it.
    return tuple(s for s in stops if fields.valid_unicode(s) == s)


def _tenant(name: str) -> str:
    if len(name) > _MOST_TENANT_CHARS or not name.isprintable():
        raise fields.wrong_value("tenant", f"up to {_MOST_TENANT_CHARS} printable characters", name)
    return name


def _messages(data: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Role and text of each message; the text is valid Unicode."""
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong_value("messages", "a non-empty list", messages)
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: object, path: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise fields.wrong_value(path, "an object", message)
    role = message.get("role")
    if role not in _ROLES:
        raise fields.wrong_value(f"{path}.role", f"one of {', '.join(_ROLES)}", role)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise fields.wrong_value(f"{path}.content", "a string or a list of text parts", content)
    return role, fields.valid_unicode(content)


def _part(part: object, path: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    expected = "{'type': 'text', 'text': …}, the only supported kind of part"
    raise fields.wrong_value(path, expected, part)


def _prompt(data: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...] | None]:
    """(text, None) or (None, token ids); the text is valid Unicode."""
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return fields.valid_unicode(prompt), None
    if isinstance(prompt, list) and prompt and all(fields.is_int(token) for token in prompt):
        for token in prompt:
            if abs(token) >= _MOST_ID:
                raise WireError(f"prompt: token id {token} is above 32 bits", param="prompt")
        return None, tuple(prompt)
    expected = "a string or a non-empty list of token ids (no batches)"
    raise fields.wrong_value("prompt", expected, prompt)
