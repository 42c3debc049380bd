"""Importing what a run will need, while its preflight waits for the server's answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from typing import Any

# In the order in which they are needed: before the first request, while it runs, after it. In
# pieces, for an import that has begun when the preflight ends delays the first request.
_MODULES = (
    "loadgen.run.recording",
    "pyarrow.parquet",
    "rich.live",
    "loadgen.measure.aggregate",
    "jinja2",
    "reports.run.page",
    "loadgen.run.conclude",
    "reports.run.console",
)


class Preload:
    """Imports in the calling thread, one module after another, until the probing in another thread
    has ended; what is left then is imported where it is used.

    Importing holds the interpreter for tens of milliseconds at a time, so nothing begins before
    `may_begin` was called: by then the probe has timed all that it times.
    """

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        self._first = first
        self._go = threading.Event()

    def may_begin(self) -> None:
        self._go.set()

    def during(self, probing: Future[Any]) -> None:
        """`first` and the imports, at most until `probing` is done."""
        probing.add_done_callback(lambda _: self._go.set())
        self._go.wait()
        if not probing.done():
            self._first()
        for module in _MODULES:
            if probing.done():
                return
            import_module(module)
