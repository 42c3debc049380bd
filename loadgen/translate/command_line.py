"""From one string, as copied from a terminal, to a scenario and the command that runs it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from pydantic import ValidationError

from loadgen.errors import UsageError
from loadgen.translate import aiperf, guidellm, vllm
from loadgen.translate.draft import Draft
from loadgen.workload.scenario import Scenario
from loadgen.yaml_document import write_document

TOOLS = "vllm bench serve …, guidellm benchmark …, aiperf profile …"


@dataclass(frozen=True, slots=True)
class Translation:
    """A scenario as YAML, a target file where a URL is not enough ("" otherwise), the command, and
    what does not carry over."""

    scenario_yaml: str
    target_yaml: str
    command: str
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def translate(text: str) -> Translation:
    """The equivalent of another tool's command line.

    Raises UsageError where the tool is not known or the line has no meaning as a scenario.
    """
    try:
        draft = _draft(text)
    except ValueError as error:  # a number that is none, inside a flag's own little language
        raise UsageError(f"the command line cannot be read: {error}") from None
    values = draft.values()
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise UsageError("\n".join(lines)) from None
    target = "" if draft.api == "chat" else write_document({"url": draft.url, "api": draft.api})
    spec = "target.yaml" if target else draft.url
    words = ["slobench", draft.verb, "scenario.yaml", "--target", spec]
    words += ["--model", draft.model] if draft.model else []
    words += draft.options
    head = (
        f"# The traffic of one {draft.tool} command, translated; the numbers are that command's.\n"
    )
    return Translation(
        scenario_yaml=head + scenario.to_yaml(),
        target_yaml=target,
        command=shlex.join(words),
        missing=tuple(draft.missing),
        notes=tuple(draft.notes),
    )


def _draft(text: str) -> Draft:
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"the command line cannot be read: {error}") from None
    for begin, word in enumerate(words):
        rest = words[begin + 1 :]
        name = word.rpartition("/")[2]
        if name == "vllm" and rest[:2] == ["bench", "serve"]:
            return vllm.translate(rest[2:])
        if name == "benchmark_serving.py":
            return vllm.translate(rest)
        if name == "guidellm" and rest[:1] in (["benchmark"], ["run"]):
            return guidellm.translate(rest[1 + (rest[1:2] == ["run"]) :])
        if name in ("aiperf", "genai-perf") and rest[:1] == ["profile"]:
            return aiperf.translate(rest[1:])
    raise UsageError(f"no known command in {text[:60]!r}; expected one of: {TOOLS}")
