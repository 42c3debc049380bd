"""Translation of `genai-bench benchmark`.

Source: genai-bench `cli/option_groups.py`.
"""

from __future__ import annotations

import re

from loadgen.translate.draft import Draft, Flags, around, rate_text, refuse

_IGNORED = """
    model-tokenizer experiment-folder-name experiment-base-dir master-port num-workers
    server-gpu-count server-gpu-type server-version server-engine upload-results
    iteration-type batch-size storage-provider storage-bucket storage-prefix storage-auth-type
    prefix namespace bucket auth config-file profile security-token region github-token github-owner
    github-repo metrics-time-unit log-dir spawn-rate model-auth-type dataset-image-column
    aws-access-key-id aws-secret-access-key aws-session-token aws-profile aws-region azure-ad-token
"""
_BACKENDS = ("openai", "vllm", "sglang", "azure-openai", "baseten", "together")
_SCENARIOS = ["N(480,240)/(300,150)", "D(100,100)", "D(100,1000)", "D(2000,200)", "D(7800,200)"]
"""The default of the task text-to-text."""
_CONCURRENCIES = ["1", "2", "4", "8", "16", "32", "64", "128", "256"]
_NUMBERS = r"\((\d+(?:\.\d+)?),\s*(\d+(?:\.\d+)?)\)"
_PAIR = re.compile(rf"(?P<kind>[DNU]){_NUMBERS}(?:/{_NUMBERS})?")


def translate(words: list[str]) -> Draft:
    """The draft for the words after `genai-bench benchmark`."""
    flags, draft = Flags(words), Draft("genai-bench")
    _target(flags, draft)
    _traffic(flags, draft)
    if text := flags.text("additional-request-params"):
        draft.add_body(text.replace("'", '"').replace("False", "false"), "--additional-…-params")
    draft.notes.append("genai-bench leaves the temperature to the server; slobench sends 0")
    for name in ("warmup-ratio", "cooldown-ratio"):
        if (ratio := flags.text(name)) is not None:
            draft.add_missing(f"--{name} {ratio}", "set phases.warmup to a time instead")
    return draft.finish(flags, _IGNORED)


def _target(flags: Flags, draft: Draft) -> None:
    backend = (flags.text("api-backend") or "openai").lower()
    if backend not in _BACKENDS:
        refuse(f"--api-backend {backend}", "slobench supports OpenAI's chat and completions only")
    task = (flags.text("task") or "text-to-text").lower()
    if task != "text-to-text":
        refuse(f"--task {task}", "slobench sends text and measures streamed text")
    draft.model = flags.text("api-model-name", "model") or ""
    draft.url = flags.text("api-base") or draft.url
    endpoint, deployment = flags.text("azure-endpoint"), flags.text("azure-deployment")
    version = flags.text("azure-api-version") or "2024-02-01"
    if backend == "azure-openai" and (base := endpoint or draft.url) and deployment:
        draft.url = f"{base.rstrip('/')}/openai/deployments/{deployment}?api-version={version}"
    flags.texts("model")
    for name in ("model-api-key",):
        if flags.texts(name) is not None:
            draft.add_missing(f"--{name} …", "export it as OPENAI_API_KEY")


def _traffic(flags: Flags, draft: Draft) -> None:
    scenarios = flags.texts("traffic-scenario") or _SCENARIOS
    path, column = flags.text("dataset-path"), flags.text("dataset-prompt-column")
    if flags.texts("dataset-config") is not None:
        refuse("--dataset-config", "name a file of prompts with --dataset FILE")
    first, *others = scenarios
    if first.strip().lower() == "dataset":
        if path is None:
            refuse("--traffic-scenario dataset", "it needs --dataset-path with a local file")
        draft.prompts = {"kind": "dataset", "path": path}
        if str(path).endswith(".txt"):
            draft.prompts["format"] = "lines"
        draft.requests["output_tokens"] = 128
        draft.notes.append("genai-bench lets the model end its answers; 128 tokens instead")
        if column not in (None, "prompt", "question", "text", "instruction"):
            draft.add_missing(f"--dataset-prompt-column {column}", "rename the column to prompt")
    else:
        _set_lengths(first, draft)
        if path is not None:
            draft.prompts = {"kind": "text", "path": path}
    if others:
        draft.add_missing(
            f"--traffic-scenario {' '.join(others)}", "translate each by itself; the first is here"
        )
    rates = flags.texts("request-rate")
    users = flags.texts("num-concurrency") or _CONCURRENCIES
    minutes = flags.text("max-time-per-run")
    seconds = float(minutes.rstrip("smh")) * _unit_s(minutes) if minutes else None
    n_requests = flags.count("max-requests-per-run")
    if rates:
        draft.arrivals = {"kind": "constant", "rate": rate_text(float(rates[0]))}
        if len(rates) > 1:
            draft.set_sweep("arrivals.rate", [rate_text(float(rate)) for rate in rates])
    else:
        draft.set_closed_loop(int(users[0]))
        if len(users) > 1:
            draft.set_sweep("arrivals.users", users)
    draft.set_window(seconds, n_requests, float(rates[0]) if rates else 0.0)


def _unit_s(text: str) -> float:
    """Seconds of the unit of a duration; a bare number is in minutes."""
    return {"s": 1.0, "h": 3600.0}.get(text[-1], 60.0)


def _set_lengths(scenario: str, draft: Draft) -> None:
    """`D(in,out)`, `N(in,sd)/(out,sd)`, `U(min,max)/(min,max)` or `U(max in,max out)`."""
    found = _PAIR.fullmatch(scenario.strip())
    if found is None:
        refuse(f"--traffic-scenario {scenario}", "slobench knows D(…), N(…), U(…) and dataset")
    kind = found["kind"]
    one, two, three, four = (None if n is None else float(n) for n in found.groups()[1:])
    if kind == "N" and three is None:
        refuse(f"--traffic-scenario {scenario}", "expected N(mean,sd)/(mean,sd)")
    lengths: tuple[object, object]
    if kind == "D":
        lengths = (round(one or 0), round(two or 0))
    elif kind == "N":
        lengths = (around(one or 0, two or 0), around(three or 0, four or 0))
    elif three is None:
        lengths = (_uniform(1, one), _uniform(1, two))
    else:
        lengths = (_uniform(one, two), _uniform(three, four))
    draft.requests["input_tokens"], draft.requests["output_tokens"] = lengths


def _uniform(low: float | None, high: float | None) -> dict[str, object]:
    return {"kind": "uniform", "min": max(1, round(low or 1)), "max": round(high or 1)}
