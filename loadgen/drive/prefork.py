"""A load-generating process made by copying this one, which has most of its modules already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import NoReturn

_HELD_BACK = {signal.SIGINT, signal.SIGTERM}  # until the copy no longer handles them as we do
_POLL_S = 0.001


def may_copy() -> bool:
    """A lock that another thread holds stays locked in a copy; and the copy's pipes take the place
    of our standard streams, which have to be there."""
    streams = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    return sys.platform == "linux" and threading.active_count() == 1 and None not in streams


class PreforkedProcess:
    """`loadgen.drive.shard` in a copy of this process, which must be one that `may_copy`; the
    counterpart of a subprocess.Popen. What it logs goes to `log_fd`."""

    def __init__(self, log_fd: int) -> None:
        task_fd, stdin_fd = os.pipe()
        stdout_fd, said_fd = os.pipe()
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        try:
            self.pid = os.fork()
            if not self.pid:
                _generate((task_fd, said_fd, log_fd))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        os.close(task_fd)
        os.close(said_fd)
        self.stdin, self.stdout = os.fdopen(stdin_fd, "wb", 0), os.fdopen(stdout_fd, "rb", 0)
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = float("inf")) -> int:
        """Its exit status, minus the signal's number where one ended it. Raises
        subprocess.TimeoutExpired."""
        deadline_s = time.monotonic() + timeout
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("loadgen.drive.shard", timeout)
            else:
                time.sleep(_POLL_S)
        return self._code


def _generate(streams: tuple[int, int, int]) -> NoReturn:
    """Nothing of what this process was comes back: not its files, handlers, or callers."""
    code = 1
    try:
        os.setpgid(0, 0)  # Ctrl-C is the parent's to interpret
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        os.closerange(len(streams), os.sysconf("SC_OPEN_MAX"))
        sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
        for held_back in _HELD_BACK:
            signal.signal(held_back, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
        from loadgen.drive.shard import main

        main()
        code = 0
    except SystemExit as end:
        code = int(end.code is not None)
        if end.code is not None:
            print(end.code, file=sys.stderr)  # noqa: T201  # as the interpreter does
    except BaseException:  # the process boundary
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
