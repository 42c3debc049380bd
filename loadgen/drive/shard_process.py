"""A load-generating process as the controlling one sees it: its pipes, its log, its last words."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from loadgen.drive.prefork import PreforkedProcess, may_fork

_LAST_WORDS_S = 10.0
_TAIL_BYTES = 1 << 16  # more than any last line


def _new_process(log_fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "loadgen.drive.shard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log_fd,
        bufsize=0,
        process_group=0,  # Ctrl-C is the parent's to interpret
    )


class ShardProcess:
    """Started on creation; waits for its task on `stdin`, answers on `stdout`. `log_fd` is open for
    reading, too, and is closed by `end`."""

    def __init__(
        self,
        log_fd: int,
        start: Callable[[int], subprocess.Popen[bytes] | PreforkedProcess] = _new_process,
    ) -> None:
        self._log_fd = log_fd
        self._kept_as: Path | None = None
        self._process = start(log_fd)
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
        """What it says is to be found there once it has ended, or `last_words` were asked for."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._kept_as = path

    def kill(self) -> None:
        self._process.kill()

    def last_words(self) -> str:
        """Its exit status and the last line of its log."""
        try:
            code = self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return "it is still running but says nothing"
        size = os.fstat(self._log_fd).st_size
        tail = os.pread(self._log_fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        said = tail.decode(errors="replace").strip()
        return f"exit status {code}; {said.splitlines()[-1] if said else 'nothing in its log'}"

    def end(self, patience_s: float = 2.0) -> None:
        """Close its pipes, which ends it, and wait; one that does not end is killed. Raises OSError
        where its log cannot be kept, and has ended it then, too."""
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with open(self._log_fd, "rb") as log:
            if self._kept_as is not None:
                log.seek(0)
                with self._kept_as.open("wb") as kept:
                    shutil.copyfileobj(log, kept)


class PreforkedShard:
    """A load-generating process started before its run is planned; the first run that takes it has
    it. A context manager, which ends a process that no run took.

    With `forks` it is a copy of this process where that is possible, and ready at once; the caller
    must then be inside a `main` that catches ForkedShard. No process is started on systems other
    than Linux: its log is held in memory (memfd) until there is a directory for it.
    """

    def __init__(self, *, is_wanted: bool = True, forks: bool = False) -> None:
        self._process: ShardProcess | None = None
        if is_wanted and sys.platform == "linux":
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
        """The process, once."""
        process, self._process = self._process, None
        return process
