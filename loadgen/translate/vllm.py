"""`vllm bench serve` (and its predecessor benchmark_serving.py)."""

from __future__ import annotations

import json
from math import sqrt

from loadgen.errors import UsageError
from loadgen.translate.draft import Draft, Flags, rate_text
from loadgen.units import write_duration

_ABOUT_OUTPUT = (
    *("percentile-metrics", "metric-percentiles", "save-result", "save-detailed", "append-result"),
    *("result-dir", "result-filename", "label", "metadata", "disable-tqdm", "plot-timeline"),
    *(
        "tokenizer",
        "tokenizer-mode",
        "trust-remote-code",
        "request-id-prefix",
        "plot-dataset-stats",
    ),
    *("ignore-eos", "ready-check-timeout-sec", "profile", "no-stream", "disable-shuffle"),
    *("no-oversample", "logprobs"),
)
_LENGTHS = ("input_tokens", "output_tokens")
_SLO_WORDS = {"ttft": "ttft_from_send", "tpot": "tpot", "e2el": "e2e_from_send"}  # its clocks


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
        word, _, limit = pair.partition(":")
        if word not in _SLO_WORDS:
            raise UsageError(f"--goodput {pair}: expected ttft:MS, tpot:MS or e2el:MS")
        draft.slo.append(f"{_SLO_WORDS[word]} <= {write_duration(float(limit) / 1000)}")
    if flags.texts("num-warmups"):
        draft.lacks("--num-warmups", "set phases.warmup to a time instead")
    for flag in ("top-p", "top-k", "min-p", "extra-body"):
        if value := flags.texts(flag):
            draft.lacks(f"--{flag} {' '.join(value)}", "goes into a target file (extra_body)")
    draft.lacks_secrets(flags)
    flags.drop(_ABOUT_OUTPUT)
    for flag in flags.left():
        draft.lacks(flag, "not known to this translation")
    return draft


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
    of_sharegpt = flags.count("sharegpt-output-len")
    ratio = _range_ratio(flags)
    prefix = flags.count("random-prefix-len") or 0
    if dataset in ("random", "random-ids"):
        for key, mean, spread in zip(_LENGTHS, (inputs, outputs), ratio, strict=True):
            low, high = round(mean * (1 - spread)), round(mean * (1 + spread))
            ends = {"kind": "uniform", "min": max(1, low), "max": high}
            draft.requests[key] = ends if spread else round(mean)
        if prefix:
            draft.requests["shared_prefix"] = {"tokens": prefix}
    elif dataset in ("sharegpt", "burstgpt") and path is not None:
        if dataset == "sharegpt":
            draft.prompts = {"kind": "sharegpt", "path": path}
            if of_sharegpt is not None:
                draft.requests["output_tokens"] = of_sharegpt
        else:
            draft.lacks("--dataset-name burstgpt", "replay it: arrivals: {kind: trace, path: …}")
            draft.requests.update(input_tokens=round(inputs), output_tokens=round(outputs))
    else:
        draft.lacks(f"--dataset-name {dataset}", f"lengths of {inputs:g} and {outputs:g} instead")
        draft.requests.update(input_tokens=round(inputs), output_tokens=round(outputs))


def _range_ratio(flags: Flags) -> tuple[float, float]:
    """The half width of inputs and of outputs, as shares of their means: one number for both, or
    `{"input": 0.3, "output": 0.5}`."""
    text = flags.text("random-range-ratio") or "0"
    if not text.startswith("{"):
        return float(text), float(text)
    given = json.loads(text)
    return float(given.get("input", 0.0)), float(given.get("output", 0.0))


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
            draft.notes.append(f"a closed loop: {n_requests} prompts end it there, a time here")
        else:
            draft.arrivals = {"kind": "burst", "requests": n_requests}
        return
    elif burstiness == 1:
        draft.arrivals = {"kind": "poisson", "rate": rate_text(rate)}
    elif burstiness == float("inf"):
        draft.arrivals = {"kind": "constant", "rate": rate_text(rate)}
    else:
        cv = float(f"{1 / sqrt(burstiness):.6g}")
        draft.arrivals = {"kind": "gamma", "rate": rate_text(rate), "cv": cv}
    if draft.measure_s is None and rate is not None:
        draft.set_duration(None, n_requests, rate)
    if in_flight is not None:
        draft.limits = {"max_concurrency": in_flight, "when_full": "wait"}
        draft.notes.append(
            "at --max-concurrency requests wait in both tools; slobench counts the waiting as"
            " latency, vLLM starts its clock after it"
        )
