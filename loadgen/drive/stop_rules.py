"""When a run is ended early because going on would only measure a broken server."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_AT_LEAST = 10  # endings in the window before a share of them means anything


@dataclass
class ErrorRate:
    """Stops when more than `limit` of the requests that ended in the last `over_s` had failed.

    Judged once a whole `over_s` has passed and at least ten requests ended in it. Feed it running
    totals; they may come from several shards, summed.
    """

    limit: float
    over_s: float
    _history: deque[tuple[float, int, int]] = field(default_factory=lambda: deque([(0.0, 0, 0)]))

    def reason(self, now_s: float, n_ended: int, n_failed: int) -> str | None:
        """Why to stop now, or None."""
        self._history.append((now_s, n_ended, n_failed))
        while len(self._history) > 2 and self._history[1][0] <= now_s - self.over_s:
            self._history.popleft()
        then_s, ended_then, failed_then = self._history[0]
        n, failed = n_ended - ended_then, n_failed - failed_then
        if now_s - then_s < self.over_s or n < _AT_LEAST or failed <= self.limit * n:
            return None
        return (
            f"{failed} of {n} requests failed in the last {self.over_s:g} s "
            f"(stop_when.error_rate {self.limit:.0%})"
        )
