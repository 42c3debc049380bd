"""The fleet of Locust's workers: the shell around Controller, in the control process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from loadgen.drive.shards import CutShort, OnBeat, Outcome, RemoteWorkers
from loadgen.live.early_warning import EarlyWarning
from loadgen.live.live_histogram import LiveCounts
from loadgen.manifest.json_section import JsonObject
from loadgen.manifest.sections import LiveQuantiles
from loadgen.manifest.self_report import SelfReport
from loadgen.run.manifest import instrument_limits
from loadgen.run.shard_tasks import Job
from loadgen.system.whole_file import replacing
from loadgen.web.assignment import assignments
from loadgen.web.control_messages import Bad, Frame, Kept, encode, read_up
from loadgen.web.live_frames import LiveStatus, merged, quantiles
from loadgen.web.relay_pipe import Back, FromWorker, Gone, LiveUpdate, Note, RelayPipe, ToWorker
from loadgen.web.run_protocol import Controller, Policy, Send
from loadgen.web.validate import check_part, read_self_report

_UPDATE_EVERY_S = 1.0
_POLL_S = 0.1
_COLLECTING_S = 600.0  # after the drain, for the rows of all workers
_HURRIED_S = 2.0
_LINE_CLOSED = "the master's Locust process ended"
_QUIET_S = 5.0  # after the drain: then the Locust process passes nothing on, as under SIGSTOP
_QUIET = "the master's Locust process passed nothing on"


class RemoteFleet:
    """`workers` take one share each; `line` connects to them; their histograms are stored in
    `logs`."""

    def __init__(
        self,
        line: RelayPipe,
        workers: Sequence[str],
        max_skew_s: float,
        on_loss: Policy,
        logs: Path,
    ) -> None:
        self._line, self._workers, self._logs = line, list(workers), logs
        self._max_skew_s, self._on_loss = max_skew_s, on_loss
        self._job: Job | None = None
        self._controller: Controller | None = None
        self._last_frames: dict[int, tuple[int, dict[str, LiveCounts]]] = {}
        self._cut_short: CutShort | None = None
        self._silent = set[int]()
        self._reports: dict[int, SelfReport] = {}  # by shard
        self._drained_s = self._end_s = float("inf")
        self._n_quiet = 0  # of `_POLL_S`, so that a pause of this process does not count

    def __enter__(self) -> RemoteFleet:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._controller is not None:
            self._send(self._controller.release())

    @property
    def pids(self) -> None:
        return None

    def hand_over(self, job: Job) -> None:
        """Stores the job for `run`: the workers receive their shares at the start."""
        self._job = job

    def run(
        self,
        on_beat: OnBeat,
        on_start: Callable[[int], None],
        on_idle: Callable[[], None],
        on_death: Callable[[int, str], None],
    ) -> Outcome:
        """See `Shards.run`. Raises RunInvalid or UsageError if the workers cannot begin."""
        assert self._job is not None, "hand_over comes first"
        job = self._job
        shares = assignments(job, len(self._workers))
        controller = self._controller = Controller(
            job.run_name, self._workers, shares, self._max_skew_s, self._on_loss
        )
        live = LiveStatus(
            job.plan.schedule,
            job.scenario.horizon_s,
            job.scenario.has_per_request_limit,
            job.scenario.requested_rate_per_s(),
            job.scenario.has_closed_loop,
            job.scenario.requests_in_flow,
            {"": job.scenario.slos()}
            | {name: own.slos() for name, own in job.scenario.classes.items()},
            EarlyWarning(
                instrument_limits(job.scenario),
                job.scenario.lateness_limit_s,
                job.scenario.phases.measure,
            ),
        )
        self._send(controller.start(time.monotonic_ns()))
        started, updated_s, reported_dead = False, 0.0, set[int]()
        while controller.phase != "over":
            self._receive(controller)
            if controller.phase == "running" and not started:
                started = True
                on_start(controller.epoch_ns)
                scenario = job.scenario
                self._drained_s = time.monotonic() + scenario.horizon_s + scenario.phases.drain
                self._end_s = self._drained_s + _COLLECTING_S
            if started:
                on_idle()
                self._beat(controller, on_beat)
                self._report_losses(controller, reported_dead, on_death)
            if time.monotonic() > self._end_s or not self._line.is_open or self._is_cut_off():
                break  # no worker can come back over a closed line
            if started and time.monotonic() >= updated_s + _UPDATE_EVERY_S:
                updated_s = time.monotonic()
                self._line.send(LiveUpdate(live.snapshot(controller.shards)))
        self._beat(controller, on_beat)
        self._line.send(LiveUpdate(live.snapshot(controller.shards, is_over=True)))
        frames = [shard.frame for shard in controller.shards if shard.frame is not None]
        self._write_histograms(frames)
        return self._outcome(controller, quantiles(frames))

    def stop(self, reason: str, drain_s: float, *, sends_waiting: bool = False) -> None:
        assert self._controller is not None, "only a started run can be stopped"
        self._send(self._controller.stop(reason, drain_s, sends_waiting=sends_waiting))

    def hurry(self, *, is_last: bool) -> None:
        """Waits 2 s more for the rows, which the workers keep; with `is_last`, no more."""
        self._end_s = min(self._end_s, time.monotonic() + (0.0 if is_last else _HURRIED_S))

    def _is_cut_off(self) -> bool:
        """Whether no message has come for `_QUIET_S` after the drain. Each worker sends once a
        second until its rows have arrived."""
        if time.monotonic() < self._drained_s or self._n_quiet * _POLL_S < _QUIET_S:
            return False
        self._cut_short = self._cut_short or CutShort(_QUIET, time.monotonic_ns())
        return True

    def _receive(self, controller: Controller) -> None:
        events = self._line.receive(_POLL_S)
        self._n_quiet = 0 if events else self._n_quiet + 1
        for event in events:
            now_ns = time.monotonic_ns()
            if isinstance(event, FromWorker):
                try:
                    message = read_up(event.data)
                except Bad as problem:
                    controller.n_bad += 1
                    self._line.send(Note(f"worker {event.worker}: unreadable message: {problem}"))
                    continue
                sends = controller.take(event.worker, message, now_ns)
                self._keep_rows(controller)
                self._send(sends)
            elif isinstance(event, Gone):
                controller.gone(event.worker, now_ns)
            elif isinstance(event, Back):
                controller.back(event.worker)
        if not self._line.is_open:
            if controller.phase == "running" and self._cut_short is None:
                self._cut_short = CutShort(_LINE_CLOSED, time.monotonic_ns())
            for worker in self._workers:
                controller.gone(worker, time.monotonic_ns())
        self._send(controller.tick(time.monotonic_ns()))

    def _report_losses(
        self, controller: Controller, reported: set[int], on_death: Callable[[int, str], None]
    ) -> None:
        for shard in controller.shards:
            worker = f"worker {shard.worker} (share {shard.number})"
            if shard.state == "died" and shard.number not in reported:
                reported.add(shard.number)
                on_death(shard.number, shard.note)
            elif shard.state == "lost" and shard.number not in self._silent:
                self._silent.add(shard.number)
                note = f"{worker} is silent: its requests are lost unless it comes back"
                self._line.send(Note(note))
            elif shard.state == "running" and shard.number in self._silent:
                self._silent.discard(shard.number)
                self._line.send(Note(f"{worker} is back"))
        if (lost := controller.must_abort) is not None and self._cut_short is None:
            reason = f"worker {lost.worker} was lost (--on-worker-loss abort)"
            self._cut_short = CutShort(reason, time.monotonic_ns())
            self._send(controller.stop(reason, 0.0))

    def _beat(self, controller: Controller, on_beat: OnBeat) -> None:
        """Passes each new frame on as the beat that a local process would have sent."""
        for shard in controller.shards:
            frame = shard.frame
            seq, before = self._last_frames.get(shard.number, (0, merged([])))
            if frame is None or frame.seq == seq:
                continue
            counts = merged([frame])
            self._last_frames[shard.number] = frame.seq, counts
            on_beat(shard.number, _beat_of(frame, counts, before))

    def _keep_rows(self, controller: Controller) -> None:
        """Writes the rows of each shard that is done, and confirms them to its worker. Marks as
        died each shard whose rows or self-report cannot be used; the others count."""
        assert self._job is not None, "rows come after hand_over"
        for shard in controller.shards:
            if shard.state != "done" or shard.number in self._reports:
                continue
            assert shard.done is not None, "its rows came before it was done"
            share = self._job.shares(len(self._workers))[shard.number]
            try:
                report = read_self_report(shard.done.instrument, shard.number)
                check_part(shard.part, share.plan.schedule["request_id"])
            except Bad as problem:
                shard.state, shard.note = "died", str(problem)
                continue
            path = self._job.parts_dir / f"shard-{shard.number}.npz"
            with replacing(path) as partial:
                partial.write_bytes(shard.part)
            shard.part = b""
            self._reports[shard.number] = report
            self._send([Send(shard.worker, Kept(self._job.run_name))])

    def _write_histograms(self, frames: Sequence[Frame]) -> None:
        """Writes the last frames' histograms, each and merged, in a form that any HdrHistogram
        library reads."""
        told = {
            "unit": "µs",
            "merged": {metric: one.encode().decode() for metric, one in merged(frames).items()},
            "shards": {
                frame.shard: {metric: data.decode() for metric, data in frame.histograms.items()}
                for frame in frames
            },
        }
        self._logs.mkdir(parents=True, exist_ok=True)
        (self._logs / "histograms.json").write_text(json.dumps(told) + "\n")

    def _outcome(self, controller: Controller, live: dict[str, LiveQuantiles]) -> Outcome:
        reports: list[SelfReport] = []
        dead = controller.dead
        for shard in controller.shards:
            report = self._reports.get(shard.number)
            if shard.state != "done" or report is None:
                continue
            reports.append(report)
            if report.broken:
                dead[shard.number] = report.broken
        remote = RemoteWorkers(controller.n_bad, controller.worker_sections(), live)
        return Outcome(controller.epoch_ns, reports, dead, remote, self._cut_short)

    def _send(self, sends: Sequence[Send]) -> None:
        for send in sends:
            self._line.send(ToWorker(send.worker, encode(send.message)))


def _beat_of(
    frame: Frame, counts: dict[str, LiveCounts], before: dict[str, LiveCounts]
) -> JsonObject:
    new = {name: counts[name].more_than(before[name]) for name in ("ttft", "e2e", "lateness")}
    return {
        "kind": "beat",
        "now_s": frame.now_s,
        "heard_s": frame.heard_s,
        "released": frame.released,
        "sent": frame.sent,
        "in_flight": frame.in_flight,
        "waiting": frame.waiting,
        "by_status": frame.by_status,
        "withdrawn": frame.withdrawn,
        "measured": frame.measured,
        **{f"{name}_s": one.seconds() for name, one in new.items()},
    }
