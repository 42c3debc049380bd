"""A process that decodes the full parts of a shard: while the run goes on if a core is idle, else
in parallel with the shard after it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from loadgen.drive.part_decoder import PartDecoder, claim


class DecoderProcess:
    """A copy of this process (fork) that decodes `.raw` files.

    With `is_idle` it runs only when its core is otherwise idle (SCHED_IDLE), until `finish`, and
    not on the core that this process is on when it starts. It ends when the pipe from this process
    closes, so no crash leaves it behind. Only for a process with a single thread, on Linux: see
    `may_fork`.
    """

    def __init__(
        self, decoder: PartDecoder, advance: Callable[[int], None], *, is_idle: bool
    ) -> None:
        paths_fd, self._fd = os.pipe()
        self._cores = os.sched_getaffinity(0)
        own_core = ctypes.CDLL(None).sched_getcpu()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._fd)
            if is_idle:
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                os.sched_setaffinity(0, self._cores - {own_core} or self._cores)
            _decode_files(paths_fd, decoder, advance)
        os.close(paths_fd)
        os.set_blocking(self._fd, False)

    def decode(self, path: Path, epoch_ns: int) -> None:
        """Hands a file over. A process that is far behind takes no more; the caller decodes those
        files itself."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fd, b"%d %b\n" % (epoch_ns, os.fsencode(path)))

    def finish(self) -> float:
        """Waits until the process has decoded its present file; returns its CPU time, seconds."""
        os.close(self._fd)
        with contextlib.suppress(OSError):  # has ended, or may not be given back its priority
            os.sched_setaffinity(self.pid, self._cores)
            os.sched_setscheduler(self.pid, os.SCHED_OTHER, os.sched_param(0))
        _, _, used = os.wait4(self.pid, 0)
        return used.ru_utime + used.ru_stime


def _decode_files(paths_fd: int, decoder: PartDecoder, advance: Callable[[int], None]) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        gc.disable()  # decoding makes no cycles
        with open(paths_fd, "rb") as lines:
            for line in lines:
                epoch_ns, _, path = line.rstrip(b"\n").partition(b" ")
                if claim(Path(os.fsdecode(path))):
                    decoder.decode_file(Path(os.fsdecode(path)), int(epoch_ns), advance)
        code = 0
    except Exception:  # the process boundary
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
