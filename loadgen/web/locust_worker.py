"""A worker's side of a run, in Locust's process: it starts the generating process and passes
messages on. It never sends a request, and never waits in a message handler."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gevent
import gevent.queue
from gevent.subprocess import PIPE, Popen

from loadgen.web.control_messages import (
    Assign,
    Bad,
    Died,
    Done,
    Go,
    Got,
    Lease,
    LoadPiece,
    Ping,
    Pong,
    Release,
    ShareReady,
    ShareRefused,
    StopShard,
    Up,
    Upload,
    encode,
    pieces,
    read_down,
)
from loadgen.web.frames import Ended, FrameBuilder

LEASE_TICKS = 5
_UNLEASED = f"nothing was heard of the master for {LEASE_TICKS} s"
"""Seconds of our own running time without a lease after which nothing more is released. Ticks, not
a clock: a worker that was stopped itself has not been left alone."""
_FRAME_EVERY_S = 1.0
_LOG_TAIL = 2000


class ShardHost:
    """One share at a time. `send` takes encoded messages to the conductor, `on_ended` each request
    that ended."""

    def __init__(self, send: Callable[[bytes], None], on_ended: Callable[[Ended], None]) -> None:
        self._send, self._on_ended = send, on_ended
        self._work: _Work | None = None
        self.n_bad = 0

    def take(self, data: object) -> None:
        """A message of the conductor's."""
        try:
            message = read_down(data)
        except Bad:
            self.n_bad += 1
            return
        work = self._work
        if isinstance(message, Ping):
            self._say(Pong(message.run, message.sent_ns, time.monotonic_ns()))
        elif isinstance(message, Assign):
            self.drop()
            self._work = _Work(message, self._say, self._on_ended)
            self._work.feed(message)
        elif work is None or message.run != work.run:
            return
        elif isinstance(message, LoadPiece):
            work.feed(message)
        elif isinstance(message, Go):
            work.go(message.epoch_ns)
        elif isinstance(message, Lease):
            work.lease()
        elif isinstance(message, Got):
            work.got(message.k)
        elif isinstance(message, StopShard):
            work.stop(message.reason, message.drain_s)
        elif isinstance(message, Release):
            self.drop()

    @property
    def is_busy(self) -> bool:
        return self._work is not None

    def drop(self) -> None:
        """End the generating process, if there is one, and forget its rows."""
        if self._work is not None:
            self._work.close()
            self._work = None

    def _say(self, message: Up) -> None:
        self._send(encode(message))


class _Work:
    """One generating process and what it has told so far."""

    def __init__(
        self, assign: Assign, say: Callable[[Up], None], on_ended: Callable[[Ended], None]
    ) -> None:
        self.run, self._shard, self._say, self._on_ended = assign.run, assign.shard, say, on_ended
        self._tally = FrameBuilder(assign.run, assign.shard, assign.promises)
        self._folder = Path(tempfile.mkdtemp(prefix="slobench-shard-"))
        self._log = self._folder / "log"
        self._sha256, self._is_going, self._is_done = "", False, False
        self._ticks_left, self._broken = LEASE_TICKS, ""
        self._upload = Upload([])
        with self._log.open("wb") as log:
            self._process = Popen(
                [sys.executable, "-P", "-m", "loadgen.web.load_process", str(self._folder)],
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                process_group=0,  # Ctrl-C is the worker's to interpret
            )
        self._outgoing: gevent.queue.Queue[bytes | None] = gevent.queue.Queue()
        self._greenlets = [
            gevent.spawn(self._write), gevent.spawn(self._read), gevent.spawn(self._tick)
        ]  # fmt: skip

    def feed(self, message: Assign | LoadPiece) -> None:
        data = encode(message)
        self._outgoing.put(len(data).to_bytes(4, "big") + data)

    def go(self, epoch_ns: int) -> None:
        self._is_going = True
        self._outgoing.put(b"GO %d\n" % epoch_ns)

    def lease(self) -> None:
        self._ticks_left = LEASE_TICKS

    def stop(self, reason: str, drain_s: float) -> None:
        self._outgoing.put(f"STOP {drain_s:f} {' '.join(reason.split())}\n".encode())

    def got(self, k: int) -> None:
        for part in self._upload.got(k):
            self._say(part)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        current = gevent.getcurrent()
        gevent.killall([one for one in self._greenlets if one is not current], block=False)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # its death is noticed by `_read`
            for data in self._outgoing:
                self._process.stdin.write(data)
                self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard(json.loads(line))
        if not self._is_done:
            self._say(Died(self.run, self._shard, self._last_words()))

    def _heard(self, said: dict[str, Any]) -> None:
        kind = said["kind"]
        if kind == "task":
            self._sha256 = said["sha256"]
        elif kind == "refused":
            self._is_done = True
            self._say(ShareRefused(self.run, self._shard, said["reason"][:_LOG_TAIL]))
        elif kind == "ready":
            host = socket.gethostname()
            self._say(ShareReady(self.run, self._shard, self._sha256, host, version("slobench")))
        elif kind == "beat":
            for ended in self._tally.take(said):
                self._on_ended(ended)
        elif kind == "done":
            self._finish(said["instrument"])

    def _finish(self, instrument: dict[str, Any]) -> None:
        """The last frame, then the rows, as the generating process wrote them. A share that was cut
        short here is no whole one, though all its rows say how they ended."""
        self._is_done = True
        instrument = instrument | {"broken": instrument["broken"] or self._broken}
        self._say(self._tally.frame())
        data = (self._folder / f"shard-{self._shard}.npz").read_bytes()
        parts = pieces(self.run, self._shard, data)
        shutil.rmtree(self._folder, ignore_errors=True)  # a kill during the upload leaves none
        digest = hashlib.sha256(data).hexdigest()
        self._say(Done(self.run, self._shard, len(parts), digest, instrument))
        self._upload = Upload(parts)
        for part in self._upload.begin():
            self._say(part)

    def _tick(self) -> None:
        while not self._is_done:
            gevent.sleep(_FRAME_EVERY_S)
            if self._is_done or not self._is_going:
                continue
            self._say(self._tally.frame())
            self._ticks_left -= 1
            if self._ticks_left == 0:
                self._broken = _UNLEASED
                self.stop(_UNLEASED, 0.0)

    def _last_words(self) -> str:
        code = self._process.wait()
        log = self._log.read_text(errors="replace").strip()
        last = log.splitlines()[-1] if log else "nothing in its log"
        return f"exit status {code}; {last}"[:_LOG_TAIL]
