"""Translation of llmperf's `token_benchmark_ray.py`."""

from __future__ import annotations

from loadgen.errors import UsageError
from loadgen.translate.draft import Draft, Flags, around

_IGNORED = "results-dir metadata"
_APIS = ("openai", "litellm")
_BASE = "OPENAI_API_BASE="


def translate(words: list[str], before: list[str]) -> Draft:
    """The draft for the words after `token_benchmark_ray.py`. `before`: the words in front of it,
    which may set OPENAI_API_BASE."""
    flags, draft = Flags(words), Draft("llmperf")
    api = flags.text("llm-api") or "openai"
    if api not in _APIS:
        raise UsageError(f"--llm-api {api}: slobench supports OpenAI's API only")
    bases = [word.removeprefix(_BASE) for word in before if word.startswith(_BASE)]
    if bases:
        draft.url = bases[-1]
    else:
        draft.notes.append(f"llmperf reads {_BASE.rstrip('=')}, which the text does not set")
    draft.model = flags.text("model") or ""
    for key, flag, mean, sd in (
        ("input_tokens", "input-tokens", 550.0, 150.0),
        ("output_tokens", "output-tokens", 150.0, 80.0),
    ):
        stated, stated_sd = flags.number(f"mean-{flag}"), flags.number(f"stddev-{flag}")
        draft.requests[key] = around(
            mean if stated is None else stated, sd if stated_sd is None else stated_sd
        )
    draft.set_closed_loop(flags.count("num-concurrent-requests") or 10)
    seconds = flags.number("timeout")
    draft.set_window(
        90.0 if seconds is None else seconds, flags.count("max-num-completed-requests") or 10, 0.0
    )
    if text := flags.text("additional-sampling-params"):
        draft.add_body(text, "--additional-sampling-params")
    return draft.finish(flags, _IGNORED)
