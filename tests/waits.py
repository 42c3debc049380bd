"""Waiting for a condition of another process or thread, with a deadline instead of a guess."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_POLL_S = 0.02


def wait_until(read: Callable[[], T], within_s: float, problem: str) -> T:
    """The first true value of `read`. Raises AssertionError after `within_s`."""
    deadline_s = time.monotonic() + within_s
    while not (value := read()):
        assert time.monotonic() < deadline_s, f"{problem} within {within_s:g} s: {value!r}"
        select.select([], [], [], _POLL_S)
    return value
