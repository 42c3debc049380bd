"""From the word after `--target` to something that answers and is fit to be measured."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.errors import UsageError, nearest
from loadgen.records import Schedule
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.scenario import Scenario
from targets.base import Adapter
from targets.embed import engine, mock, parse_engine
from targets.endpoint import Endpoint, load_target
from targets.mock_options import split_options
from targets.preflight import Preflight
from targets.probe import preflight

OURS = ("reference", "mock")
_PATIENCE_S = 30.0
_TOKENS_PER_CHAR = 0.25  # the usual rule of thumb, for servers that do not count for us
_MARKS = {True: "ok  ", False: "warn", None: "  – "}


@dataclass(frozen=True)
class Choice:
    """What the user asked for: `spec` as after `--target`, `engine` as after `--engine`."""

    spec: str
    engine: str = ""
    model: str = ""
    environ: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Target:
    """A server that passed its preflight; `adapter` asks only for what it accepts."""

    kind: str
    endpoint: Endpoint
    adapter: Adapter
    fit: PromptFit
    checks: list[dict[str, Any]]

    def to_manifest(self) -> dict[str, Any]:
        """What a run records of its target. Holds no secret."""
        return {
            "kind": self.kind,
            **self.endpoint.to_manifest(),
            "model": self.adapter.model,
            "ignore_eos": self.adapter.ignore_eos,
            "prompt_fit": [self.fit.overhead_tokens, self.fit.tokens_per_char],
        }


@contextmanager
def open_target(
    choice: Choice, scenario: Scenario, schedule: Schedule, log_dir: Path, console: Console
) -> Iterator[Target]:
    """Start what has to be started, probe it, and yield it; ends what it started.

    Raises UsageError for what cannot be meant, TargetError where measuring would be meaningless.
    """
    with _server(choice, log_dir) as (kind, endpoint, name):
        line = f"{name}: {endpoint.url}  {endpoint.labels.flags or ''}".rstrip()
        console.print(line, soft_wrap=True, markup=False)
        yield _probed(kind, endpoint, choice.model, scenario, schedule, console)


@contextmanager
def _server(choice: Choice, log_dir: Path) -> Iterator[tuple[str, Endpoint, str]]:
    """(kind, endpoint, what to call it), running inside the `with` block if it is ours."""
    if choice.spec == "reference":
        with engine(parse_engine(choice.engine), log_dir) as served:
            yield "reference", served.endpoint, "reference engine"
    elif choice.spec == "mock":
        with mock(_mock_options(choice.engine), log_dir, truth=log_dir / "truth.csv") as served:
            yield "mock", served.endpoint, "mock server"
    else:
        if choice.engine:
            raise UsageError("--engine sets up a server of ours: use it with reference or mock")
        _refuse_bare_word(choice.spec)
        yield "url", load_target(choice.spec, choice.environ or {}), "target"


def _refuse_bare_word(spec: str) -> None:
    """`--target refrence` is a slip of the pen, not a host name or a file."""
    if spec.isidentifier() and not Path(spec).exists():
        raise UsageError(f"--target {spec}: no URL and no file; {nearest(spec, OURS)}")


def _mock_options(text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in split_options(text):
        options[key] = f"{options[key]};{value}" if key in options else value
    return options


def _probed(
    kind: str,
    endpoint: Endpoint,
    model: str,
    scenario: Scenario,
    schedule: Schedule,
    console: Console,
) -> Target:
    sample = _Samples(Prompts(scenario.prompts, scenario.seed, b"preflight"))
    found = _finish(
        preflight(
            endpoint,
            endpoint.adapter(**({"model": model} if model else {})),
            max_input_tokens=int(schedule["input_tokens"].max()),
            max_output_tokens=int(schedule["output_tokens"].max()),
            timeout_s=min(_PATIENCE_S, scenario.limits.timeout),
            text_of=sample.text,
        )
    )
    _tell(found, console)
    found.or_raise()
    fit = PromptFit(0.0, _TOKENS_PER_CHAR)
    if found.fit is not None:
        overhead_tokens = sample.overhead_tokens(*found.fit)
        fit = PromptFit(max(0.0, overhead_tokens), found.fit.tokens_per_char)
    checks = [{"check": c.check, "ok": c.ok, "detail": c.detail} for c in found.checks]
    return Target(kind, endpoint, found.adapter, fit, checks)


class _Samples:
    """The texts that a preflight sent, and what a local tokenizer knows of them."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts, self._sent = prompts, list[str]()

    def text(self, n_chars: int) -> str:
        self._sent.append(self._prompts.sample(n_chars))
        return self._sent[-1]

    def overhead_tokens(self, overhead_tokens: float, tokens_per_char: float) -> float:
        """The template's tokens: the fit's, or, with a local tokenizer, the server's count of the
        first text (a point that the fit goes through) less our own."""
        tokenizer = self._prompts.tokenizer
        if tokenizer is None or not self._sent:
            return overhead_tokens
        stated = overhead_tokens + tokens_per_char * len(self._sent[0])
        return stated - tokenizer.count(self._sent[0])


def _finish(probing: Coroutine[Any, Any, Preflight]) -> Preflight:
    """Run to its end, also where a loop is running already (a notebook)."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, probing).result()


def _tell(found: Preflight, console: Console) -> None:
    """One line per check; what could not be known is dim."""
    for check in found.checks:
        style = "yellow" if check.ok is False else "dim" if check.ok is None else ""
        line = f"{_MARKS[check.ok]} {check.check:<14} {check.detail}"
        console.print(line, style=style, soft_wrap=True, markup=False)
