"""The load generator in virtual time: the real dispatcher and release rule, a simulated engine
instead of a socket, and the tables that a perfect network and client would record."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from loadgen.drive.dispatch import Bounds, Dispatcher
from loadgen.lab.open_loop import CHECK_S
from loadgen.lab.prompt_ids import PromptIds
from loadgen.live.progress import NEVER_SENT
from loadgen.manifest.sections import Ended
from loadgen.records import (
    CHUNKS,
    ON_PURPOSE,
    OWN_SLO,
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
from loadgen.run.stop_rules import StopRules, stop_rules
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan
from reference_engine.accounting.ledger import S_PER_TICK
from reference_engine.simulator import SimulatedService
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import Request, State

_REASONS = {State.finished_stop: FinishReason.stop, State.finished_length: FinishReason.length}


class VirtualTimer:
    """`drive.timer.Timer` in virtual time: a single alarm on a clock that jumps from alarm to
    alarm."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._alarm: tuple[float, Callable[[], None]] | None = None

    def now_s(self) -> float:
        return self._now_s

    def arm(self, at_s: float, callback: Callable[[], None]) -> None:
        self._alarm = (at_s, callback)

    def next_s(self) -> float | None:
        return None if self._alarm is None else self._alarm[0]

    def advance_to(self, instant_s: float) -> None:
        """Fires each alarm that is due by then, at its own time."""
        while self._alarm is not None and self._alarm[0] <= instant_s:
            at_s, callback = self._alarm
            self._alarm = None
            self._now_s = max(self._now_s, at_s)
            callback()
        self._now_s = max(self._now_s, instant_s)


class VirtualClient:
    """Sends a plan to a simulated engine (`reference_engine.simulator.PatientClient`).

    `declared_max_tokens` is the generation limit that every request declares; None declares its
    planned length. `on_step` is called each time the engine lets the client act; `early` may end
    the run. `waits_s` adds up the waiting seconds of requests of the measured window, by class and
    reason. With `block_tokens`, requests bring the keys of KV blocks of that size. `ended` holds
    how the run ended, why, and when it stopped releasing early.
    """

    def __init__(
        self,
        scenario: Scenario,
        plan: Plan,
        declared_max_tokens: int | None = None,
        on_step: Callable[[], None] = lambda: None,
        early: Early | None = None,
        block_tokens: int | None = None,
    ) -> None:
        self._schedule, self._names = plan.schedule, scenario.names()
        self._declared_max_tokens = declared_max_tokens
        self._class_limits, self._own_slo_s = scenario.limits_by_class(), own_limits(plan.schedule)
        self._prompts = PromptIds(plan, block_tokens)
        self._timer = VirtualTimer()
        self._engine: SimulatedService | None = None
        self._live: dict[int, Request] = {}  # by row
        self._row: dict[Request, int] = {}
        self._chunks: list[tuple[int, list[float]]] = []
        self._errors: dict[str, int] = {"": 0}
        self._n_unreleased = len(plan.schedule)
        self._is_started = self._is_over = False
        self._step_end_s = math.inf  # of the step whose end is being received
        self._on_step = on_step
        stop = scenario.stop_when
        self._rules = stop_rules(stop.error_rate, stop.over, stop.saturated) if stop else None
        self._early = early
        self._ended: list[dict[str, Any]] = []  # since the last check
        self._drain_s, self._next_check_s = scenario.phases.drain, 0.0
        self._warmup_s = scenario.phases.warmup
        self.ended: tuple[Ended, str, float | None] = ("completed", "", None)
        self.rows = empty_requests(plan.schedule)
        self._by_status = [0] * len(Status)
        self._ttft_s: list[float] = []  # since the last beat
        self._answered_s: tuple[list[float], list[float]] = ([], [])  # since the last check
        self._n_withdrawn = 0
        self._wait_ticks: defaultdict[tuple[str, str], int] = defaultdict(int)
        limits = scenario.limits
        self._dispatcher = Dispatcher(
            plan.schedule,
            plan.edges,
            sender=self,
            recorder=self,
            timer=self._timer,
            bounds=Bounds(
                timeout_s=limits.timeout,
                max_concurrency=limits.max_concurrency,
                when_full=limits.when_full,
                horizon_s=scenario.horizon_s,
                drain_s=scenario.phases.drain,
                warmup_s=scenario.phases.warmup,
                n_measured=scenario.requests_in_flow,
            ),
            on_finished=self._finish,
        )

    # simulator.PatientClient
    @property
    def is_closed(self) -> bool:
        return self._n_unreleased == 0

    def next_s(self) -> float | None:
        return None if self._is_over else self._timer.next_s()

    def quiet_until_s(self) -> float:
        next_s = self._timer.next_s()
        instants_s = [math.inf if self._is_over or next_s is None else next_s]
        if self.ended[0] == "completed" and (self._rules is not None or self._early is not None):
            instants_s.append(self._next_check_s)
        return min(instants_s)

    def act(self, engine: SimulatedService) -> None:
        self._engine = engine
        if not self._is_started:
            self._is_started = True
            self._dispatcher.start()
        self._timer.advance_to(engine.now_s)
        self._on_step()
        if engine.now_s >= self._next_check_s and self.ended[0] == "completed":
            self._next_check_s = engine.now_s + CHECK_S
            self._check(engine.now_s)

    def stop(self, how: Ended, reason: str, drain_s: float) -> None:
        """Releases no more requests; those in flight have `drain_s` to finish."""
        if self.ended[0] == "completed":
            self.ended = (how, reason, self._timer.now_s())
        self._dispatcher.stop(reason, drain_s)

    def receive(self, events: StepTokens, engine: SimulatedService) -> None:
        now_s = engine.now_s
        # Alarms during the step first: a request that timed out in it receives no more tokens.
        self._step_end_s = now_s
        self._timer.advance_to(now_s)
        self._step_end_s = math.inf
        for request, finish in events.ends.items():
            if request in self._row:
                self._answered(request, finish, now_s)

    def refuse(self, request: Request, error: AdmissionError) -> None:
        row = self._row.pop(request, None)
        if row is not None:
            del self._live[row]
            self._refused(row, error, self._timer.now_s())

    def lose(self, request: Request, reason: str, engine: SimulatedService) -> None:
        now_s = self._step_end_s = engine.now_s
        self._timer.advance_to(now_s)  # a request that timed out before is not lost
        self._step_end_s = math.inf
        row = self._row.pop(request, None)
        if row is None:
            return
        del self._live[row]
        times = request.token_times_s or []
        self._write_tokens(row, times)
        if times:  # headers and tokens were sent before
            self.rows["http_status"][row] = 200
            self._end(row, Status.stream_error, reason, now_s)
        else:
            self.rows["http_status"][row] = 502
            self._end(row, Status.http_error, f"HTTP 502: {reason}", now_s)

    # dispatch.Sender
    def send(self, row: int) -> None:
        assert self._engine is not None, "the engine acts first"
        now_s = self._timer.now_s()
        request = self._request(row, now_s)
        self.rows["sent_s"][row] = self.rows["connected_s"][row] = now_s
        self.rows["reused_connection"][row] = True
        try:
            self._engine.submit(request)
        except AdmissionError as error:
            self._refused(row, error, now_s)
        else:
            self._live[row], self._row[request] = request, row

    def sent_s(self, row: int) -> float:
        return float(self.rows["sent_s"][row])

    def abort(self, row: int, outcome: Status, reason: str) -> None:
        assert self._engine is not None, "only a sent row is aborted"
        request = self._live.pop(row)
        del self._row[request]
        self._engine.cancel(request.id)
        self._engine.settle(request)
        times = request.token_times_s or []
        self._write_tokens(row, [at_s for at_s in times if at_s < self._step_end_s])
        self._n_withdrawn += reason == ON_PURPOSE
        self._end(row, outcome, reason, self._timer.now_s())

    # dispatch.Recorder
    def released(self, row: int, release_s: float) -> None:
        self._n_unreleased -= 1
        self.rows["released_s"][row] = release_s

    def unsent(self, row: int, status: Status, reason: str) -> None:
        self._n_unreleased -= bool(np.isnan(self.rows["released_s"][row]))
        self._by_status[status] += 1
        self.rows["status"][row], self.rows["error_id"][row] = status, self._error(reason)

    @property
    def waits_s(self) -> dict[tuple[str, str], float]:
        """Added up in the ledger's whole ticks, so that the order of the requests is immaterial."""
        return {key: ticks * S_PER_TICK for key, ticks in self._wait_ticks.items()}

    def beat(self) -> dict[str, Any]:
        """The progress so far, for `live.progress`."""
        ttft_s, self._ttft_s = self._ttft_s, []
        return {
            "now_s": self._timer.now_s(),
            "released": len(self._schedule) - self._n_unreleased,
            "in_flight": self._dispatcher.n_in_flight,
            "waiting": self._dispatcher.n_waiting,
            "by_status": list(self._by_status),
            "withdrawn": self._n_withdrawn,
            "measured": self._dispatcher.n_measured,
            "ttft_s": ttft_s,
            "lateness_s": [],
        }

    def tables(self) -> tuple[Requests, Chunks, Names]:
        """The recorded rows, the chunks grouped by request id, and the error texts."""
        self._chunks.sort()
        sizes = [len(times) for _, times in self._chunks]
        chunks = np.empty(sum(sizes), CHUNKS)
        ids = np.array([row for row, _ in self._chunks], np.int64)
        chunks["request_id"] = np.repeat(self._schedule["request_id"][ids], sizes)
        chunks["received_s"] = [at_s for _, times in self._chunks for at_s in times]
        chunks["tokens"] = 1
        return self.rows, chunks, Names(errors=tuple(self._errors))

    def _request(self, row: int, now_s: float) -> Request:
        planned = self._schedule[row]
        n_output = max(1, int(planned["output_tokens"]))
        ttft_slo_s, tpot_slo_s, e2e_slo_s = (
            float(planned[column]) or class_limit
            for column, class_limit in zip(
                OWN_SLO.values(), self._class_limits[int(planned["class_id"])], strict=True
            )
        )
        prompt = self._prompts.of(row)
        return Request(
            id=self._name(row),
            tokens=prompt.tokens,
            chain=prompt.chain,
            max_tokens=max(n_output, self._declared_max_tokens or 0),
            arrived_s=now_s,
            tenant=self._names.tenants[int(planned["tenant_id"])],
            priority=int(planned["priority"]),
            ttft_slo_s=ttft_slo_s,
            tpot_slo_s=tpot_slo_s,
            deadline_s=None if e2e_slo_s is None else now_s + e2e_slo_s,
            oracle_output_tokens=None if self._declared_max_tokens is None else n_output,
            token_times_s=[],
        )

    def _refused(self, row: int, error: AdmissionError, now_s: float) -> None:
        code = 400 if error.retry_after_s is None else 429
        self.rows["http_status"][row] = code
        self._end(row, Status.http_error, f"HTTP {code}: {error}", now_s)

    def _name(self, row: int) -> str:
        return f"req-{self._schedule['request_id'][row]}"

    def _answered(self, request: Request, finish: State, now_s: float) -> None:
        rows, row = self.rows, self._row.pop(request)
        del self._live[row]
        self._write_tokens(row, request.token_times_s or [])
        rows["http_status"][row] = 200
        rows["finish_reason"][row] = _REASONS[finish]
        rows["cached_tokens"][row] = request.n_cached
        rows["input_tokens"][row] = request.n_prompt
        if request.scheduled_s is not None and request.first_token_s is not None:
            rows["server_queue_s"][row] = request.scheduled_s - request.arrived_s
            rows["server_ttft_s"][row] = request.first_token_s - request.arrived_s
            released_s = float(rows["released_s"][row])
            self._ttft_s.append(request.first_token_s - released_s)
            if self._rules is not None:
                self._answered_s[0].append(request.first_token_s - released_s)
                self._answered_s[1].append(now_s - released_s)
        self._prompts.answered(row, request)
        self._add_waits(row, request.id)
        self._end(row, Status.ok, "", now_s)

    def _write_tokens(self, row: int, times: list[float]) -> None:
        if not times:
            return
        rows = self.rows
        for name in ("headers_s", "first_chunk_s", "first_token_s", "first_answer_s"):
            rows[name][row] = times[0]
        rows["last_token_s"][row] = times[-1]
        rows["output_tokens"][row] = rows["chunks"][row] = len(times)
        rows["first_chunk_tokens"][row], rows["token_source"][row] = 1, TokenSource.usage
        self._chunks.append((row, times))

    def _add_waits(self, row: int, request_id: str) -> None:
        assert self._engine is not None, "only a sent row is answered"
        account = self._engine.explain(request_id)
        if account is not None and self.rows["released_s"][row] >= self._warmup_s:
            name = self._names.classes[int(self._schedule["class_id"][row])]
            for cause, seconds in account.waits:
                self._wait_ticks[name, cause.why.name] += round(seconds / S_PER_TICK)

    def _end(self, row: int, status: Status, error: str, done_s: float) -> None:
        self._by_status[status] += 1
        self.rows["status"][row], self.rows["error_id"][row] = status, self._error(error)
        self.rows["done_s"][row] = done_s
        if self._early is not None:
            self._ended.append(self._sample(row, status, done_s))
        self._dispatcher.ended(row, status, done_s)

    def _sample(self, row: int, status: Status, done_s: float) -> dict[str, Any]:
        """The request as a shard reports it (`drive.live_sample.FIELDS`)."""
        rows = self.rows
        released_s, first_s, last_s = (
            float(rows[name][row]) for name in ("released_s", "first_token_s", "last_token_s")
        )
        n, has_token = int(rows["output_tokens"][row]), first_s == first_s
        times_s = self._chunks[-1][1] if has_token and self._chunks[-1][0] == row else []
        gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
        return {
            "class_id": int(self._schedule["class_id"][row]),
            "status": status,
            "ttft_s": first_s - released_s if has_token else None,
            "ttfat_s": first_s - released_s if has_token else None,
            "lateness_s": float(rows["sent_s"][row]) - released_s,
            "tpot_s": (last_s - first_s) / (n - 1) if n > 1 else None,
            "e2e_s": last_s - released_s if has_token else None,
            "close_s": done_s - released_s,
            "max_stall_s": max(gaps_s, default=None),
            "duration_s": done_s - float(rows["sent_s"][row]),
            "n_events": n,
            "n_bytes": 0,
            "own_slo_s": self._own_slo_s.get(row),
        }

    def _check(self, now_s: float) -> None:
        reason = None if self._rules is None else self._reason(self._rules, now_s)
        if self._early is not None:
            self._early.note(now_s, self._ended)
            self._ended = []
            reason = reason or self._early.reason(now_s, self._dispatcher.n_in_flight)
        if reason is not None:
            self.stop("stopped", reason, self._drain_s)

    def _reason(self, rules: StopRules, now_s: float) -> str | None:
        n_ended = sum(self._by_status) - sum(self._by_status[status] for status in NEVER_SENT)
        (ttft_s, e2e_s), self._answered_s = self._answered_s, ([], [])
        return rules.reason(
            now_s,
            n_released=len(self._schedule)
            - self._n_unreleased
            - self._by_status[Status.not_released],
            n_ended=n_ended,
            n_failed=n_ended - self._by_status[Status.ok] - self._by_status[Status.cancelled],
            ttft_s=ttft_s,
            e2e_s=e2e_s,
        )

    def _error(self, text: str) -> int:
        return self._errors.setdefault(text, len(self._errors))

    def _finish(self) -> None:
        self._is_over = True
