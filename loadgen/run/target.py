"""Opens the target of a run: starts it if needed and runs the preflight."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from loadgen.errors import UsageError, nearest
from loadgen.manifest.sections import PreflightLine, TargetSection
from loadgen.measure.slo import Slo, needs_stream, own_slo
from loadgen.records import Schedule
from loadgen.run.example_requests import example_requests
from loadgen.run.known_preflights import (
    KnownPreflight,
    KnownPreflights,
    ModelLengths,
    models_now,
)
from loadgen.run.preload import Preload
from loadgen.run.run_options import RunOptions, RunSetup
from loadgen.units import format_duration
from loadgen.workload.calibration import Calibration
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.scenario import Scenario
from targets.base import Adapter
from targets.canary import Canaries, record_idle
from targets.child import Child
from targets.endpoint import Endpoint, load_target
from targets.preflight import preflight
from targets.preflight_result import Longest, Preflight, PreflightCheck
from targets.readiness import await_ready
from targets.scrape import find_metrics

T = TypeVar("T")
OURS = ("reference", "mock")
NO_LAUNCH = "SLOBENCH_NO_LAUNCH"
"""The environment variable that refuses to start servers from target files."""
REUSED = "preflight"
"""The line of a manifest that states the age of a reused preflight."""
_PATIENCE_S = 30.0
_CANARY_SHARE = 0.02
_PROGRESS_S = 30.0  # between two lines about a launch, where there is no terminal
_PREFLIGHT = b"preflight"  # the salt of its prompts
_MARKS = {True: "ok  ", False: "warn", None: "  – "}


@dataclass(frozen=True)
class Target:
    """A server that passed its preflight; `adapter` sends only fields that it accepts. `ended`
    returns how a server that slobench started has ended, None while it runs and for other servers.
    `metrics` are the URLs of the server's own metrics, empty where they cannot be read. `prompts`
    are the scenario's prompts with the salt of the preflight, if it made some. `longest_wait_s` is
    the longest time to a first token in the preflight. `canaries` holds their answers at idle.
    """

    kind: str
    endpoint: Endpoint
    adapter: Adapter
    fit: PromptFit
    checks: list[PreflightLine]
    ended: Callable[[], str | None] = lambda: None
    metrics: tuple[str, ...] = ()
    prompts: Prompts | None = None
    longest_wait_s: float = 0.0
    canaries: Canaries | None = None

    def to_manifest(self) -> TargetSection:
        """The target section of the manifest, without secrets."""
        return msgspec.structs.replace(
            self.endpoint.to_manifest(),
            kind=self.kind,
            model=self.endpoint.redact(self.adapter.model),
            ignore_eos=self.adapter.requests_exact_lengths,
            stream=self.adapter.stream,
            results=self.adapter.results,
            prompt_fit=(self.fit.overhead, self.fit.step),
            metrics=tuple(url.partition("?")[0] for url in self.metrics),
            prompt_words=0 if self.fit.words is None else len(self.fit.words.words),
            recorded_prompts=None if self.prompts is None else self.prompts.n_repeated,
            is_bundled=self.adapter.sends_slos,
        )


@contextmanager
def open_target(
    setup: RunSetup, warm_up: Preload | None = None, server: Server | None = None
) -> Iterator[Target]:
    """Starts the server of a run if needed, runs the preflight and yields the target; ends a server
    that it started. A `server` that is up already stays up; as it serves many runs, only failed
    checks are printed, and a server of ours that passed a preflight with the same requests is not
    examined again. A server by URL is not examined again either if the options accept an earlier
    preflight and the server still lists the same models. Results of its preflights are stored in
    `cache_dir`. `warm_up` imports modules while the preflight waits for responses.

    Raises UsageError for impossible options, TargetError where measuring would be meaningless.
    """
    options, scenario, console = setup.options, setup.scenario, setup.console
    is_kept = server is not None
    with (
        open_server(setup.target, options, setup.log_dir, console)
        if server is None
        else nullcontext(server)
    ) as server:
        endpoint = server.endpoint
        if scenario.sampling is not None:
            endpoint = endpoint.with_fields(scenario.sampling.body())
        if not endpoint.streams and (problem := needs_stream(_slos(scenario))) is not None:
            raise UsageError(f"SLO {problem}")
        line = f"{server.name}: {endpoint.shown_url}  {endpoint.labels.flags or ''}".rstrip()
        console.print(line, soft_wrap=True, markup=False)
        store = None
        if server.kind == "url" and options.cache_dir is not None:  # a URL may have changed since
            store = KnownPreflights(options.cache_dir / "preflights")
        requests = _requests(setup) if is_kept or store else ()
        target = server.known.get(requests)
        if target is None and store is not None and options.reuse_preflight_s:
            known = store.find(endpoint, requests)
            target = _reused(known, endpoint, options.reuse_preflight_s, console)
        if target is not None:
            target = replace(target, prompts=Prompts(scenario.prompts, scenario.seed, _PREFLIGHT))
        else:
            target, models = _examined(server.kind, endpoint, setup, warm_up, not is_kept)
            if _is_certain(target) and store is not None:
                store.keep(endpoint, requests, _kept(target, models))
            elif _is_certain(target) and server.kind != "url":
                server.known[requests] = target
        yield replace(_with_canaries(target, setup), ended=server.ended)


def _with_canaries(target: Target, setup: RunSetup) -> Target:
    """The target with the answers of an idle server, if the run has canaries."""
    share = canary_share(setup)
    if not share:
        return target
    if target.adapter.results:
        raise UsageError(f"--canary: answers of api {target.endpoint.api} have no text to compare")
    timeout_s = setup.scenario.limits.timeout
    canaries = finish(record_idle(target.endpoint, target.adapter, share, timeout_s))
    check = canaries.check()
    print_check(check, setup.console)
    line = PreflightLine(check.check, check.ok, check.detail)
    return replace(target, canaries=canaries, checks=[*target.checks, line])


def canary_share(setup: RunSetup) -> float:
    """The share of canaries that a run asks for, by its options or by an SLO."""
    if setup.options.canary:
        return setup.options.canary
    has_slo = any(slo.metric == "canary_match" for slo in setup.scenario.all_slos())
    return _CANARY_SHARE if has_slo else 0.0


def launch_line(spec: str, environ: Mapping[str, str], settings: Sequence[str] = ()) -> str:
    """The command with which a target file starts its server; 0 stands for a port that is chosen at
    the launch. Raises UsageError for a target without `launch`."""
    _refuse_bare_word(spec)
    launch = load_target(spec, environ, settings).launch
    if launch is None:
        raise UsageError(f"--print-launch: target {spec} has no `launch` section")
    return launch.plan(launch.port, sys.executable, environ).shown


@dataclass(frozen=True)
class Server:
    """A server that is up; `name` is used in messages. `known` maps the requests of its successful
    preflights to their results."""

    kind: str
    endpoint: Endpoint
    name: str
    ended: Callable[[], str | None] = lambda: None
    known: dict[tuple[object, ...], Target] = field(default_factory=dict, repr=False, compare=False)


@contextmanager
def open_server(
    target: str, options: RunOptions, log_dir: Path, console: Console
) -> Iterator[Server]:
    """Yields the server to measure, started and ended here if it is a bundled or launched
    server."""
    if options.target_settings and target in OURS:
        raise UsageError(
            f"target setting {options.target_settings[0]}: {target} has no target file; "
            "configure it with --engine"
        )
    if target == "reference":
        from targets.embed import engine, parse_engine

        settings = parse_engine(options.engine)
        with engine(settings, log_dir, plugins=options.plugins) as served:
            yield Server("reference", served.endpoint, "reference engine", _end_of(served.child))
    elif target == "mock":
        from targets.embed import mock

        with mock(_mock_options(options.engine), log_dir, truth=log_dir / "truth.csv") as served:
            yield Server("mock", served.endpoint, "mock server", _end_of(served.child))
    else:
        if options.engine:
            raise UsageError("--engine configures a bundled server: use it with reference or mock")
        _refuse_bare_word(target)
        environ = options.environ
        endpoint = load_target(target, environ, options.target_settings)
        if endpoint.launch is None:
            if options.wait_ready_s:
                with _Waiting(console, first_s=0.0) as waiting:
                    finish(await_ready(endpoint, options.model, options.wait_ready_s, waiting.on))
            yield Server("url", endpoint, "target")
            return
        line = launch_line(target, environ, options.target_settings)
        if environ.get(NO_LAUNCH):
            raise UsageError(
                f"{target}: its `launch` is a program, and --no-launch ({NO_LAUNCH}) refuses "
                f"to start it: {line}"
            )
        if console.quiet:  # a probe of a search; the command is shown in any case
            sys.stderr.write(f"launching: {line}\n")
        console.print(f"launching: {line}", soft_wrap=True, markup=False)
        from targets.launch import launched

        with _Waiting(console) as waiting, launched(endpoint, environ, log_dir, waiting.on) as up:
            waiting.over()
            yield Server("launched", up.endpoint, "launched server", up.ended)


def _end_of(child: Child) -> Callable[[], str | None]:
    """Returns a sentence once the child process has ended, None before."""

    def ended() -> str | None:
        code = child.exit_code
        return None if code is None else f"the {child.name} ended with code {code}: see {child.log}"

    return ended


class _Waiting:
    """Shows that a server is still starting: for how long, and the last line of its log or the
    reason. Without a terminal, the first line is printed after `first_s`."""

    def __init__(self, console: Console, first_s: float = _PROGRESS_S) -> None:
        self._console, self._printed_s = console, first_s - _PROGRESS_S
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> _Waiting:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over()

    def on(self, waited_s: float, last_line: str) -> None:
        words = Text(f"waiting for the server, {waited_s:.0f} s: {last_line or 'its log is empty'}")
        if self._status is not None:
            words.truncate(max(20, self._console.width - 4), overflow="ellipsis")
            self._status.update(words)
        elif waited_s >= self._printed_s + _PROGRESS_S:
            self._printed_s = waited_s
            self._console.print(words, soft_wrap=True)

    def over(self) -> None:
        if self._status is not None:
            self._status.stop()


def _refuse_bare_word(spec: str) -> None:
    """Raises UsageError for a misspelt target such as `refrence`."""
    if spec.isidentifier() and not Path(spec).exists():
        raise UsageError(
            f"--target {spec}: neither a URL nor a file; {nearest(spec, (*OURS, 'sim'))}"
        )


def _mock_options(text: str) -> dict[str, str]:
    from targets.mock_script import split_options

    options: dict[str, str] = {}
    for key, value in split_options(text):
        options[key] = f"{options[key]};{value}" if key in options else value
    return options


def _examined(
    kind: str,
    endpoint: Endpoint,
    setup: RunSetup,
    warm_up: Preload | None,
    prints_all: bool,
) -> tuple[Target, ModelLengths]:
    """The target after a preflight, and the models that it lists."""
    scenario, options, schedule = setup.scenario, setup.options, setup.plan.schedule
    prompts = Prompts(scenario.prompts, scenario.seed, _PREFLIGHT, setup.plan.pieces)
    calibration = Calibration(prompts, schedule)
    if endpoint.api != "chat" and (place := prompts.needs_chat):
        raise UsageError(
            f"{place}: has tools or typed parts in the form of chats, which api {endpoint.api} "
            "cannot carry; use api: chat"
        )
    warm_up = warm_up or Preload()
    probing = preflight(
        endpoint,
        endpoint.adapter(**_fields(options, scenario, endpoint)),
        max_input_tokens=int(schedule["input_tokens"].max()),
        max_output_tokens=int(schedule["output_tokens"].max()),
        timeout_s=min(_PATIENCE_S, scenario.limits.timeout),
        text_of=calibration.sample,
        calibrate=calibration.steps,
        first_prompts=calibration.early_prompts,
        temperature=_temperature(schedule),
        longest=_longest(schedule, prompts),
        requests_of=partial(
            example_requests, endpoint, scenario, setup.plan, prompts, lambda: calibration.fit
        ),
        on_first_token=warm_up.may_begin,
    )
    found, metrics = finish(_both(probing, endpoint, options.scrape), warm_up.during)
    checks = [*found.checks]
    if metrics is not None and found.fatal is None:
        checks.append(metrics[0])
    for check in checks:
        if check.is_checked and (prints_all or check.ok is False):
            print_check(check, setup.console)
    if prints_all and (n_left := sum(not check.is_checked for check in checks)):
        left = f"{n_left} further {'check was' if n_left == 1 else 'checks were'} not made"
        setup.console.print(f"{_MARKS[None]} {left}", style="dim", markup=False)
    found.or_raise()
    target = Target(
        kind=kind,
        endpoint=endpoint,
        adapter=found.adapter,
        fit=calibration.fit,
        checks=[PreflightLine(c.check, c.ok, c.detail) for c in checks],
        metrics=endpoint.metrics_urls() if metrics is not None and metrics[1] else (),
        prompts=prompts,
        longest_wait_s=found.longest_wait_s,
    )
    return target, found.models or {}


def _longest(schedule: Schedule, prompts: Prompts) -> Longest:
    totals = schedule["input_tokens"].astype(np.uint64) + schedule["output_tokens"]
    row = schedule[int(np.argmax(totals))]
    return Longest(int(row["input_tokens"]), int(row["output_tokens"]), prompts.place(row))


def _fields(options: RunOptions, scenario: Scenario, endpoint: Endpoint) -> dict[str, Any]:
    """The fields of the codec that command line and scenario set."""
    fields: dict[str, Any] = {"stream": endpoint.streams and scenario.stream}
    return fields | ({"model": options.model} if options.model else {})


def _slos(scenario: Scenario) -> list[Slo]:
    """All SLOs, and those that requests bring themselves."""
    return [*scenario.all_slos(), *map(own_slo, scenario.own_slo_metrics())]


def _kept(target: Target, models: ModelLengths) -> KnownPreflight:
    fields = target.adapter.model_dump(mode="json", exclude={"extra_body"})  # it may hold secrets
    checks = tuple(target.checks)
    return KnownPreflight(
        time.time(), models, fields, target.fit, checks, target.metrics, target.longest_wait_s
    )


def _reused(
    known: KnownPreflight | None, endpoint: Endpoint, most_age_s: float, console: Console
) -> Target | None:
    """The target by an earlier preflight, if it is recent and the server lists the same models;
    else None. Prints which."""
    if known is None or known.age_s > most_age_s:
        reason = f"no successful one with such requests in the last {format_duration(most_age_s)}"
    elif not known.models or finish(models_now(endpoint)) != known.models:
        reason = "GET /v1/models does not list the same models as then"
    else:
        age = format_duration(round(known.age_s))
        line = f"that of {age} ago counts: GET /v1/models lists the same models"
        check = PreflightCheck(REUSED, None, line)
        print_check(check, console)
        return Target(
            kind="url",
            endpoint=endpoint,
            adapter=endpoint.adapter(**known.adapter),
            fit=known.fit,
            checks=[PreflightLine(REUSED, None, line), *known.checks],
            metrics=known.metrics,
            longest_wait_s=known.longest_wait_s,
        )
    print_check(PreflightCheck(REUSED, None, f"not reused: {reason}"), console)
    return None


def _temperature(schedule: Schedule) -> float:
    """The median. `np.median` and `np.unique` would import numpy.ma, 30 ms, before a preflight."""
    ordered = np.sort(schedule["temperature"])
    return round(float((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2), 6)


def _distinct(values: NDArray[Any]) -> NDArray[Any]:
    """The different values, ascending."""
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def _is_certain(target: Target) -> bool:
    """Whether another preflight would have the same result: no failed check, no estimated
    length."""
    oks = {line.check: line.ok for line in target.checks}
    return False not in oks.values() and oks.get("prompt_fit", True) is True


def _requests(setup: RunSetup) -> tuple[object, ...]:
    """The parts of the preflight's requests that its result depends on; two preflights of the same
    server with equal parts have equal results."""
    scenario, schedule = setup.scenario, setup.plan.schedule
    inputs = schedule["context"].astype(np.uint64) << np.uint64(32) | schedule["input_tokens"]
    lengths = _distinct(inputs).tobytes(), _distinct(schedule["prefix_tokens"]).tobytes()
    longest, timeout_s = int(schedule["output_tokens"].max()), scenario.limits.timeout
    return (
        setup.options.model,
        setup.options.scrape,
        scenario.prompts.model_dump_json(),
        "" if scenario.sampling is None else scenario.sampling.model_dump_json(),
        timeout_s,
        longest,
        lengths,
        scenario.stream,
        _temperature(schedule),
    )


async def _both(
    probing: Coroutine[Any, Any, Preflight], endpoint: Endpoint, scrape: bool
) -> tuple[Preflight, tuple[PreflightCheck, bool] | None]:
    """Runs the preflight and, with `scrape`, checks whether the server's metrics can be read."""
    if not scrape:
        return await probing, None
    found, metrics = await asyncio.gather(probing, find_metrics(endpoint))
    return found, metrics


def finish(
    probing: Coroutine[Any, Any, T], meanwhile: Callable[[Future[T]], None] = lambda _: None
) -> T:
    """Runs a coroutine to its end, also inside a running event loop (a notebook)."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(asyncio.run, probing)
        meanwhile(future)
        return future.result()


def print_check(check: PreflightCheck, console: Console) -> None:
    """Prints a line per check; an unknown result is dim."""
    style = "yellow" if check.ok is False else "dim" if check.ok is None else ""
    mark = "stop" if check.is_stop else _MARKS[check.ok]
    line = f"{mark} {check.check:<14} {check.detail}"
    console.print(line, style=style, soft_wrap=True, markup=False)
