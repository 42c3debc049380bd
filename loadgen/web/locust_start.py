"""Starts Locust: `python -m loadgen.web.locust_start WORDS…`.

Locust imports for a second before slobench's handlers of signals are in place. Until then a signal
ends the process with the exit code of an interrupt, without a traceback; the local workers that
Locust has started end with it.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from loadgen.system.endings import ending_signals

_INTERRUPTED = 130


def main() -> None:
    first = os.getpid()

    def leave(number: int, frame: object) -> NoReturn:
        if os.getpid() == first:  # not a worker, which is a copy of this process
            os.write(2, b"slobench: interrupted\n")
        raise SystemExit(_INTERRUPTED)

    for number in ending_signals():
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())
    from locust.main import main as locust_main

    locust_main()


if __name__ == "__main__":
    main()
