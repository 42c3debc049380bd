"""Translation of `vllm bench serve` (and its predecessor benchmark_serving.py)."""

from __future__ import annotations

import json

from loadgen.errors import UsageError
from loadgen.translate.draft import Draft, Flags, rate_text
from loadgen.units import write_duration

_IGNORED = """
    percentile-metrics metric-percentiles save-result save-detailed append-result result-dir
    result-filename label metadata disable-tqdm plot-timeline plot-dataset-stats request-id-prefix
    tokenizer tokenizer-mode trust-remote-code ignore-eos ready-check-timeout-sec profile no-stream
    disable-shuffle no-oversample logprobs
"""
_LENGTHS = ("input_tokens", "output_tokens")
_METRICS = {"ttft": "ttft_from_send", "tpot": "tpot", "e2el": "e2e_from_send"}  # with its clocks


def translate(words: list[str]) -> Draft:
    """The draft for the words after `vllm bench serve`."""
    flags, draft = Flags(words), Draft("vllm")
    _target(flags, draft)
    _lengths(flags, draft)
    _arrivals(flags, draft)
    draft.seed = flags.count("seed")
    if (temperature := flags.number("temperature")) is not None:
        draft.requests["temperature"] = temperature
    for pair in flags.texts("goodput") or []:
        name, _, limit_ms = pair.partition(":")
        if name not in _METRICS:
            raise UsageError(f"--goodput {pair}: expected ttft:MS, tpot:MS or e2el:MS")
        draft.add_slo(_METRICS[name], limit_ms)
    if flags.texts("num-warmups"):
        draft.add_missing("--num-warmups", "set phases.warmup to a time instead")
    for flag in ("top-p", "top-k", "min-p", "extra-body"):
        if values := flags.texts(flag):
            draft.add_missing(
                f"--{flag} {' '.join(values)}", "belongs in a target file (extra_body)"
            )
    return draft.finish(flags, _IGNORED)


def _target(flags: Flags, draft: Draft) -> None:
    host, port = flags.text("host") or "127.0.0.1", flags.text("port") or "8000"
    draft.url = flags.text("base-url") or f"http://{host}:{port}"
    draft.model = flags.text("model", "served-model-name") or ""
    endpoint = flags.text("endpoint") or ""
    backend = flags.text("backend", "endpoint-type") or "openai"
    is_chat = "chat" in backend or "chat" in endpoint
    draft.api = "chat" if is_chat else "completions"


def _lengths(flags: Flags, draft: Draft) -> None:
    dataset = flags.text("dataset-name") or "random"
    path = flags.text("dataset-path")
    inputs = flags.number("random-input-len", "input-len") or 1024
    outputs = flags.number("random-output-len", "output-len") or 128
    sharegpt_outputs = flags.count("sharegpt-output-len")
    ratios = _range_ratios(flags)
    prefix = flags.count("random-prefix-len") or 0
    if dataset in ("random", "random-ids"):
        for key, mean, ratio in zip(_LENGTHS, (inputs, outputs), ratios, strict=True):
            low, high = round(mean * (1 - ratio)), round(mean * (1 + ratio))
            uniform = {"kind": "uniform", "min": max(1, low), "max": high}
            draft.requests[key] = uniform if ratio else round(mean)
        if prefix:
            draft.requests["shared_prefix"] = {"tokens": prefix}
        return
    if dataset == "sharegpt" and path is not None:
        draft.prompts = {"kind": "sharegpt", "path": path}
        if sharegpt_outputs is not None:
            draft.requests["output_tokens"] = sharegpt_outputs
        return
    reason = f"lengths of {inputs:g} and {outputs:g} instead"
    if dataset == "burstgpt" and path is not None:
        reason = "replay it: arrivals: {kind: trace, path: …}"
    draft.add_missing(f"--dataset-name {dataset}", reason)
    draft.requests.update(input_tokens=round(inputs), output_tokens=round(outputs))


def _range_ratios(flags: Flags) -> tuple[float, float]:
    """The half widths of inputs and outputs as fractions of their means: one number for both, or
    `{"input": 0.3, "output": 0.5}`."""
    text = flags.text("random-range-ratio") or "0"
    if not text.startswith("{"):
        return float(text), float(text)
    ratios = json.loads(text)
    return float(ratios.get("input", 0.0)), float(ratios.get("output", 0.0))


def _arrivals(flags: Flags, draft: Draft) -> None:
    n_requests = flags.count("num-prompts") or 1000
    rate = flags.number("request-rate")
    burstiness = flags.number("burstiness") or 1.0
    in_flight = flags.count("max-concurrency")
    ramp = flags.text("ramp-up-strategy")
    first, last = flags.number("ramp-up-start-rps"), flags.number("ramp-up-end-rps")
    if ramp is not None and first is not None and last is not None:
        over_s = 2 * n_requests / (first + last)
        draft.arrivals = {
            "kind": "ramp",
            "from": rate_text(first),
            "to": rate_text(last),
            "over": write_duration(over_s),
            "shape": ramp,
        }
        draft.measure_s = over_s
    elif rate is None or rate == float("inf"):
        if in_flight is not None:
            draft.set_closed_loop(in_flight)
            draft.notes.append(
                f"a closed loop: vLLM ends after {n_requests} prompts, slobench after a fixed time"
            )
        else:
            draft.arrivals = {"kind": "burst", "requests": n_requests}
        return
    elif burstiness in (1, float("inf")):
        kind = "poisson" if burstiness == 1 else "constant"
        draft.arrivals = {"kind": kind, "rate": rate_text(rate)}
    else:
        draft.set_gamma(rate, burstiness)
    if draft.measure_s is None and rate is not None:
        draft.set_duration(None, n_requests, rate)
    if in_flight is not None:
        draft.limit_in_flight(
            in_flight,
            "at --max-concurrency requests wait in both tools; slobench counts the waiting as"
            " latency, vLLM starts its clock after it",
        )
