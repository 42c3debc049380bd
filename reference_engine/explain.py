"""What became of a request and why it waited: an account of it, and the sentence that says so."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from reference_engine.plan import Cause
from reference_engine.sequence import Request

_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Account:
    """What is remembered of a request: its times (s), sizes (tokens) and the causes of its
    waits."""

    request_id: str
    tenant: str
    state: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    n_preemptions: int
    arrived_s: float
    queue_s: float
    ttft_s: float | None
    e2e_s: float | None
    waits: tuple[tuple[Cause, float], ...]

    def sentence(self) -> str:
        """`waited 1.84 s: 1.61 s behind req-17, 0.23 s for token budget`, the longest wait
        first."""
        total_s = sum(seconds for _, seconds in self.waits)
        parts = [
            f"{seconds:.3g} s {cause.why}{' ' + cause.blocker if cause.blocker else ''}"
            for cause, seconds in sorted(self.waits, key=lambda wait: -wait[1])
            if seconds > 0
        ]
        return f"waited {total_s:.3g} s: {', '.join(parts)}" if parts else "did not wait"


def account(request: Request, waits: dict[Cause, float], now_s: float) -> Account:
    """The account of a request as it stands at `now_s`."""
    arrived_s = request.arrived_s
    queued_until_s = next(
        (t for t in (request.scheduled_s, request.finished_s) if t is not None), now_s
    )
    return Account(
        request_id=request.id,
        tenant=request.tenant,
        state=request.state.name,
        input_tokens=request.n_prompt,
        cached_tokens=request.n_cached,
        output_tokens=request.n_output,
        n_preemptions=request.n_preemptions,
        arrived_s=arrived_s,
        queue_s=queued_until_s - arrived_s,
        ttft_s=None if request.first_token_s is None else request.first_token_s - arrived_s,
        e2e_s=None if request.finished_s is None else request.finished_s - arrived_s,
        waits=tuple(waits.items()),
    )


class Accounts:
    """The most recent finished requests, by id; the oldest is forgotten first."""

    def __init__(self, n_kept: int = _KEPT) -> None:
        self._n_kept = n_kept
        self._by_id: OrderedDict[str, Account] = OrderedDict()

    def add(self, entry: Account) -> None:
        self._by_id.pop(entry.request_id, None)
        self._by_id[entry.request_id] = entry
        while len(self._by_id) > self._n_kept:
            self._by_id.popitem(last=False)

    def get(self, request_id: str) -> Account | None:
        return self._by_id.get(request_id)
