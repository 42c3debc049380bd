"""Imports the modules of a run while its preflight waits for the server, and during the run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from typing import Any

# In the order of their use: before the first request, during the run, after it. One at a time: an
# import that is under way when the preflight ends delays the first request.
MODULES = (
    "loadgen.run.recording",
    "loadgen.archive.arrow",
    "rich.live",
    "loadgen.measure.aggregate",
    "numpy.fft",
    "numpy.ma",  # 30 ms, by numpy.unique
    "jinja2",
    "reports.run.page",
    "loadgen.run.conclude",
    "reports.run.console",
)


class Preload:
    """Imports modules in the calling thread until the preflight, in another thread, has ended, and
    one at each `step` of a run. Modules that remain are imported where they are used.

    An import holds the interpreter for tens of milliseconds, which would distort the preflight's
    timings; the imports therefore begin only when the preflight calls `may_begin`.
    """

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        self._first = first
        self._go = threading.Event()
        self._left = deque(MODULES)

    def may_begin(self) -> None:
        self._go.set()

    def during(self, probing: Future[Any]) -> None:
        """Calls `first` and imports, until `probing` is done."""
        probing.add_done_callback(lambda _: self._go.set())
        self._go.wait()
        if not probing.done():
            self._first()
        while self._left and not probing.done():
            self.step()

    def step(self) -> None:
        """Imports the next module, if any is left."""
        if self._left:
            import_module(self._left.popleft())
