"""Translation of `evalscope perf`, in the flags of versions 0.x and 1.x.

Source: evalscope `perf/arguments.py` and `perf/config/cli.py`.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from loadgen.errors import UsageError
from loadgen.translate.draft import Draft, Flags, rate_text, refuse
from loadgen.units import write_duration

_IGNORED = """
    tokenizer tokenizer-path log-every-n-query debug name outputs-dir output-root run-id overwrite
    no-timestamp wandb-api-key swanlab-api-key swanlab-host visualizer visualizer-project
    visualizer-name progress enable-progress-tracker db-commit-interval queue-size dataset-workers
    num-workers queue-size-multiplier in-flight-task-multiplier no-html-report no-console-report
    no-test-connection skip-connection-test stream connect-timeout apply-chat-template data-source
"""
_CHAT = ("openai", "openai_chat", "default")
_COMPLETIONS = ("openai_completions",)
_PATHS = {"openqa", "longalpaca", "custom", "share_gpt_zh", "share_gpt_en"}
_SAMPLINGS = ("top-p", "top-k", "frequency-penalty", "repetition-penalty", "min-p")
_CONVERSATIONS = "its conversations are a `session` of a scenario file (docs/scenarios.md)"
_QUESTION_TOKENS = 64  # of OpenQA, which evalscope downloads


def translate(words: list[str]) -> Draft:
    """The draft for the words after `evalscope perf`."""
    flags, draft = Flags(words, {"-n": "number"}), Draft("evalscope")
    _refuse_other_kinds(flags)
    _target(flags, draft)
    _data(flags, draft)
    _outputs(flags, draft)
    _load(flags, draft)
    draft.seed = flags.count("seed")
    temperature = flags.number("temperature")
    draft.requests["temperature"] = 0.0 if temperature is None else temperature
    draft.add_samplings(flags, _SAMPLINGS)
    if stop := flags.texts("stop"):
        draft.add_field("stop", stop)
    if flags.texts("logprobs") is not None:
        draft.add_field("logprobs", True)
    timeout_s = flags.number("total-timeout", "read-timeout")
    if timeout_s is not None:
        draft.limits["timeout"] = write_duration(timeout_s)
    if flags.texts("no-stream") is not None:
        draft.add_missing("--no-stream", "slobench times each token, so its requests stream")
    return draft.finish(flags, _IGNORED)


def _refuse_other_kinds(flags: Flags) -> None:
    """Raises UsageError for what has no equivalent of the same kind."""
    for name, remedy in (
        ("multi-turn", _CONVERSATIONS),
        ("conversations", _CONVERSATIONS),
        ("sla-auto-tune", "a search is `slobench capacity --slo 'p99(ttft)<=2s'`"),
        ("sla-config", "a search is `slobench capacity --slo 'p99(ttft)<=2s'`"),
        ("prompt", "write it into a file and send it with --dataset FILE:lines"),
        ("query-template", "write the requests into a file of OpenAI batch lines: --dataset FILE"),
        ("load", "write its keys as flags (--mode, --request-rate, --concurrency)"),
    ):
        if flags.texts(name) is not None:
            refuse(f"--{name}", remedy)
    n_choices = flags.count("n-choices")
    if n_choices not in (None, 1):
        refuse(f"--n-choices {n_choices}", "slobench measures one answer per request")


def _target(flags: Flags, draft: Draft) -> None:
    draft.url = flags.text("url", "base-url") or "http://127.0.0.1:8877/v1/chat/completions"
    draft.model = flags.text("model") or ""
    protocol = flags.text("api", "protocol") or "openai_chat"
    kind = flags.text("target-kind") or "remote"
    if kind != "remote" or protocol.startswith("local"):
        refuse(f"{protocol} {kind}", "start the server with `launch:` in a target file")
    if protocol not in (*_CHAT, *_COMPLETIONS):
        refuse(f"--api {protocol}", "slobench supports chat and completions only")
    path = urlsplit(draft.url).path.rstrip("/")
    is_completions = path.endswith("/completions") and not path.endswith("/chat/completions")
    is_chat = protocol in _CHAT and not is_completions
    if flags.texts("tokenize-prompt") is not None:
        refuse("--tokenize-prompt", "slobench sends text, not token ids")
    draft.api = "chat" if is_chat else "completions"


def _data(flags: Flags, draft: Draft) -> None:
    name = flags.text("dataset", "workload") or "openqa"
    path = flags.text("dataset-path", "workload-path")
    low, high = flags.count("min-prompt-length") or 0, flags.count("max-prompt-length")
    prefix = flags.count("prefix-length") or 0
    if any(word in name for word in ("vl", "flickr", "kontext", "mmmu", "image", "multi_modal")):
        refuse(f"--dataset {name}", "it has images, and slobench sends text")
    if any(word in name for word in ("embedding", "rerank", "multi_turn", "swe_smith", "trace")):
        refuse(f"--dataset {name}", "slobench has no requests of this kind; see docs/scenarios.md")
    if name == "random":
        if high is None:
            raise UsageError("--dataset random: expected --max-prompt-length")
        uniform = {"kind": "uniform", "min": max(1, low), "max": high}
        draft.requests["input_tokens"] = uniform if max(1, low) < high else high
        if prefix:
            draft.requests["shared_prefix"] = {"tokens": prefix}
        return
    if path is not None and (name == "line_by_line" or name in _PATHS):
        draft.prompts = {"kind": "dataset", "path": path}
        if name == "line_by_line":
            draft.prompts["format"] = "lines"
        bounds = {"--min-prompt-length": low, "--max-prompt-length": high}
        for flag, value in bounds.items():
            if value:
                draft.add_missing(f"{flag} {value}", "every prompt of the file is sent")
        return
    draft.add_missing(
        f"--dataset {name}",
        f"evalscope downloads it; name a file with --dataset FILE; synthetic prompts of "
        f"{_QUESTION_TOKENS} tokens instead",
    )
    draft.requests["input_tokens"] = _QUESTION_TOKENS


def _outputs(flags: Flags, draft: Draft) -> None:
    values = flags.texts("max-tokens") or ["2048"]
    if len(values) > 1:
        draft.add_missing(
            f"--max-tokens {' '.join(values[1:])}", "a run has one; repeat it for each"
        )
    most, least = int(values[0]), flags.count("min-tokens")
    draft.requests["output_tokens"] = most
    extra = flags.text("extra-args", "generation-extra")
    if extra is not None:
        draft.add_body(extra, "--extra-args")
    if least != most and not (extra is not None and "ignore_eos" in extra):
        draft.end_naturally()


def _load(flags: Flags, draft: Draft) -> None:
    """A closed loop of --parallel; with a rate, Poisson arrivals that wait at --parallel, or in an
    open loop without that limit."""
    parallel = [int(n) for n in flags.texts("parallel", "concurrency") or []]
    rates = [float(rate) for rate in flags.texts("rate", "request-rate") or []]
    rates = [rate for rate in rates if rate > 0]
    counts = [int(n) for n in flags.texts("number", "requests") or ["1000"]]
    mode = flags.text("mode") or ""
    is_open = flags.texts("open-loop") is not None or mode == "open_loop"
    arrival, most = flags.text("arrival"), flags.count("max-outstanding")
    policy = flags.text("overflow-policy")
    if mode == "conversation":
        refuse("--mode conversation", _CONVERSATIONS)
    if is_open and not rates:
        raise UsageError("an open loop needs --rate")
    if warmup := flags.text("warmup-num", "warmup-count", "warmup-ratio"):
        draft.add_missing(f"--warmup-num {warmup}", "set phases.warmup to a time instead")
    if pause := flags.text("sleep-interval", "sleep-between-runs"):
        draft.add_missing(f"--sleep-interval {pause}", "runs of a sweep follow at once")
    users = parallel or [1]
    if rates:
        kind = "constant" if arrival == "constant" else "poisson"
        draft.arrivals = {"kind": kind, "rate": rate_text(rates[0])}
        if len(rates) > 1:
            draft.set_sweep("arrivals.rate", [rate_text(rate) for rate in rates])
        if len(users) > 1:
            draft.add_missing(f"--parallel {' '.join(map(str, users[1:]))}", "needs no --rate")
    else:
        draft.set_closed_loop(users[0])
        if len(users) > 1:
            draft.set_sweep("arrivals.users", [str(n) for n in users])
    draft.set_window(flags.number("duration"), counts[0], rates[0] if rates else 0.0)
    for n in counts[1:]:
        if n != counts[0]:
            draft.add_missing(f"--number {n}", "every run of a sweep has the requests of the first")
    if rates and not is_open and parallel:
        draft.limit_in_flight(
            users[0], "at --parallel requests wait in both; slobench counts the waiting as latency"
        )
    elif rates and most is not None:
        draft.limits["max_concurrency"] = most
        if policy == "fail":
            draft.add_missing("--overflow-policy fail", "a dropped request counts as failed")
