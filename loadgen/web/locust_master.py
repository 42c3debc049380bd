"""The master's side of a run, in Locust's process: starts the control process, relays messages
between it and the workers, reports lost workers to it, and stores its updates for the page."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Collection

import gevent
import gevent.queue
import msgspec
from gevent.subprocess import Popen

from loadgen.drive.stall_watch import STALL_S, process_use
from loadgen.manifest.json_section import JsonObject
from loadgen.system.endings import blocked, exit_words
from loadgen.web import relay_pipe
from loadgen.web.form import RunForm

_LOOK_EVERY_S = 1.0
_POINTS = 3600
_NOTES = 20
_INTERNAL = 4
_NO_VERDICT, _INTERRUPTED = 3, 130
_STOPPED = "T"  # proc(5)
NO_WORKER = "no worker is connected; start one with slobench worker"


class Master:
    """`send` sends bytes to a worker by its id; `present` lists the workers that answer, in the
    order of their shares; `log` prints lines for the user."""

    def __init__(
        self,
        send: Callable[[str, bytes], None],
        present: Callable[[], Collection[str]],
        log: Callable[[str], None],
    ) -> None:
        self._send, self._present, self._log = send, present, log
        self._process: Popen[bytes] | None = None
        self._outgoing: gevent.queue.Queue[relay_pipe.ToControl] = gevent.queue.Queue()
        self._greenlets: list[gevent.Greenlet] = []
        self._roster: list[str] = []
        self.form: RunForm | None = None
        self.facts: JsonObject = {}
        self.points: deque[JsonObject] = deque(maxlen=_POINTS)
        self.n_points = 0
        self.notes: deque[str] = deque(maxlen=_NOTES)
        self.finished: relay_pipe.RunEnded | None = None
        self.n_runs = 0
        self._is_interrupted = self.is_stopping = False
        self._stalled = self._directory = ""

    @property
    def why_not(self) -> str | None:
        """The reason why no run can begin now; None if a run can begin."""
        if self.is_running:
            state = "the last run's report is being written" if self.is_over else "a run is on"
            return f"{state}: start again when it has ended"
        return None if self.present() else NO_WORKER

    @property
    def is_running(self) -> bool:
        """Whether a run has begun and its result has not arrived."""
        return self._process is not None and self.finished is None

    @property
    def is_over(self) -> bool:
        """Whether the run sends and awaits no more; its result may still be on the way."""
        return self.finished is not None or bool(self.facts.get("is_over"))

    def begin(self, form: RunForm) -> None:
        """Starts a run with the workers that are present."""
        assert not self.is_running, "one run at a time"
        self.renew()
        self.n_runs += 1
        self.form, self._roster = form, list(self._present())
        ours, theirs = socket.socketpair()
        with theirs, blocked(relay_pipe.ENDING):  # until it can report the end of a run
            self._process = Popen(
                [sys.executable, "-P", "-m", "loadgen.web.control_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                process_group=0,  # this process handles Ctrl-C
            )
        self._outgoing = gevent.queue.Queue()
        self._outgoing.put(relay_pipe.Begin(msgspec.to_builtins(form), self._roster))
        self._greenlets = [
            gevent.spawn(self._write, ours),
            gevent.spawn(self._read, ours),
            gevent.spawn(self._watch_roster),
        ]

    def refuse(self, exit_code: int, error: str) -> None:
        """Records a run that could not start."""
        self._note(error)
        self.finished = relay_pipe.RunEnded(exit_code, error=error)

    @property
    def roster(self) -> list[str]:
        """The workers of the present run, or those of the next run."""
        return self._roster if self.is_running else self.present()

    def present(self) -> list[str]:
        """The workers that answer now."""
        return list(self._present())

    def renew(self) -> None:
        """Forgets the last run, without a switch to another greenlet: the shape may check at any
        time whether it is over. Its report stays on disk."""
        assert not self.is_running, "the run is not over"
        gevent.killall(self._greenlets, block=False)
        self._process, self._greenlets, self.is_stopping = None, [], False
        self._stalled = self._directory = ""
        self.facts, self.finished, self.n_points = {}, None, 0
        self.points.clear()
        self.notes.clear()

    def take(self, worker: str, data: object) -> None:
        """Forwards a worker's message, undecoded, to the control process."""
        if self.is_running and isinstance(data, bytes):
            self._outgoing.put(relay_pipe.FromWorker(worker, data))

    def stop(self, *, is_interrupt: bool) -> None:
        """Ends the run for the user, by Ctrl-C or from the page: requests in flight may finish; a
        second call ends them too."""
        self._is_interrupted = is_interrupt
        if self._process is not None and not self.is_over:
            if self.is_stopping and self._is_frozen():
                self._kill_frozen("stopped, and interrupted twice: killed")
            self.is_stopping = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT if is_interrupt else relay_pipe.STOP)

    def _is_frozen(self) -> bool:
        """Whether a signal (SIGSTOP) stopped the control process."""
        return self._process is not None and process_use(self._process.pid).state == _STOPPED

    def _kill_frozen(self, reason: str) -> None:
        assert self._process is not None, "it was started before it was stopped"
        self._stalled = reason
        self._process.kill()

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait_until(self, condition: Callable[[], bool], most_s: float) -> bool:
        """Runs other greenlets until the condition holds; False after `most_s`."""
        with gevent.Timeout(most_s, False):
            while not condition():
                gevent.sleep(0.05)
        return condition()

    def _write(self, ours: socket.socket) -> None:
        with contextlib.suppress(OSError):  # `_read` notices its end
            for message in self._outgoing:
                ours.sendall(relay_pipe.pack(message))

    def _read(self, ours: socket.socket) -> None:
        unpacker = relay_pipe.Unpacker(for_master=True)
        with ours:
            while data := _received(ours):
                for message in unpacker.feed(data):
                    self._handle(message)
        assert self._process is not None, "it was started before it was read"
        code = self._process.wait()
        if self.finished is None:
            problem = f"the control process has no result: {self._stalled or exit_words(code)}"
            if self._directory:
                problem += f"; rows that the workers keep: slobench collect {self._directory}"
            self._note(problem)
            exit_code = _NO_VERDICT if code < 0 else _INTERNAL
            self.finished = relay_pipe.RunEnded(exit_code, error=problem)

    def _handle(self, message: relay_pipe.ToMaster) -> None:
        if isinstance(message, relay_pipe.ToWorker):
            self._send(message.worker, message.data)
        elif isinstance(message, relay_pipe.LiveUpdate):
            point = message.facts.pop("point", None)
            if point is not None:
                self.points.append(point)
                self.n_points += 1
            self.facts = message.facts
        elif isinstance(message, relay_pipe.Note):
            self._note(message.text)
        elif isinstance(message, relay_pipe.Recording):
            self._directory = message.directory
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
        n_stopped = 0
        while self.is_running:
            gevent.sleep(_LOOK_EVERY_S)
            n_stopped = n_stopped + 1 if self._is_frozen() else 0
            if n_stopped * _LOOK_EVERY_S >= STALL_S:
                self._kill_frozen(f"stopped for {STALL_S:g} s: killed")
            now_gone = set(self._roster) - set(self._present())
            for worker in now_gone - gone:
                self._outgoing.put(relay_pipe.Gone(worker))
            for worker in gone - now_gone:
                self._outgoing.put(relay_pipe.Back(worker))
            gone = now_gone


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 20)
    except OSError:
        return b""
