"""Measures the cost of TLS in the client: CPU time per event and the error of TTFT.

    python benchmarks/tls_cost.py [--rounds 5] [--rate 100] [--write]

A relay (this file, a process of its own on the server's core) forwards each read at once between
the client and the C server of targets/truth: without TLS on one side, with TLS 1.3 on the other
(ECDSA P-256 certificate, made by the openssl command). The two sides take turns, so that the
difference between them is TLS alone. Errors include the relay's own delay on both sides. No goals:
the figures are those of docs/targets.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import ssl
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import uvloop
from fidelity import Figures, errors
from rig.clients import Load, Rig
from rig.machine import interleaved, keep, machine_line, show, spreads

SIDES = ("plain", "TLS")
SHOWN = ("CPU µs/event, paced", "TTFT error p50 ms", "TTFT error p99 ms", "send lateness p99 ms")
TOKENS, FOR_S = 64, 5.0


class _Pipe(asyncio.Protocol):
    """One end of a relayed connection; `other` is the opposite end once it is connected."""

    def __init__(self) -> None:
        self.other: _Pipe | None = None
        self.transport: asyncio.Transport | None = None
        self._waiting: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def join(self, other: _Pipe) -> None:
        self.other, other.other = other, self
        for end in (self, other):
            for data in end._waiting:
                end.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._waiting.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def relay(port: int, certificate: Path | None) -> None:
    """Serves on a free port, which it prints, until stdin ends."""
    loop, context = asyncio.get_running_loop(), None
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    joins: set[asyncio.Task[None]] = set()

    async def connect(near: _Pipe) -> None:
        _, far = await loop.create_connection(_Pipe, "127.0.0.1", port)
        near.join(far)

    class Near(_Pipe):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            task = loop.create_task(connect(self))
            joins.add(task)
            task.add_done_callback(joins.discard)

    server = await loop.create_server(Near, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def relayed(url: str, certificate: Path | None, cpu: int | None) -> Iterator[int]:
    """The port of a relay to the server at `url`."""
    words = [sys.executable, __file__, "--relay", url.rpartition(":")[2]]
    if certificate is not None:
        words += ["--certificate", str(certificate)]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None, "stdin is a pipe"
    assert child.stdout is not None, "stdout is a pipe"
    try:
        if cpu is not None:
            os.sched_setaffinity(child.pid, {cpu})
        yield int(child.stdout.readline())
    finally:
        child.stdin.close()
        child.wait(timeout=10)
        child.stdout.close()


def certificate_in(folder: Path) -> Path:
    """A folder with a new certificate of 127.0.0.1 and its key."""
    words = shlex.split(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*words, *files], check=True, capture_output=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--write", action="store_true", help="keep the result")
    parser.add_argument("--relay", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--certificate", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.relay is not None:
        uvloop.run(relay(chosen.relay, chosen.certificate))
        return 0
    print(machine_line())
    rounds = defaultdict[str, list[Figures]](list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rig, certificate = Rig(folder), certificate_in(folder)

        def one(side: str, number: int) -> None:
            @contextmanager
            def through(url: str, cpu: int | None) -> Iterator[str]:
                with relayed(url, certificate if side == "TLS" else None, cpu) as port:
                    scheme = "https" if side == "TLS" else "http"
                    target = folder / "target.yaml"
                    lines = f"url: {scheme}://127.0.0.1:{port}\n"
                    target.write_text(
                        lines + (f"ca_cert: {certificate / 'cert.pem'}\n" if side == "TLS" else "")
                    )
                    yield str(target)

            load = Load(TOKENS, FOR_S, chosen.rate)
            found = rig.measure("slobench", load, through=through, ttft_s=0.05, itl_s=0.01)
            rounds[side].append({k: v for k, v in errors(found).items() if k in SHOWN})

        interleaved(chosen.rounds, SIDES, one)
    table = {side: spreads(rounds[side]) for side in SIDES}
    show(f"{chosen.rate:g} requests/s × {TOKENS} tokens, through a relay", SIDES, table)
    ratio = spreads(
        [
            {key: tls[key] / plain[key] for key in SHOWN}
            for plain, tls in zip(rounds["plain"], rounds["TLS"], strict=True)
        ]
    )
    show("TLS in relation to plain, round by round", ["ratio"], {"ratio": ratio})
    if chosen.write:
        asked = {"rounds": chosen.rounds, "rate": chosen.rate}
        print(keep("tls_cost", asked, {"sides": table, "ratio": ratio}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
