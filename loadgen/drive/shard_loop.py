"""A shard on its event loop: connects dispatcher, transport, recorder and self-measurement."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import msgspec

from loadgen.drive.decode import answer_text, decode, quick_status
from loadgen.drive.dispatch import Dispatcher, families
from loadgen.drive.first_failures import FirstFailures
from loadgen.drive.instrument import GcPauses, ThreadMeter
from loadgen.drive.live_sample import LiveSamples
from loadgen.drive.loop_probe import LoopProbe, ProcessorSpeed, ReceiveBacklog
from loadgen.drive.payloads import Payloads
from loadgen.drive.recorder import ShardRecorder
from loadgen.drive.stall_watch import WATCH_EVERY_S, ProgressCounter
from loadgen.drive.store import write_part
from loadgen.drive.task import ShardTask
from loadgen.drive.transport import Exchange, Transport
from loadgen.manifest.self_report import ConnectionsReport, DecodingReport, SelfReport
from loadgen.records import ON_PURPOSE, Status
from loadgen.timer import EARLY_NS, make_quiet_timer, make_timer

_BEAT_S = 0.25  # between two progress messages
_ENCODE_EVERY_S = 0.005
_ENCODE_SHARE = 0.1  # of the time, at most, for encoding requests ahead
# Memory per read: its bytes, its time, two list entries, a share of its request. With 320 bytes it
# was used up at 0.6 of a run at 400 requests/s; from there on 2 700 pages a second were faulted in.
_READ_BYTES = 480  # below 512: Python's own allocator for small objects serves them
_ARENA_BYTES = 1 << 20  # that allocator returns memory to the system in arenas
_MOST_BYTES = 256 << 20


class Shard:
    """A shard of a run. It is built before the epoch is set, because building the tables of many
    rows takes longer than the 50 ms between the epoch's choice and the first row."""

    def __init__(
        self,
        task: ShardTask,
        loop: asyncio.AbstractEventLoop,
        client: Transport,
        payloads: Payloads,
        write_message: Callable[..., None],
        progress: ProgressCounter,
    ) -> None:
        self._progress = progress
        self._loop, self._epoch_ns, self._write_message = loop, 0, write_message
        self._client, self._payloads = client, payloads
        self._part_path, self._number, self._adapter = task.part_path, task.shard, task.adapter
        children_of, _ = families(task.schedule, task.edges)
        self._late_children = {  # children to encode during the run; most are encoded before it
            row: late
            for row, children in children_of.items()
            if (late := [child for child in children if payloads.comes_late(child)])
        }
        goes_on: list[bool] = task.schedule["after_failure"].tolist()
        self._is_decisive = {  # rows whose success decides whether a child is released
            row for row, children in children_of.items() if not all(goes_on[c] for c in children)
        }
        self._finished, self._broken = asyncio.Event(), ""
        self._n_released = self._n_sent = self._n_withdrawn = 0
        self._by_status = [0] * len(Status)
        self._first_failures, self._redact = FirstFailures(), task.head.redact
        self._samples: dict[str, list[float]] = {}  # since the last progress message
        self._clear_samples()
        self._released_s = [0.0] * len(task.schedule)
        self._live_samples: LiveSamples | None = None
        if task.is_watched:
            self._live_samples = LiveSamples(task.schedule, task.adapter.looks_like_token)
        self._sessions: list[int] = task.schedule["session_id"].tolist()
        last = {session: row for row, session in enumerate(self._sessions)}
        self._is_last = [last[session] == row for row, session in enumerate(self._sessions)]
        self._meter, self._gc = ThreadMeter(), GcPauses()
        self._backlog, self._speed = ReceiveBacklog(client.in_flight), ProcessorSpeed()
        self._probe_timer = make_quiet_timer(loop)
        self._probe = LoopProbe(self._probe_timer, self._sample)
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
        """Arms the first release and starts the self-measurement."""
        self._epoch_ns = self._recorder.epoch_ns = self._timer.epoch_ns = epoch_ns
        self._probe_timer.epoch_ns = epoch_ns
        for meter in (self._meter, self._probe):
            meter.start()
        self._loop.set_exception_handler(self._break)
        self._advance()
        self._loop.call_later(_BEAT_S, self._beat)
        self._loop.call_later(_ENCODE_EVERY_S, self._encode_ahead)
        self._dispatcher.start()

    def stop(self, reason: str, drain_s: float, *, sends_waiting: bool = False) -> None:
        self._dispatcher.stop(reason, drain_s, sends_waiting=sends_waiting)

    async def finish(self, n_not_opened_ahead: int = 0) -> SelfReport:
        """Waits for the last row, writes the part file, and returns the instrument readings of this
        shard; `broken` is the error that ended it early, if any. `n_not_opened_ahead` is the number
        of connections that failed to open before the start."""
        await self._finished.wait()
        for meter in (self._probe, self._meter):
            meter.stop()
        for timer in (self._probe_timer, self._timer):
            timer.close()
        await self._client.close()
        lost = f"the load generator failed: {self._broken}" if self._broken else ""
        started_s, before_s = time.monotonic(), time.thread_time()
        rows, chunks, names = self._recorder.finish(lost, self._progress.advance)
        write_part(self._part_path, rows, chunks, names, self._progress.advance)
        decoding = DecodingReport(
            cpu_s=time.thread_time() - before_s, wall_s=time.monotonic() - started_s
        )
        loop_lag, stalls = self._probe.summary()
        self._gc.stop()  # not earlier: decoding makes no cycles, and collections double its time
        self._report()
        return SelfReport(
            shard=self._number,
            broken=self._broken,
            **msgspec.structs.asdict(self._meter.use),
            loop_lag_s=loop_lag,
            stalls=stalls,
            backlog=self._backlog.summary(self._recorder.n_reads, self._meter.window_s),
            processor=self._speed.summary(stalls.spans_s),
            gc=self._gc.summary(),
            decoding=decoding,
            connections=ConnectionsReport(
                opened=self._client.n_opened,
                reused=self._client.n_reused,
                known=tuple(self._client.addresses),
                not_opened_ahead=n_not_opened_ahead,
            ),
            encoded_late=self._payloads.n_late,
            spilled_bytes=self._recorder.spilled_bytes,
        )

    def _sample(self) -> None:
        self._backlog.sample()
        self._speed.sample(self._probe_timer.now_s())

    def _break(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Ends the shard after an error in a callback: later measurements could not be trusted.
        Rows recorded before it are kept."""
        loop.default_exception_handler(context)
        if not self._broken:
            self._broken = repr(context.get("exception") or context["message"])
            self._finished.set()

    # dispatch.Sender
    def send(self, row: int) -> None:
        self._n_sent += 1
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
        self._n_released += 1
        self._released_s[row] = release_s
        self._recorder.released(row, release_s)

    def unsent(self, row: int, status: Status, reason: str) -> None:
        self._by_status[status] += 1
        if self._live_samples is not None:
            self._live_samples.unsent(row, status)
        self._recorder.unsent(row, status, reason)

    def _on_end(self, exchange: Exchange) -> None:
        try:
            self._note_end(exchange)
        except Exception as error:  # loops ignore an OSError (a full disk) raised in a protocol
            context = {"message": f"the end of request {exchange.row}", "exception": error}
            self._loop.call_exception_handler(context)

    def _note_end(self, exchange: Exchange) -> None:
        status, samples = self._status(exchange), self._samples
        self._by_status[status] += 1
        self._first_failures.ended(status, exchange.http_status, lambda: self._error_of(exchange))
        self._n_withdrawn += exchange.error.startswith(ON_PURPOSE)
        released_s = self._released_s[exchange.row]
        samples["lateness_s"].append(self._seconds(exchange.sent_ns) - released_s)
        if exchange.first_guess_ns:
            samples["ttft_s"].append(self._seconds(exchange.first_guess_ns) - released_s)
            samples["e2e_s"].append(self._seconds(exchange.done_ns) - released_s)
        if self._live_samples is not None:
            released_ns = self._epoch_ns + round(released_s * 1e9)
            self._live_samples.ended(exchange, status, released_ns)
        self._recorder.ended(exchange)
        if exchange.row in self._late_children:
            self._payloads.answered(exchange.row, lambda: answer_text(exchange, self._adapter))
            self._loop.call_soon(self._prepare, exchange.row)
        self._dispatcher.ended(exchange.row, status, self._seconds(exchange.done_ns))

    def _error_of(self, exchange: Exchange) -> str:
        try:
            return self._redact(decode(exchange, self._adapter).error)
        except Exception:  # a codec's bug on this body; the recorder records it
            return f"HTTP {exchange.http_status}"

    def _status(self, exchange: Exchange) -> Status:
        """The status of an ended request. It is decoded only if the release of a child depends on
        it, so that an error inside a 200 response releases no child."""
        status = quick_status(exchange)
        if exchange.row not in self._is_decisive or status is not Status.ok:
            return status
        try:
            return decode(exchange, self._adapter).status
        except Exception:  # a codec's bug on this body; the recorder records it
            return Status.stream_error

    def _prepare(self, row: int) -> None:
        """Encodes the children of a row, as far as their prompts are known."""
        for child in self._late_children[row]:
            self._payloads.prepare(child)

    def _advance(self) -> None:
        """Shows the controlling process that the event loop runs; also after the last row."""
        self._progress.advance()
        self._loop.call_later(WATCH_EVERY_S, self._advance)

    def _beat(self) -> None:
        """Writes a progress message and schedules the next."""
        if self._finished.is_set():
            return
        self._report()
        self._loop.call_later(_BEAT_S, self._beat)

    def _encode_ahead(self) -> None:
        """Encodes requests for 0.5 ms at a time, so that no socket read waits longer."""
        if self._finished.is_set():
            return
        has_more = self._payloads.extend(self._timer.now_s(), _ENCODE_SHARE * _ENCODE_EVERY_S)
        self._loop.call_later(_ENCODE_EVERY_S if has_more else _BEAT_S, self._encode_ahead)

    def _report(self) -> None:
        self._write_message(
            "beat",
            now_s=self._timer.now_s(),
            released=self._n_released,
            sent=self._n_sent,
            measured=self._dispatcher.n_measured,
            in_flight=self._dispatcher.n_in_flight,
            waiting=self._dispatcher.n_waiting,
            by_status=self._by_status,
            withdrawn=self._n_withdrawn,
            failed_alike=self._first_failures.message(),
            **{name: [round(s, 6) for s in samples] for name, samples in self._samples.items()},
            **({} if self._live_samples is None else self._live_samples.take()),
        )
        self._clear_samples()

    def _clear_samples(self) -> None:
        self._samples = {"e2e_s": [], "ttft_s": [], "lateness_s": []}

    def _seconds(self, ns: int) -> float:
        return (ns - self._epoch_ns) * 1e-9


def memory_for(n_reads: int) -> list[bytes]:
    """Faults in memory for `n_reads` reads of a single event, at most 256 MiB, before the run. The
    memory is free for use while the caller holds the result.

    The first access to a page costs 2.4 µs, more in a virtual machine; in a run, the faults for a
    page per dozen reads were 6 % of the client's CPU time.
    """
    n_bytes = min(n_reads * _READ_BYTES, _MOST_BYTES)
    blocks = [bytes(_READ_BYTES - sys.getsizeof(b"")) for _ in range(n_bytes // _READ_BYTES)]
    return blocks[:: _ARENA_BYTES // 2 // _READ_BYTES]  # enough to keep every arena allocated
