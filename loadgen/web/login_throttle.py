"""A limit on guesses at the page's password."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

_FREE = 3
_LONGEST_S = 300.0
_MOST_CALLERS = 1000


class LoginThrottle:
    """After three failed attempts, a caller waits 2, 4, 8 … 300 s between attempts. At most 1000
    callers are remembered; the caller with the oldest failure is dropped first."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def wait_s(self, caller: str) -> float:
        """Seconds until the caller's next attempt counts; 0 if it counts now."""
        n, last_s = self._failures.get(caller, (0, 0.0))
        if n < _FREE:
            return 0.0
        return max(0.0, last_s + min(_LONGEST_S, 2.0 ** min(n - _FREE + 1, 30)) - self._now_s())

    def failed(self, caller: str) -> None:
        n, _ = self._failures.pop(caller, (0, 0.0))
        self._failures[caller] = n + 1, self._now_s()
        if len(self._failures) > _MOST_CALLERS:
            self._failures.popitem(last=False)

    def passed(self, caller: str) -> None:
        self._failures.pop(caller, None)
