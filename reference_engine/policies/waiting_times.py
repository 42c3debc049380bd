"""The time that requests have spent waiting, which stands still while they run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reference_engine.state.sequence import Request


@dataclass(slots=True)
class _Wait:
    """The current wait, or the last if the request runs. All instants in seconds."""

    queued_s: float  # its beginning
    aged_from_s: float  # its beginning, earlier by all waits before it
    n_preemptions: int
    started_s: float | None = None  # its end


class WaitingTimes:
    """Waits of live requests. Call `enter` whenever a request is filed, and `start` with the
    admissions of every plan."""

    __slots__ = ("_waits",)

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}

    def enter(self, request: Request, now_s: float) -> None:
        """Begin a wait: at the arrival, and at each preemption. A request that is filed again for
        another reason (its priority was changed) continues its wait."""
        wait, n_preemptions = self._waits.get(request.id), request.n_preemptions
        if wait is None:
            queued_s = now_s if n_preemptions else request.arrived_s
            self._waits[request.id] = _Wait(queued_s, queued_s, n_preemptions, request.scheduled_s)
        elif wait.n_preemptions < n_preemptions:
            waited_s = self.waited_s(request.id, now_s)
            self._waits[request.id] = _Wait(now_s, now_s - waited_s, n_preemptions)

    def start(self, requests: Iterable[Request], now_s: float) -> None:
        """Requests are admitted. If the core leaves one out, its wait goes on."""
        for request in requests:
            self._waits[request.id].started_s = now_s

    def drop(self, request_id: str) -> None:
        self._waits.pop(request_id, None)

    def queued_s(self, request_id: str) -> float:
        """The instant of the last preemption, or else of the arrival."""
        return self._waits[request_id].queued_s

    def aged_from_s(self, request_id: str) -> float:
        """The arrival of a request that never ran and is as old as this waiting request."""
        return self._waits[request_id].aged_from_s

    def started_s(self, request_id: str, now_s: float) -> float:
        """The last admission of a running request; `now_s` if it is not known."""
        started_s = self._waits[request_id].started_s
        return now_s if started_s is None else started_s

    def waited_s(self, request_id: str, now_s: float) -> float:
        """Seconds that a running request waited, over all its waits."""
        wait = self._waits[request_id]
        started_s = now_s if wait.started_s is None else wait.started_s
        return started_s - wait.aged_from_s

    def is_promoted(
        self, request_id: str, overdue_s: float, now_s: float, duration_s: float
    ) -> bool:
        """Whether a running request was overdue (since `overdue_s`) when it was admitted, which was
        less than `duration_s` ago."""
        started_s = self.started_s(request_id, now_s)
        return overdue_s <= started_s and now_s - started_s < duration_s
