"""Flags and verbs of other tools that people type here, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping

from loadgen.workload.traffic_flags import FLAGS, LENGTHS, flag_of

_LENGTHS = "write --input-len 512 --output-len 128"
_DURATION = "write --duration 60s: a measured window, so that gaps are not biased"
_FILES = "every run stores all of it in --out DIR; tables: --export csv, json, jsonl or parquet"
_ALWAYS = "leave it out"
_TRACE = "write --trace FILE"
_TEXTS = "write --dataset FILE (JSON lines, ShareGPT, OpenAI batch, CSV …)"

HINTS: Mapping[str, tuple[str, ...]] = {
    "write --rate 8 (per second)": (
        *("--request-rate", "--rps", "--qps", "--arrival-rate", "-q", "-R"),
    ),
    "write --concurrency 32 (the next request starts when one ends)": (
        *("--concurrent", "--parallel", "--streams", "-c", "--num-concurrency", "--clients"),
    ),
    "write --users 32, and --think 2s for a pause": (*("--vus", "--num-users", "--virtual-users"),),
    "write --users 32 --think 2s": ("--think-time", "--wait", "--wait-time"),
    "write --set arrivals.ramp_up=8s with --users": ("--spawn-rate", "-r", "--ramp-up"),
    _LENGTHS: (
        *("--random-input-len", "--random-output-len", "--isl", "--osl", "--prompt-tokens"),
        *("--output-tokens", "--input-tokens", "--max-tokens", "--data", "--dataset-name"),
        *("--sharegpt-output-len", "--mean-input-tokens", "--mean-output-tokens"),
    ),
    "write --target http://host:port": (
        *("--base-url", "--url", "--host", "-H", "--port", "--server", "--api-base"),
    ),
    "set api: chat, completions, responses, embeddings, … in a target file (docs/targets.md)": (
        *("--backend", "--endpoint", "--endpoint-type", "--request-type", "--request-format"),
        *("--completions", "--chat", "--api"),
    ),
    _DURATION: ("--max-seconds", "--benchmark-duration", "--time", "-d", "-z"),
    "name the certificate of the server's authority: --ca-cert FILE": ("--insecure", "-k"),
    "write --num-prompts 500": (
        *("--iterations", "-i", "--number", "--num-requests", "-n", "--requests"),
    ),
    "write --warmup 10s: the same traffic, not counted": ("--num-warmups", "--warmup-percent"),
    "write --rate 8 (Poisson), --set arrivals.kind=constant with it, --concurrency 32, or slobench "
    "sweep": (
        "--rate-type",
        "--profile",
        "--executor",
        "--arrivals",
        "--arrival",
        "--distribution",
    ),
    "write --set arrivals.kind=gamma --set arrivals.cv=1.4 (cv = 1/√burstiness)": ("--burstiness",),
    "write --set 'arrivals={kind: steps, levels: […]}' or kind: ramp": (
        *("--stage", "-s", "--ramp-up-strategy", "--ramp-up-start-rps"),
    ),
    "write --slo 'p99(ttft)<500ms', or a preset such as --slo chat": (
        *("--threshold", "--sla", "--percentile"),
    ),
    "use slobench capacity: it finds the highest rate that meets the SLO": ("--max-rate",),
    "write --set stop_when.error_rate=20%": ("--max-error-rate", "--constraint", "--max-errors"),
    _TEXTS: ("--dataset-path", "--prompts-file"),
    _TRACE: ("--trace-file", "--input-file"),
    _FILES: (
        *("--save-result", "--save-detailed", "--output-path", "--output-file", "--output-dir"),
        *("--summary-export", "--csv", "--result-dir", "--outputs", "--artifact-dir"),
        *("--output", "-o", "--name", "--label"),
    ),
    "write --export vllm-bench=FILE": ("--result-filename",),
    "the page is always written: report.html in --out DIR": ("--html", "--plot-timeline"),
    f"{_ALWAYS}: every run has all metrics and percentiles, with intervals": (
        *("--percentile-metrics", "--metric-percentiles", "--metrics"),
    ),
    f"{_ALWAYS}: it is sent where the server accepts it": (
        *("--ignore-eos", "--stream", "--streaming"),
    ),
    f"{_ALWAYS}: the progress goes to stderr, and 2>FILE stores it": (
        *("--quiet", "--silent", "--verbose", "-v", "--debug", "--no-progress", "--disable-tqdm"),
    ),
    f"{_ALWAYS}: run has no page of its own; slobench web has": ("--headless",),
    "write --workers 4": ("--processes", "--num-workers"),
    "no tokenizer is needed; a local one: --set prompts.tokenizer=DIR": (
        *("--tokenizer", "--processor", "--model-tokenizer"),
    ),
    "export OPENAI_API_KEY, or name another variable with api_key_env in a target file": (
        *("--api-key", "--header", "--extra-headers"),
    ),
    "write --set requests.temperature=0.7": ("--temperature",),
    "write it into extra_body of a target file (docs/targets.md)": (
        *("--extra-body", "--extra-inputs"),
    ),
    "write --set sampling.top_k=20": ("--top-k",),
    "write --set requests.shared_prefix.tokens=256": (
        *("--random-prefix-len", "--prefix-tokens", "--prefix-len"),
    ),
    "write --set 'requests.input_tokens={kind: uniform, min: 100, max: 500}'": (
        *("--random-range-ratio",),
    ),
    "write --set limits.timeout=30s": ("--timeout", "--request-timeout"),
    "write --seed 42": ("--random-seed",),
    "a scenario file takes its place: slobench run FILE (docs/scenarios.md)": (
        *("-f", "--locustfile", "--config", "--script"),
    ),
}
"""What to write → the flags of vllm bench, sglang, guidellm, aiperf, k6 and Locust that mean it."""
HINT_OF: Mapping[str, str] = {flag: hint for hint, flags in HINTS.items() for flag in flags}

_OVER = "write --over rate=2,4,8, or --over concurrency=1,2,4"
_BUDGET = "write --budget 3m: the time for all probes"
_OF_VERB: Mapping[str, Mapping[str, str]] = {
    "sweep": dict.fromkeys(("--rates", "--values", "--levels", "--concurrencies"), _OVER),
    "capacity": dict.fromkeys(("--max-seconds", "--max-duration", "--time", "--timeout"), _BUDGET),
    "web": {"--port": "write --web-port 8089"},
    "compare": dict.fromkeys(
        ("--baseline", "--base", "--candidate"),
        "write --target A --target B, or slobench compare A B for stored runs: the first is the "
        "baseline",
    ),
    "serve": dict.fromkeys(
        ("--model", "--name", "--served-model-name"),
        "write --shape tiny or a model directory; the id in the API: --model-name",
    ),
}
_LATENCY = re.compile(r"--?(p\d+)[-_.]?(ttft|tpot|itl|e2e)|--?(ttft|tpot|itl|e2e)[-_.]?(p\d+)")


def hint_for(verb: str, flag: str) -> str | None:
    """What to write in place of `flag`, which `verb` does not have."""
    hint = _OF_VERB.get(verb, {}).get(flag) or HINT_OF.get(flag)
    if hint is None and (found := _LATENCY.fullmatch(flag)):
        percentile, metric = found[1] or found[4], found[2] or found[3]
        return f"write --slo '{percentile}({metric})<500ms'"
    return hint


_LOADS = {"--rate": "rate", "--concurrency": "concurrency", "--users": "concurrency"}


def several_loads(verb: str, flag: str, value: str) -> str | None:
    """The line that measures each of several loads, if `value` lists them: 1,2,4."""
    if flag not in _LOADS or "," not in value:
        return None
    line = f"--over {_LOADS[flag]}={value.replace(' ', '')}"
    return f"write {line}" if verb == "sweep" else f"for several loads write slobench sweep {line}"


def other_length(flag: str) -> str:
    """How to write lengths that differ, if `flag` is that of a length."""
    keys = {flag_of(name): FLAGS[name].key for name in LENGTHS}
    if flag not in keys:
        return ""
    return f"; lengths that differ: --set '{keys[flag]}={{kind: uniform, min: 256, max: 1024}}'"


_RUN = "write slobench run, or translate a whole command: slobench from '…'"
VERB_HINTS: Mapping[str, str] = {
    "bench": _RUN,
    "benchmark": _RUN,
    "profile": _RUN,
    "perf": _RUN,
    "attack": _RUN,
    "test": _RUN,
    "start": _RUN,
    "ui": "write slobench web",
    "scenarios": "write slobench list scenarios",
    "presets": "write slobench list presets",
    "help": "write slobench --help, or slobench run --help",
    "version": "write slobench --version",
    "diff": "write slobench compare A B",
    "max": "write slobench capacity",
    "search": "write slobench capacity",
}
"""Verb of another tool → what to write."""
