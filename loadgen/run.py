"""One run, wired together: scenario → schedule → target → shards → tables → summary → report."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from rich.console import Console

from loadgen.drive import store
from loadgen.drive.dispatch import Bounds
from loadgen.drive.instrument import host
from loadgen.drive.payloads import HttpHead
from loadgen.drive.progress import Progress
from loadgen.drive.shard import ShardTask
from loadgen.drive.shards import Outcome, Shards
from loadgen.drive.stop_rules import ErrorRate
from loadgen.errors import UsageError
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import derived
from loadgen.measure.summary import Summary
from loadgen.records import CHUNKS, SCHEMA, Run, Schedule, empty_requests
from loadgen.target import Choice, Target, open_target
from loadgen.workload.classes import DEFAULT_TENANT
from loadgen.workload.prompts import Prompts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan, make_plan, schedule_sha256, split_plan

_INTERRUPT_DRAIN_S = 10.0
_DECODING_S = 600.0  # after the drain, for shards to decode what they hold and write it
_EVENTS_PER_WORKER = 50_000.0  # token events a second one core holds; CLIENT measurements: 100 k
_MOST_PREOPENED = 256


@dataclass(frozen=True)
class RunOptions:
    """How to run, apart from what (scenario) and against what (target).

    `engine` are settings of a server of ours, `mode=chunked,shape=tiny`. `n_workers` 0 means:
    as many as the asked token rate needs. `command` is what the user typed, for the report.
    `cache_dir` keeps what is slow to make (the plotting bundle); None keeps nothing. `plugins` are
    Python files that were loaded here and must be in the load-generating processes too.
    """

    out_dir: Path | None = None
    force: bool = False
    n_workers: int = 0
    engine: str = ""
    model: str = ""
    confidence: float | None = None
    command: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    cache_dir: Path | None = None
    plugins: Sequence[Path] = ()


@dataclass(frozen=True)
class Finished:
    """A run and what was made of it."""

    run: Run
    summary: Summary
    directory: Path

    @property
    def was_interrupted(self) -> bool:
        return bool(self.run.manifest["ended"] == "interrupted")


def run(scenario: Scenario, target: str, out_dir: Path | str | None = None, **options: Any) -> Run:
    """Run a scenario against `target` (a URL, a target file, `reference` or `mock`) and record it.

    Without `out_dir` the run goes to `runs/<scenario>-<time>`; further options are the fields of
    RunOptions. Raises UsageError, TargetError or RunInvalid; failing requests are rows, not errors.
    """
    options.setdefault("environ", dict(os.environ))
    chosen = RunOptions(out_dir=Path(out_dir) if out_dir else None, **options)
    return execute(scenario, target, chosen, Console(quiet=True)).run


def execute(scenario: Scenario, target: str, options: RunOptions, console: Console) -> Finished:
    """`run`, telling `console` how it goes, and returning the summary and the directory too."""
    plan = make_plan(scenario)
    with _run_directory(scenario.name, options) as directory:
        choice = Choice(target, options.engine, options.model, options.environ)
        with open_target(choice, scenario, plan.schedule, directory / "logs", console) as opened:
            recorded = record(scenario, plan, opened, options, directory, console)
        summary = summarize(recorded, confidence=options.confidence)
        _tell(recorded, summary, directory, options.cache_dir)
        return Finished(recorded, summary, directory)


def record(
    scenario: Scenario,
    plan: Plan,
    target: Target,
    options: RunOptions,
    directory: Path,
    console: Console,
) -> Run:
    """Send a plan to an open target and put the run together; the plan and the manifest are in
    `directory` before the first request goes out."""
    return _Recorder(scenario, plan, target, options, directory, console).record()


def conclude(
    directory: Path, slo: Sequence[str] | None, confidence: float | None, cache_dir: Path | None
) -> Summary:
    """Compute a recorded run's numbers again, with other promises if given, and render its page.
    A run whose results were never put together is put together first."""
    run = store.read_run(directory)
    if not (directory / "requests.parquet").exists():
        ending = {"ended": "interrupted", "end_reason": "slobench was ended from outside"}
        run = replace(run, manifest=run.manifest | ending)
        store.write_run(directory, run, derived(run))
        shutil.rmtree(directory / "parts")
    summary = summarize(run, slo=slo, confidence=confidence)
    _tell(run, summary, directory, cache_dir)
    return summary


class _Recorder:
    """Drives the shards through one schedule and puts the run together."""

    def __init__(
        self,
        scenario: Scenario,
        plan: Plan,
        target: Target,
        options: RunOptions,
        directory: Path,
        console: Console,
    ) -> None:
        self._scenario, self._plan, self._target = scenario, plan, target
        self._schedule, self._names = plan.schedule, scenario.names()
        self._options, self._directory, self._console = options, directory, console
        self._salt = secrets.token_bytes(8) if scenario.prompts.salt == "run" else b""
        self._epoch_ns = 0
        self._ended, self._end_reason, self._ended_s = "completed", "", math.inf
        self._n_interrupts = self._n_handled = 0
        self._progress = Progress(
            console, len(plan.schedule), scenario.horizon_s, len(plan.schedule) / scenario.horizon_s
        )
        limits = scenario.stop_when
        self._error_rate = ErrorRate(limits.error_rate, limits.over) if limits else None

    def record(self) -> Run:
        manifest = self._manifest()
        nothing = empty_requests(self._schedule)
        edges = self._plan.edges
        chunks = np.empty(0, CHUNKS)
        planned = Run(manifest, self._schedule, nothing, chunks, edges, self._names)
        store.write_schedule(self._directory, planned)
        parts_dir = self._directory / "parts"
        parts_dir.mkdir(exist_ok=True)
        tasks = self._tasks(parts_dir)
        with (
            Shards(tasks, self._directory / "logs", self._options.plugins) as shards,
            self._interruptible(),
        ):
            phases = self._scenario.phases
            limit_s = self._scenario.horizon_s + phases.drain + _DECODING_S
            with self._progress:
                outcome = shards.run(
                    self._on_beat(shards), self._on_start, lambda: self._obey(shards), limit_s
                )
            run = self._put_together(manifest | self._ending(outcome), tasks, outcome)
            store.write_run(self._directory, run, derived(run))
        shutil.rmtree(parts_dir)
        return run

    def _put_together(
        self, manifest: dict[str, Any], tasks: Sequence[ShardTask], outcome: Outcome
    ) -> Run:
        parts = [store.read_part(t.part_path) for t in tasks if t.part_path.exists()]
        requests, chunks, found = store.merge_parts(self._schedule, parts)
        names = replace(self._names, errors=found.errors, remotes=found.remotes)
        instrument = {"shards": outcome.instruments}
        return Run(manifest, self._schedule, requests, chunks, self._plan.edges, names, instrument)

    def _tasks(self, parts_dir: Path) -> list[ShardTask]:
        scenario, endpoint = self._scenario, self._target.endpoint
        n_shards = self._options.n_workers or workers_needed(self._schedule, scenario.horizon_s)
        cap = scenario.limits.max_concurrency
        n_shards = min(n_shards, len(self._schedule), cap)
        address = endpoint.address
        prompts = Prompts(scenario.prompts, scenario.seed, self._salt)
        n_preopen = math.ceil(2 * len(self._schedule) / scenario.horizon_s) + 4
        return [
            ShardTask(
                shard=number,
                schedule=part.schedule,
                edges=part.edges,
                host=address.host,
                port=address.port,
                is_tls=address.ssl,
                ca_cert=endpoint.ca_cert,
                head=HttpHead(address.host_header, address.base_path, endpoint.request_headers()),
                adapter=self._target.adapter,
                prompts=prompts,
                fit=self._target.fit,
                run_name=self._directory.name,
                tenants=tuple("" if t == DEFAULT_TENANT else t for t in self._names.tenants),
                bounds=Bounds(
                    timeout_s=scenario.limits.timeout,
                    max_concurrency=cap // n_shards + (number < cap % n_shards),
                    when_full=scenario.limits.when_full,
                    horizon_s=scenario.horizon_s,
                    drain_s=scenario.phases.drain,
                ),
                connections=endpoint.connections,
                n_preopen=min(
                    cap // n_shards,
                    len(part.schedule),
                    n_preopen // n_shards + 1,
                    _MOST_PREOPENED,
                ),
                part_path=parts_dir / f"shard-{number}.npz",
            )
            for number, part in enumerate(split_plan(self._plan, n_shards))
        ]

    def _on_start(self, epoch_ns: int) -> None:
        self._epoch_ns = epoch_ns

    def _on_beat(self, shards: Shards) -> Callable[[int, dict[str, Any]], None]:
        def beat(shard: int, message: dict[str, Any]) -> None:
            totals = self._progress.beat(shard, message)
            if self._error_rate is None or self._ended != "completed":
                return
            reason = self._error_rate.reason(totals.now_s, totals.n_ended, totals.n_failed)
            if reason is not None:
                self._progress.note(f"ending the run: {reason}")
                self._stop(shards, "stopped", reason, self._scenario.phases.drain)

        return beat

    def _stop(self, shards: Shards, how: str, reason: str, drain_s: float) -> None:
        if self._ended == "completed":
            self._ended, self._end_reason = how, reason
            self._ended_s = (time.monotonic_ns() - self._epoch_ns) * 1e-9
        shards.stop(reason, drain_s)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """While a run is under way, Ctrl-C and SIGTERM are counted and obeyed by `_obey`, and
        nothing recorded can be lost to them. Only the main thread may handle signals."""

        def note(number: int, frame: FrameType | None) -> None:
            if not self._epoch_ns:
                raise KeyboardInterrupt
            self._n_interrupts += 1

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _obey(self, shards: Shards) -> None:
        """Once: release nothing more and wait for what is in flight. Twice: give that up too."""
        if self._n_handled == self._n_interrupts:
            return
        self._n_handled = self._n_interrupts
        drain_s = min(_INTERRUPT_DRAIN_S, self._scenario.phases.drain)
        if self._n_interrupts == 1:
            self._progress.note(
                f"interrupted: waiting up to {drain_s:g} s for requests in flight; "
                "Ctrl-C again gives them up"
            )
            self._stop(shards, "interrupted", "the interrupt", drain_s)
        else:
            self._progress.note("interrupted again: giving up the requests in flight")
            self._stop(shards, "interrupted", "the second interrupt", 0.0)

    def _ending(self, outcome: Outcome) -> dict[str, Any]:
        """What the manifest can only say afterwards."""
        now_ns, now = time.monotonic_ns(), datetime.now(UTC)
        epoch_utc = now.timestamp() - (now_ns - outcome.epoch_ns) * 1e-9
        window = self._manifest_window()
        if self._ended != "completed":
            window["ended_s"] = min(self._ended_s, self._scenario.horizon_s)
        ended, reason = self._ended, self._end_reason
        if outcome.dead:
            shard, words = next(iter(outcome.dead.items()))
            reason = f"load-generating process {shard} died ({words})"
        return {
            "ended": ended,
            "end_reason": reason,
            "epoch_monotonic_s": outcome.epoch_ns * 1e-9,
            "epoch_utc": datetime.fromtimestamp(epoch_utc, UTC).isoformat(),
            "window": window,
        }

    def _manifest_window(self) -> dict[str, float]:
        phases = self._scenario.phases
        return {
            "warmup_s": phases.warmup,
            "measure_s": phases.measure,
            "drain_s": phases.drain,
        }

    def _manifest(self) -> dict[str, Any]:
        scenario, names = self._scenario, self._names
        instrument = scenario.instrument
        return {
            "schema": SCHEMA,
            "run": self._directory.name,
            "slobench": version(),
            "command": [_without_key(word) for word in self._options.command],
            "scenario": {
                "name": scenario.name,
                "text": scenario.to_yaml(),
                "resolved": scenario.resolved(),
            },
            "seed": scenario.seed,
            "salt": self._salt.hex(),
            "schedule_sha256": schedule_sha256(*self._plan),
            "n_requests": len(self._schedule),
            "slo": list(scenario.slo_texts()),
            "classes": {
                name: {
                    "slo": list(asked.slo_texts()),
                    "priority": asked.priority,
                    "tenant": asked.tenant,
                    "is_closed_loop": scenario.is_closed_loop(name),
                }
                for name, asked in scenario.traffic().items()
            },
            "target": self._target.to_manifest(),
            "preflight": self._target.checks,
            "names": {"classes": list(names.classes), "tenants": list(names.tenants)},
            "window": self._manifest_window(),
            "instrument_limits": {
                "lateness_s": instrument.lateness,
                "loop_lag_s": instrument.loop_lag,
                "cpu_share": instrument.cpu,
                "run_delay_share": instrument.run_delay,
            },
            "clock": "CLOCK_MONOTONIC",
            "host": host(),
            "versions": _versions(),
            "git": _git_commit(),
            "started_utc": datetime.now(UTC).isoformat(),
            "ended": "running",
            "end_reason": "",
        }


def _without_key(word: str) -> str:
    """A word of the command line without the API key it may set on a server of ours."""
    return re.sub(r"(api[_-]key=)[^,]+", r"\1…", word)


def workers_needed(schedule: Schedule, horizon_s: float) -> int:
    """Processes for the asked token rate, with one core left to the rest of the machine."""
    tokens_per_s = float(schedule["output_tokens"].sum(dtype=np.float64)) / horizon_s
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(math.ceil(tokens_per_s / _EVENTS_PER_WORKER), (n_cores or 2) - 1))


def version() -> str:
    """The installed version of slobench."""
    from importlib.metadata import version as installed

    return installed("slobench")


def _tell(run: Run, summary: Summary, directory: Path, cache_dir: Path | None) -> None:
    """What was made of a run, for programs and for people."""
    from reports.html import write

    store.write_summary(directory, summary.to_json())
    write(run, summary, directory / "report.html", cache_dir=cache_dir)


@contextlib.contextmanager
def _run_directory(name: str, options: RunOptions) -> Iterator[Path]:
    """The directory of this run, fresh. If the run ends before its manifest is written, it is
    removed again, and the run that `force` would have replaced is back."""
    chosen = options.out_dir
    if chosen is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        chosen = _free(Path("runs") / f"{name}-{stamp}")
    replaced = _set_aside(chosen, options.force)
    try:
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {chosen}: cannot be made: {error.strerror}") from None
    try:
        yield chosen
    except BaseException:
        if not (chosen / "manifest.json").is_file():
            shutil.rmtree(chosen, ignore_errors=True)
            if replaced is not None:
                replaced.rename(chosen)
        raise
    if replaced is not None:
        shutil.rmtree(replaced)
    _point_latest(chosen)


def _set_aside(chosen: Path, force: bool) -> Path | None:
    """Where the run that stands in `chosen` waits until a new one has begun; None if none does."""
    if not chosen.exists() or (chosen.is_dir() and not any(chosen.iterdir())):
        return None
    if not force:
        raise UsageError(f"--out {chosen}: exists already; --force overwrites the run in it")
    if not (chosen / "manifest.json").is_file():
        raise UsageError(f"--out {chosen}: --force overwrites runs only, and this is none")
    return chosen.rename(_free(chosen.with_name(f".{chosen.name}.replaced")))


def _free(path: Path) -> Path:
    candidates = (path.with_name(f"{path.name}-{n}") if n else path for n in range(1000))
    return next(candidate for candidate in candidates if not candidate.exists())


def _point_latest(directory: Path) -> None:
    """`latest` beside a run points at it, unless that name is somebody else's; where links cannot
    be made there is none."""
    link = directory.parent / "latest"
    is_ours = link.is_symlink() and (not link.exists() or (link / "manifest.json").is_file())
    if is_ours or not (link.exists() or link.is_symlink()):
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(directory.name, target_is_directory=True)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    found = {"python": sys.version.split()[0]}
    for package in ("numpy", "uvloop", "httptools", "msgspec", "pyarrow", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = installed(package)
    return found


def _git_commit() -> str:
    """The commit of the working directory, "" outside of a repository or without git."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
