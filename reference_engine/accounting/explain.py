"""What became of a request and why it waited: an account of it, and the sentence that says so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reference_engine.state.plan import Cause, Why
from reference_engine.state.sequence import Request, StartForecast

_KEPT = 1024
_N_TOLD = 4  # causes in a sentence
_UNTOLD = StartForecast(0, None, None)


class Blocker(NamedTuple):
    """A request that others waited for."""

    request_id: str
    n_prompt: int
    tenant: str

    def __str__(self) -> str:
        tenant = "" if self.tenant == "default" else f", tenant {self.tenant}"
        return f"{self.request_id} ({_grouped(self.n_prompt)} prompt tokens{tenant})"


class Account(NamedTuple):
    """What is remembered of a request: its times (s), sizes (tokens), promises, and the causes of
    its waits.

    `tokens_ahead` and `predicted_start_s` were said at its arrival; `start_error_s` is how much
    later it started. `displaced_s` is what it cost others that came before it and were let in after
    it (summed over them), `pushed_back_s` what others cost it.
    """

    request_id: str
    tenant: str
    state: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int
    n_preemptions: int
    arrived_s: float
    queue_s: float
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    deadline_s: float | None
    tokens_ahead: int | None
    predicted_start_s: float | None
    start_error_s: float | None
    n_displaced: int
    displaced_s: float
    pushed_back_s: float
    waits: tuple[tuple[Cause, float], ...]
    blockers: tuple[Blocker, ...]

    def sentence(self) -> str:
        """`waited 1.84 s: 1.61 s behind req-17 (16 384 prompt tokens, tenant B), 0.23 s token
        budget`, the longest wait first."""
        waits = sorted((w for w in self.waits if w[1] > 0), key=lambda wait: -wait[1])
        if not waits:
            return "did not wait"
        parts = [f"{seconds:.3g} s {self._reason(cause)}" for cause, seconds in waits[:_N_TOLD]]
        if len(waits) > _N_TOLD:
            others_s = sum(seconds for _, seconds in waits[_N_TOLD:])
            parts.append(f"{others_s:.3g} s {len(waits) - _N_TOLD} other causes")
        total_s = sum(seconds for _, seconds in waits)
        return f"waited {total_s:.3g} s: {', '.join(parts)}"

    def _reason(self, cause: Cause) -> str:
        known = {blocker.request_id: str(blocker) for blocker in self.blockers}
        blocker = known.get(cause.blocker, cause.blocker)
        if not blocker:
            return str(cause.why)
        link = ", the prompt of" if cause.why is Why.step_in_flight else ""
        return f"{cause.why}{link} {blocker}"


def account(
    request: Request,
    waits: Mapping[Cause, float],
    now_s: float,
    known: Mapping[str, Blocker],
    pushed_back_s: float | None = None,
) -> Account:
    """The account of a request as it stands at `now_s`; `known` are the blockers there may be."""
    arrived_s, forecast = request.arrived_s, request.forecast or _UNTOLD
    predicted_s, scheduled_s = forecast.start_s, request.scheduled_s
    queued_until_s = now_s if request.finished_s is None else request.finished_s
    if scheduled_s is not None:
        queued_until_s = scheduled_s
    late_s = None
    if predicted_s is not None and scheduled_s is not None:
        late_s = scheduled_s - predicted_s
    return Account(
        request_id=request.id,
        tenant=request.tenant,
        state=request.state.name,
        input_tokens=request.n_prompt,
        cached_tokens=request.n_cached,
        output_tokens=request.n_output,
        max_tokens=request.max_tokens,
        priority=request.priority,
        n_preemptions=request.n_preemptions,
        arrived_s=arrived_s,
        queue_s=queued_until_s - arrived_s,
        ttft_s=None if request.first_token_s is None else request.first_token_s - arrived_s,
        tpot_s=_tpot_s(request),
        e2e_s=None if request.finished_s is None else request.finished_s - arrived_s,
        ttft_slo_s=request.ttft_slo_s,
        tpot_slo_s=request.tpot_slo_s,
        deadline_s=request.deadline_s,
        tokens_ahead=None if request.forecast is None else forecast.tokens_ahead,
        predicted_start_s=predicted_s,
        start_error_s=late_s,
        n_displaced=request.n_displaced,
        displaced_s=request.displaced_s,
        pushed_back_s=request.pushed_back_s if pushed_back_s is None else pushed_back_s,
        waits=tuple(waits.items()),
        blockers=tuple(known[name] for name in {c.blocker: None for c in waits} if name in known),
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

    def __iter__(self) -> Iterator[Account]:
        """The oldest first."""
        return iter(self._by_id.values())


class Blockers:
    """Requests that were named as somebody's blocker lately; the oldest is forgotten first."""

    def __init__(self, n_kept: int = 4 * _KEPT) -> None:
        self._n_kept = n_kept
        self.known: OrderedDict[str, Blocker] = OrderedDict()

    def add(self, request: Request) -> None:
        self.known[request.id] = Blocker(request.id, request.n_prompt, request.tenant)
        while len(self.known) > self._n_kept:
            self.known.popitem(last=False)


def _tpot_s(request: Request) -> float | None:
    """(last − first token) / (tokens − 1); None before there are two and an end."""
    first_s, last_s = request.first_token_s, request.finished_s
    if first_s is None or last_s is None or request.n_output < 2:
        return None
    return (last_s - first_s) / (request.n_output - 1)


def _grouped(n: int) -> str:
    return f"{n:,}".replace(",", " ")
