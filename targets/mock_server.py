"""A scripted OpenAI-compatible server, for tests and for proving the instrument: it does what it is
told, on time, and writes down what it really did.

    python -m targets.mock_server --ttft 50ms --itl 10ms --fail cut:5% --log truth.csv

Prints `READY http://host:port`, or `READY unix:/path`, on stdout. A request may change its own
script with an `x-mock: ttft=80ms,fail=hang` header; its number, which decides what fails, is its
`x-seq` header if it has one. Every write has an absolute deadline on one timer; the log holds the
instants of CLOCK_MONOTONIC, so a client on the same machine can subtract.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import ssl
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from loadgen.errors import UsageError
from targets.mock_http import MockConnection
from targets.mock_options import OPTIONS, apply_options
from targets.mock_reply import LogRow, Replies, write_log
from targets.mock_script import Script


@dataclass(frozen=True)
class Place:
    """Where to listen: a TCP port (0: any free one), or the socket file `unix` if that is named."""

    host: str
    port: int
    unix: Path | None = None
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return f"unix:{self.unix}" if self.unix is not None else f"{self.host}:{self.port}"

    async def listen(
        self, loop: asyncio.AbstractEventLoop, connection: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.Server, str]:
        """The listener and the URL it is reached by."""
        if self.unix is not None:
            path = str(self.unix)
            return await loop.create_unix_server(connection, path, backlog=4096), f"unix:{path}"
        listener = await loop.create_server(
            connection, self.host, self.port, ssl=self.tls, backlog=4096
        )
        port = listener.sockets[0].getsockname()[1]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return listener, f"{'https' if self.tls else 'http'}://{host}:{port}"


async def serve(script: Script, place: Place, parent_pid: int | None) -> list[LogRow]:
    """Serve until SIGTERM, SIGINT or the parent's end; the rows of the log, in order of arrival."""
    loop = asyncio.get_running_loop()
    replies = Replies(script, loop)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listener, url = await place.listen(loop, lambda: MockConnection(replies))
    sys.stdout.write(f"READY {url}\n")
    sys.stdout.flush()
    gc.collect()
    gc.freeze()
    while not stop.is_set() and (parent_pid is None or os.getppid() == parent_pid):
        try:
            await asyncio.wait_for(stop.wait(), 0.5)
        except TimeoutError:
            continue
    listener.close()
    if place.unix is not None:
        place.unix.unlink(missing_ok=True)
    replies.close()
    return replies.rows


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage block."""
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(2)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m targets.mock_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--unix", type=Path, help="a socket file to listen on instead")
    parser.add_argument("--log", type=Path, help="CSV of what really happened, written at exit")
    parser.add_argument("--tls-cert", type=Path, help="PEM file; serve https")
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--parent-pid", type=int, help="end when this parent has gone")
    for name, (_, _, text) in OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, action="append", default=[], help=text.replace("%", "%%"))
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the server; 0 when it was told to end, 2 with one line on stderr when it cannot start."""
    options = _arguments(argv)
    place = Place(options.host, options.port, options.unix)
    try:
        given = [(name, value) for name in OPTIONS for value in getattr(options, name)]
        script = apply_options(Script(), given)
        if options.tls_cert is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(options.tls_cert, options.tls_key)
            place = replace(place, tls=tls)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            rows = runner.run(serve(script, place, options.parent_pid))
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: cannot serve on {place}: {error.strerror or error}\n")
        return 2
    if options.log is not None:
        write_log(rows, options.log)
    return 0


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
