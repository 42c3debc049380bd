"""When a run is ended early because going on would only measure a broken or overrun server."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.drive.saturation import Saturation

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


@dataclass
class StopRules:
    """The rules of one run; None where a scenario does without."""

    error_rate: ErrorRate | None = None
    saturation: Saturation | None = None

    def reason(
        self,
        now_s: float,
        *,
        n_released: int,
        n_ended: int,
        n_failed: int,
        ttft_s: Sequence[float] = (),
        e2e_s: Sequence[float] = (),
    ) -> str | None:
        """Why to stop now, or None. Counts are running totals, `ttft_s` and `e2e_s` those of the
        answers since the last call; requests that were cancelled on purpose have not failed."""
        why = None
        if self.error_rate is not None:
            why = self.error_rate.reason(now_s, n_ended, n_failed)
        if self.saturation is not None:
            piled_up = self.saturation.reason(now_s, n_released, n_ended, ttft_s, e2e_s)
            why = why or piled_up
        return why


def stop_rules(error_rate: float, over_s: float, saturated_s: float | None) -> StopRules:
    """The rules of a scenario's `stop_when`."""
    saturation = None if saturated_s is None else Saturation(saturated_s)
    return StopRules(ErrorRate(error_rate, over_s), saturation)
