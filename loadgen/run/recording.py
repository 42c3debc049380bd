"""One plan driven through the shards: what is told while it runs, how it ends, and the run that
comes of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from rich.console import Console

from loadgen.drive import store
from loadgen.drive.core_time import Cpu, family_cpu, family_cpu_s
from loadgen.drive.live_sample import FIELDS
from loadgen.drive.progress import Progress
from loadgen.drive.shards import Outcome
from loadgen.drive.stop_rules import StopRules, stop_rules
from loadgen.live.watched import WatchedRun
from loadgen.live.watching import about, watching
from loadgen.measure.attainment import derived
from loadgen.records import CHUNKS, SERVER, Run, empty_requests
from loadgen.run.fleet import Fleet
from loadgen.run.manifest import ending, manifest
from loadgen.run.run_options import RunOptions
from loadgen.run.shard_tasks import Job
from loadgen.run.target import Target
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan
from targets.scrape import Scraped, Scraper

_INTERRUPT_DRAIN_S = 10.0
_DEAD_DRAIN_S = 1.0  # for answers on their way from a server that has ended
_DECODING_S = 600.0  # after the drain, for shards to decode what they hold and write it


class Recording:
    """Drives the shards through one schedule and puts the run together."""

    def __init__(
        self,
        scenario: Scenario,
        plan: Plan,
        target: Target,
        options: RunOptions,
        directory: Path,
        console: Console,
        fleet: Fleet,
    ) -> None:
        self._scenario, self._plan, self._target = scenario, plan, target
        self._fleet = fleet
        self._schedule, self._names = plan.schedule, scenario.names()
        self._options, self._directory = options, directory
        self._salt = secrets.token_bytes(8) if scenario.prompts.salt == "run" else b""
        self._name = options.name or directory.name
        self._epoch_ns = 0
        self._family: Cpu = {}
        self._ended, self._end_reason = "completed", ""
        self._ended_s: float | None = None
        self._server_ended_s: float | None = None
        self._n_interrupts = self._n_handled = 0
        self._progress = Progress(
            console, len(plan.schedule), scenario.horizon_s, len(plan.schedule) / scenario.horizon_s
        )
        self._scraper = Scraper(target.metrics, target.endpoint) if target.metrics else None
        self._watched: WatchedRun | None = None
        if options.watch.is_on:
            self._watched = WatchedRun(about(scenario, target, self._name), plan.schedule)
        self._rules = StopRules()
        if (when := scenario.stop_when) is not None:
            self._rules = stop_rules(when.error_rate, when.over, when.saturated)

    def record(self) -> Run:
        """The run; the plan and the manifest are on disk before the first request goes out."""
        parts_dir = self._directory / "parts"
        parts_dir.mkdir(exist_ok=True)
        job = Job(
            self._scenario,
            self._plan,
            self._target,
            self._options.transport,
            self._salt,
            self._name,
            parts_dir,
            is_watched=self._watched is not None or self._options.early is not None,
        )
        self._fleet.hand_over(job)  # what is written here takes as long as to get ready there
        planned = self._planned()
        store.write_schedule(self._directory, planned)
        watched = watching(self._watched, self._options.watch, self._progress.note)
        with watched, self._scraping() as scraped, self._interruptible():
            limit_s = self._scenario.horizon_s + self._scenario.phases.drain + _DECODING_S
            with self._progress:
                outcome = self._fleet.run(
                    self._on_beat,
                    self._on_start,
                    self._obey,
                    limit_s,
                    lambda shard: self._progress.note(
                        f"load-generating process {shard} died: its requests are lost, "
                        "the others go on"
                    ),
                )
            run = self._put_together(planned.manifest | self._ending(outcome), parts_dir, outcome)
            run = _with_server(run, scraped())
            store.write_run(self._directory, run, derived(run))
        shutil.rmtree(parts_dir)
        return run

    def _planned(self) -> Run:
        said = manifest(
            self._name,
            self._scenario,
            self._plan,
            self._target,
            self._salt,
            self._options.command,
        )
        said["transport"] = self._options.transport
        nothing, no_chunks = empty_requests(self._schedule), np.empty(0, CHUNKS)
        return Run(said, self._schedule, nothing, no_chunks, self._plan.edges, self._names)

    def _put_together(self, manifest: dict[str, Any], parts_dir: Path, outcome: Outcome) -> Run:
        parts = store.read_parts(parts_dir)
        requests, chunks, found = store.merge_parts(self._schedule, parts)
        names = replace(self._names, errors=found.errors, remotes=found.remotes)
        instrument = {"shards": outcome.instruments, "family_s": self._family_s(outcome)}
        return Run(manifest, self._schedule, requests, chunks, self._plan.edges, names, instrument)

    def _family_s(self, outcome: Outcome) -> float:
        """CPU seconds of this process and of the server that it started, if it did, on the cores
        that the shards may use."""
        used = [one.get("cores") or {} for one in outcome.instruments]
        cores = frozenset(core for one in used for core in one.get("allowed", ()))
        after = self._family_cpu()
        return family_cpu_s(self._family, after, cores)

    def _family_cpu(self) -> Cpu:
        """Nothing where the shards are on machines of their own: it is not their cores' time."""
        shards = self._fleet.pids
        return {} if shards is None else family_cpu(os.getpid(), without=shards)

    def _on_start(self, epoch_ns: int) -> None:
        self._epoch_ns = epoch_ns
        self._family = self._family_cpu()
        self._progress.begin()
        if self._scraper is not None:
            self._scraper.start(epoch_ns)

    @contextlib.contextmanager
    def _scraping(self) -> Iterator[Callable[[], Scraped]]:
        """What the server said of itself, to be asked for after the run; reading ends then, or with
        the block."""

        def stop() -> Scraped:
            return Scraped() if self._scraper is None else self._scraper.stop()

        try:
            yield stop
        finally:
            stop()

    def _on_beat(self, shard: int, message: dict[str, Any]) -> None:
        totals = self._progress.beat(shard, message)
        if self._watched is not None:
            self._watched.take(shard, message)
        if self._ended != "completed":
            return
        reason = self._rules.reason(
            totals.now_s,
            n_released=totals.released,
            n_ended=totals.n_ended,
            n_failed=totals.n_failed,
            ttft_s=message["ttft_s"],
            e2e_s=message["e2e_s"],
        )
        if reason is None and self._options.early is not None:
            early = self._options.early
            early.note(totals.now_s, [dict(zip(FIELDS, e, strict=True)) for e in message["ended"]])
            reason = early.reason(totals.now_s, totals.in_flight)
        if reason is not None:
            self._progress.note(f"ending the run: {reason}")
            self._stop("stopped", reason, self._scenario.phases.drain)

    def _stop(self, how: str, reason: str, drain_s: float) -> None:
        if self._ended == "completed":
            self._ended, self._end_reason = how, reason
            self._ended_s = (time.monotonic_ns() - self._epoch_ns) * 1e-9
        self._fleet.stop(reason, drain_s)

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

    def _obey(self) -> None:
        """Once: release nothing more and wait for what is in flight. Twice: give that up too. A
        server of ours that has ended ends the run."""
        gone = self._target.ended() if self._ended == "completed" else None
        if gone is not None:
            self._progress.note(f"ending the run: {gone}")
            self._stop("stopped", gone, min(_DEAD_DRAIN_S, self._scenario.phases.drain))
            self._server_ended_s = self._ended_s
        if self._n_handled == self._n_interrupts:
            return
        self._n_handled = self._n_interrupts
        drain_s = min(_INTERRUPT_DRAIN_S, self._scenario.phases.drain)
        if self._n_interrupts == 1:
            self._progress.note(
                f"interrupted: waiting up to {drain_s:g} s for requests in flight; "
                "Ctrl-C again gives them up"
            )
            self._stop("interrupted", "the interrupt", drain_s)
        else:
            self._progress.note("interrupted again: giving up the requests in flight")
            self._stop("interrupted", "the second interrupt", 0.0)

    def _ending(self, outcome: Outcome) -> dict[str, Any]:
        if outcome.cut_short is not None and self._ended == "completed":
            self._ended, self._end_reason = "stopped", outcome.cut_short.reason
            self._ended_s = (outcome.cut_short.at_ns - self._epoch_ns) * 1e-9
        reason = self._end_reason
        if outcome.dead:
            shard, words = next(iter(outcome.dead.items()))
            reason = f"load-generating process {shard} died ({words})"
        now_ns, now_utc = time.monotonic_ns(), datetime.now(UTC)
        said = ending(
            self._scenario, self._ended, reason, self._ended_s, outcome.epoch_ns, now_ns, now_utc
        )
        return said | {"server_ended_s": self._server_ended_s} | outcome.told


def _with_server(run: Run, scraped: Scraped) -> Run:
    """The run with what its server said of itself, and how often that worked."""
    if not scraped.n_scrapes:
        return run
    series = tuple(dict.fromkeys(name for _, name, _ in scraped.rows))
    number = {name: k for k, name in enumerate(series)}
    rows = np.array([(t_s, number[name], value) for t_s, name, value in scraped.rows], SERVER)
    said = {"n": scraped.n_scrapes, "n_failed": scraped.n_failed, "reason": scraped.reason}
    return replace(
        run,
        manifest=run.manifest | {"scrapes": said},
        names=replace(run.names, series=series),
        server_rows=rows,
    )
