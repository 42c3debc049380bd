"""Sends a plan through the load-generating processes and assembles the recorded run."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec
import numpy as np

from loadgen.archive import store
from loadgen.archive.directory import keep_elsewhere
from loadgen.archive.part_decoder import PartDecoder, decode_left
from loadgen.drive.core_time import Cpu, family_cpu, family_cpu_s
from loadgen.drive.first_failures import refused
from loadgen.drive.live_sample import FIELDS
from loadgen.drive.shards import OnBeat, Outcome
from loadgen.live.early_warning import EarlyWarning
from loadgen.live.progress import Progress, Totals
from loadgen.live.run_figures import RunFigures
from loadgen.live.watched import WatchedRun
from loadgen.live.watching import run_labels, watching
from loadgen.manifest.json_section import JsonObject
from loadgen.manifest.sections import CanarySection, Ended, EndKind, Manifest, Scrapes
from loadgen.manifest.self_report import ClientReport
from loadgen.measure.attainment import derived, with_counted_window
from loadgen.measure.cause import is_too_long
from loadgen.measure.closed_loop import with_start_left_out
from loadgen.measure.truncated import with_truncated
from loadgen.records import CHUNKS, SERVER, Run, Status, empty_requests
from loadgen.run.example_requests import head_of
from loadgen.run.manifest import completed, instrument_limits, manifest
from loadgen.run.run_options import RunSetup
from loadgen.run.shard_tasks import Job
from loadgen.run.stop_rules import Silence, StopRules, stop_rules
from loadgen.run.target import Target
from loadgen.system.endings import ending_signals
from loadgen.workload.prompts import Prompts
from loadgen.workload.schedule import more_units
from targets.canary import CanarySender
from targets.scrape import Scraped, Scraper

_INTERRUPT_DRAIN_S = 10.0
_OF_GAPS = ("max_itl_s", "max_stall_s")  # need the gaps between tokens
_MOST_PLACES = 10
_TTFT = ("ttft_s", "ttft_from_send_s")
_DEAD_DRAIN_S = 1.0  # for responses already on their way when the server ended


class Fleet(Protocol):
    """The load-generating processes of a run, on this machine (`drive.shards.Shards`) or on
    others. `stop` and `hurry` may be called from the callbacks of `run`, which are those of
    `Shards.run`."""

    @property
    def pids(self) -> Collection[int] | None:
        """The processes that are children of this process; None where they are elsewhere."""

    def hand_over(self, job: Job) -> None:
        """Passes the work on, so that the processes prepare it."""

    def run(
        self,
        on_beat: OnBeat,
        on_start: Callable[[int], None],
        on_idle: Callable[[], None],
        on_death: Callable[[int, str], None],
    ) -> Outcome:
        """Starts the work and returns when each process has written its rows or was given up."""

    def stop(self, reason: str, drain_s: float, *, sends_waiting: bool = False) -> None:
        """Releases no further request; requests in flight, and with `sends_waiting` also those that
        wait for a slot, have `drain_s` to finish."""

    def hurry(self, *, is_last: bool) -> None:
        """Waits only for processes that make progress; with `is_last`, for none."""


class Recording:
    """A run while its load is being sent. `on_idle` is called a few times a second meanwhile."""

    def __init__(
        self,
        setup: RunSetup,
        target: Target,
        fleet: Fleet,
        on_idle: Callable[[], object] = lambda: None,
    ) -> None:
        self._meanwhile = on_idle
        self._setup, self._target, self._fleet = setup, target, fleet
        self._scenario, self._plan, self._options = setup.scenario, setup.plan, setup.options
        scenario, schedule = setup.scenario, setup.plan.schedule
        self._salt = secrets.token_bytes(8) if scenario.prompts.salt == "run" else b""
        self._epoch_ns = 0
        self._family: Cpu = {}
        self._ended: Ended = "completed"
        self._end_reason = ""
        self._end_kind: EndKind = "other"
        self._ended_s: float | None = None
        self._has_ended_window = False
        self._server_ended_s: float | None = None
        self._n_interrupts = self._n_handled = 0
        self._signal = ""
        self._progress = Progress(
            setup.console,
            len(schedule),
            scenario.horizon_s,
            scenario.has_closed_loop,
            scenario.requests_in_flow,
            # workers on other machines report to the page, which shows the same figures
            RunFigures(scenario) if fleet.pids is not None else None,
            EarlyWarning(
                instrument_limits(scenario), scenario.lateness_limit_s, scenario.phases.measure
            ),
            target.adapter.stream,
        )
        self._scraper = Scraper(target.metrics, target.endpoint) if target.metrics else None
        self._canaries = None if target.canaries is None else CanarySender(target.canaries)
        self._watched: WatchedRun | None = None
        if setup.options.watch is not None:
            labels = run_labels(scenario, target.to_manifest(), setup.name)
            self._watched = WatchedRun(labels, schedule)
        limits_s = [slo.limit for slo in scenario.all_slos() if slo.metric in _TTFT]
        self._silence = Silence(target.longest_wait_s, max(limits_s, default=0.0))
        self._silent_since_s: float | None = None
        self._rules = StopRules()
        if (when := scenario.stop_when) is not None:
            self._rules = stop_rules(when.error_rate, when.over, when.saturated)

    def record(self) -> Run:
        """Sends the load and returns the run. The plan and the manifest are on disk before the
        first request goes out; the manifest is removed again if none went out."""
        directory = self._setup.directory
        parts_dir = directory / "parts"
        parts_dir.mkdir(exist_ok=True)
        job = Job(
            self._scenario,
            self._plan,
            self._target,
            self._options.transport,
            self._salt,
            self._setup.name,
            parts_dir,
            is_watched=self._watched is not None
            or self._options.early is not None
            or any(slo.metric in _OF_GAPS for slo in self._scenario.all_slos()),
            # workers on other machines send back the rows of their share only
            more=None if self._fleet.pids is None else more_units(self._scenario, self._plan),
        )
        self._fleet.hand_over(job)  # the shards prepare while the plan is written here
        planned = self._planned()
        try:
            store.write_schedule(directory, planned)
        except OSError:
            (directory / "manifest.json").unlink(missing_ok=True)
            raise
        watched = watching(self._watched, self._options.watch, self._progress.note)
        with (
            watched,
            self._scraping() as scraped,
            self._sending_canaries() as canary,
            self._interruptible(),
        ):
            try:
                outcome = self._send()
            except BaseException:
                if not self._epoch_ns:
                    (directory / "manifest.json").unlink()
                raise
            ended = msgspec.structs.replace(
                self._completed(planned.manifest, outcome), canary=canary()
            )
            run = self._assembled(ended, parts_dir, outcome)
            run = with_truncated(with_counted_window(_with_server(run, scraped())))
            run = _with_places(run, job.prompts())
            run = with_start_left_out(run)
            with keep_elsewhere(directory, run, self._options.cache_dir):
                store.write_run(directory, run, derived(run))
        shutil.rmtree(parts_dir)
        if outcome.remote is not None and outcome.dead:
            hint = f"rows that a worker still has: slobench collect {directory}"
            self._setup.console.print(hint, soft_wrap=True, markup=False)
        return run

    def _send(self) -> Outcome:
        with self._progress:
            return self._fleet.run(
                self._on_beat,
                self._on_start,
                self._on_idle,
                lambda shard, reason: self._progress.note(
                    f"worker {shard} died ({reason}): its requests are lost, the others go on"
                ),
            )

    def _planned(self) -> Run:
        """The run before its first request: its plan and its manifest."""
        content = manifest(
            self._setup.name,
            self._scenario,
            self._plan,
            self._target,
            self._salt,
            self._options.command,
        )
        return Run(
            msgspec.structs.replace(
                content,
                transport=self._options.transport,
                min_requests=self._options.min_requests,
            ),
            self._plan.schedule,
            empty_requests(self._plan.schedule),
            np.empty(0, CHUNKS),
            self._plan.edges,
            self._scenario.names(),
            piece_rows=self._plan.pieces,
        )

    def _assembled(self, manifest: Manifest, parts_dir: Path, outcome: Outcome) -> Run:
        parts: list[store.Part] = []
        decode_left(parts_dir, self._decoder, parts)
        parts += store.read_parts(parts_dir)
        for name, content in outcome.parts.items():
            parts.append(store.part_of_file(io.BytesIO(content), name))
        plan = self._plan
        schedule, edges = store.with_more(plan.schedule, plan.edges, parts_dir)
        n_added = len(schedule) - len(plan.schedule)
        manifest = msgspec.structs.replace(manifest, extended_rows=n_added)
        requests, chunks, merged = store.merge_parts(schedule, parts)
        names = replace(self._scenario.names(), errors=merged.errors, remotes=merged.remotes)
        reports = tuple(outcome.reports)
        helpers_s = sum(report.decoding.helper_cpu_s for report in reports)
        instrument = ClientReport(reports, self._family_s(outcome) + helpers_s)
        return Run(
            manifest,
            schedule,
            requests,
            chunks,
            edges,
            names,
            instrument,
            piece_rows=plan.pieces,
        )

    def _decoder(self, shard: int) -> PartDecoder:
        target = self._target
        return PartDecoder(shard, target.adapter, head_of(target.endpoint).redact)

    def _family_s(self, outcome: Outcome) -> float:
        """CPU seconds of this process and of a server that it started, on the cores that the shards
        may use."""
        used = [report.cores for report in outcome.reports if report.cores is not None]
        cores = frozenset(core for times in used for core in times.allowed)
        return family_cpu_s(self._family, self._family_cpu(), cores)

    def _family_cpu(self) -> Cpu:
        """Empty where the shards run on other machines: this process does not use their cores."""
        shards = self._fleet.pids
        return {} if shards is None else family_cpu(os.getpid(), without=shards)

    def _on_start(self, epoch_ns: int) -> None:
        self._epoch_ns = epoch_ns
        self._family = self._family_cpu()
        self._progress.begin()
        if self._scraper is not None:
            self._scraper.start(epoch_ns)
        if self._canaries is not None:
            self._canaries.start()

    @contextlib.contextmanager
    def _scraping(self) -> Iterator[Callable[[], Scraped]]:
        """Yields the function that stops reading the server's metrics and returns them; reading
        stops with the block at the latest."""

        def stop() -> Scraped:
            return Scraped() if self._scraper is None else self._scraper.stop()

        try:
            yield stop
        finally:
            stop()

    @contextlib.contextmanager
    def _sending_canaries(self) -> Iterator[Callable[[], CanarySection | None]]:
        """Yields the function that ends the canaries and returns their counts; they end with the
        block at the latest."""

        def stop() -> CanarySection | None:
            return None if self._canaries is None else self._canaries.stop()

        try:
            yield stop
        finally:
            stop()

    def _on_beat(self, shard: int, message: JsonObject) -> None:
        totals = self._progress.beat(shard, message)
        if self._watched is not None:
            self._watched.take(shard, message)
        if self._ended != "completed":
            return
        if self._canaries is not None:
            now_s = min(totals.now_s, self._scenario.horizon_s)
            self._canaries.catch_up(totals.released, now_s)
        self._end_window(message["measured"], totals.measured)
        if self._has_stopped_answering(totals):
            return
        refusal = refused(totals.failed_alike, totals.n_ended)
        if refusal is not None:
            self._end_kind = "refused"
        reason = refusal or self._rules.reason(
            totals.now_s,
            n_released=totals.released,
            n_ended=totals.n_ended,
            n_failed=totals.n_failed - totals.by_status[Status.truncated],  # missed, not hopeless
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

    def _has_stopped_answering(self, totals: Totals) -> bool:
        """Ends the run if the server fell silent, except under `stop_when: never`. Whole answers
        are silent by design."""
        if not self._target.adapter.stream:
            return False
        silence = self._silence
        silence.note(totals.now_s, totals.in_flight, totals.heard_s)
        self._progress.quiet(silence.quiet_s if silence.is_notable else 0.0)
        reason = silence.reason(totals.in_flight)
        if reason is None or self._scenario.stop_when is None:
            return False
        self._progress.note(f"ending the run: {reason}")
        self._end_kind, self._silent_since_s = "silent", silence.since_s
        self._stop("stopped", reason, min(_DEAD_DRAIN_S, self._scenario.phases.drain))
        return True

    def _end_window(self, n_of_worker: int, n_measured: int) -> None:
        """Ends the releases when several workers together have released the measured requests of a
        window that their number ends; a worker ends by itself if it releases so many alone."""
        wanted = self._scenario.requests_in_flow
        if wanted is None or self._has_ended_window or not n_of_worker < wanted <= n_measured:
            return
        self._has_ended_window = True
        reason = f"the run's {wanted} measured requests were released"
        self._fleet.stop(reason, self._scenario.phases.drain, sends_waiting=True)

    def _stop(self, how: Ended, reason: str, drain_s: float) -> None:
        if self._ended == "completed":
            self._ended, self._end_reason = how, reason
            self._ended_s = (time.monotonic_ns() - self._epoch_ns) * 1e-9
        self._fleet.stop(reason, drain_s)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Counts Ctrl-C, SIGTERM and SIGHUP for `_on_idle` while the run is under way, so that no
        recorded row is lost to them. Only the main thread may handle signals."""

        def note(number: int, frame: FrameType | None) -> None:
            if not self._epoch_ns:
                raise KeyboardInterrupt
            self._n_interrupts += 1
            own = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self._signal = self._options.stop_names.get(number, own)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, note) for number in ending_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_idle(self) -> None:
        """Ends the run when a bundled server has ended. On the first interrupt it releases no
        further request and waits for those in flight; on the second it gives them up."""
        server_end = self._target.ended() if self._ended == "completed" else None
        if server_end is not None:
            self._progress.note(f"ending the run: {server_end}")
            self._stop("stopped", server_end, min(_DEAD_DRAIN_S, self._scenario.phases.drain))
            self._server_ended_s = self._ended_s
        if self._n_handled == self._n_interrupts:
            self._meanwhile()
            return
        self._n_handled = self._n_interrupts
        drain_s = min(_INTERRUPT_DRAIN_S, self._scenario.phases.drain)
        if self._n_interrupts == 1:
            self._progress.note(
                f"interrupted: waiting up to {drain_s:g} s for requests in flight; "
                "Ctrl-C again gives them up"
            )
            self._stop("interrupted", f"you stopped the run ({self._signal})", drain_s)
        else:
            self._progress.note(
                "interrupted again: giving up the requests in flight; Ctrl-C again gives up the "
                "recorded rows"
            )
            self._stop("interrupted", f"you stopped the run twice ({self._signal})", 0.0)
            self._fleet.hurry(is_last=self._n_interrupts > 2)

    def _completed(self, planned: Manifest, outcome: Outcome) -> Manifest:
        """The manifest after the run."""
        if outcome.cut_short is not None and self._ended == "completed":
            self._ended, self._end_reason = "stopped", outcome.cut_short.reason
            self._ended_s = (outcome.cut_short.at_ns - self._epoch_ns) * 1e-9
        totals = self._progress.totals()
        last_reason = refused(totals.failed_alike, totals.n_ended, is_final=True)
        if last_reason is not None and self._ended == "completed":
            self._ended, self._end_reason, self._ended_s = "stopped", last_reason, totals.now_s
            self._end_kind = "refused"
        reason = self._end_reason
        if outcome.dead:
            shard, last_words = next(iter(outcome.dead.items()))
            reason = f"worker {shard} died ({last_words})"
        now_ns, now_utc = time.monotonic_ns(), datetime.now(UTC)
        content = completed(
            planned,
            self._scenario,
            self._ended,
            reason,
            self._ended_s,
            outcome.epoch_ns,
            now_ns,
            now_utc,
        )
        content = msgspec.structs.replace(
            content,
            end_kind=self._end_kind,
            silent_since_s=self._silent_since_s,
            server_ended_s=self._server_ended_s,
            dead_workers=tuple(outcome.dead),
        )
        if outcome.remote is None:
            return content
        remote = outcome.remote
        return msgspec.structs.replace(
            content, n_bad_messages=remote.n_bad, workers=remote.workers, live=remote.live
        )


def _with_places(run: Run, prompts: Prompts) -> Run:
    """The run with the first `file:line` of recorded prompts that the server refused for their
    length."""
    rows, errors = run.request_rows, run.names.errors
    places: list[str] = []
    for row in np.flatnonzero(np.isin(rows["status"], (Status.http_error, Status.stream_error))):
        place = prompts.place(run.schedule_rows[row])
        if not place or len(places) == _MOST_PLACES:
            break
        error = errors[rows["error_id"][row]]
        if place not in places and is_too_long(int(rows["http_status"][row]), error):
            places.append(place)
    if not places:
        return run
    return replace(run, manifest=msgspec.structs.replace(run.manifest, too_long_at=tuple(places)))


def _with_server(run: Run, scraped: Scraped) -> Run:
    """The run with the server's own metrics, and with how often reading them failed."""
    if not scraped.n_scrapes:
        return run
    series = tuple(dict.fromkeys(name for _, name, _ in scraped.rows))
    number = {name: k for k, name in enumerate(series)}
    rows = np.array([(t_s, number[name], value) for t_s, name, value in scraped.rows], SERVER)
    scrapes = Scrapes(scraped.n_scrapes, scraped.n_failed, scraped.reason)
    return replace(
        run,
        manifest=msgspec.structs.replace(run.manifest, scrapes=scrapes),
        names=replace(run.names, series=series),
        server_rows=rows,
    )
