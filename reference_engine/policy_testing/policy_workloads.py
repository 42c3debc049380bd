"""Workloads for the policy check: small random traffic for a small engine, a flood that starves the
request a policy favours least, and the client that submits them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from reference_engine.core.core import EngineState
from reference_engine.policy_testing.watched_policy import (
    WatchedPolicy,
    check_invariants,
    watched_request_type,
)
from reference_engine.simulator import SimulatedService
from reference_engine.state.batch import StepTokens
from reference_engine.state.cost_model import StepCost
from reference_engine.state.plan import AdmissionError, Limits
from reference_engine.state.sequence import Request

_CHECK_EVERY = 16  # steps between two checks of the engine's invariants, which are slow
_COST = StepCost(
    step_s=5e-3, seq_s=1e-4, token_s=1e-4, context_token_s=1e-6, prefill_attention_s=1e-7
)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of a workload: its arrival, its parameters, and the length of its answer."""

    name: str
    at_s: float
    n_prompt: int
    n_output: int
    max_tokens: int
    tenant: str = "default"
    priority: int = 0
    ttft_slo_s: float | None = None
    deadline_s: float | None = None  # after its arrival
    prefix: int = 0  # prompts of equal prefix (> 0) have equal first halves
    cancel_after_s: float | None = None

    def __str__(self) -> str:
        words = [
            f"{self.name}: at {self.at_s:.4g} s, {self.n_prompt} prompt tokens, {self.n_output} of "
            f"at most {self.max_tokens} output tokens"
        ]
        words += [f"tenant {self.tenant}"] * (self.tenant != "default")
        words += [f"priority {self.priority}"] * (self.priority != 0)
        if self.ttft_slo_s is not None:
            words.append(f"ttft_slo {self.ttft_slo_s:g} s")
        if self.deadline_s is not None:
            words.append(f"deadline {self.deadline_s:g} s later")
        if self.cancel_after_s is not None:
            words.append(f"cancelled after {self.cancel_after_s:g} s")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests and the size of the engine that serves them."""

    requests: tuple[PlannedRequest, ...]
    n_blocks: int
    limits: Limits
    cost: StepCost = _COST

    @property
    def n_tokens(self) -> int:
        return sum(request.n_prompt + request.n_output for request in self.requests)

    def renamed(self, prefix: str) -> Workload:
        """The same requests with `prefix` before their ids, which keeps the order of the ids."""
        return replace(
            self, requests=tuple(replace(r, name=prefix + r.name) for r in self.requests)
        )

    def __str__(self) -> str:
        limits = self.limits
        head = (
            f"{len(self.requests)} requests, {self.n_blocks} KV blocks of 16 tokens, "
            f"{limits.max_num_seqs} sequences and {limits.max_step_tokens} tokens a step:"
        )
        shown = [f"  {request}" for request in self.requests[:12]]
        more = len(self.requests) - len(shown)
        return "\n".join([head, *shown, *([f"  … and {more} more"] if more else [])])


def workloads(n: int, seed: int) -> Iterator[Workload]:
    """`n` random workloads. Every second workload has so few KV blocks that requests are
    preempted."""
    rng = np.random.default_rng(seed)
    for number in range(n):
        yield _random(rng, is_tight=number % 2 == 1, n_requests=int(rng.integers(1, 28)))


def smaller_workloads(workload: Workload) -> Iterator[Workload]:
    """The workload with requests left out: first halves, at last single requests."""
    requests = workload.requests
    size = len(requests) // 2
    while size:
        for first in range(0, len(requests), size):
            rest = requests[:first] + requests[first + size :]
            if rest:
                yield replace(workload, requests=rest)
        size //= 2


def flood(starvation_s: float, max_num_seqs: int) -> Workload:
    """Short urgent requests of one tenant at 1.3 times the capacity of an engine that runs
    `max_num_seqs` sequences at a time, for six times `starvation_s`. Early among them arrives
    `victim`, a long request of low priority of another tenant.

    A step takes a hundredth of `starvation_s`, and a short request needs 9 steps.
    """
    step_s = starvation_s / 100
    gap_s = 9 * step_s / max_num_seqs / 1.3
    short = [
        PlannedRequest(
            f"r{k}", k * gap_s, 8, 8, 8, "a", -2, ttft_slo_s=10 * step_s, deadline_s=50 * step_s
        )
        for k in range(int(6 * starvation_s / gap_s))
    ]
    victim = PlannedRequest("victim", starvation_s / 2, 64, 64, 64, "b", 2)
    requests = tuple(sorted([*short, victim], key=lambda request: request.at_s))
    limits = Limits(max_num_seqs, 4096, 1024, 1024)
    return Workload(requests, 400, limits, StepCost(step_s=step_s))


def _random(rng: np.random.Generator, is_tight: bool, n_requests: int) -> Workload:
    n_blocks = int(rng.integers(24, 40)) if is_tight else 600
    limits = Limits(int(rng.choice([2, 4, 16])), 4096, 384, 1024)
    spread_s = float(rng.choice([0.0, 0.05, 0.5]))  # mean gap between arrivals
    at_s = np.cumsum(rng.exponential(spread_s, n_requests)) if spread_s else np.zeros(n_requests)
    requests = []
    for k in range(n_requests):
        n_prompt, n_output = int(rng.integers(1, 250)), int(rng.integers(1, 60))
        requests.append(
            PlannedRequest(
                name=f"r{k}",
                at_s=float(at_s[k]),
                n_prompt=n_prompt,
                n_output=n_output,
                max_tokens=n_output + int(rng.choice([0, 0, 40])),
                tenant=str(rng.choice(["default", "a", "b"])),
                priority=int(rng.integers(-2, 3)),
                ttft_slo_s=float(rng.choice([0.05, 0.5])) if rng.random() < 0.5 else None,
                deadline_s=float(rng.choice([0.2, 2.0])) if rng.random() < 0.3 else None,
                prefix=int(rng.choice([0, 0, 1, 2])),
                cancel_after_s=float(rng.uniform(0, 0.3)) if rng.random() < 0.1 else None,
            )
        )
    return Workload(tuple(requests), n_blocks, limits)


class WorkloadClient:
    """Client of the simulated engine (`simulator.EngineClient`) that submits the requests of a
    workload and cancels those that have `cancel_after_s`."""

    def __init__(self, workload: Workload, watched: WatchedPolicy, state: EngineState) -> None:
        self._state = state
        self._watched, self._request_type = watched, watched_request_type(watched.watch)
        # (instant, is a cancel, number), the next entry last; a submission goes before a cancel.
        self._todo: list[tuple[float, bool, int]] = []
        self._requests = workload.requests
        for number, planned in enumerate(workload.requests):
            self._todo.append((planned.at_s, False, number))
            if planned.cancel_after_s is not None:
                self._todo.append((planned.at_s + planned.cancel_after_s, True, number))
        self._todo.sort(reverse=True)

    @property
    def is_closed(self) -> bool:
        return all(is_cancel for _, is_cancel, _ in self._todo)

    def next_s(self) -> float | None:
        return self._todo[-1][0] if self._todo else None

    def act(self, engine: SimulatedService) -> None:
        while self._todo and self._todo[-1][0] <= engine.now_s:
            _, is_cancel, number = self._todo.pop()
            name = self._requests[number].name
            if is_cancel:
                engine.cancel(name)
                continue
            request = self._watched.requests[name] = self._request(number)
            with suppress(AdmissionError):  # a request that could never run is no policy's fault
                engine.submit(request)

    def receive(self, events: StepTokens, engine: SimulatedService) -> None:
        if len(self._watched.plans) % _CHECK_EVERY == 0:
            check_invariants(self._state)

    def refuse(self, request: Request, error: AdmissionError) -> None:
        pass  # as in `act`

    def _request(self, number: int) -> Request:
        planned = self._requests[number]
        n_shared = planned.n_prompt // 2 if planned.prefix else 0
        own = [100 + number] * (planned.n_prompt - n_shared)
        return self._request_type(
            id=planned.name,
            tokens=[planned.prefix] * n_shared + own,
            max_tokens=planned.max_tokens,
            arrived_s=planned.at_s,
            tenant=planned.tenant,
            priority=planned.priority,
            ttft_slo_s=planned.ttft_slo_s,
            deadline_s=None if planned.deadline_s is None else planned.at_s + planned.deadline_s,
            oracle_output_tokens=planned.n_output,
        )
