"""Translation of `python -m sglang.bench_serving`."""

from __future__ import annotations

from typing import Any

from loadgen.errors import UsageError
from loadgen.translate.draft import Draft, Flags, rate_text, refuse

_IGNORED = """
    output-file output-details disable-tqdm tokenizer print-requests plot-throughput tag
    flush-cache-timeout gsp-fast-prepare cache-report rust-client rust-worker-threads
"""
_PORTS = {"vllm": 8000, "lmdeploy": 23333}  # of every other backend: 30000
_OPENAI = ("sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat", "lmdeploy", "lmdeploy-chat")


def translate(words: list[str]) -> Draft:
    """The draft for the words after `sglang.bench_serving`."""
    flags, draft = Flags(words), Draft("sglang")
    _target(flags, draft)
    stated = flags.count("num-prompts", "num-prompt")
    n_requests = stated or 1000
    n_requests = _dataset(flags, draft, n_requests)
    in_flight, rate = flags.count("max-concurrency"), flags.number("request-rate")
    if draft.arrivals.get("kind") != "trace":
        draft.set_rate(rate, 1.0, in_flight, n_requests)
    elif rate is not None:
        draft.arrivals["rate"] = rate_text(rate)
        draft.arrivals.pop("time_scale", None)
        draft.set_duration(None, n_requests, rate)
    elif stated is not None:
        draft.set_trace_requests(stated)
    if in_flight is not None and draft.arrivals["kind"] != "users":
        draft.limit_in_flight(
            in_flight,
            "at --max-concurrency requests wait in both tools; slobench counts the waiting as"
            " latency, SGLang starts its clock after it",
        )
    draft.seed = flags.count("seed")
    if (temperature := flags.number("temperature")) is not None:
        draft.requests["temperature"] = temperature
    draft.add_samplings(flags, ["top-p"])
    if (text := flags.text("extra-request-body")) is not None:
        draft.add_body(text, "--extra-request-body")
    if flags.texts("disable-ignore-eos") is not None:
        draft.extra_body["ignore_eos"] = False
    draft.add_goodput(flags)
    if ready_s := flags.count("ready-check-timeout-sec"):
        draft.options += ["--wait-ready", f"{ready_s}s"]
    return draft.finish(flags, _IGNORED)


def _target(flags: Flags, draft: Draft) -> None:
    backend = flags.text("backend") or "sglang"
    if backend not in (*_OPENAI, "sglang", "sglang-native"):
        raise UsageError(f"--backend {backend}: slobench supports chat and completions only")
    host, port = flags.text("host") or "127.0.0.1", flags.count("port")
    host = "127.0.0.1" if host == "0.0.0.0" else host
    draft.url = flags.text("base-url") or f"http://{host}:{port or _PORTS.get(backend, 30000)}"
    name, served_name = flags.text("model"), flags.text("served-model-name")
    draft.model = served_name or name or ""
    is_templated = flags.texts("apply-chat-template") is not None
    draft.api = "chat" if backend.endswith("-chat") or is_templated else "completions"
    if backend not in _OPENAI:
        draft.notes.append(
            f"--backend {backend} uses SGLang's own /generate; slobench uses /v1/{draft.api}"
        )


def _dataset(flags: Flags, draft: Draft, n_requests: int) -> int:
    """Set the lengths and prompts; the number of requests, which a dataset may change."""
    dataset = flags.text("dataset-name") or "sharegpt"
    path = flags.text("dataset-path") or None
    if dataset in ("random", "random-ids"):
        ratio = flags.number("random-range-ratio") or 0.0
        for key, flag in (("input", "random-input-len"), ("output", "random-output-len")):
            most = flags.count(flag, f"random-{key}") or 1024
            draft.requests[f"{key}_tokens"] = _down_to(most, ratio)
    elif dataset == "generated-shared-prefix":
        return _shared_prefix(flags, draft)
    elif dataset in ("sharegpt", "custom") and path is not None:
        draft.prompts = {"kind": "sharegpt", "path": path}
        if (outputs := flags.count("sharegpt-output-len")) is not None:
            draft.requests["output_tokens"] = outputs
    elif dataset == "openai" and path is not None:
        draft.prompts = {"kind": "dataset", "path": path}
        draft.requests["output_tokens"] = 128
        draft.notes.append("answers have 128 tokens unless a line states output_tokens")
    elif dataset == "mooncake" and path is not None:
        draft.arrivals = {"kind": "trace", "path": path, "format": "mooncake"}
        slowdown = flags.number("mooncake-slowdown-factor")
        if slowdown is not None:
            draft.arrivals["time_scale"] = slowdown
        flags.texts("use-trace-timestamps")
    elif dataset in ("image", "mmmu"):
        refuse(f"--dataset-name {dataset}", "its requests have images, and slobench sends text")
    else:
        draft.add_missing(
            f"--dataset-name {dataset}",
            "SGLang downloads it; name a file with --dataset-path; 1024 and 128 tokens instead"
            if dataset in ("sharegpt", "mooncake")
            else "its prompts cannot be read; 1024 and 128 tokens instead",
        )
        draft.requests.update(input_tokens=1024, output_tokens=128)
    return n_requests


def _down_to(most: int, ratio: float) -> Any:
    """Uniform on ratio · most … most, both included; fixed at ratio 1."""
    least = max(1, int(most * ratio))
    return {"kind": "uniform", "min": least, "max": most} if least < most else most


def _shared_prefix(flags: Flags, draft: Draft) -> int:
    groups = flags.count("gsp-num-groups") or 64
    per_group = flags.count("gsp-prompts-per-group") or 16
    ratio = flags.number("gsp-range-ratio")
    ratio = 1.0 if ratio is None else ratio
    popularity = flags.text("gsp-group-distribution")
    alpha = flags.number("gsp-zipf-alpha")
    prefix: dict[str, Any] = {
        "tokens": flags.count("gsp-system-prompt-len") or 2048,
        "groups": groups,
    }
    if popularity == "zipf":
        prefix["popularity"] = {"kind": "zipf", "exponent": 1.0 if alpha is None else alpha}
    if ratio != 1.0:
        draft.notes.append("--gsp-range-ratio: the shared prefix has its full length in slobench")
    draft.requests.update(
        input_tokens=_down_to(flags.count("gsp-question-len") or 128, ratio),
        output_tokens=_down_to(flags.count("gsp-output-len") or 256, ratio),
        shared_prefix=prefix,
    )
    turns = flags.count("gsp-num-turns") or 1
    if turns > 1:
        draft.session = {"turns": turns}
    return groups * per_group
