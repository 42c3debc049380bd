"""A worker's side of a run, in Locust's process: starts the load process and relays messages. It
never sends a request and never blocks in a message handler."""

from __future__ import annotations

import contextlib
import hashlib
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

import gevent
import gevent.event
import gevent.queue
from gevent.subprocess import PIPE, Popen

from loadgen.archive.collect import UNCONFIRMED
from loadgen.drive.stall_watch import STALL_S, WATCH_EVERY_S, ProgressCounter, WatchedProcess
from loadgen.drive.worker_messages import BadMessage, ReceivedParts, read_message
from loadgen.manifest.json_section import JsonObject
from loadgen.system.cache_directory import cache_dir
from loadgen.system.endings import exit_words
from loadgen.web import control_messages as messages
from loadgen.web.live_frames import Ended, FrameBuilder

LEASE_TICKS = 5
"""Ticks (seconds of this process's running time) without a lease after which the worker releases no
more requests. A clock would be wrong: a worker that was itself stopped has not lost its master."""
_UNLEASED = f"no message from the master for {LEASE_TICKS} s"
_FRAME_EVERY_S = 1.0
_LOG_TAIL = 2000
_LEAVING = "its worker was told to end"
_LEAVING_DRAIN_S = 5.0  # containers are killed 10 s after SIGTERM, or later
_CONFIRMED_S = 3.0  # for the rows of a share that ended early to reach the master
_WRITING_S = 10.0  # for a load process to write its rows after its input has ended


class ShardHost:
    """Runs a single share at a time. `send` sends encoded messages to the control process;
    `on_ended` receives each ended request."""

    def __init__(self, send: Callable[[bytes], None], on_ended: Callable[[Ended], None]) -> None:
        self._send, self._on_ended = send, on_ended
        self._share: _Share | None = None
        self._leaving: gevent.Greenlet | None = None
        self.n_bad = 0

    def take(self, data: object) -> None:
        """Handles a message of the control process."""
        try:
            message = messages.read_down(data)
        except messages.Bad:
            self.n_bad += 1
            return
        share = self._share
        if isinstance(message, messages.Ping):
            self._send_message(messages.Pong(message.run, message.sent_ns, time.monotonic_ns()))
        elif isinstance(message, messages.Assign):
            self.drop()
            self._share = _Share(message, self._send_message, self._on_ended)
            self._share.feed(message)
        elif share is None or message.run != share.run:
            return
        elif isinstance(message, messages.LoadPiece):
            share.feed(message)
        elif isinstance(message, messages.Go):
            share.go(message.epoch_ns)
        elif isinstance(message, messages.Lease):
            share.lease()
        elif isinstance(message, messages.Got):
            share.got(message.k)
        elif isinstance(message, messages.StopShard):
            share.stop(message.reason, message.drain_s, sends_waiting=message.sends_waiting)
        elif isinstance(message, messages.Kept):
            share.kept()
        elif isinstance(message, messages.Release):
            self.drop()

    @property
    def is_busy(self) -> bool:
        return self._share is not None

    def drop(self) -> None:
        """Ends the load process, if any, in a greenlet. Recorded rows that no master has confirmed
        stay on disk."""
        share, self._share = self._share, None
        if share is not None:
            gevent.spawn(share.close)

    def leave(self) -> None:
        """Ends the load process, if any, as `_Share.leave` does. A second call, by another signal,
        ends its wait."""
        if self._leaving is None:
            self._leaving = gevent.spawn(self._leave)
        elif self._share is not None:
            self._share.give_up()
        self._leaving.join()

    def _leave(self) -> None:
        if self._share is not None:
            self._share.leave()
            self._share = None

    def _send_message(self, message: messages.Up) -> None:
        self._send(messages.encode(message))


def _new_folder() -> Path:
    """A folder for the rows of a share, which outlives the worker: see `slobench collect`."""
    cache = cache_dir(os.environ)
    if cache is None:
        return Path(tempfile.mkdtemp(prefix="slobench-shard-"))
    place = cache / UNCONFIRMED
    place.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=place))


class _Share:
    """A load process and the state of its share."""

    def __init__(
        self,
        assign: messages.Assign,
        send: Callable[[messages.Up], None],
        on_ended: Callable[[Ended], None],
    ) -> None:
        self.run, self._shard, self._send, self._on_ended = assign.run, assign.shard, send, on_ended
        self._frames = FrameBuilder(assign.run, assign.shard, assign.slos)
        self._folder = _new_folder()
        self._log = self._folder / "log"
        self._sha256, self._is_ready, self._is_going, self._is_done = "", False, False, False
        self._is_settled = gevent.event.Event()  # the master has the rows, or there are none
        self._ticks_left, self._broken = LEASE_TICKS, ""
        self._n_missing, self._is_closed = assign.n_pieces, False
        self._upload = messages.Upload([])
        self._progress = ProgressCounter.create()
        command = [sys.executable, "-P", "-m", "loadgen.web.load_process", str(self._folder)]
        with self._log.open("wb") as log:
            self._process = Popen(
                [*command, str(self._progress.fd)],
                pass_fds=[self._progress.fd],
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                process_group=0,  # the worker handles Ctrl-C
            )
        self._watched = WatchedProcess(self._process.pid, self._progress)
        self._killed = ""
        self._rows = ReceivedParts()  # that the load process cannot write
        self._outgoing: gevent.queue.Queue[bytes | None] = gevent.queue.Queue()
        self._greenlets = [
            gevent.spawn(self._write),
            gevent.spawn(self._read),
            gevent.spawn(self._tick),
            gevent.spawn(self._watch),
        ]

    def feed(self, message: messages.Assign | messages.LoadPiece) -> None:
        self._n_missing -= isinstance(message, messages.LoadPiece)
        data = messages.encode(message)
        self._outgoing.put(len(data).to_bytes(4, "big") + data)

    def go(self, epoch_ns: int) -> None:
        self._is_going = True
        self._outgoing.put(b"GO %d\n" % epoch_ns)

    def lease(self) -> None:
        self._ticks_left = LEASE_TICKS

    def stop(self, reason: str, drain_s: float, *, sends_waiting: bool = False) -> None:
        command = "STOP_RELEASES" if sends_waiting else "STOP"
        self._outgoing.put(f"{command} {drain_s:f} {' '.join(reason.split())}\n".encode())

    def got(self, k: int) -> None:
        for part in self._upload.got(k):
            self._send(part)

    def kept(self) -> None:
        """The master has the rows."""
        self._is_settled.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    def leave(self) -> None:
        """Ends the share early, at the worker's own end: requests in flight may finish, and the
        rows go to the master if it lives. Then as `close`."""
        if self._is_going and self._ticks_left > 0:
            if not self._is_done:
                self._broken = _LEAVING
                self.stop(_LEAVING, _LEAVING_DRAIN_S)
            self._is_settled.wait(_LEAVING_DRAIN_S + _CONFIRMED_S)
        self.close()

    def give_up(self) -> None:
        """Ends the wait of `leave`."""
        self._is_settled.set()

    def close(self) -> None:
        """Ends the load process. If it is sending, it may still write its rows."""
        self._is_settled.set()
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_going and not (self._is_done or self._killed):
            self._outgoing.put(None)  # closes its input
            with gevent.Timeout(_WRITING_S, False):
                self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        current = gevent.getcurrent()
        others = [greenlet for greenlet in self._greenlets if greenlet is not current]
        gevent.killall(others, block=False)
        self._process.wait()
        self._progress.close()
        if not any(self._folder.glob("shard-*.npz")):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # `_read` notices its death
            while (data := self._outgoing.get()) is not None:
                self._process.stdin.write(data)
                self._process.stdin.flush()
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                if line.endswith(b"\n"):  # not the half line of a process that was killed
                    self._handle(read_message(line))
        except BadMessage as error:
            self._kill_load_process(str(error))
        if not self._is_done:
            self._send(messages.Died(self.run, self._shard, self._last_words()))
            self._is_settled.set()

    def _handle(self, line: JsonObject) -> None:
        kind = line["kind"]
        if kind == "task":
            self._sha256 = line["sha256"]
        elif kind == "refused":
            self._is_done = True
            self._send(messages.ShareRefused(self.run, self._shard, line["reason"][:_LOG_TAIL]))
        elif kind == "ready":
            self._is_ready = True
            host = socket.gethostname()
            self._send(
                messages.ShareReady(self.run, self._shard, self._sha256, host, version("slobench"))
            )
        elif kind == "beat":
            for ended in self._frames.take(line):
                self._on_ended(ended)
        elif kind == "part":
            self._rows.add(line)
        elif kind == "done":
            self._finish(line["instrument"])

    def _finish(self, instrument: JsonObject) -> None:
        """Sends the last frame, then the rows as the load process wrote them. A share that was cut
        short here is reported as broken, although all its rows have a status."""
        self._is_done = True
        instrument = instrument | {"broken": instrument["broken"] or self._broken}
        self._send(self._frames.frame())
        (data,) = self._rows.whole.values() or (self._part().read_bytes(),)
        parts = messages.pieces(self.run, self._shard, data)
        digest = hashlib.sha256(data).hexdigest()
        self._send(messages.Done(self.run, self._shard, len(parts), digest, instrument))
        self._upload = messages.Upload(parts)
        for part in self._upload.begin():
            self._send(part)

    def _part(self) -> Path:
        return self._folder / f"shard-{self._shard}.npz"

    def _tick(self) -> None:
        while not self._is_done:
            gevent.sleep(_FRAME_EVERY_S)
            if self._is_done or not self._is_going:
                continue
            self._send(self._frames.frame())
            self._ticks_left -= 1
            if self._ticks_left == 0:
                self._broken = _UNLEASED
                self.stop(_UNLEASED, 0.0)

    def _watch(self) -> None:
        """Kills the load process when it makes no progress; `_read` notices its end."""
        while not self._is_done:
            gevent.sleep(WATCH_EVERY_S)
            if self._has_stalled(time.monotonic()):
                self._kill_load_process(f"no progress for {STALL_S:g} s")
                return

    def _kill_load_process(self, reason: str) -> None:
        self._killed = f"{reason}: killed"
        with contextlib.suppress(ProcessLookupError):  # it died meanwhile
            os.kill(self._process.pid, signal.SIGKILL)

    def _has_stalled(self, now_s: float) -> bool:
        if self._is_going:
            return self._watched.is_stalled(now_s)
        is_preparing = self._n_missing <= 0 and not self._is_ready
        return is_preparing and self._watched.is_idle(now_s)

    def _last_words(self) -> str:
        code = self._process.wait()
        if self._killed:
            return self._killed
        log = self._log.read_text(errors="replace").strip()
        last_line = log.splitlines()[-1] if log else "its log is empty"
        return f"{exit_words(code)}; {last_line}"[:_LOG_TAIL]
