"""The console script. Light: what a verb needs is imported where an interrupt is heard already.

Exit codes: 0 met · 1 missed · 2 usage or scenario error · 3 no verdict · 4 internal error ·
130 interrupted.
"""

from __future__ import annotations

import gc
import os
import signal

_OBJECTS = 200_000  # between two collections: importing makes half of that, and it all stays


def main() -> None:
    """Every way to fail is a line and an exit code, never a bare traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):  # in a script's background, too, Ctrl-C is heard
        signal.signal(number, signal.default_int_handler)  # clean up, say so
    gc.set_threshold(_OBJECTS)
    try:
        from loadgen.cli import exit_codes
        from loadgen.cli.app import app

        code = exit_codes.guarded(app, os.environ)
    except KeyboardInterrupt:  # before there was anything to clean up
        os.write(2, b"slobench: interrupted\n")
        os._exit(130)
    exit_codes.leave(code)
