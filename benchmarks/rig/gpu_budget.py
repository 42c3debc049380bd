"""How long a suite may take: what is running when the time is over is interrupted."""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

_AGAIN_S = 30.0  # long enough for what was interrupted to end its own processes
_DEAF_S = 60.0


class Over(BaseException):
    """The time is over. Not an Exception, so that no code under way takes it for a failure of its
    own and goes on."""


class Budget:
    """Seconds from now on, which parts of a suite spend one after the other; infinite ones last."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    @contextmanager
    def watched(self, at_most_s: float) -> Iterator[None]:
        """Raises Over in the block when `at_most_s` or the budget is over, also out of a wait, and
        every 30 s again. A block that hears no signal, such as a kernel that never ends, is ended
        with the process 60 s later, its stack on stderr. Main thread only."""
        seconds = min(at_most_s, self.left_s)
        if seconds == float("inf"):
            yield
            return

        def interrupt(number: int, frame: object) -> None:
            raise Over(f"interrupted after {seconds:.0f} s")

        before = signal.signal(signal.SIGALRM, interrupt)
        others = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), _AGAIN_S)
        faulthandler.dump_traceback_later(seconds + _DEAF_S, exit=True, file=2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, *others)
            signal.signal(signal.SIGALRM, before)
