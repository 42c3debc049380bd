"""Accounts of requests: times, sizes and causes of waiting, and a sentence that explains them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from reference_engine.state.plan import Cause, Why
from reference_engine.state.sequence import Request, StartForecast

_MOST_CAUSES = 4  # in a sentence
_NO_FORECAST = StartForecast(0, None, None)
# The words between the seconds and a cause that is a noun: "0.2 s for token budget".
_PREPOSITIONS = {
    Why.step_in_flight: "for the ",
    Why.no_token_budget: "for ",
    Why.no_seq_slot: "for ",
    Why.no_kv_blocks: "for ",
    Why.tenant_budget: "for the ",
    Why.admission_limit: "for the ",
    Why.static_group_running: "for the ",
    Why.kv_transfer: "for the ",
    Why.replica_failed: "for the ",
}
_LINKS = {
    Why.step_in_flight: ", mostly the prompt of",
    Why.static_group_running: ", which waits for",
}


class Blocker(NamedTuple):
    """A request that others waited for."""

    request_id: str
    n_prompt: int
    tenant: str

    def __str__(self) -> str:
        tenant = "" if self.tenant == "default" else f", tenant {self.tenant}"
        n_prompt = f"{self.n_prompt:,}".replace(",", " ")
        return f"{self.request_id} ({n_prompt} prompt tokens{tenant})"


class Account(NamedTuple):
    """The record of a request: its times (s), sizes (tokens), SLOs, and the causes of its waits.

    `tokens_ahead` and `predicted_start_s` are the forecast made at its arrival; `start_error_s` is
    how much later it started. `displaced_s` is the wait that it added to earlier arrivals by being
    admitted before them (summed over them), `pushed_back_s` the wait that others added to it.
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
        """`waited 1.84 s: 1.61 s behind req-17 (16 384 prompt tokens, tenant B), 0.23 s for token
        budget`, the longest wait first."""
        waits = sorted((w for w in self.waits if w[1] > 0), key=lambda wait: -wait[1])
        if not waits:
            return "did not wait"
        parts = [
            f"{seconds:.3g} s {self._reason(cause)}" for cause, seconds in waits[:_MOST_CAUSES]
        ]
        if len(waits) > _MOST_CAUSES:
            others_s = sum(seconds for _, seconds in waits[_MOST_CAUSES:])
            parts.append(f"{others_s:.3g} s for {len(waits) - _MOST_CAUSES} other causes")
        total_s = sum(seconds for _, seconds in waits)
        return f"waited {total_s:.3g} s: {', '.join(parts)}"

    def _reason(self, cause: Cause) -> str:
        by_id = {blocker.request_id: str(blocker) for blocker in self.blockers}
        reason = f"{_PREPOSITIONS.get(cause.why, '')}{cause.why}"
        if not cause.blocker:
            return reason
        return f"{reason}{_LINKS.get(cause.why, '')} {by_id.get(cause.blocker, cause.blocker)}"


def account(
    request: Request,
    waits: Mapping[Cause, float],
    now_s: float,
    blockers: Mapping[str, Blocker],
    pushed_back_s: float,
) -> Account:
    """The account of a request as of `now_s`. `blockers` describes the requests that the causes in
    `waits` name, as far as they are remembered."""
    arrived_s, forecast = request.arrived_s, request.forecast or _NO_FORECAST
    instants_s = (request.scheduled_s, request.finished_s, now_s)
    left_queue_s = next(instant_s for instant_s in instants_s if instant_s is not None)
    first_s, last_s, tpot_s = request.first_token_s, request.finished_s, None
    if first_s is not None and last_s is not None and request.n_output >= 2:
        tpot_s = (last_s - first_s) / (request.n_output - 1)
    names = {cause.blocker: None for cause in waits}  # each once, in their order
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
        queue_s=left_queue_s - arrived_s,
        ttft_s=_duration(arrived_s, first_s),
        tpot_s=tpot_s,
        e2e_s=_duration(arrived_s, last_s),
        ttft_slo_s=request.ttft_slo_s,
        tpot_slo_s=request.tpot_slo_s,
        deadline_s=request.deadline_s,
        tokens_ahead=None if request.forecast is None else forecast.tokens_ahead,
        predicted_start_s=forecast.start_s,
        start_error_s=_duration(forecast.start_s, request.scheduled_s),
        n_displaced=request.n_displaced,
        displaced_s=request.displaced_s,
        pushed_back_s=pushed_back_s,
        waits=tuple(waits.items()),
        blockers=tuple(blockers[name] for name in names if name in blockers),
    )


def _duration(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


T = TypeVar("T")


class Recent(OrderedDict[str, T]):
    """The `n_kept` entries added last, by id."""

    def __init__(self, n_kept: int) -> None:
        super().__init__()
        self._n_kept = n_kept

    def add(self, key: str, entry: T) -> None:
        self.pop(key, None)
        self[key] = entry
        while len(self) > self._n_kept:
            self.popitem(last=False)
