"""One shard on its event loop: dispatcher, client, recorder and instrument, wired together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loadgen.drive.answer import answer_text
from loadgen.drive.backlog import ReceiveBacklog
from loadgen.drive.decode import decode, quick_status
from loadgen.drive.dispatch import Dispatcher, families
from loadgen.drive.exchange import Exchange
from loadgen.drive.instrument import GcPauses, ThreadMeter
from loadgen.drive.live_sample import LiveSamples
from loadgen.drive.loop_probe import LoopProbe
from loadgen.drive.memory import memory_for
from loadgen.drive.payloads import Payloads
from loadgen.drive.processor_speed import ProcessorSpeed
from loadgen.drive.recorder import ShardRecorder
from loadgen.drive.store import write_part
from loadgen.drive.task import ShardTask
from loadgen.drive.transport import Transport
from loadgen.records import ON_PURPOSE, Status
from loadgen.self_report import ConnectionsReport, DecodingReport, SelfReport
from loadgen.timer import EARLY_NS, make_quiet_timer, make_timer

_BEAT_S = 0.25
_CHORE_S = 0.005
_CHORE_SHARE = 0.1


@dataclass
class _Live:
    """Counters since the start, and samples since the last beat."""

    released: int = 0
    sent: int = 0
    by_status: list[int] = field(default_factory=lambda: [0] * len(Status))
    withdrawn: int = 0
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    lateness_s: list[float] = field(default_factory=list)


class Shard:
    """Made before the epoch is known: with many rows that takes longer than the time between
    knowing it and the first one."""

    def __init__(
        self,
        task: ShardTask,
        loop: asyncio.AbstractEventLoop,
        client: Transport,
        payloads: Payloads,
        say: Callable[..., None],
    ) -> None:
        self._loop, self._epoch_ns, self._say = loop, 0, say
        self._client, self._payloads = client, payloads
        self._part_path, self._number, self._adapter = task.part_path, task.shard, task.adapter
        self._children, _ = families(task.schedule, task.edges)
        # Most rows with parents are written before the start: nobody has to look at them again.
        late = {
            row: [child for child in children if payloads.comes_late(child)]
            for row, children in self._children.items()
        }
        self._late_children = {row: children for row, children in late.items() if children}
        goes_on: list[bool] = task.schedule["after_failure"].tolist()
        self._is_decisive = {
            row for row, children in self._children.items() if not all(goes_on[c] for c in children)
        }
        self._finished, self._broken = asyncio.Event(), ""
        self._live = _Live()
        self._released_s = [0.0] * len(task.schedule)
        self._glimpses: LiveSamples | None = None
        if task.is_watched:
            self._glimpses = LiveSamples(task.schedule, task.adapter.looks_like_token)
        self._sessions: list[int] = task.schedule["session_id"].tolist()
        last = {session: row for row, session in enumerate(self._sessions)}
        self._is_last = [last[session] == row for row, session in enumerate(self._sessions)]
        self._meter, self._gc, self._backlog = (
            ThreadMeter(),
            GcPauses(),
            ReceiveBacklog(client.in_flight),
        )
        self._speed = ProcessorSpeed()
        self._probe_timer = make_quiet_timer(loop)
        self._probe = LoopProbe(self._probe_timer, self._look)
        self._recorder = ShardRecorder(
            task.schedule,
            task.adapter,
            self._epoch_ns,
            task.shard,
            task.part_path.with_suffix(".bodies"),
            redact=task.head.redact,
        )
        self._timer = make_timer(loop, self._epoch_ns, EARLY_NS)
        self._dispatcher = Dispatcher(
            task.schedule,
            task.edges,
            sender=self,
            recorder=self,
            timer=self._timer,
            bounds=task.bounds,
            on_finished=self._finished.set,
        )
        client.on_end, client.alarm = self._on_end, self._timer
        self._memory = memory_for(int(task.schedule["output_tokens"].sum(dtype="u8")))
        self._gc.start()

    def start(self, epoch_ns: int) -> None:
        """Arm the first release and begin to measure ourselves."""
        self._epoch_ns = self._recorder.epoch_ns = self._timer.epoch_ns = epoch_ns
        self._probe_timer.epoch_ns = epoch_ns
        for meter in (self._meter, self._probe):
            meter.start()
        self._loop.set_exception_handler(self._break)
        self._loop.call_later(_BEAT_S, self._beat)
        self._loop.call_later(_CHORE_S, self._encode_ahead)
        self._dispatcher.start()

    def stop(self, reason: str, drain_s: float) -> None:
        self._dispatcher.stop(reason, drain_s)

    async def finish(self, n_not_opened_ahead: int = 0) -> SelfReport:
        """Waits for the last row, writes the part file, and returns the shard's measurements of
        itself. `n_not_opened_ahead` is the number of connections that failed to open before the
        start."""
        await self._finished.wait()
        for meter in (self._probe, self._meter):
            meter.stop()
        for timer in (self._probe_timer, self._timer):
            timer.close()
        await self._client.close()
        lost = f"the load generator broke: {self._broken}" if self._broken else ""
        started_s, before_s = time.monotonic(), time.thread_time()
        write_part(self._part_path, *self._recorder.finish(lost))
        decoding = DecodingReport(
            cpu_s=time.thread_time() - before_s, wall_s=time.monotonic() - started_s
        )
        thread, (loop_lag, stalls) = self._meter.summary(), self._probe.summary()
        self._gc.stop()  # only now: decoding makes no cycles, and collecting would double its time
        self._report()
        return SelfReport(
            shard=self._number,
            broken=self._broken,
            window_s=thread.window_s,
            cpu_share=thread.cpu_share,
            run_delay_share=thread.run_delay_share,
            throttled_share=thread.throttled_share,
            stolen_share=thread.stolen_share,
            cores=thread.cores,
            loop_lag_s=loop_lag,
            stalls=stalls,
            backlog=self._backlog.summary(self._recorder.n_reads, self._meter.window_s),
            processor=self._speed.summary(stalls.spans_s),
            gc=self._gc.summary(),
            decoding=decoding,
            connections=ConnectionsReport(
                opened=self._client.n_opened,
                reused=self._client.n_reused,
                known=tuple(self._client.known),
                not_opened_ahead=n_not_opened_ahead,
            ),
            encoded_late=self._payloads.n_late,
            spilled_bytes=self._recorder.spilled_bytes,
        )

    def _look(self) -> None:
        """With each probe of the loop."""
        self._backlog.look()
        self._speed.look(self._probe_timer.now_s())

    def _break(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a callback: nothing measured from now on could be trusted, but what was
        recorded before is kept."""
        loop.default_exception_handler(context)
        if not self._broken:
            self._broken = repr(context.get("exception") or context["message"])
            self._finished.set()

    # dispatch.Sender
    def send(self, row: int) -> None:
        self._live.sent += 1
        payload = self._payloads.take(row)
        self._client.send(row, payload, self._sessions[row], self._is_last[row])
        if row in self._late_children:
            self._loop.call_soon(self._prepare, row)

    def sent_s(self, row: int) -> float:
        return self._seconds(self._client.sent_ns(row))

    def abort(self, row: int, outcome: Status, reason: str) -> None:
        self._client.abort(row, outcome, reason)

    # dispatch.Recorder
    def released(self, row: int, release_s: float) -> None:
        self._live.released += 1
        self._released_s[row] = release_s
        self._recorder.released(row, release_s)

    def unsent(self, row: int, status: Status, reason: str) -> None:
        self._live.by_status[status] += 1
        if self._glimpses is not None:
            self._glimpses.unsent(row, status)
        self._recorder.unsent(row, status, reason)

    def _on_end(self, exchange: Exchange) -> None:
        try:
            self._note_end(exchange)
        except Exception as error:  # of an OSError (a full disk) in a protocol no loop would tell
            context = {"message": f"the end of request {exchange.row}", "exception": error}
            self._loop.call_exception_handler(context)

    def _note_end(self, exchange: Exchange) -> None:
        status, live = self._status(exchange), self._live
        live.by_status[status] += 1
        live.withdrawn += exchange.error.startswith(ON_PURPOSE)
        released_s = self._released_s[exchange.row]
        live.lateness_s.append(self._seconds(exchange.sent_ns) - released_s)
        if exchange.first_guess_ns:
            live.ttft_s.append(self._seconds(exchange.first_guess_ns) - released_s)
            live.e2e_s.append(self._seconds(exchange.done_ns) - released_s)
        if self._glimpses is not None:
            released_ns = self._epoch_ns + round(released_s * 1e9)
            self._glimpses.ended(exchange, status, released_ns)
        self._recorder.ended(exchange)
        if exchange.row in self._late_children:
            self._payloads.answered(exchange.row, lambda: answer_text(exchange, self._adapter))
            self._loop.call_soon(self._prepare, exchange.row)
        self._dispatcher.ended(exchange.row, status, self._seconds(exchange.done_ns))

    def _status(self, exchange: Exchange) -> Status:
        """How a request ended; read in full where rows wait for it to have ended well, so that an
        error inside a 200 releases nothing."""
        status = quick_status(exchange)
        if exchange.row not in self._is_decisive or status is not Status.ok:
            return status
        try:
            return decode(exchange, self._adapter).status
        except Exception:  # a codec's bug on one body: the recorder meets it again, and tells it
            return Status.stream_error

    def _prepare(self, row: int) -> None:
        """Write what comes after a row, as far as it is known by now."""
        for child in self._late_children[row]:
            self._payloads.prepare(child)

    def _beat(self) -> None:
        """Progress out, for whoever is looking."""
        if self._finished.is_set():
            return
        self._report()
        self._loop.call_later(_BEAT_S, self._beat)

    def _encode_ahead(self) -> None:
        """A little at a time, so that no socket read waits for it."""
        if self._finished.is_set():
            return
        has_more = self._payloads.extend(self._timer.now_s(), _CHORE_SHARE * _CHORE_S)
        self._loop.call_later(_CHORE_S if has_more else _BEAT_S, self._encode_ahead)

    def _report(self) -> None:
        live = self._live
        self._say(
            "beat",
            now_s=self._timer.now_s(),
            released=live.released,
            sent=live.sent,
            in_flight=self._dispatcher.n_in_flight,
            waiting=self._dispatcher.n_waiting,
            by_status=live.by_status,
            withdrawn=live.withdrawn,
            e2e_s=[round(value, 6) for value in live.e2e_s],
            ttft_s=[round(value, 6) for value in live.ttft_s],
            lateness_s=[round(value, 6) for value in live.lateness_s],
            **({} if self._glimpses is None else self._glimpses.take()),
        )
        live.ttft_s, live.e2e_s, live.lateness_s = [], [], []

    def _seconds(self, ns: int) -> float:
        return (ns - self._epoch_ns) * 1e-9
