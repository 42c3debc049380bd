"""A load-generating process: `python -m loadgen.drive.shard PROGRESS_FD`, started by `shards`.

It starts before its task exists, so that its imports overlap with other work (docs/decisions/0037).
On stdin it receives its task once, then the lines `GO` and `STOP`; on stdout it writes a JSON line
about four times a second. If stdin closes, the parent is gone and the shard stops by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import platform
import signal
import struct
import sys
from collections.abc import Callable
from typing import NoReturn

from loadgen.archive.part_decoder import mark_as_written
from loadgen.drive.client import Client
from loadgen.drive.decoder_process import DecoderProcess
from loadgen.drive.file_limit import file_limit_problem, raise_file_limit
from loadgen.drive.payloads import HttpHead, Payloads
from loadgen.drive.prefork import may_fork
from loadgen.drive.shard_loop import Shard, fills_parts, part_decoder
from loadgen.drive.stall_watch import WATCH_EVERY_S, ProgressCounter
from loadgen.drive.task import ShardTask
from loadgen.drive.transport import Transport
from loadgen.drive.worker_messages import Lines, MessageWriter
from loadgen.system.endings import ending_signals
from loadgen.system.plugins import load_plugin
from loadgen.workload.dialogue import Dialogue
from targets.dialer import Dialer

# Modules that most tasks need, imported while the process waits for its task.
_NEEDED_LATER = ("uvloop", "targets.openai_chat", "loadgen.workload.texts")
_TIME_SLICE_NS = 100_000  # the shortest that Linux grants
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # number of the system call
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # 48 bytes: size, policy, flags, nice, …, runtime, …
_ORPHAN_S = 30.0  # to write the part after the parent is gone; then the process ends itself


def make_transport(task: ShardTask, loop: asyncio.AbstractEventLoop) -> Transport:
    """The transport of a shard. Each shard starts at a different address of the target's name."""
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
    """The requests of a task, with `head` in place of the task's own; none is encoded yet."""
    dialogue = Dialogue(task.schedule, task.edges, task.prompts, task.fit)
    return Payloads(
        task.schedule,
        dialogue.prompt,
        task.adapter,
        head,
        task.run_name,
        task.tenants,
        dialogue.waits_for,
        task.fit.tokens_per_char,
        task.slo_limits_s,
        on_rows=dialogue.add_rows,
    )


async def _serve(
    task: ShardTask,
    commands_fd: int,
    write_message: Callable[..., None],
    progress: ProgressCounter,
    helper: DecoderProcess | None,
) -> None:
    loop = asyncio.get_running_loop()
    client = make_transport(task, loop)
    payloads = payloads_of(task, task.head)
    payloads.encode_first()
    opening = loop.create_task(_show_progress(progress))
    opened = await client.open(task.n_preopen)
    opening.cancel()
    shard = Shard(task, loop, client, payloads, write_message, progress, helper)
    commands: asyncio.Queue[bytes] = asyncio.Queue()
    os.set_blocking(commands_fd, False)
    loop.add_reader(commands_fd, _read_commands, commands_fd, Lines(), commands, loop)
    write_message("ready", opened=opened)
    command, _, argument = (await commands.get()).partition(b" ")
    if command != b"GO":
        await client.close()
        return
    shard.start(int(argument))
    listener = loop.create_task(_execute(commands, shard))
    preopens = task.connections == "reuse" and task.transport == "fast"  # the only case
    report = await shard.finish(task.n_preopen - opened if preopens else 0)
    write_message("done", instrument=report.to_json())
    listener.cancel()


async def _show_progress(progress: ProgressCounter) -> None:
    """Advances the counter while the process waits for the server."""
    while True:
        progress.advance()
        await asyncio.sleep(WATCH_EVERY_S)


async def _execute(commands: asyncio.Queue[bytes], shard: Shard) -> None:
    while True:
        command, _, argument = (await commands.get()).partition(b" ")
        if command in (b"STOP", b"STOP_RELEASES"):
            drain_s, _, reason = argument.decode().partition(" ")
            shard.stop(reason, float(drain_s), sends_waiting=command == b"STOP_RELEASES")
        elif command == b"":
            shard.stop("the controlling process ended", 0.0)
            asyncio.get_running_loop().call_later(_ORPHAN_S, os._exit, 70)
            return


def _read_commands(
    fd: int, lines: Lines, commands: asyncio.Queue[bytes], loop: asyncio.AbstractEventLoop
) -> None:
    try:
        data = os.read(fd, 65536)
    except BlockingIOError:
        return
    if not data:
        loop.remove_reader(fd)
        commands.put_nowait(b"")
    for line in lines.split(data):
        commands.put_nowait(line)


def main(progress_fd: int) -> None:
    """Reads the pickled task from stdin (length first), runs it, and exits with 0 once its part is
    written. Advances the counter behind `progress_fd`."""
    prepare()
    write_message = MessageWriter(own_stdout()).write
    write_message("started")
    stdin_fd = 0
    size = int.from_bytes(_read_exactly(stdin_fd, 8, may_end=True), "big")
    plugins, pickled = pickle.loads(_read_exactly(stdin_fd, size))
    for plugin in plugins:  # before the task, which may hold instances of their classes
        load_plugin(plugin)
    task: ShardTask = pickle.loads(pickled)
    serve(task, stdin_fd, write_message, ProgressCounter(progress_fd))


def own_stdout() -> int:
    """A new descriptor of standard output, for messages only: what a plug-in prints goes to the log
    from then on."""
    messages_fd = os.dup(1)
    os.dup2(2, 1)
    return messages_fd


def prepare() -> None:
    """Prepares this process for any task: signals, limits, imports, garbage collection."""
    for number in ending_signals():  # a service manager signals every process; the parent decides
        signal.signal(number, signal.SIG_IGN)
    raise_file_limit()
    request_short_slices()
    for module in _NEEDED_LATER:
        with contextlib.suppress(ImportError):  # uvloop is not built for every platform
            importlib.import_module(module)
    gc.collect()  # once, while there is time; frozen objects are not traversed again
    gc.freeze()


def serve(
    task: ShardTask,
    commands_fd: int,
    write_message: Callable[..., None],
    progress: ProgressCounter,
    at_end: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Writes `ready`, runs the task by the commands from `commands_fd`, writes `done` once the part
    is written, calls `at_end` and ends the process."""
    too_few = file_limit_problem(task.n_preopen)
    if too_few:
        sys.exit(too_few)  # the last line of the log, which the parent prints
    mark_as_written(task.part_path.parent)
    helper = None
    if fills_parts(task) and may_fork():
        helper = DecoderProcess(part_decoder(task), is_idle=task.decodes_meanwhile)
    with asyncio.Runner(loop_factory=_loop_factory(task)) as runner:
        runner.run(_serve(task, commands_fd, write_message, progress, helper))
        at_end()
        os._exit(0)  # an orderly exit would spend time on freeing hundreds of megabytes


def request_short_slices() -> None:
    """Requests time slices of 0.1 ms for the calling thread.

    Linux lets a waking thread preempt another only if its slice ends earlier. With equal slices a
    shard that shares its core waits some milliseconds; with short slices it runs at once, and is
    interrupted as often in return. A scheduling policy that a user chose stays. No effect before
    Linux 6.12 and on other systems.

    Source: sched(7), sched_setattr(2); Linux 6.12 `sched_attr::sched_runtime` of SCHED_OTHER.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    size, nice = _SCHED_ATTR.size, os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(size, os.SCHED_OTHER, 0, nice, 0, _TIME_SLICE_NS, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def _loop_factory(task: ShardTask) -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop for the fast transport; asyncio's loop for aiohttp, which stalled for 7-26 ms on
    uvloop in 13 of 21 runs."""
    with contextlib.suppress(ImportError):  # uvloop is not built for every platform
        if task.transport != "aiohttp":
            import uvloop

            return uvloop.new_event_loop
    return asyncio.new_event_loop


def _read_exactly(fd: int, size: int, *, may_end: bool = False) -> bytearray:
    """Reads `size` bytes. With `may_end`, an input that ends before the first byte ends the process
    with status 0: it has no task."""
    data = bytearray()
    while len(data) < size:
        piece = os.read(fd, min(size - len(data), 1 << 20))
        if not piece and may_end and not data:
            raise SystemExit
        if not piece:
            raise SystemExit("loadgen.drive.shard: the task on stdin is incomplete")
        data += piece
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]))
