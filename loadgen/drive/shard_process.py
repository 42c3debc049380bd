"""Handle of a load-generating process: its pipes, its log, its exit status."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from loadgen.drive.prefork import PreforkedProcess, may_fork
from loadgen.drive.stall_watch import ProgressCounter, WatchedProcess
from loadgen.system.endings import exit_words
from loadgen.system.whole_file import replacing

_EXIT_S = 10.0
_TAIL_BYTES = 1 << 16  # longer than any line


def _new_process(log_fd: int, progress_fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "loadgen.drive.shard", str(progress_fd)],
        pass_fds=[progress_fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log_fd,
        bufsize=0,
        process_group=0,  # Ctrl-C reaches the parent only, which decides
    )


class ShardProcess:
    """A running load-generating process: reads its task from `stdin`, writes messages to `stdout`.
    The constructor starts it. `log_fd` must be readable, too; `end` closes it."""

    def __init__(
        self,
        log_fd: int,
        start: Callable[[int, int], subprocess.Popen[bytes] | PreforkedProcess] = _new_process,
    ) -> None:
        self._log_fd = log_fd
        self._log_copy: Path | None = None
        self._progress = ProgressCounter.create()
        self._process = start(log_fd, self._progress.fd)
        self._watched = WatchedProcess(self._process.pid, self._progress)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin, self.stdout = self._process.stdin, self._process.stdout

    @classmethod
    def logging_to(cls, path: Path) -> ShardProcess:
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))

    @property
    def pid(self) -> int:
        return self._process.pid

    def keep_log(self, path: Path) -> None:
        """Sets the file to which `end` copies the log. Raises OSError if it cannot be created."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._log_copy = path

    def is_stalled(self, now_s: float, most_s: float) -> bool:
        """See `WatchedProcess.is_stalled`."""
        return self._watched.is_stalled(now_s, most_s)

    def is_idle(self, now_s: float) -> bool:
        """See `WatchedProcess.is_idle`."""
        return self._watched.is_idle(now_s)

    def kill(self) -> None:
        self._process.kill()

    def exit_report(self) -> str:
        """The exit status and the last line of the log; waits up to 10 s for the process."""
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return "still running, but silent"
        size = os.fstat(self._log_fd).st_size
        tail = os.pread(self._log_fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = tail.decode(errors="replace").strip().splitlines()
        return f"{exit_words(code)}; {lines[-1] if lines else 'nothing in its log'}"

    def end(self, patience_s: float = 2.0) -> None:
        """Ends the process by closing its pipes; kills it if it has not ended after `patience_s`.
        Raises OSError if the log cannot be copied; the process has ended then, too."""
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._progress.close()
        with open(self._log_fd, "rb") as log:
            if self._log_copy is not None:
                log.seek(0)
                with replacing(self._log_copy) as partial, partial.open("wb") as kept:
                    shutil.copyfileobj(log, kept)


class PreforkedShard:
    """A load-generating process started before its run is planned, so that its imports cost no time
    later. `take` returns it to the first run; the end of the `with` block ends a process not taken.

    With `forks` it is a copy of this process where possible, which has its modules at once; the
    caller must then run inside a `main` that catches ForkedShard. Starts no process unless
    `is_enabled`, nor on systems other than Linux: its log is in memory (memfd) until the run has a
    directory.
    """

    def __init__(self, *, is_enabled: bool = True, forks: bool = False) -> None:
        self._process: ShardProcess | None = None
        if is_enabled and sys.platform == "linux":
            log_fd = os.memfd_create("shard.log")
            start = PreforkedProcess if forks and may_fork() else _new_process
            self._process = ShardProcess(log_fd, start)

    def __enter__(self) -> PreforkedShard:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.end()
            self._process = None

    def take(self) -> ShardProcess | None:
        """The process at the first call, then None."""
        process, self._process = self._process, None
        return process
