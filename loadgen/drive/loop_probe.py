"""How late a read of this event loop can be, looked at a hundred times a second while measuring."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from loadgen.self_report import LoopLag, StallsReport
from loadgen.timer import Timer

PERIOD_S = 0.01
STALL_S = 0.005  # a probe later than this is a stall of the client's
_MOST_STALLS = 10_000


class LoopProbe:
    """An alarm every 10 ms that takes its turn among the sockets of the loop: what it is late by, a
    read that became due with it is, too. Instants are those of `timer`.

    A stall lasts from the last probe that came on time to the next one that does: only those two
    say that the loop was alive. `look` is called by each probe.
    """

    def __init__(self, timer: Timer, look: Callable[[], None] = lambda: None) -> None:
        self._timer, self._look = timer, look
        self._lags_s: list[float] = []
        self._stalls: list[list[float]] = []  # [from, until, the latest probe's lag], by time
        self._is_stalled = self._is_over = False
        self._due_s = self._alive_s = 0.0

    def start(self) -> None:
        self._alive_s = self._timer.now_s()
        self._due_s = self._alive_s + PERIOD_S
        self._timer.arm(self._due_s, self._probe)

    def stop(self) -> None:
        """A stall that goes on is over with the measuring."""
        self._is_over = True
        if self._is_stalled:
            self._stalls[-1][1] = self._timer.now_s()

    def summary(self) -> tuple[LoopLag, StallsReport]:
        lags = np.sort(np.array(self._lags_s)) if self._lags_s else np.zeros(1)

        def quantile(q: float) -> float:
            return float(lags[max(0, int(np.ceil(q * len(lags))) - 1)])

        lag = LoopLag(n=len(self._lags_s), p50=quantile(0.5), p99=quantile(0.99), max=quantile(1.0))
        spans_s = tuple(
            (round(from_s, 6), round(until_s, 6), round(lag_s, 6))
            for from_s, until_s, lag_s in self._stalls
        )
        return lag, StallsReport(over_s=STALL_S, spans_s=spans_s)

    def _probe(self) -> None:
        """A stall is as many late probes as would have run in it: one long stall must weigh what
        it lasted, or the probe would omit what it is there to see."""
        if self._is_over:
            return
        now_s = self._timer.now_s()
        lag_s = max(0.0, now_s - self._due_s)
        self._note(now_s, lag_s)
        self._look()
        self._lags_s.append(lag_s)
        while lag_s > PERIOD_S:
            lag_s -= PERIOD_S
            self._lags_s.append(lag_s)
        self._due_s = max(self._due_s, now_s - PERIOD_S) + PERIOD_S
        self._timer.arm(self._due_s, self._probe)

    def _note(self, now_s: float, lag_s: float) -> None:
        if lag_s > STALL_S:
            # Past the bound all of the rest is one stall: nobody trusts such a run.
            if self._is_stalled or len(self._stalls) == _MOST_STALLS:
                self._stalls[-1][2] = max(self._stalls[-1][2], lag_s)
            else:
                self._stalls.append([self._alive_s, now_s, lag_s])
            self._is_stalled = True
            return
        if self._is_stalled:
            self._stalls[-1][1] = now_s
            self._is_stalled = False
        self._alive_s = now_s
