"""`python -m reference_engine.serving.http_workers CHANNEL LISTENER`: one HTTP worker process.

The engine's process starts it (`processes`) and passes both descriptors on."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys

import uvloop

from reference_engine.serving.http_workers.worker_app import HttpWorker


async def _run(channel: int, listener: int) -> int:
    worker = HttpWorker(socket.socket(fileno=listener))
    gc.freeze()  # what is there by now stays
    if await worker.run(socket.socket(fileno=channel)):
        return 0
    logging.getLogger("reference_engine").error("the engine's process is gone; leaving")
    return 1


def main(arguments: list[str]) -> int:
    # Who stops a server may signal all of its processes. A worker has answers to bring to their
    # end, and leaves when its channel does.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    channel, listener = map(int, arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(channel, listener))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
