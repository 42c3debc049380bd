"""From the word after `--target` to something that answers and is fit to be measured."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from loadgen.errors import UsageError, nearest
from loadgen.manifest import PreflightLine, TargetSection
from loadgen.records import Schedule
from loadgen.run.preload import Preload
from loadgen.workload.calibration import Calibration
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.scenario import Scenario
from targets.base import Adapter
from targets.child import Child
from targets.embed import engine, mock, parse_engine
from targets.endpoint import Endpoint, load_target
from targets.launch import launched
from targets.mock_options import split_options
from targets.preflight import preflight
from targets.preflight_result import Preflight, PreflightCheck
from targets.scrape import find_metrics

T = TypeVar("T")
OURS = ("reference", "mock")
_PATIENCE_S = 30.0
_TOLD_EVERY_S = 30.0  # how a launch is getting on, where there is no terminal
_PREFLIGHT = b"preflight"  # the salt of its prompts
_MARKS = {True: "ok  ", False: "warn", None: "  – "}


@dataclass(frozen=True)
class Choice:
    """What the user asked for: `spec` as after `--target`, `engine` as after `--engine`; `scrape`
    whether to read the server's own metrics; `plugins` are files with modes for `reference`;
    `settings` are keys set on top of a target file."""

    spec: str
    engine: str = ""
    model: str = ""
    environ: Mapping[str, str] | None = None
    scrape: bool = True
    plugins: Sequence[Path] = ()
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class Target:
    """A server that passed its preflight; `adapter` asks only for what it accepts. `ended` says how
    a server of ours ended, None while it runs or where it is somebody else's. `metrics` are the
    URLs of its own metrics, none where they cannot be read. `prompts` are the scenario's with a
    salt of the preflight's, where it made some.
    """

    kind: str
    endpoint: Endpoint
    adapter: Adapter
    fit: PromptFit
    checks: list[PreflightLine]
    ended: Callable[[], str | None] = lambda: None
    metrics: tuple[str, ...] = ()
    prompts: Prompts | None = None

    def to_manifest(self) -> TargetSection:
        """What a run records of its target. Holds no secret."""
        return msgspec.structs.replace(
            self.endpoint.to_manifest(),
            kind=self.kind,
            model=self.adapter.model,
            ignore_eos=self.adapter.ignore_eos,
            prompt_fit=(self.fit.overhead, self.fit.step),
            metrics=tuple(url.partition("?")[0] for url in self.metrics),
            prompt_words=0 if self.fit.words is None else len(self.fit.words.words),
        )


@contextmanager
def open_target(
    choice: Choice,
    scenario: Scenario,
    schedule: Schedule,
    log_dir: Path,
    console: Console,
    warm_up: Preload | None = None,
    server: Server | None = None,
) -> Iterator[Target]:
    """Start what has to be started, probe it, and yield it; ends what it started. A `server` that
    is up already is left up, and only what is wrong with it is told, for it serves many runs; where
    it was started by us and found fit by a probe that asked the same, it is not probed again.
    `warm_up` has its time while a probe waits for answers.

    Raises UsageError for what cannot be meant, TargetError where measuring would be meaningless.
    """
    opening = open_server(choice, log_dir, console) if server is None else nullcontext(server)
    is_kept = server is not None
    with opening as server:
        endpoint = server.endpoint
        line = f"{server.name}: {endpoint.url}  {endpoint.labels.flags or ''}".rstrip()
        console.print(line, soft_wrap=True, markup=False)
        asked = _asked(choice, scenario, schedule) if is_kept else ()
        found = server.known.get(asked)
        if found is not None:
            found = replace(found, prompts=Prompts(scenario.prompts, scenario.seed, _PREFLIGHT))
        else:
            found = _probed(
                server.kind, endpoint, choice, scenario, schedule, console, warm_up, not is_kept
            )
            if server.kind != "url" and _is_certain(found):  # nobody knows what a URL became since
                server.known[asked] = found
        yield replace(found, ended=server.ended)


def launch_line(spec: str, environ: Mapping[str, str], settings: Sequence[str] = ()) -> str:
    """The command that a target file would start its server with; a port that is free at the time
    is 0 here. Raises UsageError for a target that launches nothing."""
    _refuse_bare_word(spec)
    launch = load_target(spec, environ, settings).launch
    if launch is None:
        raise UsageError(f"--print-launch: target {spec} has no launch: it runs already")
    return launch.plan(launch.port, sys.executable, environ).shown


@dataclass(frozen=True)
class Server:
    """Something that answers; `name` is what to call it. `known` is what its probes found
    that found nothing wrong, by what they asked for."""

    kind: str
    endpoint: Endpoint
    name: str
    ended: Callable[[], str | None] = lambda: None
    known: dict[tuple[object, ...], Target] = field(default_factory=dict, repr=False, compare=False)


@contextmanager
def open_server(choice: Choice, log_dir: Path, console: Console) -> Iterator[Server]:
    """What is to be measured, running inside the `with` block if it is ours to start."""
    if choice.settings and choice.spec in OURS:
        raise UsageError(
            f"target setting {choice.settings[0]}: {choice.spec} has no target file; it is set up "
            "by --engine"
        )
    if choice.spec == "reference":
        settings = parse_engine(choice.engine)
        with engine(settings, log_dir, plugins=choice.plugins) as served:
            yield Server("reference", served.endpoint, "reference engine", _end_of(served.child))
    elif choice.spec == "mock":
        with mock(_mock_options(choice.engine), log_dir, truth=log_dir / "truth.csv") as served:
            yield Server("mock", served.endpoint, "mock server", _end_of(served.child))
    else:
        if choice.engine:
            raise UsageError("--engine sets up a server of ours: use it with reference or mock")
        _refuse_bare_word(choice.spec)
        environ = choice.environ or {}
        endpoint = load_target(choice.spec, environ, choice.settings)
        if endpoint.launch is None:
            yield Server("url", endpoint, "target")
            return
        line = launch_line(choice.spec, environ, choice.settings)
        console.print(f"launching: {line}", soft_wrap=True, markup=False)
        with _Waiting(console) as waiting, launched(endpoint, environ, log_dir, waiting.on) as up:
            waiting.over()
            yield Server("launched", up.endpoint, "launched server", up.ended)


def _end_of(child: Child) -> Callable[[], str | None]:
    """How a child of ours ended, in words."""

    def ended() -> str | None:
        code = child.exit_code
        return None if code is None else f"the {child.name} ended with code {code}: see {child.log}"

    return ended


class _Waiting:
    """Tells that a launched server is still on its way: how long, and the last line of its log."""

    def __init__(self, console: Console) -> None:
        self._console, self._told_s = console, 0.0
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> _Waiting:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over()

    def on(self, waited_s: float, last_line: str) -> None:
        words = Text(f"waiting for it, {waited_s:.0f} s: {last_line or 'nothing in its log yet'}")
        if self._status is not None:
            words.truncate(max(20, self._console.width - 4), overflow="ellipsis")
            self._status.update(words)
        elif waited_s >= self._told_s + _TOLD_EVERY_S:
            self._told_s = waited_s
            self._console.print(words, soft_wrap=True)

    def over(self) -> None:
        if self._status is not None:
            self._status.stop()


def _refuse_bare_word(spec: str) -> None:
    """`--target refrence` is a slip of the pen, not a host name or a file."""
    if spec.isidentifier() and not Path(spec).exists():
        raise UsageError(f"--target {spec}: no URL and no file; {nearest(spec, (*OURS, 'sim'))}")


def _mock_options(text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in split_options(text):
        options[key] = f"{options[key]};{value}" if key in options else value
    return options


def _probed(
    kind: str,
    endpoint: Endpoint,
    choice: Choice,
    scenario: Scenario,
    schedule: Schedule,
    console: Console,
    warm_up: Preload | None,
    tells_all: bool,
) -> Target:
    prompts = Prompts(scenario.prompts, scenario.seed, _PREFLIGHT)
    calibration = Calibration(prompts, schedule)
    warm_up = warm_up or Preload()
    probing = preflight(
        endpoint,
        endpoint.adapter(**({"model": choice.model} if choice.model else {})),
        max_input_tokens=int(schedule["input_tokens"].max()),
        max_output_tokens=int(schedule["output_tokens"].max()),
        timeout_s=min(_PATIENCE_S, scenario.limits.timeout),
        text_of=calibration.sample,
        calibrate=calibration.steps,
        ahead=calibration.ahead,
        on_timed=warm_up.may_begin,
    )
    found, metrics = finish(_both(probing, endpoint, choice.scrape), warm_up.during)
    checks = [*found.checks]
    if metrics is not None and found.fatal is None:
        checks.append(metrics[0])
    for check in checks:
        if tells_all or check.ok is False:
            print_check(check, console)
    found.or_raise()
    return Target(
        kind=kind,
        endpoint=endpoint,
        adapter=found.adapter,
        fit=calibration.fit,
        checks=[PreflightLine(c.check, c.ok, c.detail) for c in checks],
        metrics=endpoint.metrics_urls() if metrics is not None and metrics[1] else (),
        prompts=prompts,
    )


def _is_certain(found: Target) -> bool:
    """Whether a probe would find the same again: nothing wrong, and no length estimated."""
    oks = {line.check: line.ok for line in found.checks}
    return False not in oks.values() and oks.get("prompt_fit", True) is True


def _asked(choice: Choice, scenario: Scenario, schedule: Schedule) -> tuple[object, ...]:
    """What a probe asks for, but for the seed: two of one server that ask for the same find the
    same."""
    inputs = schedule["context"].astype(np.uint64) << np.uint64(32) | schedule["input_tokens"]
    lengths = np.unique(inputs).tobytes(), np.unique(schedule["prefix_tokens"]).tobytes()
    longest, timeout_s = int(schedule["output_tokens"].max()), scenario.limits.timeout
    return (
        choice.model,
        choice.scrape,
        scenario.prompts.model_dump_json(),
        timeout_s,
        longest,
        lengths,
    )


async def _both(
    probing: Coroutine[Any, Any, Preflight], endpoint: Endpoint, scrape: bool
) -> tuple[Preflight, tuple[PreflightCheck, bool] | None]:
    """The preflight and, if they are wanted, whether the server's metrics can be read."""
    if not scrape:
        return await probing, None
    found, metrics = await asyncio.gather(probing, find_metrics(endpoint))
    return found, metrics


def finish(
    probing: Coroutine[Any, Any, T], meanwhile: Callable[[Future[T]], None] = lambda _: None
) -> T:
    """Run a probe to its end, also where a loop is running already (a notebook)."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(asyncio.run, probing)
        meanwhile(future)
        return future.result()


def print_check(check: PreflightCheck, console: Console) -> None:
    """One line per check; what could not be known is dim."""
    style = "yellow" if check.ok is False else "dim" if check.ok is None else ""
    line = f"{_MARKS[check.ok]} {check.check:<14} {check.detail}"
    console.print(line, style=style, soft_wrap=True, markup=False)
