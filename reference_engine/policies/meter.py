"""Output tokens per tenant and step, without looking at every request in every step."""

from __future__ import annotations

from collections import Counter

from reference_engine.state.plan import View
from reference_engine.state.sequence import Request


class OutputTokenMeter:
    """Counts that every decoding request writes one token a step, and puts right at each one's end
    what it counted wrongly because a request was held or its step was cut."""

    def __init__(self) -> None:
        self._reading: dict[str, Request] = {}
        self._n_before: dict[str, int] = {}  # output tokens at the start, of those reading
        self._decoding: dict[str, int] = {}  # output tokens counted, less steps counted
        self._n_decoding: Counter[str] = Counter()  # by tenant
        self._n_steps = 0

    def start(self, request: Request) -> None:
        """It may begin to run."""
        self._reading[request.id] = request
        self._n_before[request.id] = request.n_output

    def stop(self, request: Request) -> int:
        """It runs no more: tokens it wrote and that were not counted, or minus those counted and
        not written."""
        if self._reading.pop(request.id, None) is not None:
            return request.n_output - self._n_before.pop(request.id)
        counted = self._decoding.pop(request.id, None)
        if counted is None:
            return 0
        self._n_decoding[request.tenant] -= 1
        if not self._n_decoding[request.tenant]:
            del self._n_decoding[request.tenant]
        return request.n_output - counted - self._n_steps

    def read(self, view: View) -> Counter[str]:
        """At the end of a step: tokens that the requests of each tenant wrote in it."""
        self._n_steps += 1
        written = Counter(self._n_decoding)
        for request in [other for other in self._reading.values() if view.is_decoding(other.id)]:
            del self._reading[request.id]
            written[request.tenant] += request.n_output - self._n_before.pop(request.id)
            self._decoding[request.id] = request.n_output - self._n_steps
            self._n_decoding[request.tenant] += 1
        return written
