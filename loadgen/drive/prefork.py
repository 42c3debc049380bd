"""Fork of this process as a load-generating process, which then has most modules imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from types import TracebackType

from loadgen.system.endings import ending_signals

_BLOCKED = ending_signals()  # until the copy ignores them
_POLL_S = 0.001


def may_fork() -> bool:
    """Whether a copy of this process would work: not with other threads, whose locks would stay
    locked in the copy, and not without standard streams, which the copy's pipes replace."""
    streams = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    return sys.platform == "linux" and threading.active_count() == 1 and None not in streams


class ForkedShard(BaseException):
    """Raised in the copy: unwinds the stack up to `main`, which then generates load:

        except ForkedShard as copy:
            forked = copy
        with forked as progress_fd:
            shard.main(progress_fd)

    The copy thus keeps no file, no signal handler and no caller of the original; the end of the
    block ends the process.
    """

    def __init__(self, streams: tuple[int, int, int], progress_fd: int) -> None:
        super().__init__()
        self._fds = (*streams, progress_fd)

    def __enter__(self) -> int:
        """The descriptor of the progress counter."""
        os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which decides
        for number, fd in enumerate(self._fds):
            os.dup2(fd, number)
        os.closerange(len(self._fds), os.sysconf("SC_OPEN_MAX"))
        sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
        for number in _BLOCKED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)

        return len(self._fds) - 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        code = int(error is not None)
        if isinstance(error, SystemExit):
            code = int(error.code is not None)
            if error.code is not None:
                print(error.code, file=sys.stderr)  # noqa: T201  # as the interpreter does
        elif error is not None:  # the process boundary
            traceback.print_exception(kind, error, trace)
        sys.stderr.flush()
        os._exit(code)


class PreforkedProcess:
    """A copy of this process with the interface of subprocess.Popen; `may_fork` must be true. Its
    log goes to `log_fd`, and it inherits `progress_fd`. In the copy the constructor raises
    ForkedShard."""

    def __init__(self, log_fd: int, progress_fd: int) -> None:
        task_fd, stdin_fd = os.pipe()
        stdout_fd, answer_fd = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            self.pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        if not self.pid:
            raise ForkedShard((task_fd, answer_fd, log_fd), progress_fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(task_fd)
        os.close(answer_fd)
        self.stdin, self.stdout = os.fdopen(stdin_fd, "wb", 0), os.fdopen(stdout_fd, "rb", 0)
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = float("inf")) -> int:
        """The exit status; after a signal minus the signal's number. Raises
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
