"""Traffic to try a batching policy on: small random workloads for a small engine, and a flood that
starves whoever a policy likes least."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from reference_engine.policy_testing.watched_policy import WatchedPolicy, check_accounting, sealed
from reference_engine.simulator import Simulator
from reference_engine.state.admission import AdmissionError
from reference_engine.state.cost_model import StepCost
from reference_engine.state.plan import Limits
from reference_engine.state.sequence import Request
from reference_engine.state.step_tokens import StepTokens

_COST = StepCost(
    step_s=5e-3, seq_s=1e-4, token_s=1e-4, context_token_s=1e-6, prefill_attention_s=1e-7
)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: when it arrives, what it asks, and what it ends up doing."""

    name: str
    at_s: float
    n_prompt: int
    n_output: int
    max_tokens: int
    tenant: str = "default"
    priority: int = 0
    ttft_slo_s: float | None = None
    deadline_s: float | None = None  # after its arrival
    prefix: int = 0  # prompts of the same prefix (> 0) begin alike
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
    """Requests and the engine they meet."""

    asks: tuple[PlannedRequest, ...]
    n_blocks: int
    limits: Limits
    cost: StepCost = _COST

    def renamed(self, prefix: str) -> Workload:
        """The same requests under other ids, which sort alike."""
        return replace(self, asks=tuple(replace(a, name=prefix + a.name) for a in self.asks))

    def __str__(self) -> str:
        limits = self.limits
        head = (
            f"{len(self.asks)} requests, {self.n_blocks} KV blocks of 16 tokens, "
            f"{limits.max_num_seqs} sequences and {limits.max_step_tokens} tokens a step:"
        )
        shown = [f"  {ask}" for ask in self.asks[:12]]
        more = len(self.asks) - len(shown)
        return "\n".join([head, *shown, *([f"  … and {more} more"] if more else [])])


def workloads(n: int, seed: int) -> Iterator[Workload]:
    """`n` random workloads, from roomy to so tight that requests displace each other."""
    rng = np.random.default_rng(seed)
    for number in range(n):
        yield _random(rng, is_tight=number % 2 == 1, n_requests=int(rng.integers(1, 28)))


def smaller(workload: Workload) -> Iterator[Workload]:
    """The same with requests left out: first halves, then single ones."""
    asks = workload.asks
    size = len(asks) // 2
    while size:
        for first in range(0, len(asks), size):
            rest = asks[:first] + asks[first + size :]
            if rest:
                yield replace(workload, asks=rest)
        size //= 2


def flood(patience_s: float) -> Workload:
    """Short, urgent requests of one tenant at 1.3 times what the engine can do, for six times
    `patience_s`; early among them one long, unimportant request of another, named `victim`.

    A step takes a hundredth of `patience_s`; four sequences run; a short request needs 9 steps.
    """
    step_s = patience_s / 100
    gap_s = 9 * step_s / 4 / 1.3
    short = [
        PlannedRequest(
            f"r{k}", k * gap_s, 8, 8, 8, "a", -2, ttft_slo_s=10 * step_s, deadline_s=50 * step_s
        )
        for k in range(int(6 * patience_s / gap_s))
    ]
    victim = PlannedRequest("victim", patience_s / 2, 64, 64, 64, "b", 2)
    asks = tuple(sorted([*short, victim], key=lambda ask: ask.at_s))
    return Workload(asks, 400, Limits(4, 4096, 1024, 1024), StepCost(step_s=step_s))


def total_tokens(asks: Iterable[PlannedRequest]) -> int:
    return sum(ask.n_prompt + ask.n_output for ask in asks)


def _random(rng: np.random.Generator, is_tight: bool, n_requests: int) -> Workload:
    n_blocks = int(rng.integers(24, 40)) if is_tight else 600
    limits = Limits(int(rng.choice([2, 4, 16])), 4096, 384, 1024)
    spread_s = float(rng.choice([0.0, 0.05, 0.5]))  # between arrivals, on average
    at_s = np.cumsum(rng.exponential(spread_s, n_requests)) if spread_s else np.zeros(n_requests)
    asks = []
    for k in range(n_requests):
        n_prompt, n_output = int(rng.integers(1, 250)), int(rng.integers(1, 60))
        asks.append(
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
    return Workload(tuple(asks), n_blocks, limits)


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
