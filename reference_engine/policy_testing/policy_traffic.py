"""A policy's check as a client of the simulated engine: submits a workload and cancels what it
says."""

from __future__ import annotations

from contextlib import suppress

from reference_engine.policy_testing.policy_workloads import PlannedRequest, Workload
from reference_engine.policy_testing.watched_policy import WatchedPolicy, check_accounting, sealed
from reference_engine.simulator import Simulator
from reference_engine.state.batch import StepTokens
from reference_engine.state.plan import AdmissionError
from reference_engine.state.sequence import Request

_CHECK_EVERY = 16  # steps between two looks at the engine's own invariants, which take long


class WorkloadClient:
    """Submits a workload and cancels what it says (`simulator.EngineClient`)."""

    def __init__(self, workload: Workload, watched: WatchedPolicy) -> None:
        self._watched, self._sealed = watched, sealed(watched.watch)
        self._todo: list[tuple[float, int, PlannedRequest, bool]] = []
        for number, ask in enumerate(workload.asks):
            self._todo.append((ask.at_s, number, ask, False))
            if ask.cancel_after_s is not None:
                self._todo.append((ask.at_s + ask.cancel_after_s, number, ask, True))
        self._todo.sort(key=lambda entry: (entry[0], entry[3], entry[1]), reverse=True)

    @property
    def is_closed(self) -> bool:
        return all(is_cancel for *_, is_cancel in self._todo)

    def next_s(self) -> float | None:
        return self._todo[-1][0] if self._todo else None

    def act(self, engine: Simulator) -> None:
        while self._todo and self._todo[-1][0] <= engine.now_s:
            _, number, ask, is_cancel = self._todo.pop()
            if is_cancel:
                engine.cancel(ask.name)
                continue
            request = self._watched.requests[ask.name] = self._request(ask, number)
            with suppress(AdmissionError):  # it could never run, and nobody is to blame
                engine.submit(request)

    def receive(self, events: StepTokens, engine: Simulator) -> None:
        if len(self._watched.plans) % _CHECK_EVERY == 0:
            check_accounting(engine.state)

    def _request(self, ask: PlannedRequest, number: int) -> Request:
        n_alike = ask.n_prompt // 2 if ask.prefix else 0
        return self._sealed(
            id=ask.name,
            tokens=[ask.prefix] * n_alike + [100 + number] * (ask.n_prompt - n_alike),
            max_tokens=ask.max_tokens,
            arrived_s=ask.at_s,
            tenant=ask.tenant,
            priority=ask.priority,
            ttft_slo_s=ask.ttft_slo_s,
            deadline_s=None if ask.deadline_s is None else ask.at_s + ask.deadline_s,
            oracle_output_tokens=ask.n_output,
        )
