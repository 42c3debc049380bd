"""A run of the GPU suite: the device, the time limits, and the results so far."""

from __future__ import annotations

import faulthandler
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from reference_engine.kernels.ops import Ops, ops
from rig.gpu_ceilings import Ceilings, Place
from rig.gpu_results import Results

_REPEAT_S = 30.0  # time for interrupted code to end its own processes
_GRACE_S = 60.0


class BudgetExceeded(BaseException):
    """The time is over. Not an Exception, so that no handler in the running code takes it for a
    failure of its own and continues."""


class Budget:
    """Seconds from now on that the parts of a suite share; may be infinite."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    @contextmanager
    def limited(self, at_most_s: float) -> Iterator[None]:
        """Raises BudgetExceeded in the block when `at_most_s` or the budget is over, also out of a
        wait, and every 30 s again. If the block does not react, such as a kernel that never ends,
        the process exits 60 s later with its stack on stderr. Main thread only."""
        seconds = min(at_most_s, self.left_s)
        if seconds == float("inf"):
            yield
            return

        def interrupt(number: int, frame: object) -> None:
            raise BudgetExceeded(f"interrupted after {seconds:.0f} s")

        earlier_handler = signal.signal(signal.SIGALRM, interrupt)
        earlier_timer = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), _REPEAT_S)
        faulthandler.dump_traceback_later(seconds + _GRACE_S, exit=True, file=2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, *earlier_timer)
            signal.signal(signal.SIGALRM, earlier_handler)


@dataclass
class Session:
    """The argument of every part of the suite. `logs` is the folder for the parts' own files."""

    place: Place
    is_long: bool
    logs: Path
    results: Results
    budget: Budget
    top: Ceilings = field(default_factory=lambda: Ceilings(float("nan"), float("nan")))

    @property
    def is_rehearsal(self) -> bool:
        """Whether there is no GPU: nothing is compared with a goal or written to disk."""
        return self.place.cuda is None

    @property
    def is_small(self) -> bool:
        return self.place.scale > 1

    def shape(self, name: str) -> str:
        return "nano" if self.is_small else name

    def ops(self) -> Ops:
        return ops("triton" if self.place.is_gpu else "plain")

    def run(self, name: str, part: Callable[[Session], None], at_most_s: float) -> None:
        """Run a part. If it raises or takes too long, that is recorded and the next part can run: a
        GPU is often available for a limited time, and the other parts are still useful."""
        results = self.results
        if self.budget.left_s <= 0:
            over_s = -self.budget.left_s
            results.add_failure(
                name,
                f"not started: the budget of {self.budget.seconds:g} s was over {over_s:.0f} s ago",
            )
            return
        print(f"\n== {name}", flush=True)
        began_s = time.monotonic()
        results.write()
        try:
            with self.budget.limited(float("inf") if self.is_long else at_most_s):
                part(self)
        except BudgetExceeded as error:
            print(f"   {error}", flush=True)
            results.failures[name] = str(error)
        except Exception as error:  # the boundary of a part: recorded, printed, and exit code 1
            traceback.print_exc()
            results.failures[name] = f"{type(error).__name__}: {error}"
        results.seconds[name] = time.monotonic() - began_s
        results.write()
        self.place.release_memory()
        print(f"   {results.seconds[name]:.1f} s", flush=True)
