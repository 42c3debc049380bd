"""Open-loop traffic on the step core in C: the plan of a run as arrays, and the tables that
`virtual_client` writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.drive.dispatch import rows_by_time
from loadgen.errors import UsageError
from loadgen.manifest.sections import Ended
from loadgen.records import (
    CHUNKS,
    FIRST_PIECE,
    Chunks,
    FinishReason,
    Names,
    Requests,
    Status,
    TokenSource,
    empty_requests,
    own_limits,
)
from loadgen.run.run_options import Early
from loadgen.run.stop_rules import stop_rules
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan
from reference_engine.accounting.ledger import S_PER_TICK
from reference_engine.core.core import EngineState
from reference_engine.state.plan import AdmissionError, check_admission
from reference_engine.step_core.library import WHYS, Outcome, SharedTexts, StepCore, Traffic
from reference_engine.step_core.library import Status as CoreStatus

_STATUS = {
    Outcome.not_released: Status.not_released,
    Outcome.in_flight: Status.not_released,
    Outcome.length: Status.ok,
    Outcome.stop: Status.ok,
    Outcome.refused: Status.http_error,
    Outcome.timed_out: Status.timeout,
    Outcome.cancelled: Status.cancelled,
    Outcome.dropped: Status.dropped,
}
_STEPS_A_TURN = 20_000  # some 20 ms
CHECK_S = 0.25  # between two checks of the stop rules
Rows = NDArray[np.int64]


def is_open_loop(scenario: Scenario, plan: Plan) -> bool:
    """Whether all arrivals are known in advance, and requests end by themselves or by the limits
    of all."""
    limits = scenario.limits
    may_wait = limits.when_full == "wait" and len(plan.schedule) > limits.max_concurrency
    return not (
        len(plan.edges)
        or (plan.schedule["n_parents"] > 0).any()
        or plan.schedule["cancel_after_s"].any()
        or may_wait
        or scenario.requests_in_flow is not None
    )


class OpenLoop:
    """A plan whose requests wait for nothing, as a client of the step core; the attributes are
    those of `VirtualClient`, and so are the instants at which `early` and the scenario's own rules
    may end the run."""

    def __init__(
        self,
        scenario: Scenario,
        plan: Plan,
        declared_max_tokens: int | None = None,
        early: Early | None = None,
    ) -> None:
        schedule, limits = plan.schedule, scenario.limits
        self._schedule, self._names = schedule, scenario.names()
        self._order = rows_by_time(schedule)
        planned = schedule[self._order]
        n_output = np.maximum(planned["output_tokens"], 1).astype(np.int32)
        arrived_s = np.ascontiguousarray(planned["scheduled_s"])
        self._warmup_s = scenario.phases.warmup
        is_counted = arrived_s >= self._warmup_s
        self.traffic = Traffic(
            arrived_s,
            np.maximum(planned["input_tokens"], 1).astype(np.int32),
            n_output,
            np.maximum(n_output, declared_max_tokens or 0),
            account=np.where(is_counted, planned["class_id"].astype(np.int32), np.int32(-1)),
            timeout_s=limits.timeout,
            end_s=scenario.horizon_s + scenario.phases.drain,
            max_in_flight=limits.max_concurrency,
            texts=SharedTexts(
                planned["tenant_id"],
                planned["prefix_id"],
                planned["prefix_tokens"],
                first_piece=FIRST_PIECE,
                after=plan.pieces["after"],
                tokens=plan.pieces["tokens"],
            ),
        )
        self._limits, self._drain_s = limits, scenario.phases.drain
        stop, self._early = scenario.stop_when, early
        self._rules = stop_rules(stop.error_rate, stop.over, stop.saturated) if stop else None
        self._next_check_s = 0.0
        self._own_slo_s = own_limits(schedule)
        self._core: StepCore | None = None
        self.ended: tuple[Ended, str, float | None] = ("completed", "", None)
        self._now_s, self._n_released, self._n_in_flight, self._n_ended = 0.0, 0, 0, 0
        # Of the ended requests.
        self._n_failed = self._n_checked = self._n_shown = self._n_before_stop = 0

    def run(self, core: StepCore, on_turn: Callable[[], None]) -> CoreStatus:
        """Run to the end, with a call of `on_turn` every few milliseconds; `done`, or the reason
        for which the core cannot continue."""
        self._core, status = core, CoreStatus.paused
        if self._rules is not None or self._early is not None:
            core.check_at(self._next_check_s)
        while status in (CoreStatus.paused, CoreStatus.check):
            status = core.run(_STEPS_A_TURN)
            self._now_s, self._n_released = core.now_s, core.n_released
            self._n_in_flight, self._n_ended = core.n_in_flight, core.n_ended
            if status is CoreStatus.check:
                self._next_check_s = self._now_s + CHECK_S
                core.check_at(self._next_check_s)
                self._check(self._now_s)
            on_turn()
        return status

    def stop(self, how: Ended, reason: str, drain_s: float) -> None:
        """Releases no more requests; those in flight have `drain_s` to finish."""
        if self.ended[0] == "completed":
            self.ended = (how, reason, self._now_s)
            self._n_before_stop = self._n_ended
        assert self._core is not None, "only a run that has begun is stopped"
        self._core.stop(drain_s)

    def _check(self, now_s: float) -> None:
        """End the run if the scenario's rules or `early` have a reason."""
        traffic = self.traffic
        rows = traffic.ended[self._n_checked : self._n_ended]
        self._n_checked = self._n_ended
        outcome = traffic.outcome[rows]
        answered = rows[outcome <= Outcome.stop]
        is_failed = (outcome == Outcome.refused) | (outcome == Outcome.timed_out)
        self._n_failed += int(np.count_nonzero(is_failed))
        reason = None
        if self._rules is not None:
            released_s = traffic.arrived_s[answered]
            reason = self._rules.reason(
                now_s,
                n_released=self._n_released,
                n_ended=self._n_ended,
                n_failed=self._n_failed,
                ttft_s=(traffic.first_token_s[answered] - released_s).tolist(),
                e2e_s=(traffic.done_s[answered] - released_s).tolist(),
            )
        if self._early is not None:
            self._early.note(now_s, [self._sample(k) for k in rows.tolist()])
            reason = reason or self._early.reason(now_s, self._n_in_flight)
        if reason is not None:
            self.stop("stopped", reason, self._drain_s)

    def _sample(self, k: int) -> dict[str, Any]:
        """The request as a shard reports it (`drive.live_sample.FIELDS`)."""
        traffic, row = self.traffic, int(self._order[k])
        assert traffic.times_s is not None, "samples need the instants of all tokens"
        first, n = int(traffic.first_time[k]), int(traffic.n_received[k])
        times_s = traffic.times_s[first : first + n]
        released_s, done_s = float(traffic.arrived_s[k]), float(traffic.done_s[k])
        return {
            "class_id": int(self._schedule["class_id"][row]),
            "status": _STATUS[Outcome(traffic.outcome[k])],
            "ttft_s": float(times_s[0]) - released_s if n else None,
            "ttfat_s": float(times_s[0]) - released_s if n else None,
            "lateness_s": 0.0,
            "tpot_s": float(times_s[-1] - times_s[0]) / (n - 1) if n > 1 else None,
            "e2e_s": float(times_s[-1]) - released_s if n else None,
            "close_s": done_s - released_s,
            "max_stall_s": float(np.diff(times_s).max()) if n > 1 else None,
            "duration_s": done_s - released_s,
            "n_events": n,
            "n_bytes": 0,
            "own_slo_s": self._own_slo_s.get(row),
        }

    @property
    def waits_s(self) -> dict[tuple[str, str], float]:
        """Seconds that requests of the measured window waited, by class and reason."""
        return {
            (self._names.classes[class_id], why.name): int(ticks) * S_PER_TICK
            for class_id, row in enumerate(self.traffic.waits)
            for why, ticks in zip(WHYS, row, strict=True)
            if ticks
        }

    def beat(self) -> dict[str, Any]:
        """The progress so far, for `live.progress`."""
        traffic = self.traffic
        rows = traffic.ended[self._n_shown : self._n_ended]
        self._n_shown = self._n_ended
        answered = rows[traffic.outcome[rows] <= Outcome.stop]
        counts = np.bincount(traffic.outcome[: self._n_released], minlength=len(Outcome))
        by_status = [0] * len(Status)
        for outcome, status in _STATUS.items():
            if outcome > Outcome.in_flight:
                by_status[status] += int(counts[outcome])
        first = np.searchsorted(traffic.arrived_s, self._warmup_s)
        ttft_s = traffic.first_token_s[answered] - traffic.arrived_s[answered]
        return {
            "now_s": self._now_s,
            "released": self._n_released,
            "in_flight": self._n_in_flight,
            "waiting": 0,
            "by_status": by_status,
            "withdrawn": 0,
            "measured": max(0, self._n_released - int(first)),
            "ttft_s": ttft_s.tolist(),
            "lateness_s": [],
        }

    def tables(self, engines: Sequence[EngineState]) -> tuple[Requests, Chunks, Names]:
        """The recorded rows, the chunks grouped by request id, and the error texts. `engines` are
        those of the replicas."""
        traffic, order, outcome = self.traffic, self._order, self.traffic.outcome
        rows, errors = empty_requests(self._schedule), {"": 0}
        status = np.array([_STATUS[kind] for kind in Outcome], np.uint8)[outcome]
        is_released = outcome != Outcome.not_released
        is_sent = is_released & (outcome != Outcome.dropped)
        is_answered = (outcome == Outcome.length) | (outcome == Outcome.stop)

        def put(column: str, chosen: NDArray[np.bool_], values: Any) -> None:
            rows[column][order[chosen]] = values

        rows["status"][order] = status
        put("released_s", is_released, traffic.arrived_s[is_released])
        for column in ("sent_s", "connected_s"):
            put(column, is_sent, traffic.arrived_s[is_sent])
        put("reused_connection", is_sent, True)
        put("done_s", is_sent, traffic.done_s[is_sent])
        put("http_status", is_answered, 200)
        put("http_status", outcome == Outcome.refused, 400)
        put("finish_reason", outcome == Outcome.length, FinishReason.length)
        put("finish_reason", outcome == Outcome.stop, FinishReason.stop)
        put("input_tokens", is_answered, traffic.n_prompt[is_answered])
        put("cached_tokens", is_answered, traffic.n_cached[is_answered])
        arrived_s = traffic.arrived_s[is_answered]
        put("server_queue_s", is_answered, traffic.scheduled_s[is_answered] - arrived_s)
        put("server_ttft_s", is_answered, traffic.first_token_s[is_answered] - arrived_s)
        has_token = traffic.n_received > 0
        first, n = traffic.first_time[:-1][has_token], traffic.n_received[has_token]
        assert traffic.times_s is not None, "tables need the instants of all tokens"
        for column in ("headers_s", "first_chunk_s", "first_token_s", "first_answer_s"):
            put(column, has_token, traffic.times_s[first])
        put("last_token_s", has_token, traffic.times_s[first + n - 1])
        for column in ("output_tokens", "chunks"):
            put(column, has_token, n)
        put("first_chunk_tokens", has_token, 1)
        put("token_source", has_token, TokenSource.usage)
        before_stop = {*traffic.ended[: self._n_before_stop].tolist()}
        for k in np.flatnonzero(~is_answered).tolist():
            stopped = "" if k in before_stop else self.ended[1]
            text = self._reason(Outcome(outcome[k]), k, engines, stopped or "the run's end")
            rows["error_id"][order[k]] = errors.setdefault(text, len(errors))
        return rows, self._chunks(), Names(errors=tuple(errors))

    def _chunks(self) -> Chunks:
        traffic = self.traffic
        assert traffic.times_s is not None, "chunks need the instants of all tokens"
        by_row = np.argsort(self._order, kind="stable")
        sizes = traffic.n_received[by_row]
        chunks = np.empty(int(sizes.sum()), CHUNKS)
        chunks["request_id"] = np.repeat(self._schedule["request_id"], sizes)
        ends = np.cumsum(sizes)
        shift = np.repeat(traffic.first_time[:-1][by_row] - (ends - sizes), sizes)
        chunks["received_s"] = traffic.times_s[shift + np.arange(len(chunks))]
        chunks["tokens"] = 1
        return chunks

    def _reason(
        self, outcome: Outcome, k: int, engines: Sequence[EngineState], stopped: str
    ) -> str:
        """The text of an error, as the dispatcher and the engine word it; `stopped` is the reason
        for which the run ended."""
        limits = self._limits
        if outcome is Outcome.timed_out:
            return f"no complete response within {limits.timeout:g} s (limits.timeout)"
        if outcome is Outcome.cancelled:
            return f"still running when the drain after {stopped} ended"
        if outcome is Outcome.dropped:
            return f"{limits.max_concurrency} requests in flight (limits.max_concurrency)"
        if outcome is Outcome.not_released:
            return stopped
        traffic, engine = self.traffic, engines[self.traffic.served_by[k]]
        n_prompt, max_tokens = int(traffic.n_prompt[k]), int(traffic.max_tokens[k])
        try:
            check_admission(n_prompt, max_tokens, engine.limits, engine.kv)
        except AdmissionError as error:
            return f"HTTP 400: {error}"
        raise UsageError(f"request {k} was refused without a reason")
