"""`aiperf profile` (and genai-perf, whose flags it kept)."""

from __future__ import annotations

from math import sqrt

from loadgen.errors import UsageError
from loadgen.translate.draft import Draft, Flags, around, rate_text
from loadgen.units import write_duration

_ABOUT_OUTPUT = (
    *("artifact-dir", "output-artifact-dir", "profile-export-file", "profile-export-prefix", "ui"),
    *(
        "ui-type",
        "no-gpu-telemetry",
        "gpu-telemetry",
        "no-server-metrics",
        "server-metrics",
        "verbose",
    ),
    *("tokenizer", "tokenizer-revision", "tokenizer-trust-remote-code", "use-server-token-count"),
    *("workers-max", "max-workers", "record-processors", "streaming", "log-level", "export-level"),
    *("slice-duration", "extra-verbose", "random-pool", "benchmark-grace-period"),
)
_SLO_WORDS = {
    "time_to_first_token": "ttft_from_send",
    "inter_token_latency": "tpot",  # its mean over a request, which is tpot here
    "request_latency": "e2e_from_send",
}
_SHORT = {"-m": "model", "-u": "url", "-H": "header"}


def translate(words: list[str]) -> Draft:
    """The draft for the words after `aiperf profile`."""
    flags, draft = Flags(words, _SHORT), Draft("aiperf")
    url = flags.text("url") or "localhost:8000"
    draft.url = url if "://" in url else f"http://{url}"
    draft.model = flags.text("model", "model-names") or ""
    endpoint = flags.text("endpoint-type") or "chat"
    if endpoint not in ("chat", "completions"):
        raise UsageError(f"--endpoint-type {endpoint}: slobench speaks chat and completions only")
    draft.api = endpoint
    draft.seed = flags.count("random-seed")
    if not _is_replay(flags, draft):
        _lengths(flags, draft)
        _arrivals(flags, draft)
    if (timeout_s := flags.number("request-timeout-seconds")) is not None:
        draft.limits["timeout"] = write_duration(timeout_s)
    for pair in " ".join(flags.texts("goodput") or []).split():
        word, _, limit = pair.partition(":")
        if word not in _SLO_WORDS:
            draft.lacks(f"--goodput {pair}", f"known: {', '.join(_SLO_WORDS)}")
            continue
        draft.slo.append(f"{_SLO_WORDS[word]} <= {write_duration(float(limit) / 1000)}")
    extra = [e for e in flags.texts("extra-inputs") or [] if not e.startswith("ignore_eos")]
    for pair in extra:
        key, _, value = pair.partition(":")
        if key == "temperature":
            draft.requests["temperature"] = float(value)
        else:
            draft.lacks(f"--extra-inputs {pair}", "goes into a target file (extra_body)")
    for flag in ("warmup-request-count", "warmup-duration", "num-warmup-requests"):
        if warmup := flags.text(flag):
            draft.lacks(f"--{flag} {warmup}", "set phases.warmup to a time instead")
    draft.lacks_secrets(flags)
    flags.drop(_ABOUT_OUTPUT)
    for flag in flags.left():
        draft.lacks(flag, "not known to this translation")
    return draft


def _is_replay(flags: Flags, draft: Draft) -> bool:
    """Whether a trace with times is replayed, which the draft then says."""
    source, kind = flags.text("input-file"), flags.text("custom-dataset-type")
    is_replay = flags.has("fixed-schedule") or kind == "mooncake_trace"
    if source is not None and is_replay:
        draft.arrivals = {"kind": "trace", "path": source}
        draft.measure_s = flags.number("benchmark-duration")
        return True
    if source is not None:
        draft.lacks(f"--input-file {source}", "see prompts: {kind: dataset, path: …}")
    return False


def _lengths(flags: Flags, draft: Draft) -> None:
    inputs = flags.number("isl", "synthetic-input-tokens-mean", "prompt-input-tokens-mean") or 550
    spread = flags.number("isl-stddev", "synthetic-input-tokens-stddev") or 0.0
    outputs = flags.number("osl", "output-tokens-mean", "prompt-output-tokens-mean")
    if outputs is None:
        draft.lacks("(no --osl)", "answers end by themselves there; 128 tokens are asked for here")
        outputs = 128.0
    around_outputs = flags.number("osl-stddev", "output-tokens-stddev") or 0.0
    draft.requests["input_tokens"] = around(inputs, spread)
    draft.requests["output_tokens"] = around(outputs, around_outputs)
    prefix = flags.count("prefix-prompt-length", "prompt-prefix-length") or 0
    groups = flags.count("num-prefix-prompts", "prompt-prefix-pool-size", "prefix-prompt-pool-size")
    if prefix:
        draft.requests["shared_prefix"] = {"tokens": prefix, "groups": groups or 1}
    turns = flags.number("conversation-turn-mean", "session-turns-mean") or 1.0
    if turns > 1:
        spread = flags.number("conversation-turn-stddev", "session-turns-stddev") or 0.0
        draft.session = {"turns": around(turns, spread)}
        if (delay_ms := flags.number("conversation-turn-delay-mean")) is not None:
            draft.session["think"] = write_duration(delay_ms / 1000)


def _arrivals(flags: Flags, draft: Draft) -> None:
    rate = flags.number("request-rate")
    pattern = flags.text("arrival-pattern", "request-rate-mode") or "poisson"
    smoothness = flags.number("arrival-smoothness", "vllm-burstiness") or 1.0
    in_flight = flags.count("concurrency")
    n_requests = flags.count("request-count", "num-requests", "num-prompts")
    seconds = flags.number("benchmark-duration")
    if rate is None:
        draft.set_closed_loop(in_flight or 1)
    elif pattern == "gamma":
        cv = float(f"{1 / sqrt(smoothness):.6g}")
        draft.arrivals = {"kind": "gamma", "rate": rate_text(rate), "cv": cv}
    elif pattern in ("poisson", "constant"):
        draft.arrivals = {"kind": pattern, "rate": rate_text(rate)}
    else:
        raise UsageError(f"--arrival-pattern {pattern}: no equivalent is known")
    draft.set_duration(seconds, n_requests, rate or 0.0)
    if rate is not None and in_flight is not None:
        draft.limits = {"max_concurrency": in_flight, "when_full": "wait"}
        draft.notes.append(
            "at --concurrency aiperf skips arrivals; here they wait, and the waiting is latency"
        )
