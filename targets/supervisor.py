"""The supervisor process: it stands between slobench and a server that slobench launched, ends the
server with all its descendants, also if slobench was killed, and collects the exit code.

It reads a JSON line from stdin (command, env, cwd, log, stop_signal, stop_timeout_s) and runs the
command in a session of its own. When stdin closes, or on SIGTERM or SIGHUP, it stops the server:
the signal, then SIGKILL. It writes `PID n` to stdout, and at the end `EXIT code` (negative: the
number of a signal) or `FAILED reason`.

On Linux it is the reaper of every descendant and so finds processes that forked twice or made a
session of their own. A leader that ends with 0 while descendants live has handed over to them (a
daemon); they are the server from then on. Standard library only: it starts in 30 ms.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TypedDict

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2), Linux
_POLL_S = 0.05


class Order(TypedDict):
    """The first line on stdin, as JSON: the server's command and how to stop it."""

    command: list[str]
    env: dict[str, str]
    cwd: str | None
    log: str
    stop_signal: int
    stop_timeout_s: float


class SupervisedServer:
    """A server and its descendants. `code` is the leader's exit code once it has ended."""

    def __init__(self, order: Order) -> None:
        self._signal = int(order["stop_signal"])
        self._timeout_s = float(order["stop_timeout_s"])
        self.code: int | None = None
        with Path(order["log"]).open("ab") as log:
            self._leader = subprocess.Popen(
                order["command"],
                env=order["env"],
                cwd=order["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._leader.pid

    def reap(self) -> bool:
        """Collect the processes that have ended; False once none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._leader.pid:
                self.code = self._leader.returncode = os.waitstatus_to_exitcode(status)

    def has_ended(self) -> bool:
        """Whether no process is left, or the leader failed."""
        return not self.reap() or self.code not in (None, 0)

    def stop(self) -> None:
        """Send the signal; after the timeout, SIGKILL until no process is left, zombies
        included."""
        self._signal_all(self._signal)
        end_s = time.monotonic() + self._timeout_s
        while self.reap() and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        while self.reap():
            self._signal_all(signal.SIGKILL)
            time.sleep(_POLL_S)

    def _signal_all(self, number: int) -> None:
        """Signal the leader's group, and the descendants that have left it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._leader.pid, number)
        for pid in _descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) != self._leader.pid:
                    os.kill(pid, number)


def _descendants(ancestor: int) -> list[int]:
    """The process ids of all descendants, from /proc; empty on a system without /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it ended in the meantime
            fields = entry.read_text().rsplit(")", 1)[1].split()
            parents[int(entry.parent.name)] = int(fields[1])
    descendants, generation = list[int](), {ancestor}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        descendants += generation
    return descendants


def _adopt_orphans() -> None:
    """Orphaned descendants become children of this process instead of init's, on systems that
    support it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _read_order() -> Order:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 65536)
        if not piece:
            raise SystemExit(2)
        line += piece
    order: Order = json.loads(line)
    return order


def _report(text: str) -> None:
    with suppress(BrokenPipeError):  # slobench has ended
        os.write(1, f"{text}\n".encode())


def main() -> int:
    """Run the server until it or slobench ends; 1 if the server could not be started, else 0."""
    is_terminated = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal is_terminated
        is_terminated = True

    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, terminate)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    order = _read_order()
    _adopt_orphans()
    try:
        server = SupervisedServer(order)
    except OSError as error:
        _report(f"FAILED {error.strerror or error}: {error.filename or order['command'][0]}")
        return 1
    _report(f"PID {server.pid}")
    while not is_terminated and not server.has_ended():
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if 0 in ready and not os.read(0, 4096):
            break
    if server.code not in (None, 0):
        _report(f"EXIT {server.code}")  # at once: its descendants may take their time
    server.stop()
    _report(f"EXIT {server.code if server.code is not None else 0}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
