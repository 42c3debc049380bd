"""The queue as a few numbers: how many short and long prompts wait, and how urgent the worst is."""

from __future__ import annotations

from collections.abc import Iterator

from reference_engine.policies.sorted_queue import Key, SortedQueue
from reference_engine.state.plan import View
from reference_engine.state.sequence import Request

Ranked = tuple[Key, Request]

OK, TIGHT, LATE = range(3)


class QueueState:
    """Waiting requests in order of arrival, short and long ones (from `long_tokens` prompt tokens
    on) apart, and by the instant at which their first token is due. `tight_share` of its TTFT SLO
    left makes one tight."""

    def __init__(self, long_tokens: int, tight_share: float, ttft_slo_s: float) -> None:
        self._long_tokens, self._tight_share = long_tokens, tight_share
        self._ttft_slo_s = ttft_slo_s
        self._all, self._short, self._long, self._due = (
            SortedQueue(),
            SortedQueue(),
            SortedQueue(),
            SortedQueue(),
        )

    @property
    def n_short(self) -> int:
        return len(self._short)

    @property
    def n_long(self) -> int:
        return len(self._long)

    def put(self, request: Request) -> None:
        self.drop(request.id)
        key = (request.arrived_s,)
        self._all.put(request, key)
        (self._long if self.is_long(request) else self._short).put(request, key)
        if request.first_token_s is None:
            self._due.put(request, (request.arrived_s + self._slo_s(request),))

    def drop(self, request_id: str) -> None:
        for line in (self._all, self._short, self._long, self._due):
            line.drop(request_id)

    def is_long(self, request: Request) -> bool:
        return request.n_tokens >= self._long_tokens

    def head(self, view: View) -> Request | None:
        """The first come."""
        first = self._all.first(view)
        return None if first is None else first[1]

    def slack(self, view: View) -> int:
        """Of the request whose first token is due first, a position in `FEATURES["slack"]`."""
        first = self._due.first(view)
        if first is None:
            return OK
        (due_s,), request = first
        left_s = due_s - view.now_s
        if left_s < 0:
            return LATE
        return TIGHT if left_s < self._tight_share * self._slo_s(request) else OK

    def waiting(self, view: View, is_short_first: bool) -> Iterator[Ranked]:
        """Those that wait, with their ranks."""
        if not is_short_first:
            yield from self._all.walk(view)
            return
        for place, line in enumerate((self._short, self._long)):
            for key, request in line.walk(view):
                yield (float(place), *key), request

    def reading(self, view: View, is_short_first: bool) -> list[Ranked]:
        """The running ones that still read their prompt, ranked alike."""
        ranked: list[Ranked] = [
            (
                (float(self.is_long(request)), request.arrived_s)
                if is_short_first
                else (request.arrived_s,),
                request,
            )
            for request in view.prefilling
        ]
        return sorted(ranked, key=lambda entry: entry[0])

    def _slo_s(self, request: Request) -> float:
        return request.ttft_slo_s or self._ttft_slo_s
