"""A shard on its event loop: connects dispatcher, transport, recorder and self-measurement."""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.archive.decode import answer_texts, decode, ends_suspiciously, quick_status
from loadgen.archive.exchange import Exchange
from loadgen.archive.part_decoder import PartDecoder
from loadgen.archive.store import MORE, Part, append_more, part_bytes
from loadgen.drive.decoder_process import DecoderProcess
from loadgen.drive.dispatch import Dispatcher
from loadgen.drive.first_failures import FirstFailures
from loadgen.drive.instrument import GcPauses, ThreadMeter
from loadgen.drive.live_sample import LiveSamples
from loadgen.drive.loop_probe import LoopProbe, ProcessorSpeed, ReceiveBacklog
from loadgen.drive.payloads import ENCODE_SHARE, Payloads
from loadgen.drive.recorder import PART_BYTES, PART_REQUESTS, ShardRecorder
from loadgen.drive.stall_watch import WATCH_EVERY_S, ProgressCounter
from loadgen.drive.task import ShardTask
from loadgen.drive.transport import Transport
from loadgen.drive.worker_messages import part_messages
from loadgen.manifest.self_report import ConnectionsReport, DecodingReport, SelfReport
from loadgen.records import ON_PURPOSE, Edges, Schedule, Status, TokenSource, is_short
from loadgen.system.timer import EARLY_NS, make_quiet_timer, make_timer
from loadgen.workload.more_units import Continuation

_BEAT_S = 0.25  # between two progress messages
_BEATS_PER_USE = 4  # reading the use of the core takes 0.1 ms
_ENCODE_EVERY_S = 0.001
_ENCODE_MOST_S = 0.0003
_WRITE_EVERY_S, _WRITE_S = 0.001, 0.0002
# Memory per read: its bytes, its time, two list entries, a share of its request. With 320 bytes it
# was used up at 0.6 of a run at 400 requests/s; from there on 2 700 pages a second were faulted in.
_READ_BYTES = 480  # below 512: Python's own allocator for small objects serves them
_EVENT_BYTES = 250  # of an answer, per token
_ARENA_BYTES = 1 << 20  # that allocator returns memory to the system in arenas
_MOST_BYTES = 3 * PART_BYTES  # a part that fills, a part that is written, the overhead of both


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
        helper: DecoderProcess | None = None,
    ) -> None:
        self._progress = progress
        self._finished, self._broken = asyncio.Event(), ""
        self._loop, self._epoch_ns, self._write_message = loop, 0, write_message
        self._client, self._payloads = client, payloads
        self._number, self._adapter = task.shard, task.adapter
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
        n, families = len(task.schedule), self._dispatcher.families
        is_late = np.fromiter(map(payloads.comes_late, families.child_rows.tolist()), bool)
        self._has_late_children = bytearray(n)  # rows with children to encode during the run
        _mark(self._has_late_children, families.parent_rows[is_late])
        goes_on = task.schedule["after_failure"][families.child_rows]
        self._is_decisive = bytearray(n)  # rows whose success decides whether a child is released
        _mark(self._is_decisive, families.parent_rows[~goes_on])
        self._encoded_until_s, self._is_writing = 0.0, False
        self._n_released = self._n_sent = self._n_withdrawn = 0
        self._by_status = [0] * len(Status)
        self._has_exact_lengths = task.has_exact_lengths
        self._output_tokens = array(
            "I", np.ascontiguousarray(task.schedule["output_tokens"]).tobytes()
        )
        self._first_failures, self._redact = FirstFailures(), task.head.redact
        self._samples: dict[str, list[float]] = {}  # since the last progress message
        self._clear_samples()
        self._live_samples = LiveSamples(
            task.schedule,
            task.adapter,
            has_gaps=task.is_watched,
        )
        self._n_beats, self._beat_ns, self._heard_ns, self._heard_s = 0, 0, 0, 0.0
        sessions = np.ascontiguousarray(task.schedule["session_id"])
        last = np.zeros(int(sessions.max(initial=0)) + 1, np.int32)
        last[sessions] = np.arange(n)  # of equal sessions the last write stays
        self._sessions = array("I", sessions.tobytes())
        self._is_last = bytearray((last[sessions] == np.arange(n)).tobytes())
        self._more = None if task.more is None else MoreRows(task)
        if self._more is not None:  # a user's last row is not planned yet
            np.frombuffer(self._is_last, bool)[self._more.is_of_loop] = False
        self._meter, self._gc = ThreadMeter(), GcPauses()
        self._backlog, self._speed = ReceiveBacklog(client.in_flight), ProcessorSpeed()
        self._probe_timer = make_quiet_timer(loop)
        self._probe = LoopProbe(self._probe_timer, self._sample)
        self._recorder = ShardRecorder(
            task.schedule,
            part_decoder(task),
            task.part_path,
            helper,
            task.decodes_meanwhile,
            self._start_writing,
            secrets=task.head.secret_forms(),
            on_unwritten=self._hand_up,
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
        self._recorder.finish(lost, self._progress.advance)
        decoding = DecodingReport(
            cpu_s=time.thread_time() - before_s,
            wall_s=time.monotonic() - started_s,
            helper_cpu_s=self._recorder.helper_cpu_s,
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
            spilled_bytes=self._recorder.written_bytes,
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
        self._client.send(row, payload, self._sessions[row], bool(self._is_last[row]))
        if self._has_late_children[row]:
            self._loop.call_soon(self._prepare, row)

    def sent_s(self, row: int) -> float:
        return self._seconds(self._client.sent_ns(row))

    def abort(self, row: int, outcome: Status, reason: str) -> None:
        self._client.abort(row, outcome, reason)

    # dispatch.Recorder
    def released(self, row: int, release_s: float) -> None:
        self._n_released += 1
        self._recorder.released(row, release_s)
        if self._more is not None and row in self._more.last_units:
            self._loop.call_soon(self._continue, row)  # after the send

    def unsent(self, row: int, status: Status, reason: str) -> None:
        self._by_status[status] += 1
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
        self._continue(exchange.row)
        self._by_status[status] += 1
        is_given_up = status in (Status.timeout, Status.cancelled)  # by us
        heard_ns = exchange.read_ns if is_given_up else exchange.done_ns
        self._heard_ns = max(self._heard_ns, heard_ns)
        self._first_failures.ended(status, exchange.http_status, lambda: self._error_of(exchange))
        self._n_withdrawn += exchange.error.startswith(ON_PURPOSE)
        released_s = self._recorder.released_s[exchange.row]
        samples["lateness_s"].append(self._seconds(exchange.sent_ns) - released_s)
        if exchange.first_guess_ns:
            if self._adapter.stream:
                samples["ttft_s"].append(self._seconds(exchange.first_guess_ns) - released_s)
            samples["e2e_s"].append(self._seconds(exchange.done_ns) - released_s)
        released_ns = self._epoch_ns + round(released_s * 1e9)
        self._live_samples.ended(exchange, status, released_ns)
        self._recorder.ended(exchange)
        if self._has_late_children[exchange.row]:
            if self._is_quoted(exchange.row):
                self._payloads.answered(exchange.row, lambda: answer_texts(exchange, self._adapter))
            self._loop.call_soon(self._prepare, exchange.row)
        if status is Status.truncated:  # a conversation goes on after it
            status = Status.ok
        self._dispatcher.ended(exchange.row, status, self._seconds(exchange.done_ns))

    def _error_of(self, exchange: Exchange) -> str:
        try:
            return self._redact(decode(exchange, self._adapter).error)
        except Exception:  # a codec's bug on this body; the recorder records it
            return f"HTTP {exchange.http_status}"

    def _status(self, exchange: Exchange) -> Status:
        """The status of an ended request. It is decoded if the release of a child depends on it, so
        that an error inside a 200 response releases no child, if the response ends like an error or
        short of an exact length, and if no token was seen in a 200 response, so that an unusual
        form is not taken for a failure."""
        status, row = quick_status(exchange), exchange.row
        requested = self._output_tokens[row] if self._has_exact_lengths else 0
        if status is Status.ok:
            is_clear = not self._is_decisive[row]
            is_clear = is_clear and not ends_suspiciously(exchange, requested)
        else:
            is_clear = status is not Status.stream_error or exchange.outcome is not None
        if is_clear:
            return status
        try:
            decoded = decode(exchange, self._adapter)
            is_counted = decoded.token_source is TokenSource.usage
            if decoded.status is Status.ok and is_counted:
                return Status.truncated if is_short(requested, decoded.output_tokens) else Status.ok
            return decoded.status
        except Exception:  # a codec's bug on this body; the recorder records it
            return Status.stream_error

    def _continue(self, row: int) -> None:
        """Adds rows for the user of `row`, whose last planned unit has begun."""
        if self._more is None or row not in self._more.last_units:
            return
        rows, edges = self._more.take(row, self._sessions[row], len(self._sessions))
        self._payloads.add_rows(rows, edges)
        self._dispatcher.add_rows(rows, edges)
        self._recorder.add_rows(rows)
        self._live_samples.add_rows(rows)
        first = len(self._sessions)
        self._sessions.frombytes(np.ascontiguousarray(rows["session_id"]).tobytes())
        self._output_tokens.frombytes(np.ascontiguousarray(rows["output_tokens"]).tobytes())
        for flags in (self._is_last, self._has_late_children, self._is_decisive):
            flags += bytes(len(rows))
        row_of, goes_on = self._dispatcher.families.row, rows["after_failure"].tolist()
        for child, parent in edges[["request_id", "after"]].tolist():
            self._has_late_children[row_of(parent)] = 1
            self._is_decisive[row_of(parent)] |= not goes_on[row_of(child) - first]
        for parent in {row_of(parent) for parent in edges["after"].tolist()}:
            if parent < first:  # perhaps sent already
                self._prepare(parent)

    def _prepare(self, row: int) -> None:
        """Encodes the children of a row, as far as their prompts are known."""
        for child in self._dispatcher.families.children(row):
            self._payloads.prepare(child)

    def _is_quoted(self, row: int) -> bool:
        """Whether the prompt of a child quotes the answer to a row."""
        children = self._dispatcher.families.children(row)
        return any(self._payloads.quotes(child) == row for child in children)

    def _advance(self) -> None:
        """Shows the controlling process that the event loop runs; also after the last row."""
        self._progress.advance()
        self._loop.call_later(WATCH_EVERY_S, self._advance)

    def _hand_up(self, name: str, part: Part) -> None:
        """Sends a part that cannot be written to the controlling process."""
        for message in part_messages(name, part_bytes(*part)):
            self._progress.advance()
            self._write_message("part", **message)

    def _beat(self) -> None:
        """Writes a progress message and schedules the next."""
        if self._finished.is_set():
            return
        self._n_beats += 1
        self._report()
        self._loop.call_later(_BEAT_S, self._beat)

    def _encode_ahead(self) -> None:
        """Encodes requests for 0.1 ms at a time, 0.3 ms at most, so that no socket read waits
        longer than that or the time of a single request."""
        if self._finished.is_set():
            return
        now_s = self._timer.now_s()
        share_s, self._encoded_until_s = ENCODE_SHARE * (now_s - self._encoded_until_s), now_s
        has_more = self._payloads.extend(min(share_s, _ENCODE_MOST_S))
        self._loop.call_later(_ENCODE_EVERY_S if has_more else _BEAT_S, self._encode_ahead)

    def _start_writing(self) -> None:
        """Begins to write a full part; `_write_parts` goes on until none is left."""
        if not self._is_writing:
            self._is_writing = True
            self._loop.call_later(_WRITE_EVERY_S, self._write_parts)

    def _write_parts(self) -> None:
        """Writes ended requests for 0.2 ms at a time."""
        self._is_writing = not self._finished.is_set() and self._recorder.write(_WRITE_S)
        if self._is_writing:
            self._loop.call_later(_WRITE_EVERY_S, self._write_parts)

    def _last_heard_s(self) -> float:
        """When a byte came last, or a request ended otherwise than by us, as far as the progress
        messages tell."""
        since_ns, self._beat_ns = self._beat_ns, time.monotonic_ns()
        if self._heard_ns > since_ns or self._client.has_read_since(since_ns):
            self._heard_s = self._seconds(self._beat_ns)
        return self._heard_s

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
            heard_s=self._last_heard_s(),
            failed_alike=self._first_failures.message(),
            **{name: [round(s, 6) for s in samples] for name, samples in self._samples.items()},
            **self._live_samples.take(),
            **({} if self._n_beats % _BEATS_PER_USE else {"use": self._meter.so_far()}),
        )
        self._clear_samples()

    def _clear_samples(self) -> None:
        self._samples = {"e2e_s": [], "ttft_s": [], "lateness_s": []}

    def _seconds(self, ns: int) -> float:
        return (ns - self._epoch_ns) * 1e-9


def part_decoder(task: ShardTask) -> PartDecoder:
    return PartDecoder(task.shard, task.adapter, task.head.redact)


def fills_parts(task: ShardTask) -> bool:
    """Whether the answers to a task are more than a part."""
    n_bytes = task.schedule["output_tokens"].sum(dtype="u8") * _EVENT_BYTES
    return len(task.schedule) > PART_REQUESTS or bool(n_bytes > PART_BYTES)


def _mark(flags: bytearray, rows: NDArray[np.intp]) -> None:
    np.frombuffer(flags, bool)[rows] = True


def memory_for(n_reads: int) -> list[bytes]:
    """Faults in memory for `n_reads` reads of a single event, at most 256 MiB, before the run. The
    memory is free for use while the caller holds the result.

    The first access to a page costs 2.4 µs, more in a virtual machine; in a run, the faults for a
    page per dozen reads were 6 % of the client's CPU time.
    """
    n_bytes = min(n_reads * _READ_BYTES, _MOST_BYTES)
    blocks = [bytes(_READ_BYTES - sys.getsizeof(b"")) for _ in range(n_bytes // _READ_BYTES)]
    return blocks[:: _ARENA_BYTES // 2 // _READ_BYTES]  # enough to keep every arena allocated


class MoreRows:
    """The rows that a shard adds to its plan for users of a closed loop who get through it
    (`workload.more_units`), and the file that keeps them. `last_units` maps the first row of each
    user's last unit to the class of the user: when that row is released, the user needs more."""

    def __init__(self, task: ShardTask) -> None:
        assert task.more is not None, "rows beyond the plan of an open loop"
        self._continuation = Continuation(task.more, task.schedule, task.edges)
        self._path = task.part_path.with_suffix(MORE)
        schedule = task.schedule
        places = np.flatnonzero(schedule["after_failure"])
        users = schedule["session_id"][places]
        last = dict(zip(users.tolist(), places.tolist(), strict=True))
        self.last_units = {row: int(schedule["class_id"][row]) for row in last.values()}
        self.is_of_loop: NDArray[np.bool_] = np.isin(schedule["session_id"], users)
        """Whether each row of the task is of a user."""

    def take(self, row: int, user: int, n_rows: int) -> tuple[Schedule, Edges]:
        """The next rows of the user with `row`, to be added after `n_rows`, and the edges that lead
        to them. They are in the file before any of them can be recorded."""
        class_id = self.last_units.pop(row)
        rows, edges = self._continuation.more(user, class_id)
        append_more(self._path, rows, edges)
        self.last_units[n_rows + int(np.flatnonzero(rows["after_failure"])[-1])] = class_id
        return rows, edges
