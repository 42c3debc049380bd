"""A small process between slobench and a server it launched: it ends the server and everything the
server started, also when slobench itself was killed, and collects how the server ended.

It reads one JSON line on stdin (command, env, cwd, log, stop_signal, stop_timeout_s) and runs the
command in a session of its own. When stdin closes, or on SIGTERM, it stops the whole: the signal,
then SIGKILL. On stdout it writes `PID n`, and at the end `EXIT code` (negative: a signal's number)
or `FAILED reason`.

On Linux it is the reaper of every descendant, so one that forked twice or made a session of its own
is found as well; a leader that ended with 0 while others live on has handed over to them
(a daemon), and they are the server from then on. Standard library only: it starts in 30 ms.
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
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2), Linux
_LOOK_S = 0.05


class Warden:
    """One server and its descendants. `code` is the leader's exit code once it has ended."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._signal = int(order["stop_signal"])
        self._timeout_s = float(order["stop_timeout_s"])
        self.code: int | None = None
        self.is_stopping = False
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
        """Collect whoever has ended; False once nobody is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._leader.pid:
                self.code = self._leader.returncode = os.waitstatus_to_exitcode(status)

    def is_over(self) -> bool:
        """Whether the server has ended: nobody is left, or its leader failed."""
        return not self.reap() or self.code not in (None, 0)

    def stop(self) -> None:
        """The signal, SIGKILL to whoever is left when its time is over, and no zombie."""
        self._signal_all(self._signal)
        end_s = time.monotonic() + self._timeout_s
        while self.reap() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        while self.reap():
            self._signal_all(signal.SIGKILL)
            time.sleep(_LOOK_S)

    def _signal_all(self, number: int) -> None:
        """To the leader's group, and to descendants that have left it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._leader.pid, number)
        for pid in _descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) != self._leader.pid:
                    os.kill(pid, number)


def _descendants(of: int) -> list[int]:
    """Every process below one, by /proc; none where there is no /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it ended while we looked
            fields = entry.read_text().rsplit(")", 1)[1].split()
            parents[int(entry.parent.name)] = int(fields[1])
    found, frontier = list[int](), {of}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found += frontier
    return found


def _adopt_orphans() -> None:
    """Orphaned descendants become our children instead of init's, where the system can do that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _read_order() -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 65536)
        if not piece:
            raise SystemExit(2)
        line += piece
    order: dict[str, Any] = json.loads(line)
    return order


def _say(text: str) -> None:
    with suppress(BrokenPipeError):  # nobody listens any more
        os.write(1, f"{text}\n".encode())


def main() -> int:
    """Run the server until it or slobench ends; the exit code says whether it could be started."""
    is_asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True

    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    order = _read_order()
    _adopt_orphans()
    try:
        warden = Warden(order)
    except OSError as error:
        _say(f"FAILED {error.strerror or error}: {error.filename or order['command'][0]}")
        return 1
    _say(f"PID {warden.pid}")
    while not is_asked and not warden.is_over():
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if 0 in ready and not os.read(0, 4096):
            break
    if warden.code not in (None, 0):
        _say(f"EXIT {warden.code}")  # at once: its descendants may take their time
    warden.stop()
    _say(f"EXIT {warden.code if warden.code is not None else 0}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
