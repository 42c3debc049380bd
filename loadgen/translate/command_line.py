"""Translation of another tool's command line into a scenario and a slobench command."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from pydantic import ValidationError

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonObject
from loadgen.translate import (
    aiperf,
    evalscope,
    genai_bench,
    guidellm,
    inference_perf,
    llmperf,
    sglang,
    vllm,
)
from loadgen.translate.draft import Draft
from loadgen.workload.scenario import Scenario
from loadgen.yaml_document import write_document

TOOLS = (
    "vllm bench serve …, python -m sglang.bench_serving …, guidellm run …, aiperf profile …,"
    " genai-perf profile …, inference-perf --config_file …, evalscope perf …,"
    " genai-bench benchmark …, python token_benchmark_ray.py …"
)
_PAGES = {"k6": "docs/coming-from-k6.md", "locust": "docs/coming-from-locust.md"}
"""Tools whose traffic is a program → the page that translates it by hand."""
_CONFIG = re.compile(r"^(load|data|server):", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Translation:
    """A scenario as YAML, a target file ("" if a URL is sufficient), the slobench command, flags
    without an equivalent, and notes on differences."""

    scenario_yaml: str
    target_yaml: str
    command: str
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def translate(text: str) -> Translation:
    """The equivalent of another tool's command line, or of the text of inference-perf's file.

    Raises UsageError for an unknown tool and for a command line that is not a valid scenario.
    """
    try:
        draft = _draft(text)
    except ValueError as error:  # unbalanced quotes, or an invalid number inside a flag's value
        raise UsageError(f"the command line cannot be read: {error}") from None
    try:
        scenario = Scenario.model_validate(draft.values())
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise UsageError("\n".join(lines)) from None
    target = ""
    if draft.api != "chat" or draft.extra_body:
        body: JsonObject = {"extra_body": draft.extra_body} if draft.extra_body else {}
        if draft.texts_per_request is not None:
            body["texts_per_request"] = draft.texts_per_request
        target = write_document({"url": draft.url, "api": draft.api, **body})
    spec = "target.yaml" if target else draft.url
    words = ["slobench", draft.verb, "scenario.yaml", "--target", spec]
    words += ["--model", draft.model] if draft.model else []
    words += draft.options
    head = f"# Traffic of a command line of {draft.tool}; all numbers come from that command.\n"
    return Translation(
        scenario_yaml=head + scenario.to_yaml(),
        target_yaml=target,
        command=shlex.join(words),
        missing=tuple(draft.missing),
        notes=tuple(draft.notes),
    )


def _draft(text: str) -> Draft:
    if _CONFIG.search(text):
        return inference_perf.translate_text(text)
    words = shlex.split(text.replace("\\\n", " "))
    for begin, word in enumerate(words):
        rest = words[begin + 1 :]
        name = word.rpartition("/")[2]
        if name in ("vllm", "vllm-rs") and rest[:2] == ["bench", "serve"]:
            return vllm.translate(rest[2:])
        if name == "vllm-bench" and rest[:1] == ["serve"]:
            return vllm.translate(rest[1:])
        if name == "evalscope" and rest[:1] == ["perf"]:
            return evalscope.translate(rest[1:])
        if name == "genai-bench" and rest[:1] == ["benchmark"]:
            return genai_bench.translate(rest[1:])
        if name in _PAGES:
            raise UsageError(
                f"{name}: its traffic is a program, which cannot be translated; {_PAGES[name]} has "
                "the equivalents line by line"
            )
        if name == "benchmark_serving.py":
            return vllm.translate(rest)
        if name == "guidellm" and rest[:1] in (["benchmark"], ["run"]):
            return guidellm.translate(rest[1 + (rest[1:2] == ["run"]) :])
        if name in ("aiperf", "genai-perf") and rest[:1] == ["profile"]:
            return aiperf.translate(rest[1:], name)
        if name in ("sglang.bench_serving", "bench_serving.py"):
            return sglang.translate(rest)
        if name in ("inference-perf", "inference_perf", "inference_perf.main"):
            return inference_perf.translate(rest)
        if name == "token_benchmark_ray.py":
            return llmperf.translate(rest, words[:begin])
    raise UsageError(f"no known command in {text[:60]!r}; expected one of: {TOOLS}")
