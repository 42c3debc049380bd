"""Translation of `vllm bench serve` (and its predecessor benchmark_serving.py)."""

from __future__ import annotations

import json
import re
from math import log, sqrt

from loadgen.errors import UsageError
from loadgen.translate.draft import Draft, Flags, rate_text, refuse
from loadgen.units import write_duration

_IGNORED = """
    percentile-metrics metric-percentiles save-result save-detailed append-result result-dir
    result-filename label metadata disable-tqdm plot-timeline plot-dataset-stats
    tokenizer tokenizer-mode trust-remote-code ignore-eos
    skip-tokenizer-init timeline-itl-thresholds self-timed
"""
_SAMPLINGS = (
    *("top-p", "top-k", "min-p", "frequency-penalty", "presence-penalty", "repetition-penalty"),
    "logprobs",
)
_OTHER_APIS = (
    *("pooling", "infinity", "clip", "vlm2vec", "audio", "transcription", "classify", "messages"),
    *("tgi", "tensorrt", "deepspeed", "sagemaker", "generate", "realtime", "video", "image"),
)
_APIS = ("embeddings", "rerank", "chat", "responses", "completions")
_WITHOUT_TOKENS = ("embeddings", "rerank")
_OTHER_MEDIA = re.compile(
    r"vision|image|video|audio|speech|multi-?modal|vqa|\bmm|[-_]mm\b|\basr\b", re.IGNORECASE
)
"""Names of datasets with images, audio or video."""
_RAMP_POINTS = 33
_BURSTGPT_MODEL = "GPT-4"  # the only rows that vLLM reads
_LENGTHS = ("input_tokens", "output_tokens")


def translate(words: list[str]) -> Draft:
    """The draft for the words after `vllm bench serve`."""
    flags, draft = Flags(words), Draft("vllm")
    _target(flags, draft)
    _lengths(flags, draft)
    _arrivals(flags, draft)
    draft.seed = flags.count("seed")
    has_tokens = draft.api not in _WITHOUT_TOKENS
    if not has_tokens:
        _set_texts(flags, draft)
    if (temperature := flags.number("temperature")) is not None:
        draft.requests["temperature"] = temperature
    elif has_tokens:
        draft.notes.append(
            "without --temperature vLLM leaves the temperature to the server; slobench sends 0"
            " (requests.temperature)"
        )
    draft.add_goodput(flags)
    if ready_s := flags.count("ready-check-timeout-sec"):
        draft.options += ["--wait-ready", f"{ready_s}s"]
    if flags.texts("ignore-eos") is None and has_tokens:
        draft.notes.append(
            "without --ignore-eos vLLM lets the model end its answers; slobench requests exact"
            " lengths (extra_body: {ignore_eos: null, min_tokens: null} in a target file does not)"
        )
    if flags.texts("profile") is not None:
        draft.add_missing("--profile", "slobench starts no profiler of the server")
    if flags.texts("no-stream") is not None:
        draft.add_missing("--no-stream", "slobench times each token, so its requests stream")
    if flags.texts("num-warmups"):
        draft.add_missing("--num-warmups", "set phases.warmup to a time instead")
    draft.add_samplings(flags, _SAMPLINGS)
    if (text := flags.text("extra-body")) is not None:
        draft.add_body(text, "--extra-body")
    return draft.finish(flags, _IGNORED)


def _target(flags: Flags, draft: Draft) -> None:
    host, port = flags.text("host") or "127.0.0.1", flags.text("port") or "8000"
    draft.url = flags.text("base-url") or f"http://{host}:{port}"
    name, served_name = flags.text("model", "m"), flags.text("served-model-name")
    draft.model = served_name or name or ""
    endpoint = flags.text("endpoint") or ""
    backend = flags.text("backend", "endpoint-type") or "openai"
    if backend == "openai-embeddings-chat":
        refuse(backend, "slobench sends texts to be embedded, not chat messages")
    for name in (backend, endpoint):
        if any(word in name for word in _OTHER_APIS):
            refuse(name, f"slobench supports {', '.join(_APIS)} only")
    named = (api for api in _APIS if api in backend or api in endpoint)
    draft.api = next(named, "completions")


def _lengths(flags: Flags, draft: Draft) -> None:
    dataset = flags.text("dataset-name") or "random"
    path = flags.text("dataset-path")
    if _OTHER_MEDIA.search(f"{dataset} {path}" if dataset == "hf" else dataset):
        given = f"--dataset-name {dataset}" + (f" --dataset-path {path}" if path else "")
        refuse(given, "its requests have images, audio or video, and slobench sends text")
    general = (flags.count("input-len"), flags.count("output-len"))
    if dataset in ("random", "random-ids"):
        _set_random(flags, draft, general)
    elif dataset == "prefix_repetition":
        _set_prefix_repetition(flags, draft, general)
    elif dataset == "sonnet":
        _set_sonnet(flags, draft, general)
    elif path is not None and dataset == "sharegpt":
        draft.prompts = {"kind": "sharegpt", "path": path}
        outputs = general[1] or flags.count("sharegpt-output-len")
        if outputs is not None:
            draft.requests["output_tokens"] = outputs
    elif path is not None and dataset == "custom":
        _set_custom(flags, draft, path, general[1])
    elif path is not None and dataset == "txt-slices":
        draft.prompts = {"kind": "text", "path": path}
        _set_random(flags, draft, general)
    elif path is not None and dataset in ("burstgpt", "timed_trace"):
        draft.arrivals = {"kind": "trace", "path": path}
        if dataset == "burstgpt":
            draft.arrivals["only"] = [_BURSTGPT_MODEL]
    else:
        inputs = general[0] or flags.count("random-input-len") or 1024
        outputs = general[1] or flags.count("hf-output-len", "random-output-len") or 128
        draft.add_missing(
            f"--dataset-name {dataset}" + (f" --dataset-path {path}" if path else ""),
            f"its prompts cannot be read; synthetic prompts of {inputs} and {outputs} tokens"
            " instead",
        )
        draft.requests.update(input_tokens=inputs, output_tokens=outputs)


def _set_texts(flags: Flags, draft: Draft) -> None:
    """The texts of a request for embeddings, whose lengths vLLM states for each text; there are no
    output tokens."""
    draft.requests["output_tokens"] = 1
    n_texts = flags.count("random-batch-size")
    if n_texts is None or draft.requests.get("input_tokens") is None:
        return
    draft.texts_per_request = n_texts
    of_text = draft.requests["input_tokens"]
    if isinstance(of_text, dict):
        draft.requests["input_tokens"] = {
            key: value * n_texts if isinstance(value, int) else value
            for key, value in of_text.items()
        }
    else:
        draft.requests["input_tokens"] = of_text * n_texts


General = tuple[int | None, int | None]
"""--input-len and --output-len, which take precedence over the flags of a dataset."""


def _set_random(flags: Flags, draft: Draft, general: General) -> None:
    stated = flags.number("random-input-len"), flags.number("random-output-len")
    means = (general[0] or stated[0] or 1024, general[1] or stated[1] or 128)
    for key, mean, ratio in zip(_LENGTHS, means, _range_ratios(flags), strict=True):
        low, high = round(mean * (1 - ratio)), round(mean * (1 + ratio))
        uniform = {"kind": "uniform", "min": max(1, low), "max": high}
        draft.requests[key] = uniform if ratio else round(mean)
    if prefix := flags.count("random-prefix-len"):
        draft.requests["shared_prefix"] = {"tokens": prefix}


def _set_prefix_repetition(flags: Flags, draft: Draft, general: General) -> None:
    prefix = flags.count("prefix-repetition-prefix-len") or 256
    groups = flags.count("prefix-repetition-num-prefixes") or 10
    suffix = flags.count("prefix-repetition-suffix-len") or 256
    outputs = flags.count("prefix-repetition-output-len") or 128
    draft.requests.update(
        input_tokens=suffix,
        output_tokens=general[1] or outputs,
        shared_prefix={"tokens": prefix, "groups": groups},
    )
    if general[0] is not None:
        draft.add_missing(
            f"--input-len {general[0]}", "vLLM ignores it for the dataset prefix_repetition"
        )


def _set_sonnet(flags: Flags, draft: Draft, general: General) -> None:
    inputs = flags.count("sonnet-input-len") or 550
    outputs = flags.count("sonnet-output-len") or 150
    prefix = flags.count("sonnet-prefix-len")
    prefix = 200 if prefix is None else prefix
    if inputs <= prefix:
        raise UsageError(f"--sonnet-input-len {inputs}: must exceed --sonnet-prefix-len {prefix}")
    # vLLM's input length contains the prefix, slobench's does not
    draft.requests.update(input_tokens=inputs - prefix, output_tokens=outputs)
    if prefix:
        draft.requests["shared_prefix"] = {"tokens": prefix}
    draft.notes.append("lengths are those of the dataset sonnet; the words are slobench's")
    for flag, value in zip(("input-len", "output-len"), general, strict=True):
        if value is not None:
            draft.add_missing(f"--{flag} {value}", "vLLM ignores it for the dataset sonnet")


def _set_custom(flags: Flags, draft: Draft, path: str, general: int | None) -> None:
    draft.prompts = {"kind": "dataset", "path": path}
    stated = flags.count("custom-output-len")
    outputs = general or stated or 256
    if outputs > 0:  # -1: the file states each length
        draft.requests["output_tokens"] = outputs
        draft.notes.append(
            "vLLM sends the same output length for every line; if lines of the file have"
            " output_tokens, slobench uses them"
        )


def _range_ratios(flags: Flags) -> tuple[float, float]:
    """The half widths of inputs and outputs as fractions of their means: one number for both, or
    `{"input": 0.3, "output": 0.5}`."""
    text = flags.text("random-range-ratio") or "0"
    if not text.startswith("{"):
        return float(text), float(text)
    ratios = json.loads(text)
    return float(ratios.get("input", 0.0)), float(ratios.get("output", 0.0))


def _arrivals(flags: Flags, draft: Draft) -> None:
    stated = flags.count("num-prompts")
    n_requests = 1000 if stated is None else stated
    if n_requests < 1:
        raise UsageError(f"--num-prompts {n_requests}: expected a number above 0")
    rate = flags.number("request-rate")
    burstiness = flags.number("burstiness") or 1.0
    in_flight = flags.count("max-concurrency")
    is_user_timed = flags.texts("no-self-timed") is not None
    ramp = flags.text("ramp-up-strategy")
    first, last = flags.number("ramp-up-start-rps"), flags.number("ramp-up-end-rps")
    if draft.arrivals.get("kind") == "trace":
        _set_trace_rate(draft, rate, n_requests, is_user_timed)
        if draft.measure_s is None and stated is not None:
            draft.set_trace_requests(stated)
    elif ramp is not None and first is not None and last is not None:
        _set_ramp(draft, ramp, (first, last), n_requests, burstiness)
    else:
        draft.set_rate(rate, burstiness, in_flight, n_requests)
    if in_flight is not None and draft.arrivals["kind"] != "users":
        draft.limit_in_flight(
            in_flight,
            "at --max-concurrency requests wait in both tools; slobench counts the waiting as"
            " latency, vLLM starts its clock after it",
        )


def _set_trace_rate(draft: Draft, rate: float | None, n_requests: int, is_user_timed: bool) -> None:
    """The speed of a trace: its own times, or with BurstGPT, of which vLLM reads only the lengths,
    the rate of the command."""
    is_burstgpt = "only" in draft.arrivals
    if (is_burstgpt or is_user_timed) and rate is not None and rate != float("inf"):
        draft.arrivals["rate"] = rate_text(rate)
        draft.set_duration(None, n_requests, rate)
        draft.notes.append(
            "vLLM reads only the lengths of the trace; slobench also keeps the pattern of its"
            " arrivals, at the rate of the command"
        )
    elif is_burstgpt or is_user_timed:
        draft.add_missing(
            "--request-rate inf (or none)",
            "vLLM sends all requests of the trace at once, slobench at the trace's own times",
        )


def _set_ramp(
    draft: Draft, strategy: str, ends: tuple[float, float], n_requests: int, burstiness: float
) -> None:
    """vLLM's ramp. Its rate is a function of the request's index i of n, not of the time.

    linear: r(i) = a + (b − a) i/n, so dr/dt = r (b − a)/n: an exponential in time, over
    n ln(b/a)/(b − a). exponential: r(i) = a (b/a)^(i/n), so dr/dt = r² ln(b/a)/n: 1/r falls
    linearly in time, over n (1/a − 1/b)/ln(b/a).
    """
    first, last = ends
    if strategy not in ("linear", "exponential"):
        raise UsageError(f"--ramp-up-strategy {strategy}: expected linear or exponential")
    if not 0 < first <= last:
        raise UsageError(
            f"--ramp-up-start-rps {first:g}, --ramp-up-end-rps {last:g}: the rate must begin above"
            " 0 and may not fall"
        )
    if first == last:
        draft.set_rate(first, burstiness, None, n_requests)
        return
    growth = log(last / first)
    over_s = (
        n_requests * growth / (last - first)
        if strategy == "linear"
        else n_requests * (1 / first - 1 / last) / growth
    )
    draft.n_requests = n_requests
    over = write_duration(float(f"{over_s:.6g}"))
    if strategy == "linear" and burstiness == 1:
        draft.arrivals = {
            "kind": "ramp",
            "from": rate_text(first),
            "to": rate_text(last),
            "over": over,
            "shape": "exponential",
        }
        draft.notes.append(
            "vLLM's linear ramp is linear in the index of the request, which is exponential in time"
        )
        return
    # equal factors between the points, so that each straight piece is close to the curve
    rates = [first * (last / first) ** (k / (_RAMP_POINTS - 1)) for k in range(_RAMP_POINTS)]
    times_s = [
        over_s * log(rate / first) / growth
        if strategy == "linear"
        else over_s * (1 / first - 1 / rate) / (1 / first - 1 / last)
        for rate in rates
    ]
    points = [
        {"at": write_duration(float(f"{at_s:.6g}")), "rate": rate_text(float(f"{rate:.6g}"))}
        for at_s, rate in zip(times_s, rates, strict=True)
    ]
    draft.arrivals = {"kind": "curve", "points": points}
    if burstiness == float("inf"):
        draft.arrivals["process"] = "constant"
    elif burstiness != 1:
        draft.arrivals |= {"process": "gamma", "cv": float(f"{1 / sqrt(burstiness):.6g}")}
    draft.notes.append(f"vLLM's {strategy} ramp is a function of the request's index, not of time")
