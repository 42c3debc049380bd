"""A process that decodes the full parts of a shard: while the run goes on if a core is idle, else
in parallel with the shard after it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from loadgen.archive.part_decoder import PartDecoder, claim
from loadgen.drive.stall_watch import (
    HURRIED_STALL_S,
    WATCH_EVERY_S,
    ProgressCounter,
    WatchedProcess,
)

_PR_SET_PDEATHSIG = 1  # prctl(2)
_POLL_S = 0.001


class DecoderProcess:
    """A copy of this process (fork) that decodes `.raw` files.

    With `is_idle` it runs only when its core is otherwise idle (SCHED_IDLE), until `finish`, and
    not on the core that this process is on when it starts. It ends when the pipe from this process
    closes, and is killed when this process ends, so that it never decodes a file that another
    process has taken over. Only for a process with a single thread, on Linux: see `may_fork`.
    """

    def __init__(self, decoder: PartDecoder, *, is_idle: bool) -> None:
        paths_fd, self._fd = os.pipe()
        self._cores = os.sched_getaffinity(0)
        self._progress = ProgressCounter.create()
        libc, parent = ctypes.CDLL(None), os.getpid()
        own_core = libc.sched_getcpu()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._fd)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            if is_idle:
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                os.sched_setaffinity(0, self._cores - {own_core} or self._cores)
            _decode_files(paths_fd, decoder, self._progress.advance)
        os.close(paths_fd)
        os.set_blocking(self._fd, False)

    def decode(self, path: Path) -> None:
        """Hands a file over. A process that is far behind takes no more; the caller decodes those
        files itself."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fd, os.fsencode(path) + b"\n")

    def finish(self, advance: Callable[[], None] = lambda: None) -> float:
        """Waits until the process has decoded its present file, and calls `advance` meanwhile;
        kills it if it makes no progress. Returns its CPU time, seconds."""
        os.close(self._fd)
        with contextlib.suppress(OSError):  # has ended, or may not be given back its priority
            os.sched_setaffinity(self.pid, self._cores)
            os.sched_setscheduler(self.pid, os.SCHED_OTHER, os.sched_param(0))
        watched, next_look_s = WatchedProcess(self.pid, self._progress), 0.0
        while True:
            pid, _, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self._progress.close()
                return used.ru_utime + used.ru_stime
            if (now_s := time.monotonic()) > next_look_s:
                next_look_s = now_s + WATCH_EVERY_S
                advance()
                if watched.is_stalled(now_s, HURRIED_STALL_S):
                    os.kill(self.pid, signal.SIGKILL)
            time.sleep(_POLL_S)


def _decode_files(paths_fd: int, decoder: PartDecoder, advance: Callable[[int], None]) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        gc.disable()  # decoding makes no cycles
        with open(paths_fd, "rb") as lines:
            for line in lines:
                path = Path(os.fsdecode(line.rstrip(b"\n")))
                if claim(path):
                    decoder.decode_file(path, advance)
        code = 0
    except Exception:  # the process boundary
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
