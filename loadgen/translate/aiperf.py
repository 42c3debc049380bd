"""Translation of `aiperf profile` and of `genai-perf profile`, whose flags aiperf kept."""

from __future__ import annotations

import re
from math import ceil, floor
from typing import Any

from loadgen.errors import UsageError
from loadgen.translate.draft import Draft, Flags, around, rate_text, refuse
from loadgen.units import write_duration
from loadgen.yaml_document import parse_document

_IGNORED = """
    artifact-dir output-artifact-dir profile-export-file profile-export-prefix ui ui-type
    no-gpu-telemetry gpu-telemetry no-server-metrics server-metrics verbose extra-verbose tokenizer
    tokenizer-revision tokenizer-trust-remote-code use-server-token-count workers-max max-workers
    record-processors log-level export-level slice-duration random-pool
    profile-export-level auto-plot no-auto-plot plot-required export-http-trace show-trace-timing
    generate-plots checkpoint-dir v vv use-legacy-max-tokens stats-interval per-chunk-usage
    output-tokens-mean-deterministic fixed-schedule-auto-offset no-fixed-schedule
    record-processor-service-count
"""
_METRICS = {
    "time_to_first_token": "ttft_from_send",
    "inter_token_latency": "tpot",  # aiperf's mean over a request is our tpot
    "request_latency": "e2e_from_send",
}
_SHORT = {"-m": "model", "-u": "url", "-H": "header", "-p": "measurement-interval"}
_SINGLE = (None, "single_turn", "random_pool", "inputs_json", "sharegpt")
"""Types of --custom-dataset-type whose lines are requests of their own."""
_TRACES = ("mooncake_trace", "bailian_trace", "burst_gpt_trace")
_AGENTX = {"inferencex-agentx-mvp": (1800.0, None), "agentx": (3600.0, 300.0)}
"""Scenarios that replay recorded agents: the seconds measured, and the longest idle time of a tree,
unless flags state others. Source: aiperf 0.14, its tutorial "InferenceX AgentX MVP"."""
_PAIR = re.compile(r"[(]?([\d.]+)(?:[|]([\d.]+))?,([\d.]+)(?:[|]([\d.]+))?[)]?:([\d.]+)", re.ASCII)


def translate(words: list[str], tool: str = "aiperf") -> Draft:
    """The draft for the words after `aiperf profile`, or after `genai-perf profile`.

    genai-perf differs in its default endpoint (Triton's, which slobench does not support), and its
    requests at a rate are equally spaced.
    """
    begin = words.index("--") if "--" in words else len(words)
    flags, draft = Flags(words[:begin], _SHORT), Draft(tool)
    if words[begin + 1 :]:
        draft.add_missing(
            " ".join(words[begin:]), "these flags go to perf_analyzer and are not translated"
        )
    url = flags.text("url") or "localhost:8000"
    draft.url = url if "://" in url else f"http://{url}"
    draft.model = flags.text("model", "model-names") or ""
    is_genai_perf = tool == "genai-perf"
    service = flags.text("service-kind") or ("triton" if is_genai_perf else "openai")
    default = "chat" if service == "openai" else "kserve"
    endpoint = flags.text("endpoint-type") or default
    if endpoint not in ("chat", "completions", "responses"):
        raise UsageError(
            f"--endpoint-type {endpoint}: slobench supports chat, completions and responses only"
        )
    draft.api = endpoint
    if (backend := flags.text("backend")) is not None:
        draft.add_missing(f"--backend {backend}", "it concerns Triton's own protocol")
    if flags.texts("streaming") is None:
        draft.notes.append(
            f"without --streaming {draft.tool} receives whole answers; slobench always streams"
        )
    draft.seed = flags.count("random-seed")
    _refuse_other_kinds(flags)
    if not _is_agents(flags, draft) and not _is_replay(flags, draft):
        _lengths(flags, draft)
        _arrivals(flags, draft, "constant" if is_genai_perf else "poisson")
    _cancel(flags, draft)
    for name in ("gpu-telemetry", "server-metrics"):
        if urls := flags.texts(name):
            draft.add_missing(f"--{name} {' '.join(urls)}", "see metrics_url of the target file")
    if (timeout_s := flags.number("request-timeout-seconds")) is not None:
        draft.limits["timeout"] = write_duration(timeout_s)
    for pair in " ".join(flags.texts("goodput") or []).split():
        name, _, limit_ms = pair.partition(":")
        if name in _METRICS:
            draft.add_slo(_METRICS[name], limit_ms)
        else:
            draft.add_missing(f"--goodput {pair}", f"known: {', '.join(_METRICS)}")
    for pair in flags.texts("extra-inputs") or []:
        _extra_input(pair, draft)
    return draft.finish(flags, _IGNORED)


def _refuse_other_kinds(flags: Flags) -> None:
    """Raises UsageError for traffic that has no equivalent of the same kind."""
    rate, users = flags.number("user-centric-rate"), flags.count("num-users")
    if rate is not None:
        think = f"{users / rate:g}s" if users and rate > 0 else "SECONDS"
        refuse(
            f"--user-centric-rate {rate:g}",
            "each of --num-users sends a turn at fixed times; the nearest is slobench run --users "
            f"{users or 'N'} --think {think}, whose pause follows the answer",
        )


def _extra_input(pair: str, draft: Draft) -> None:
    """`key:value` or a JSON object; both are fields of every request's body."""
    if pair.startswith("{"):
        draft.add_body(pair, "--extra-inputs")
        return
    key, colon, value = pair.partition(":")
    text = value if colon else "true"
    draft.add_field(key, parse_document(f"v: {text}", pair, UsageError).values["v"])


def _cancel(flags: Flags, draft: Draft) -> None:
    percent = flags.number("request-cancellation-rate")
    delay_s = flags.number("request-cancellation-delay") or 0.0
    if percent is not None:
        draft.requests["cancel"] = {"share": percent / 100, "after": write_duration(delay_s)}


def _is_agents(flags: Flags, draft: Draft) -> bool:
    """Whether the command replays recorded agents by the rules of AgentX; if so, sets them."""
    name = flags.text("scenario")
    if name is None:
        return False
    if name not in _AGENTX:
        refuse(f"--scenario {name}", f"known: {', '.join(_AGENTX)}")
    seconds, idle_s = _AGENTX[name]
    path, corpus = flags.text("input-file", "f", "file"), flags.text("public-dataset")
    if path is None:
        path = corpus or "traces"
        draft.add_missing(
            f"--public-dataset {path}", "download its files, and set agents.path to their folder"
        )
    draft.agents = {"path": path}
    if (most := flags.count("max-context-length")) is not None:
        draft.agents["max_context"] = most
        draft.notes.append(
            "aiperf leaves out conversations that are longer than --max-context-length; slobench "
            "ends them before their first request that is too long"
        )
    idle_s = flags.number("trace-idle-gap-cap-seconds") or idle_s
    if idle_s is not None:
        draft.agents["idle_cap"] = {"of": "tree", "at_most": write_duration(idle_s)}
    lanes = [round(n) for n in _values(flags.text("concurrency"))] or [1]
    draft.set_closed_loop(lanes[0])
    if len(lanes) > 1:
        draft.set_sweep("arrivals.users", list(map(str, lanes)))
    draft.measure_s = flags.number("benchmark-duration") or seconds
    draft.limits["timeout"] = "10m"
    _note_other_rules(flags, draft)
    return True


def _note_other_rules(flags: Flags, draft: Draft) -> None:
    """The rules of AgentX that a scenario does not keep."""
    for name in ("custom-dataset-type", "allow-dataset-wrap"):
        flags.texts(name)
    start = [flags.text(f"trajectory-start-{end}-ratio") for end in ("min", "max")]
    low, high = start[0] or "0.0", start[1] or "1.0"
    draft.notes.append(
        f"AgentX starts the first trees at a random point of their recording ({low} to {high}), "
        "with warm-up requests; slobench starts all at their beginning: set phases.warmup to a "
        "task time"
    )
    cap = flags.text("system-idle-gap-cap-seconds") or "10"
    draft.notes.append(
        f"AgentX shortens the time without any request in flight to {cap} s; slobench keeps it"
    )
    bust = flags.text("cache-bust") or "first_turn_prefix"
    draft.notes.append(
        f"AgentX marks each play in its first user turn ({bust}), so that plays share the system "
        "prompt; plays of slobench share no text"
    )


def _is_replay(flags: Flags, draft: Draft) -> bool:
    """Whether the command replays a trace with times; if so, sets the draft's arrivals."""
    source, kind = flags.text("input-file", "f", "file"), flags.text("custom-dataset-type")
    is_payload = source is not None and source.startswith("payload:")
    has_times = flags.texts("fixed-schedule") is not None or kind in _TRACES or is_payload
    if source is None:
        return False
    if not has_times or flags.texts("no-fixed-schedule") is not None:
        given = f"--input-file {source}" + (f" --custom-dataset-type {kind}" if kind else "")
        if kind not in _SINGLE:
            refuse(given, "its requests are conversations; see `session` in docs/scenarios.md")
        draft.prompts = {"kind": "dataset", "path": source}
        return False
    draft.arrivals = {"kind": "trace", "path": source.removeprefix("payload:")}
    draft.measure_s = flags.number("benchmark-duration")
    if (n_requests := flags.count("request-count", "num-requests")) is not None:
        draft.set_trace_requests(n_requests)
    speedup = flags.number("replay-speedup", "synthesis-speedup-ratio")
    if speedup is not None:
        draft.arrivals["time_scale"] = float(f"{1 / speedup:.6g}")
    _offsets(flags, draft, speedup or 1.0)
    return True


def _offsets(flags: Flags, draft: Draft, speedup: float) -> None:
    """The part of the trace between two offsets in whole milliseconds, both included."""
    start_ms = flags.number("fixed-schedule-start-offset")
    end_ms = flags.number("fixed-schedule-end-offset")
    if start_ms is None and end_ms is None:
        return
    window = {"from": write_duration((start_ms or 0.0) / 1000)}
    if end_ms is not None:
        window["to"] = write_duration((end_ms + 1) / 1000)  # exclusive in slobench
        if draft.measure_s is None:
            draft.measure_s = (end_ms + 1 - (start_ms or 0.0)) / 1000 / speedup
    draft.arrivals["window"] = window
    draft.notes.append(
        "offsets count from the first request of the trace in slobench, from its time 0 in aiperf"
    )


def _lengths(flags: Flags, draft: Draft) -> None:
    if (text := flags.text("seq-dist", "sequence-distribution")) is not None:
        _sequences(text, draft)
    else:
        _two_lengths(flags, draft)
    prefix = flags.count("prefix-prompt-length", "prompt-prefix-length") or 0
    groups = flags.count("num-prefix-prompts", "prompt-prefix-pool-size", "prefix-prompt-pool-size")
    system = flags.count("shared-system-prompt-length") or 0
    if prefix and system:
        draft.add_missing(f"--shared-system-prompt-length {system}", "a request has one prefix")
    if prefix or system:
        draft.requests["shared_prefix"] = {"tokens": prefix or system, "groups": groups or 1}
    turns = flags.number("conversation-turn-mean", "session-turns-mean") or 1.0
    if turns > 1:
        turns_sd = flags.number("conversation-turn-stddev", "session-turns-stddev") or 0.0
        draft.session = {"turns": around(turns, turns_sd)}
        delay_ms = flags.number("conversation-turn-delay-mean", "session-turn-delay-mean")
        if delay_ms is not None:
            draft.session["think"] = write_duration(delay_ms / 1000)


def _two_lengths(flags: Flags, draft: Draft) -> None:
    inputs = flags.number("isl", "synthetic-input-tokens-mean", "prompt-input-tokens-mean") or 550
    inputs_sd = flags.number(
        "isl-stddev", "synthetic-input-tokens-stddev", "prompt-input-tokens-stddev"
    )
    outputs = flags.number("osl", "output-tokens-mean", "prompt-output-tokens-mean")
    if outputs is None:
        draft.add_missing(
            "(no --osl)", f"{draft.tool} lets the model end its answers; 128 tokens instead"
        )
        outputs = 128.0
    outputs_sd = flags.number("osl-stddev", "output-tokens-stddev", "prompt-output-tokens-stddev")
    ratio = flags.number("random-range-ratio")
    is_lower = flags.text("random-corpus-style") == "sglang"
    if not draft.prompts:
        draft.requests["input_tokens"] = _length(inputs, inputs_sd or 0.0, ratio, is_lower)
    draft.requests["output_tokens"] = _length(outputs, outputs_sd or 0.0, ratio, is_lower)


def _length(mean: float, sd: float, ratio: float | None, is_lower: bool) -> Any:
    """`ratio`: uniform on mean · (1 ∓ ratio), or with `is_lower` on mean · ratio … mean."""
    if ratio is None:
        return around(mean, sd)
    low = max(1, floor(mean * ratio) if is_lower else floor(mean * (1 - ratio)))
    high = round(mean) if is_lower else ceil(mean * (1 + ratio))
    return {"kind": "uniform", "min": low, "max": high} if low < high else round(mean)


def _sequences(text: str, draft: Draft) -> None:
    """`ISL[|sd],OSL[|sd]:percent;…` as a class for each pair, so that pairs stay together."""
    pairs = _PAIR.findall(text.replace(" ", ""))
    if not pairs or len(pairs) != text.count(":"):
        raise UsageError(f"--sequence-distribution {text}: expected ISL,OSL:PERCENT;…")
    for number, (inputs, inputs_sd, outputs, outputs_sd, percent) in enumerate(pairs, 1):
        draft.classes[f"pair{number}_{inputs}_{outputs}"] = {
            "weight": float(percent),
            "requests": {
                "input_tokens": around(float(inputs), float(inputs_sd or 0)),
                "output_tokens": around(float(outputs), float(outputs_sd or 0)),
            },
        }


def _values(text: str | None) -> list[float]:
    try:
        return [float(word) for word in (text or "").split(",") if word]
    except ValueError:
        raise UsageError(f"{text}: expected numbers, separated by commas") from None


def _arrivals(flags: Flags, draft: Draft, default: str) -> None:
    rates = _values(flags.text("request-rate"))
    stated_pattern = flags.text("arrival-pattern", "request-rate-mode")
    stated_smoothness = flags.number("arrival-smoothness", "vllm-burstiness")
    pattern = stated_pattern or default
    in_flight = [round(n) for n in _values(flags.text("concurrency", "session-concurrency"))]
    n_requests = flags.count("request-count", "num-requests")
    seconds = flags.number("benchmark-duration")
    interval_ms = flags.number("measurement-interval")
    if seconds is None and interval_ms is not None:
        seconds = interval_ms / 1000
    rate = rates[0] if rates else None
    if rate is None:
        draft.set_closed_loop(in_flight[0] if in_flight else 1)
        ramp_s = flags.number("concurrency-ramp-duration")
        if ramp_s is not None:
            draft.arrivals["ramp_up"] = write_duration(ramp_s)
        if len(in_flight) > 1:
            draft.set_sweep("arrivals.users", list(map(str, in_flight)))
    elif pattern == "gamma":
        draft.set_gamma(rate, stated_smoothness or 1.0)
    elif pattern in ("poisson", "constant"):
        draft.arrivals = {"kind": pattern, "rate": rate_text(rate)}
    else:
        raise UsageError(f"--arrival-pattern {pattern}: no equivalent is known")
    if rate is None and stated_pattern is not None:
        draft.add_missing(f"--arrival-pattern {stated_pattern}", "needs --request-rate")
    if stated_smoothness is not None and (rate is None or pattern != "gamma"):
        draft.add_missing(
            f"--arrival-smoothness {stated_smoothness:g}",
            "needs --request-rate and --arrival-pattern gamma",
        )
    if len(rates) > 1:
        draft.set_sweep("arrivals.rate", [rate_text(rate) for rate in rates])
    _warmup(flags, draft, rate)
    draft.set_window(seconds, n_requests, rate or 0.0)
    if rate is not None and in_flight:
        draft.limit_in_flight(
            in_flight[0],
            "at --concurrency aiperf skips arrivals; slobench lets them wait, as latency",
        )


def _warmup(flags: Flags, draft: Draft, rate: float | None) -> None:
    """A warm-up of the same traffic: its duration, or the time of its requests at the rate."""
    warmup_s = flags.number("warmup-duration")
    n_requests = flags.number("warmup-request-count", "num-warmup-requests")
    if warmup_s is None and n_requests is not None and rate is not None:
        warmup_s = n_requests / rate
    elif n_requests is not None:
        draft.add_missing(
            f"--warmup-request-count {n_requests:g}", "set phases.warmup to a time instead"
        )
    draft.warmup_s = warmup_s or 0.0
