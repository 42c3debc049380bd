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
from collections.abc import Callable
from typing import NoReturn

from loadgen.drive.client import Client
from loadgen.drive.payloads import HttpHead, Payloads
from loadgen.drive.shard_loop import Shard
from loadgen.drive.task import ShardTask
from loadgen.drive.time_slice import ask_for_short_slices
from loadgen.drive.transport import Transport
from loadgen.plugins import load_plugin
from loadgen.workload.dialogue import Dialogue
from targets.dialer import Dialer

# What a task usually holds instances of, or needs: imported while there is no task yet.
_NEEDED_LATER = ("uvloop", "targets.openai_chat", "loadgen.workload.texts")
_ORPHAN_S = 30.0  # for writing the part after the parent is gone; nobody would reap us later


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
        dialogue.prompt,
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
    opens_ahead = task.connections == "reuse" and task.transport == "fast"
    report = await shard.finish(task.n_preopen - opened if opens_ahead else 0)
    say("done", instrument=report.to_json())
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
    _say("started")
    stdin_fd = 0
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


def serve(
    task: ShardTask,
    commands_fd: int,
    say: Callable[..., None],
    at_end: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Say `ready`, run the task as the lines on `commands_fd` command, say `done` when the part is
    written, and end the process, `at_end` being its last act."""
    with asyncio.Runner(loop_factory=_loop_factory(task)) as runner:
        runner.run(_serve(task, commands_fd, say))
        at_end()
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
