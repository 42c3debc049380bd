"""Options of a run, and a run that has its options but has not been opened yet."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from loadgen.errors import UsageError, nearest
from loadgen.workload.flag_values import KEYWORDS, scenario_of

if TYPE_CHECKING:
    from rich.console import Console

    from loadgen.live.watching import Watch
    from loadgen.workload.scenario import Scenario
    from loadgen.workload.schedule import Plan


F = TypeVar("F", bound=Callable[..., Any])


class Early(Protocol):
    """Stops a run early: `note` receives the requests that ended, `reason` returns why the run can
    stop now, or None."""

    def note(self, now_s: float, ended: Sequence[Mapping[str, Any]]) -> None: ...

    def reason(self, now_s: float, in_flight: int) -> str | None: ...


@dataclass(frozen=True)
class RunOptions:
    """Options of a run apart from its traffic (the scenario) and its target.

    `n_workers` is the number of load-generating processes; 0: as many as the token rate needs.
    `engine` holds settings of a bundled server, `mode=chunked,shape=tiny`. `target_settings` are
    keys set on top of a target file, `launch.args=--tp 2`. `scrape` reads the server's own metrics
    once a second. `transport` is explained in docs/targets.md. `plugins` are Python files, loaded
    in this process and to be loaded in the load-generating processes. `command` is the command line
    shown in the report. `cache_dir` keeps files that are slow to make (the plotting bundle); None
    keeps nothing. `name` is the run's name where it differs from its directory's. `watch` exports
    live metrics; `early` may stop the run before its end. With fewer successful requests than
    `min_requests` the run has no verdict, with `clear` also if an SLO is neither proven nor clear.
    A server that slobench does not start may take `wait_ready_s` until it is ready; its last
    preflight, if at most `reuse_preflight_s` old, counts for this run too. `canary` is the share of
    the requests that are sent in addition, to compare their answers with those at idle; 0: 2 % if
    an SLO is on `canary_match`, else none. `stop_names` are the
    names of signals that another program sends for its user.
    """

    out_dir: Path | None = None
    force: bool = False
    n_workers: int = 0
    transport: Literal["fast", "aiohttp"] = "fast"
    engine: str = ""
    model: str = ""
    confidence: float | None = None
    clear: bool = False
    command: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    cache_dir: Path | None = None
    plugins: Sequence[Path] = ()
    scrape: bool = True
    target_settings: Sequence[str] = ()
    name: str = ""
    watch: Watch | None = None
    early: Early | None = None
    min_requests: int = 0
    wait_ready_s: float = 0.0
    reuse_preflight_s: float = 0.0
    canary: float = 0.0
    stop_names: Mapping[int, str] = field(default_factory=dict)


def takes_run_options(function: F) -> F:
    """A function of the Python API whose `**options` are fields of RunOptions and flags on the
    scenario (`rate`, `duration`, `slo`, …): its signature lists them by name, so that notebooks
    complete them and `help` shows them."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = inspect.signature(RunOptions).parameters.values()
    names = {parameter.name for parameter in own}
    further = [p.replace(kind=p.KEYWORD_ONLY) for p in options if p.name not in names]
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in KEYWORDS
        if name not in names
    ]
    listed = signature.replace(parameters=[*own, *further, *flags])
    function.__signature__ = listed  # type: ignore[attr-defined]
    return function


def split_keywords(
    scenario: Scenario | Path | str, keywords: Mapping[str, Any]
) -> tuple[Scenario, RunOptions]:
    """The scenario with the flags among the keywords of a Python function, and the options of its
    runs. Raises UsageError, also for an unknown keyword."""
    flags = {name: value for name, value in keywords.items() if name in KEYWORDS}
    options = {name: value for name, value in keywords.items() if name not in KEYWORDS}
    known = [f.name for f in fields(RunOptions)]
    for name in options:
        if name not in known:
            raise UsageError(f"unknown option '{name}'; {nearest(name, [*known, *KEYWORDS])}")
    options.setdefault("environ", dict(os.environ))
    return scenario_of(scenario, flags), RunOptions(**options)


class RunSetup(NamedTuple):
    """A run before its target is open. `target` is the value of `--target`; `directory` exists
    and is empty."""

    scenario: Scenario
    plan: Plan
    target: str
    options: RunOptions
    directory: Path
    console: Console

    @property
    def name(self) -> str:
        return self.options.name or self.directory.name

    @property
    def log_dir(self) -> Path:
        return self.directory / "logs"
