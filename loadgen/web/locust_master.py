"""The master's side of a run, in Locust's process: it starts the conductor, passes messages between
it and the workers, tells it who is gone, and keeps what it tells for the page."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import gevent
import gevent.queue
import msgspec
from gevent.subprocess import Popen

from loadgen.web.form import RunForm
from loadgen.web.relay_pipe import (
    ENDING,
    Back,
    Begin,
    FromWorker,
    Gone,
    LiveUpdate,
    Note,
    RunEnded,
    ToConductor,
    ToWorker,
    Unpacker,
    pack,
)

_LOOK_EVERY_S = 1.0
_POINTS = 3600
_NOTES = 20
_INTERNAL = 4
_NO_VERDICT, _INTERRUPTED = 3, 130
NOBODY = "no worker is connected; start one with slobench worker"


class Master:
    """`send` takes a worker's id and bytes for it; `present` says which workers answer now, in the
    order in which shares are given; `log` takes lines for people."""

    def __init__(
        self,
        send: Callable[[str, bytes], None],
        present: Callable[[], Collection[str]],
        log: Callable[[str], None],
    ) -> None:
        self._send, self._present, self._log = send, present, log
        self._process: Popen[bytes] | None = None
        self._outgoing: gevent.queue.Queue[ToConductor] = gevent.queue.Queue()
        self._greenlets: list[gevent.Greenlet] = []
        self._roster: list[str] = []
        self.asked: RunForm | None = None
        self.facts: dict[str, Any] = {}
        self.points: deque[dict[str, Any]] = deque(maxlen=_POINTS)
        self.n_points = 0
        self.notes: deque[str] = deque(maxlen=_NOTES)
        self.finished: RunEnded | None = None
        self.n_runs = 0
        self._is_interrupted = self.is_stopping = False

    @property
    def why_not(self) -> str | None:
        """Why no run can begin now; None where one can."""
        if self.is_running:
            what = "the report of the last run is being written" if self.is_over else "a run is on"
            return f"{what}: start again after it"
        return None if self.present() else NOBODY

    @property
    def is_running(self) -> bool:
        """A run was begun and its result is not here yet."""
        return self._process is not None and self.finished is None

    @property
    def is_over(self) -> bool:
        """Nothing more is sent or awaited; the result may still be on its way."""
        return self.finished is not None or bool(self.facts.get("is_over"))

    def begin(self, asked: RunForm) -> None:
        """Conduct a run with the workers that are there."""
        assert not self.is_running, "one run at a time"
        self.renew()
        self.n_runs += 1
        self.asked, self._roster = asked, list(self._present())
        ours, theirs = socket.socketpair()
        with theirs, _held_back(ENDING):
            self._process = Popen(
                [sys.executable, "-P", "-m", "loadgen.web.control_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is ours to interpret
            )
        self._outgoing = gevent.queue.Queue()
        self._outgoing.put(Begin(msgspec.to_builtins(asked), self._roster))
        self._greenlets = [
            gevent.spawn(self._write, ours),
            gevent.spawn(self._read, ours),
            gevent.spawn(self._watch_roster),
        ]

    def refuse(self, exit_code: int, error: str) -> None:
        """A run that could not be asked for."""
        self._note(error)
        self.finished = RunEnded(exit_code, error=error)

    @property
    def roster(self) -> list[str]:
        """The workers that the run began with, or that the next one would."""
        return self._roster if self.is_running else self.present()

    def present(self) -> list[str]:
        """The workers that answer now."""
        return list(self._present())

    def renew(self) -> None:
        """Forget the last run at once, without letting others work in between: the shape may ask
        at any time whether it is over. Its report stays where it is."""
        assert not self.is_running, "the run is not over"
        gevent.killall(self._greenlets, block=False)
        self._process, self._greenlets, self.is_stopping = None, [], False
        self.facts, self.finished, self.n_points = {}, None, 0
        self.points.clear()
        self.notes.clear()

    def take(self, worker: str, data: object) -> None:
        """What a worker said; it is read by the conductor."""
        if self.is_running and isinstance(data, bytes):
            self._outgoing.put(FromWorker(worker, data))

    def stop(self, *, is_interrupt: bool) -> None:
        """The user wants the end, by Ctrl-C or by the page: what is in flight is waited for; twice
        gives that up too."""
        self._is_interrupted = is_interrupt
        if self._process is not None and not self.is_over:
            self.is_stopping = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait_until(self, is_so: Callable[[], bool], most_s: float) -> bool:
        """Let others work until something is so; False where it is not after `most_s`."""
        with gevent.Timeout(most_s, False):
            while not is_so():
                gevent.sleep(0.05)
        return is_so()

    def _write(self, ours: socket.socket) -> None:
        with contextlib.suppress(OSError):  # its end is noticed by `_read`
            for message in self._outgoing:
                ours.sendall(pack(message))

    def _read(self, ours: socket.socket) -> None:
        unpacker = Unpacker(for_master=True)
        with ours:
            while data := _received(ours):
                for message in unpacker.feed(data):
                    self._heard(message)
        assert self._process is not None, "it was started before it was read"
        code = self._process.wait()
        if self.finished is None:
            said = f"the conductor ended with status {code}; the terminal says why"
            self._note(said)
            self.finished = RunEnded(_INTERNAL, error=said)

    def _heard(self, message: ToWorker | LiveUpdate | Note | RunEnded) -> None:
        if isinstance(message, ToWorker):
            self._send(message.worker, message.data)
        elif isinstance(message, LiveUpdate):
            point = message.facts.pop("point", None)
            if point is not None:
                self.points.append(point)
                self.n_points += 1
            self.facts = message.facts
        elif isinstance(message, Note):
            self._note(message.text)
        else:
            if message.exit_code == _INTERRUPTED and not self._is_interrupted:
                message = msgspec.structs.replace(message, exit_code=_NO_VERDICT)
            self.finished = message
            if message.error:
                self._note(message.error)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._log(text)

    def _watch_roster(self) -> None:
        gone: set[str] = set()
        while self.is_running:
            gevent.sleep(_LOOK_EVERY_S)
            now_gone = set(self._roster) - set(self._present())
            for worker in now_gone - gone:
                self._outgoing.put(Gone(worker))
            for worker in gone - now_gone:
                self._outgoing.put(Back(worker))
            gone = now_gone


@contextlib.contextmanager
def _held_back(signals: Collection[signal.Signals]) -> Iterator[None]:
    """A process that is started meanwhile gets them once it asks for them: while the conductor
    imports what it needs, nobody could say what an interrupt ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 20)
    except OSError:
        return b""
