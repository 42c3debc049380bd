"""Request bodies of chats and completions, parsed and checked.

A field that would change the answer and is not supported is an error that names the field. Unknown
fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reference_engine.serving.wire import fields
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.sequence import MOST_TOP_LOGPROBS, Sampling

Prompt = str | tuple[int, ...]  # text or token ids


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request body, of a chat (`messages`) or a completion (`prompts`).

    `messages` are pairs of role and text; `n` is the number of choices per prompt; `max_tokens`
    None means as many as fit; `deadline_s` counts from arrival.
    """

    model: str | None
    messages: tuple[tuple[str, str], ...] | None = None
    prompts: tuple[Prompt, ...] = ()
    n: int = 1
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

    def choices(self) -> list[Call]:
        """A call per choice of the answer, in the order of their index: each has a single prompt,
        `n` 1 and a seed of its own. The choices of a prompt are adjacent."""
        if self.n == 1 and len(self.prompts) <= 1:
            return [self]
        sampling = self.sampling or Sampling()
        seeded = [replace(sampling, seed=sampling.seed + j) for j in range(self.n)]
        prompts: list[tuple[Prompt, ...]] = [(prompt,) for prompt in self.prompts] or [()]
        return [
            replace(self, prompts=prompt, n=1, sampling=own) for prompt in prompts for own in seeded
        ]


# Unsupported fields, each with the values that have no effect and are therefore accepted.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_logprobs": (None, False, 0),
    "logit_bias": (None, {}),
    "use_beam_search": (None, False),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "guided_json": (None,),
    "guided_regex": (None,),
    "structured_outputs": (None,),
}
_MOST_STOPS = 4
_MOST_CHOICES = 8  # per prompt
_MOST_PROMPTS = 256
_LEAST_TEMPERATURE = 1e-5  # greedy below, as in vLLM: logits divided by less overflow float32
_MOST_TENANT_CHARS = 128
_MOST_ID = 1 << 32  # above the ids of any vocabulary
_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_chat(body: bytes, tenant: str | None = None) -> Call:
    """Parse the body of `/v1/chat/completions`. `tenant` is the request header's and takes
    precedence over the body's. Raises WireError naming the field."""
    return chat_call(fields.parse_object(body), tenant)


def chat_call(data: Mapping[str, Any], tenant: str | None) -> Call:
    """The call of a chat's fields. Raises WireError naming the field."""
    logprobs = fields.flag(data, "logprobs")
    n_top = fields.bounded(data, "top_logprobs", 0, MOST_TOP_LOGPROBS, 0)
    if n_top and not logprobs:
        raise WireError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    return _call(
        data,
        tenant,
        messages=chat_messages(data),
        max_tokens=fields.integer(data, "max_completion_tokens", 1)
        or fields.integer(data, "max_tokens", 1),
        n_top=n_top if logprobs else None,
    )


def parse_completion(body: bytes, tenant: str | None = None) -> Call:
    """Parse the body of `/v1/completions`, whose prompt is a string, a list of token ids, or a
    list of such prompts. `logprobs` is the number of most likely tokens per position; the chosen
    token is returned with any number. Raises WireError naming the field."""
    data = fields.parse_object(body)
    n_top = None
    if data.get("logprobs") is not None:
        n_top = fields.bounded(data, "logprobs", 0, MOST_TOP_LOGPROBS, 0)
    return _call(
        data,
        tenant,
        prompts=_prompts(data),
        max_tokens=fields.integer(data, "max_tokens", 1) or 16,
        n_top=n_top,
    )


def parse_either(body: bytes, tenant: str | None = None) -> Call:
    """Parse a chat body if it has `messages`, else a completion body."""
    parse = parse_chat if "messages" in fields.parse_object(body) else parse_completion
    return parse(body, tenant)


def _call(
    data: Mapping[str, Any],
    tenant: str | None,
    max_tokens: int | None,
    n_top: int | None,
    **prompt: Any,
) -> Call:
    """The call with the fields of both routes; `n_top` None is without logprobs."""
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
    n = fields.bounded(data, "n", 1, _MOST_CHOICES, 1)
    if data.get("best_of") not in (None, n):
        raise fields.wrong_value("best_of", f"equal to n ({n})", data["best_of"])
    return Call(
        model=fields.text(data, "model"),
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        sampling=_sampling(data, seed or 0, n_top),
        has_seed=seed is not None,
        logprobs=n_top is not None,
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


def _sampling(data: Mapping[str, Any], seed: int, n_top: int | None) -> Sampling:
    top_k = fields.integer(data, "top_k", -1)
    temperature = fields.number(data, "temperature", 0.0, 2.0, 1.0)
    return Sampling(
        temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
        top_p=fields.number(data, "top_p", 0.0, 1.0, 1.0, above=True),
        top_k=max(0, top_k or 0),
        seed=seed,
        logprobs=n_top is not None,
        min_p=fields.number(data, "min_p", 0.0, 1.0, 0.0),
        top_logprobs=n_top or 0,
        presence_penalty=fields.number(data, "presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=fields.number(data, "frequency_penalty", -2.0, 2.0, 0.0),
        repetition_penalty=fields.number(data, "repetition_penalty", 0.0, 10.0, 1.0, above=True),
    )


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


def chat_messages(data: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Role and text of each message; the text is valid Unicode. Raises WireError."""
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


def _prompts(data: Mapping[str, Any]) -> tuple[Prompt, ...]:
    value = data.get("prompt")
    prompts = [value]
    if isinstance(value, list) and value and all(isinstance(v, str | list) for v in value):
        prompts = value
    if len(prompts) > _MOST_PROMPTS:
        raise WireError(
            f"prompt: a list of {len(prompts)} prompts is above the limit of {_MOST_PROMPTS}",
            param="prompt",
        )
    return tuple(_prompt(prompt) for prompt in prompts)


def _prompt(value: object) -> Prompt:
    """Text, which is valid Unicode, or token ids."""
    if isinstance(value, str):
        return fields.valid_unicode(value)
    return token_ids(value, "prompt", "a string, a non-empty list of token ids, or a list of such")


def token_ids(value: object, field: str, expected: str) -> tuple[int, ...]:
    """A non-empty list of token ids of up to 32 bits. Raises WireError naming the field."""
    if not isinstance(value, list) or not value or not all(map(fields.is_int, value)):
        raise fields.wrong_value(field, expected, value)
    for token in value:
        if abs(token) >= _MOST_ID:
            raise WireError(f"{field}: token id {token} is above 32 bits", param=field)
    return tuple(value)
