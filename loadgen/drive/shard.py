"""One load-generating process: `python -m loadgen.drive.shard`, started by `shards`.

It is started before anybody knows what it will have to do, so that importing takes no time of the
user's. It gets its whole share of the schedule once, on stdin; after that only `GO` and `STOP`
lines come in, and a JSON line goes out a few times a second. When stdin closes, the parent is gone
and the shard stops by itself. A process of its own keeps whatever draws progress off this clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from loadgen.drive.answer import answer_text
from loadgen.drive.backlog import Backlog
from loadgen.drive.client import Client
from loadgen.drive.decode import decode, quick_status
from loadgen.drive.dispatch import Dispatcher, families
from loadgen.drive.exchange import Exchange
from loadgen.drive.glimpse import Glimpses
from loadgen.drive.instrument import GcPauses, Meter
from loadgen.drive.loop_probe import LoopProbe
from loadgen.drive.memory import memory_for
from loadgen.drive.payloads import HttpHead, Payloads
from loadgen.drive.recorder import ShardRecorder
from loadgen.drive.store import write_part
from loadgen.drive.task import ShardTask
from loadgen.drive.time_slice import ask_for_short_slices
from loadgen.drive.transport import Transport
from loadgen.plugins import load_plugin
from loadgen.records import ON_PURPOSE, Status
from loadgen.timer import EARLY_NS, make_quiet_timer, make_timer
from loadgen.workload.dialogue import Dialogue
from targets.dialer import Dialer

# What a task usually holds instances of, or needs: imported while there is no task yet.
_NEEDED_LATER = ("uvloop", "targets.openai_chat", "loadgen.workload.texts")
_BEAT_S = 0.25
_CHORE_S = 0.005
_CHORE_SHARE = 0.1
_ORPHAN_S = 30.0  # for writing the part after the parent is gone; nobody would reap us later


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
    """Wires dispatcher, client, recorder and instrument on one event loop. Made before the epoch is
    known: with many rows that takes longer than the time between knowing it and the first one."""

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
        self._glimpses: Glimpses | None = None
        if task.is_watched:
            self._glimpses = Glimpses(task.schedule, task.adapter.looks_like_token)
        self._sessions: list[int] = task.schedule["session_id"].tolist()
        last = {session: row for row, session in enumerate(self._sessions)}
        self._is_last = [last[session] == row for row, session in enumerate(self._sessions)]
        self._meter, self._gc, self._backlog = Meter(), GcPauses(), Backlog(client.in_flight)
        self._probe_timer = make_quiet_timer(loop)
        self._probe = LoopProbe(self._probe_timer, self._backlog.look)
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

    async def finish(self) -> dict[str, Any]:
        """Waits for the last row, writes the part file, and returns what the parent should know;
        `broken` is why this shard stopped before its time, if it did."""
        await self._finished.wait()
        for meter in (self._probe, self._meter):
            meter.stop()
        for timer in (self._probe_timer, self._timer):
            timer.close()
        await self._client.close()
        lost = f"the load generator broke: {self._broken}" if self._broken else ""
        started_s, before_s = time.monotonic(), time.thread_time()
        write_part(self._part_path, *self._recorder.finish(lost))
        decoding = {
            "cpu_s": time.thread_time() - before_s,
            "wall_s": time.monotonic() - started_s,
        }
        self._gc.stop()  # only now: decoding makes no cycles, and collecting would double its time
        self._report()
        return {
            "shard": self._number,
            "broken": self._broken,
            **self._meter.summary(),
            **self._probe.summary(),
            "backlog": self._backlog.summary(self._recorder.n_reads, self._meter.window_s),
            "gc": self._gc.summary(),
            "decoding": decoding,
            "connections": {
                "opened": self._client.n_opened,
                "reused": self._client.n_reused,
                "known": self._client.known,
            },
            "encoded_late": self._payloads.n_late,
            "spilled_bytes": self._recorder.spilled_bytes,
        }

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


def make_transport(task: ShardTask, loop: asyncio.AbstractEventLoop) -> Transport:
    """What carries a shard's requests; shards begin at different addresses of a name."""
    looks_like_token = task.adapter.looks_like_token
    if task.transport == "aiohttp":
        from loadgen.drive.aiohttp_client import AiohttpClient

        return AiohttpClient(
            loop,
            task.route,
            looks_like_token=looks_like_token,
            connections=task.connections,
            first=task.shard,
        )
    dialer = Dialer(loop, task.route, first=task.shard)
    return Client(loop, dialer, looks_like_token=looks_like_token, connections=task.connections)


def payloads_of(task: ShardTask, head: HttpHead) -> Payloads:
    """What a task's requests will be, behind `head`; nothing is encoded yet."""
    dialogue = Dialogue(task.schedule, task.edges, task.prompts, task.fit)
    return Payloads(
        task.schedule,
        dialogue.ask,
        task.adapter,
        head,
        task.run_name,
        task.tenants,
        dialogue.waits_for,
        task.fit.tokens_per_char,
        task.promises,
    )


async def _serve(task: ShardTask, stdin_fd: int, say: Callable[..., None]) -> None:
    loop = asyncio.get_running_loop()
    client = make_transport(task, loop)
    payloads = payloads_of(task, task.head)
    payloads.extend(0.0)
    opened = await client.open(task.n_preopen)
    shard = Shard(task, loop, client, payloads, say)
    commands: asyncio.Queue[bytes] = asyncio.Queue()
    os.set_blocking(stdin_fd, False)
    loop.add_reader(stdin_fd, _read_commands, stdin_fd, commands, loop)
    say("ready", opened=opened)
    word, _, argument = (await commands.get()).partition(b" ")
    if word != b"GO":
        await client.close()
        return
    shard.start(int(argument))
    listener = loop.create_task(_obey(commands, shard))
    instrument = await shard.finish()
    if task.connections == "reuse" and task.transport == "fast":  # the others open none ahead
        instrument["connections"]["not_opened_ahead"] = task.n_preopen - opened
    say("done", instrument=instrument)
    listener.cancel()


async def _obey(commands: asyncio.Queue[bytes], shard: Shard) -> None:
    while True:
        word, _, argument = (await commands.get()).partition(b" ")
        if word == b"STOP":
            drain_s, _, reason = argument.decode().partition(" ")
            shard.stop(reason, float(drain_s))
        elif word == b"":
            shard.stop("the controlling process ended", 0.0)
            asyncio.get_running_loop().call_later(_ORPHAN_S, os._exit, 70)
            return


def _read_commands(
    fd: int, commands: asyncio.Queue[bytes], loop: asyncio.AbstractEventLoop
) -> None:
    try:
        data = os.read(fd, 65536)
    except BlockingIOError:
        return
    if not data:
        loop.remove_reader(fd)
        commands.put_nowait(b"")
    for line in data.splitlines():
        commands.put_nowait(line)


def main() -> None:
    """The process: reads the pickled task (length first), runs it, exits 0 when its part is
    written. SIGINT is ignored: Ctrl-C reaches the whole process group, the parent decides."""
    prepare()
    stdin_fd = sys.stdin.fileno()
    size = int.from_bytes(_read_exactly(stdin_fd, 8, may_end=True), "big")
    plugins, pickled = pickle.loads(_read_exactly(stdin_fd, size))
    for plugin in plugins:  # before the task, which may hold instances of their classes
        load_plugin(plugin)
    task: ShardTask = pickle.loads(pickled)
    serve(task, stdin_fd, _say)


def prepare() -> None:
    """Make this process one that generates load, before it knows what."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_file_limit()
    ask_for_short_slices()
    for module in _NEEDED_LATER:
        with contextlib.suppress(ImportError):  # uvloop is not built for every platform
            importlib.import_module(module)
    gc.collect()  # now, while nobody waits: what is there stays, and is not looked through again
    gc.freeze()


def serve(task: ShardTask, commands_fd: int, say: Callable[..., None]) -> NoReturn:
    """Say `ready`, run the task as the lines on `commands_fd` command, say `done` when the part is
    written, and end the process."""
    with asyncio.Runner(loop_factory=_loop_factory(task)) as runner:
        runner.run(_serve(task, commands_fd, say))
        os._exit(0)  # the part is written; taking hundreds of megabytes apart would only take time


def _raise_file_limit() -> None:
    """As many open connections as the system lets us have; what most shells start with is 1024."""
    if sys.platform == "win32":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # "unlimited" cannot be had everywhere
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _loop_factory(task: ShardTask) -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop for our own transport; aiohttp's runs on asyncio's own loop, where it was seen to
    stall less (7-26 ms on uvloop in 13 of 21 runs)."""
    if task.transport == "aiohttp":
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError:  # platforms uvloop does not build for
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _say(kind: str, **fields: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more: keep what was recorded
        os.write(1, json.dumps({"kind": kind, **fields}).encode() + b"\n")


def _read_exactly(fd: int, size: int, *, may_end: bool = False) -> bytes:
    """`may_end`: the end of the input before the first byte means that there is nothing to do."""
    pieces: list[bytes] = []
    while size:
        piece = os.read(fd, min(size, 1 << 20))
        if not piece and may_end and not pieces:
            raise SystemExit
        if not piece:
            raise SystemExit("loadgen.drive.shard: the task on stdin is incomplete")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


if __name__ == "__main__":
    main()
