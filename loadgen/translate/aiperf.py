"""Translation of `aiperf profile` (and of genai-perf, whose flags aiperf kept)."""

from __future__ import annotations

from loadgen.errors import UsageError
from loadgen.translate.draft import Draft, Flags, around, rate_text
from loadgen.units import write_duration

_IGNORED = """
    artifact-dir output-artifact-dir profile-export-file profile-export-prefix ui ui-type
    no-gpu-telemetry gpu-telemetry no-server-metrics server-metrics verbose extra-verbose tokenizer
    tokenizer-revision tokenizer-trust-remote-code use-server-token-count workers-max max-workers
    record-processors streaming log-level export-level slice-duration random-pool
    benchmark-grace-period
"""
_METRICS = {
    "time_to_first_token": "ttft_from_send",
    "inter_token_latency": "tpot",  # aiperf's mean over a request is our tpot
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
        raise UsageError(f"--endpoint-type {endpoint}: slobench supports chat and completions only")
    draft.api = endpoint
    draft.seed = flags.count("random-seed")
    if not _is_replay(flags, draft):
        _lengths(flags, draft)
        _arrivals(flags, draft)
    if (timeout_s := flags.number("request-timeout-seconds")) is not None:
        draft.limits["timeout"] = write_duration(timeout_s)
    for pair in " ".join(flags.texts("goodput") or []).split():
        name, _, limit_ms = pair.partition(":")
        if name in _METRICS:
            draft.add_slo(_METRICS[name], limit_ms)
        else:
            draft.add_missing(f"--goodput {pair}", f"known: {', '.join(_METRICS)}")
    for pair in flags.texts("extra-inputs") or []:
        key, _, value = pair.partition(":")
        if key == "temperature":
            draft.requests["temperature"] = float(value)
        elif not key.startswith("ignore_eos"):
            draft.add_missing(f"--extra-inputs {pair}", "belongs in a target file (extra_body)")
    for flag in ("warmup-request-count", "warmup-duration", "num-warmup-requests"):
        if warmup := flags.text(flag):
            draft.add_missing(f"--{flag} {warmup}", "set phases.warmup to a time instead")
    return draft.finish(flags, _IGNORED)


def _is_replay(flags: Flags, draft: Draft) -> bool:
    """Whether the command replays a trace with times; if so, sets the draft's arrivals."""
    source, kind = flags.text("input-file"), flags.text("custom-dataset-type")
    is_replay = flags.texts("fixed-schedule") is not None or kind == "mooncake_trace"
    if source is not None and is_replay:
        draft.arrivals = {"kind": "trace", "path": source}
        draft.measure_s = flags.number("benchmark-duration")
        return True
    if source is not None:
        draft.add_missing(f"--input-file {source}", "see prompts: {kind: dataset, path: …}")
    return False


def _lengths(flags: Flags, draft: Draft) -> None:
    inputs = flags.number("isl", "synthetic-input-tokens-mean", "prompt-input-tokens-mean") or 550
    inputs_sd = flags.number("isl-stddev", "synthetic-input-tokens-stddev") or 0.0
    outputs = flags.number("osl", "output-tokens-mean", "prompt-output-tokens-mean")
    if outputs is None:
        draft.add_missing("(no --osl)", "aiperf lets the model end its answers; 128 tokens instead")
        outputs = 128.0
    outputs_sd = flags.number("osl-stddev", "output-tokens-stddev") or 0.0
    draft.requests["input_tokens"] = around(inputs, inputs_sd)
    draft.requests["output_tokens"] = around(outputs, outputs_sd)
    prefix = flags.count("prefix-prompt-length", "prompt-prefix-length") or 0
    groups = flags.count("num-prefix-prompts", "prompt-prefix-pool-size", "prefix-prompt-pool-size")
    if prefix:
        draft.requests["shared_prefix"] = {"tokens": prefix, "groups": groups or 1}
    turns = flags.number("conversation-turn-mean", "session-turns-mean") or 1.0
    if turns > 1:
        turns_sd = flags.number("conversation-turn-stddev", "session-turns-stddev") or 0.0
        draft.session = {"turns": around(turns, turns_sd)}
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
        draft.set_gamma(rate, smoothness)
    elif pattern in ("poisson", "constant"):
        draft.arrivals = {"kind": pattern, "rate": rate_text(rate)}
    else:
        raise UsageError(f"--arrival-pattern {pattern}: no equivalent is known")
    draft.set_duration(seconds, n_requests, rate or 0.0)
    if rate is not None and in_flight is not None:
        draft.limit_in_flight(
            in_flight, "at --concurrency aiperf skips arrivals; slobench lets them wait, as latency"
        )
