"""A request body, read: chat or completion. Fields that would change the answer and are not
supported are refused by name; unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reference_engine.serving.wire.fields import (
    flag,
    integer,
    is_int,
    number,
    parse_object,
    seconds,
    text,
    valid_unicode,
)
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.sequence import Sampling


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed body. Exactly one of `messages` (chat), `prompt`, `prompt_ids` is set.

    `max_tokens` None means as many as fit; `deadline_s` counts from arrival.
    """

    model: str | None
    messages: tuple[tuple[str, str], ...] | None = None
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    sampling: Sampling | None = None  # without a seed the service draws one
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


# Fields that change what is generated, with the values that change nothing.
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


def parse_chat(body: bytes, tenant: str | None = None) -> Call:
    """A `/v1/chat/completions` body. `tenant`, of a header, wins over the body's. Raises WireError
    naming the field."""
    data = parse_object(body)
    return _call(
        data,
        tenant,
        messages=parse_messages(data),
        max_tokens=integer(data, "max_completion_tokens", 1) or integer(data, "max_tokens", 1),
        logprobs=flag(data, "logprobs"),
    )


def parse_completion(body: bytes, tenant: str | None = None) -> Call:
    """A `/v1/completions` body: a string, a list of token ids, or a list of one string."""
    data = parse_object(body)
    prompt, ids = parse_prompt(data)
    return _call(
        data,
        tenant,
        prompt=prompt,
        prompt_ids=ids,
        max_tokens=integer(data, "max_tokens", 1) or 16,
        logprobs=_wants_logprobs(data),
    )


def parse_either(body: bytes, tenant: str | None = None) -> Call:
    """A chat body if it has `messages`, else a completion."""
    parse = parse_chat if "messages" in parse_object(body) else parse_completion
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
            raise WireError(
                f"{field}: {data[field]!r} is not supported by this engine", param=field
            )
    options = data.get("stream_options") or {}
    if not isinstance(options, dict):
        raise WireError("stream_options must be an object", param="stream_options")
    if options and not flag(data, "stream"):
        raise WireError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    min_tokens = integer(data, "min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise WireError(
            f"min_tokens {min_tokens} is above max_tokens {max_tokens}", param="min_tokens"
        )
    seed = integer(data, "seed", -(1 << 63))
    return Call(
        model=text(data, "model"),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        sampling=_sampling(data, seed or 0, logprobs),
        has_seed=seed is not None,
        logprobs=logprobs,
        stop=_stop(data),
        ignore_eos=flag(data, "ignore_eos"),
        stream=flag(data, "stream"),
        include_usage=flag(options, "include_usage", "stream_options."),
        continuous_usage=flag(options, "continuous_usage_stats", "stream_options."),
        tenant=_tenant(tenant or text(data, "tenant") or text(data, "user") or "default"),
        priority=integer(data, "priority", -(1 << 31)) or 0,
        ttft_slo_s=seconds(data, "ttft_slo_ms"),
        tpot_slo_s=seconds(data, "tpot_slo_ms"),
        deadline_s=seconds(data, "deadline_ms"),
        **prompt,
    )


def _sampling(data: Mapping[str, Any], seed: int, logprobs: bool) -> Sampling:
    top_k = integer(data, "top_k", -1)
    temperature = number(data, "temperature", 0.0, 2.0, 1.0)
    return Sampling(
        temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
        top_p=number(data, "top_p", 0.0, 1.0, 1.0, above=True),
        top_k=max(0, top_k or 0),
        seed=seed,
        logprobs=logprobs,
    )


def _wants_logprobs(data: Mapping[str, Any]) -> bool:
    """0 and 1 alike ask for the chosen token; more would ask for tokens that were not chosen."""
    value = data.get("logprobs")
    if value is None:
        return False
    if not is_int(value) or value not in (0, 1):
        raise WireError(
            f"logprobs must be 0 or 1 (of the chosen token), got {value!r}", param="logprobs"
        )
    return True


def _stop(data: Mapping[str, Any]) -> tuple[str, ...]:
    stop = data.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise WireError(f"stop must be up to {_MOST_STOPS} non-empty strings", param="stop")
    # What is no valid Unicode never comes to pass.
    return tuple(s for s in stops if valid_unicode(s) == s)


def _tenant(name: str) -> str:
    if len(name) > _MOST_TENANT_CHARS or not name.isprintable():
        raise WireError(
            f"tenant must be up to {_MOST_TENANT_CHARS} printable characters", param="tenant"
        )
    return name


_MOST_ID = 1 << 32  # of any vocabulary
_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_messages(data: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """(role, text) of each message; like a prompt's, in valid Unicode."""
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise WireError("messages must be a non-empty list", param="messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def parse_prompt(data: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...] | None]:
    """(text, None) or (None, token ids)."""
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return valid_unicode(prompt), None
    if isinstance(prompt, list) and prompt and all(is_int(token) for token in prompt):
        if any(abs(token) >= _MOST_ID for token in prompt):
            raise WireError("prompt: ids of more than 32 bits are no token's", param="prompt")
        return None, tuple(prompt)
    raise WireError(
        "prompt must be one string or one non-empty list of token ids (no batches)", param="prompt"
    )


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
    return role, valid_unicode(content)


def _part(part: object, at: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise WireError(f"{at}: only {{'type': 'text', 'text': …}} parts are supported", param=at)
