"""The console script `slobench`. Imports little: the modules of a verb are imported where Ctrl-C is
handled already.

Exit codes: 0 met · 1 missed · 2 usage or scenario error · 3 no verdict · 4 internal error ·
130 interrupted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
from typing import NoReturn

from loadgen import __version__
from loadgen.system import shadowing
from loadgen.system.endings import ending_signals

_LEAST_BYTES = 512 << 20
"""Of address space; a run needs 550 MB. With less than 256, OpenBLAS ends the process with exit
code 1 while it is loaded; with less than 400, CPython 3.11 sometimes repeats a MemoryError for ever
or ends by a segmentation fault."""
_NO_MEMORY = b"slobench: out of memory: raise the limit (ulimit -v), or send less\n"
_OBJECTS = 200_000  # between two collections: importing creates half as many, and all of them stay


def main() -> None:
    """Runs a command line; every failure is one line and an exit code, never a bare traceback."""
    for number in ending_signals():  # SIGINT also in a script's background, which ignores it
        signal.signal(number, signal.default_int_handler)
    gc.set_threshold(_OBJECTS)
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most_bytes != resource.RLIM_INFINITY:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # it reserves memory for each thread
        if most_bytes < _LEAST_BYTES:
            _leave_without_memory()
    if (found := shadowing.problem()) is not None:
        raise SystemExit(f"slobench: {found}")
    try:
        from loadgen.cli import standard_streams

        standard_streams.install()
        from loadgen.cli import exit_codes

        if sys.argv[1:] == ["--version"]:  # without typer, 40 ms
            exit_codes.leave(exit_codes.guarded(_print_version, os.environ))
        from loadgen.cli.app import app
        from loadgen.drive.prefork import ForkedShard

        forked = None
        try:
            code = exit_codes.guarded(app, os.environ, sys.argv[1:])
        except ForkedShard as copy:
            forked = copy.with_traceback(None)
    except MemoryError:  # before there was anything to clean up
        _leave_without_memory()
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            os.write(2, b"slobench: interrupted\n")
        os._exit(130)
    if forked is not None:
        from loadgen.drive import shard

        with forked as progress_fd:
            shard.main(progress_fd)
    exit_codes.leave(code)


def _print_version() -> None:
    sys.stdout.write(f"slobench {__version__}\n")


def _leave_without_memory() -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, _NO_MEMORY)
    os._exit(3)
