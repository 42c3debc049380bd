"""Personas of the mock server: each is the form in which a named server writes its stream, taken
from that server's documentation or source.

`--persona NAME` gives the mock's replies this form; the script decides content and times as before.
A field of `Wire` is one difference from the mock's own form, which is vLLM's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Wire:
    """The form of a stream. `role`: in an event of its own before the first token, in each delta,
    or never. `usage`: in an event of its own, with the finish reason, inside the choice or the
    member `x_groq` of that event, in every event, or never; `usage_always`: also unrequested.
    `finish`: in an event of its own, or with the last token.
    """

    role: Literal["own", "each", "off"] = "own"
    role_delta: Fields = field(default_factory=lambda: {"role": "assistant", "content": ""})
    text_key: str = "content"  # of the delta
    is_parts: bool = False  # the text is a list of typed parts
    reasoning: int = 0  # leading tokens under `reasoning_key`
    reasoning_key: str = "reasoning_content"
    delta: Fields = field(default_factory=dict)  # further members of a token's delta
    choice: Fields = field(default_factory=dict)  # … of each choice
    top: Fields = field(default_factory=dict)  # … of each event
    end_top: Fields = field(default_factory=dict)  # … of the event with the finish reason
    end_delta: Fields = field(default_factory=dict)
    finish: Literal["own", "last"] = "own"
    finish_word: str = ""  # the script's if empty
    usage: Literal["own", "end", "choice", "x_groq", "every", "never"] = "own"
    usage_always: bool = False
    usage_null: bool = False  # `"usage": null` in events without usage
    usage_more: Fields = field(default_factory=dict)
    no_choices_first: Fields | None = None  # an event without choices before the role
    item: tuple[str, str] = (",", ":")  # separators of the JSON
    ascii: bool = False
    prefix: str = "data: "
    finish_before: str | None = None  # the finish reason in events before the last
    line_end: str = "\n"
    opening: str = ""  # before the first event
    before_each: str = ""  # before every event
    has_done: bool = True
    framing: Literal["chunked", "close", "http1.0"] = "chunked"
    content_type: str = "text/event-stream; charset=utf-8"

    def event(self, content: Fields) -> bytes:
        text = json.dumps(content, separators=self.item, ensure_ascii=self.ascii)
        end = 2 * self.line_end
        return f"{self.before_each}{self.prefix}{text}{end}".encode()


@dataclass(frozen=True)
class Persona:
    """The stream of a server: its form, options of the mock's script, and the source."""

    source: str
    wire: Wire = Wire()
    options: Mapping[str, str] = field(default_factory=dict)


SPACED = (", ", ": ")  # Python's json.dumps
_OPENAI = "OpenAI API reference, chat completions streaming"
_VLLM = "vLLM, vllm/entrypoints/openai"
_SGLANG = "SGLang, python/sglang/srt/entrypoints/openai"
_LLAMA = "llama.cpp, tools/server (README.md and server.cpp)"
_LCP = "llama-cpp-python, llama_cpp/server/app.py"
_TGI = "TGI, router/src/server.rs and docs/source/messages_api"
_OLLAMA = "Ollama, openai/openai.go"
_TRT = "TensorRT-LLM, tensorrt_llm/serve/openai_protocol.py"
_PING = ": ping - 2026-01-01 00:00:00.000000+00:00\r\n\r\n"
_FINGERPRINT = {"system_fingerprint": "fp_44709d6fcb"}
_FILTERED = {"content_filter_results": {"hate": {"filtered": False, "severity": "safe"}}}
_TIMINGS = {"timings": {"prompt_n": 9, "prompt_ms": 12.5, "predicted_ms": 40.25}}

PERSONAS: Mapping[str, Persona] = {
    "openai": Persona(
        _OPENAI,
        Wire(top={**_FINGERPRINT, "service_tier": "default"}, usage_null=True),
        {"reject": "ignore_eos"},
    ),
    "openai-obfuscated": Persona(
        f"{_OPENAI}: stream_options.include_obfuscation",
        Wire(top={**_FINGERPRINT, "obfuscation": "9aXkT0"}, usage_null=True),
        {"reject": "ignore_eos"},
    ),
    "openai-reasoning": Persona(
        "OpenAI guide, reasoning models: max_completion_tokens; temperature 1 only",
        Wire(top=_FINGERPRINT, usage_null=True, role_delta={"role": "assistant", "content": None}),
        {"reject": "max_tokens;ignore_eos;temperature!=1"},
    ),
    "openai-refusal": Persona(
        f"{_OPENAI}: delta.refusal", Wire(text_key="refusal", usage_null=True)
    ),
    "openai-no-usage": Persona(
        f"{_OPENAI}: without stream_options no usage is sent",
        Wire(usage="never"),
        {"reject": "stream_options"},
    ),
    "azure-openai": Persona(
        "Azure OpenAI REST reference: prompt_filter_results come first, without choices",
        Wire(
            no_choices_first={"prompt_filter_results": [{"prompt_index": 0, **_FILTERED}]},
            choice=_FILTERED,
            top=_FINGERPRINT,
        ),
        {"reject": "ignore_eos"},
    ),
    "vllm": Persona(_VLLM, Wire(choice={"logprobs": None, "token_ids": None})),
    "vllm-0.5": Persona(
        f"{_VLLM}/serving_chat.py (0.5): stop_reason at the end, role without content",
        Wire(
            role_delta={"role": "assistant"}, end_delta={"content": ""}, choice={"logprobs": None}
        ),
        {"reject": "continuous_usage_stats"},
    ),
    "vllm-reasoning": Persona(
        f"{_VLLM}: --reasoning-parser", Wire(reasoning=4, choice={"logprobs": None})
    ),
    "vllm-reasoning-0.12": Persona(
        f"{_VLLM} (0.12): `reasoning` in place of `reasoning_content`",
        Wire(reasoning=4, reasoning_key="reasoning", choice={"logprobs": None}),
    ),
    "vllm-stream-interval": Persona(f"{_VLLM}: --stream-interval 4", Wire(), {"coalesce": "4"}),
    "vllm-continuous-usage": Persona(
        f"{_VLLM}: stream_options.continuous_usage_stats", Wire(usage="every")
    ),
    "vllm-prompt-ids": Persona(
        f"{_VLLM}: return_token_ids", Wire(choice={"logprobs": None, "token_ids": [11, 7]})
    ),
    "sglang": Persona(
        _SGLANG,
        Wire(
            role_delta={"role": "assistant", "content": "", "reasoning_content": None},
            delta={"role": None, "reasoning_content": None, "tool_calls": None},
            choice={"logprobs": None, "matched_stop": None},
            usage_null=True,
        ),
    ),
    "sglang-reasoning": Persona(
        f"{_SGLANG}: usage.reasoning_tokens",
        Wire(reasoning=4, usage_more={"reasoning_tokens": 4}, usage_null=True),
    ),
    "sglang-continuous-usage": Persona(
        f"{_SGLANG}: continuous_usage_stats", Wire(usage="every", choice={"matched_stop": None})
    ),
    "sglang-router": Persona(
        "SGLang model gateway: passes the worker's stream on, without charset",
        Wire(content_type="text/event-stream", usage_null=True),
    ),
    "tgi-3": Persona(
        _TGI,
        Wire(
            role="each",
            top={"system_fingerprint": "3.3.4-native"},
            choice={"logprobs": None},
            usage_null=True,
            finish="last",
        ),
    ),
    "tgi-2": Persona(
        f"{_TGI} (2.0): `data:` without a blank, no usage, eos_token",
        Wire(role="each", prefix="data:", usage="never", finish="last", finish_word="eos_token"),
    ),
    "tgi-keep-alive": Persona(
        f"{_TGI}: axum keep-alive comments", Wire(role="each", before_each=":\n\n", finish="last")
    ),
    "llama-server": Persona(
        _LLAMA,
        Wire(
            role_delta={"role": "assistant", "content": None},
            top={"system_fingerprint": "b6000-abcdef"},
            end_top=_TIMINGS,
        ),
    ),
    "llama-server-per-token-timings": Persona(
        f"{_LLAMA}: timings_per_token", Wire(top=_TIMINGS, end_top=_TIMINGS)
    ),
    "llama-server-no-usage": Persona(
        f"{_LLAMA} (before include_usage)", Wire(usage="never", end_top=_TIMINGS)
    ),
    "llama-server-reasoning": Persona(
        f"{_LLAMA}: --reasoning-format deepseek", Wire(reasoning=3, end_top=_TIMINGS)
    ),
    "llama-cpp-python": Persona(
        f"{_LCP}: starlette-context requires a UUID, sse-starlette writes CRLF",
        Wire(
            line_end="\r\n",
            item=SPACED,
            role_delta={"role": "assistant"},
            usage="never",
        ),
        {"request_id": "uuid"},
    ),
    "sse-starlette-ping": Persona(
        "sse-starlette: a ping comment every 15 s, CRLF line ends",
        Wire(line_end="\r\n", opening=_PING, item=SPACED),
    ),
    "ollama": Persona(
        _OLLAMA,
        Wire(
            role="each",
            top={"system_fingerprint": "fp_ollama"},
            end_delta={"role": "assistant", "content": ""},
        ),
    ),
    "ollama-old": Persona(
        f"{_OLLAMA} (0.1): no usage in streams",
        Wire(role="each", usage="never", content_type="text/event-stream"),
    ),
    "ollama-thinking": Persona(
        f"{_OLLAMA}: `reasoning`", Wire(role="each", reasoning=3, reasoning_key="reasoning")
    ),
    "trtllm-serve": Persona(
        _TRT,
        Wire(
            role_delta={"role": "assistant"},
            choice={"logprobs": None, "stop_reason": None, "disaggregated_params": None},
        ),
        {"reject": "continuous_usage_stats"},
    ),
    "triton-openai": Persona(
        "Triton Inference Server, python/openai: no usage for streams before 25.05",
        Wire(usage="never", role_delta={"role": "assistant"}),
    ),
    "nvidia-nim": Persona(
        "NVIDIA NIM for LLMs, API reference: vLLM's form with usage at the end", Wire(usage="end")
    ),
    "lmdeploy": Persona(
        "LMDeploy, lmdeploy/serve/openai/api_server.py: usage with the finish reason",
        Wire(usage="end", usage_null=True, choice={"gen_tokens": None}),
    ),
    "mlc-llm": Persona(
        "MLC LLM, python/mlc_llm/protocol/openai_api_protocol.py: usage.extra",
        Wire(usage_more={"extra": {"decode_tokens_per_s": 55.5}}, item=(",", ":")),
    ),
    "transformers-serve": Persona(
        "transformers, src/transformers/cli/serve.py: chunks without usage",
        Wire(usage="never", role_delta={"role": "assistant"}, item=SPACED),
    ),
    "mlx-lm": Persona(
        "mlx-lm, mlx_lm/server.py: HTTP/1.0, comments with the progress of the prompt",
        Wire(
            framing="http1.0",
            opening=": keepalive 8/9\n\n: keepalive 9/9\n\n",
            role="each",
            item=SPACED,
            top={"system_fingerprint": "0.31.0-Linux-x86_64"},
            content_type="text/event-stream",
        ),
    ),
    "guidellm-mock-server": Persona(
        "guidellm, src/guidellm/mock_server: no role, always finish reason stop",
        Wire(role="off", item=SPACED, finish_word="stop"),
    ),
    "xpyd-sim": Persona(
        "xpyd-sim, chat completions: null for every unused member, as vLLM's models with nulls",
        Wire(
            role_delta={"role": "assistant", "content": "", "tool_calls": None},
            delta={"role": None, "tool_calls": None},
            choice={"logprobs": None, "stop_reason": None},
            top={"system_fingerprint": "fp_xpyd_sim", "service_tier": None},
            usage_null=True,
        ),
    ),
    "tabbyapi": Persona(
        "TabbyAPI, endpoints/OAI: sse-starlette, usage in an event of its own",
        Wire(line_end="\r\n", role_delta={"role": "assistant"}),
    ),
    "text-generation-webui": Persona(
        "text-generation-webui, extensions/openai: usage with the finish reason",
        Wire(line_end="\r\n", role="each", usage="end", usage_always=True, item=SPACED),
    ),
    "koboldcpp": Persona(
        "KoboldCpp, koboldcpp.py: HTTP/1.1 without chunks, ends with the connection",
        Wire(framing="close", usage="never", item=SPACED, content_type="text/event-stream"),
    ),
    "localai": Persona(
        "LocalAI, core/http/endpoints/openai/chat.go: role in each delta",
        Wire(role="each", usage="end", usage_always=True),
    ),
    "lm-studio": Persona(
        "LM Studio docs, OpenAI compatibility: stream_options.include_usage",
        Wire(role="each", choice={"logprobs": None}, top={"system_fingerprint": "qwen3"}),
    ),
    "ray-serve-llm": Persona(
        "Ray Serve LLM docs: vLLM's stream behind Serve's proxy",
        Wire(content_type="text/event-stream"),
    ),
    "aphrodite": Persona(
        "Aphrodite Engine, aphrodite/endpoints/openai: vLLM's form",
        Wire(role_delta={"role": "assistant"}, choice={"logprobs": None}),
        {"reject": "continuous_usage_stats"},
    ),
    "litellm": Persona(
        "LiteLLM docs, streaming: spaced JSON, first token with the role",
        Wire(item=SPACED, role="each", delta={"provider_specific_fields": None}),
    ),
    "litellm-refuses": Persona(
        "LiteLLM docs, drop_params: unsupported parameters are refused",
        Wire(item=SPACED),
        {"reject": "ignore_eos;min_tokens"},
    ),
    "openrouter": Persona(
        "OpenRouter docs, streaming: comments while it waits, native_finish_reason",
        Wire(
            opening=": OPENROUTER PROCESSING\n\n: OPENROUTER PROCESSING\n\n",
            role="each",
            top={"provider": "Together"},
            choice={"native_finish_reason": None, "logprobs": None},
            usage_always=True,
            usage_more={"cost": 0.0003},
        ),
    ),
    "openrouter-reasoning-details": Persona(
        "OpenRouter docs, reasoning tokens: reasoning_details beside an empty content",
        Wire(role="each", reasoning=3, reasoning_key="reasoning_details", delta={"content": ""}),
    ),
    "ollama-thinking-gateway": Persona(
        "Ollama docs, thinking: its own key `thinking`, passed on by gateways",
        Wire(role="each", reasoning=3, reasoning_key="thinking", delta={"content": ""}),
    ),
    "anthropic-ping": Persona(
        "Anthropic API docs, streaming: ping events at any time, passed on by gateways",
        Wire(before_each='event: ping\ndata: {"type": "ping"}\n\n'),
    ),
    "moonshot": Persona(
        "Moonshot AI API reference: usage inside the choice with the finish reason",
        Wire(usage="choice", usage_always=True, top=_FINGERPRINT),
        {"reject": "ignore_eos", "coalesce": "2"},
    ),
    "dashscope-null-word": Persona(
        'Alibaba Model Studio docs, DashScope: finish_reason is the text "null" until the last',
        Wire(finish_before="null", usage="end", usage_always=True),
    ),
    "groq-old": Persona(
        "Groq API reference (before include_usage): x_groq.usage holds the counts",
        Wire(usage="x_groq", usage_always=True, top=_FINGERPRINT),
        {"reject": "ignore_eos;stream_options", "coalesce": "3"},
    ),
    "groq": Persona(
        "Groq API reference: x_groq.usage with the finish reason",
        Wire(
            top=_FINGERPRINT,
            end_top={"x_groq": {"id": "req_1", "usage": {"queue_time": 0.01}}},
            choice={"logprobs": None},
        ),
        {"reject": "ignore_eos"},
    ),
    "mistral": Persona(
        "Mistral API reference: usage with the finish reason, unrequested; extra fields refused",
        Wire(usage="end", usage_always=True, end_delta={"content": ""}),
        {"reject": "ignore_eos;stream_options"},
    ),
    "mistral-reasoning": Persona(
        "Mistral docs, reasoning: content as typed parts", Wire(is_parts=True, usage="end")
    ),
    "deepseek": Persona(
        "DeepSeek API reference: reasoning_content, then content; keep-alive comments",
        Wire(
            opening=": keep-alive\n\n",
            reasoning=4,
            delta={"role": None},
            top=_FINGERPRINT,
            usage_null=True,
            usage_more={"prompt_cache_hit_tokens": 0, "prompt_cache_miss_tokens": 9},
        ),
    ),
    "together": Persona(
        "Together AI docs, streaming: usage with the finish reason",
        Wire(usage="end", usage_always=True, choice={"logprobs": None, "seed": None}),
    ),
    "fireworks": Persona(
        "Fireworks docs, querying text models: usage in the last event",
        Wire(usage="end", usage_always=True, role_delta={"role": "assistant"}),
    ),
    "perplexity": Persona(
        "Perplexity API reference: citations and usage in every event",
        Wire(usage="every", usage_always=True, top={"citations": ["https://example.org"]}),
        {"reject": "ignore_eos"},
    ),
    "cerebras": Persona(
        "Cerebras API reference: time_info in the last event",
        Wire(usage="end", usage_always=True, end_top={"time_info": {"queue_time": 0.001}}),
        {"reject": "ignore_eos"},
    ),
    "gemini-openai": Persona(
        "Gemini API docs, OpenAI compatibility: role in each delta, usage in every event",
        Wire(role="each", usage="every", usage_always=True, finish="last"),
        {"reject": "ignore_eos", "coalesce": "3"},
    ),
    "xai": Persona(
        "xAI API reference: usage in every event, reasoning_content",
        Wire(role="each", reasoning=2, usage="every", usage_always=True, top=_FINGERPRINT),
        {"reject": "ignore_eos"},
    ),
    "dashscope": Persona(
        "Alibaba Model Studio docs, OpenAI compatibility: usage null, then an event of its own",
        Wire(
            usage_null=True,
            role_delta={"role": "assistant", "content": ""},
            choice={"logprobs": None},
        ),
        {"reject": "ignore_eos"},
    ),
    "databricks": Persona(
        "Databricks foundation model APIs reference: usage in every event",
        Wire(role="each", usage="every", usage_always=True),
        {"reject": "ignore_eos"},
    ),
    "html-standard-fields": Persona(
        "HTML standard section 9.2: event, id and retry fields",
        Wire(before_each="event: message\nid: 7\nretry: 3000\n"),
    ),
    "escaped-unicode": Persona(
        "Python json.dumps with ensure_ascii, the default", Wire(ascii=True, item=SPACED)
    ),
}
"""Name → the stream of a server."""
