"""Everything that is written down about waiting: whose fault, how long, what was foretold, who
pushed whom back and what each tenant owes. The core tells it what happens; it decides nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import exp

from reference_engine.accounting.displacement import Displacements
from reference_engine.accounting.explain import Account, Accounts, Blockers, account
from reference_engine.accounting.ledger import ARRIVED, Ledger
from reference_engine.accounting.totals import Tenants
from reference_engine.state.cost_model import CostModel, StepShape
from reference_engine.state.plan import Cause, Limits, Plan, Why
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request, StartForecast

_N_NAMED = 8  # of those a jump pushed back
_MEMORY_S = 30.0
_KEPT = 256


class Accounting:
    """Times are instants on the engine's clock (s)."""

    def __init__(self, queues: Queues, limits: Limits, cost: CostModel) -> None:
        self.ledger, self.prompt_rate = Ledger(), PromptReadRate()
        self.accounts, self.tenants = Accounts(), Tenants()
        self._queues, self._limits, self._cost = queues, limits, cost
        self._displacements, self._blockers = Displacements(), Blockers()
        self._n_arrived = 0

    def forecast(self, n_prompt: int, now_s: float) -> StartForecast:
        """For a request of so many prompt tokens that would arrive now, at the queue's end."""
        queues = self._queues
        unread = sum(len(r.tokens) - r.n_computed for r in queues.prefilling.values())
        n_ahead = queues.queued_tokens + unread
        has_slot = len(queues.running) < self._limits.max_num_seqs
        # Where slots are what all wait for, each takes as long to become free as a prompt is worth.
        n_first = n_ahead if has_slot else n_ahead + n_prompt
        rate = self.prompt_rate.tokens_per_s or self._modelled(n_first)
        if not queues.waiting and has_slot:
            return StartForecast(n_ahead, rate, now_s)
        return StartForecast(n_ahead, rate, None if rate is None else now_s + n_first / rate)

    def arrive(self, request: Request, now_s: float, at_work: Request | None = None) -> None:
        """A request is about to join the queue; it came during a step, most of which was the
        prompt of `at_work`, if of anybody's."""
        self._n_arrived += 1
        request.arrival = self._n_arrived
        request.forecast = self.forecast(request.n_prompt, now_s)
        cause = ARRIVED
        if at_work is not None:
            self._blockers.add(at_work)
            cause = Cause(Why.step_in_flight, at_work.id)
        self.ledger.enter(request.id, request.arrived_s, cause)
        self._displacements.enter(request.arrival)

    def requeue(self, request: Request, now_s: float, cause: Cause) -> None:
        self.ledger.enter(request.id, now_s, cause)
        self._displacements.enter(request.arrival)
        self._know(cause)

    def hold(self, request: Request, now_s: float, cause: Cause) -> None:
        self.ledger.hold(request.id, now_s, cause)
        self._push_back(request)

    def release(self, request: Request, now_s: float) -> None:
        self.ledger.release(request.id, now_s)
        self._displacements.enter(request.arrival)

    def start(
        self, requests: Iterable[Request], now_s: float
    ) -> list[tuple[Request, dict[str, object]]]:
        """Requests leave the queue together; returns those that left earlier ones behind, with
        what that costs whom."""
        requests = list(requests)
        for request in requests:
            self.ledger.leave(request.id, now_s)
            self._push_back(request)
            foretold = request.forecast
            if request.scheduled_s is None and foretold and foretold.start_s is not None:
                self.prompt_rate.errors.append(now_s - foretold.start_s)
        jumps = ((request, self._displacements.n_before(request.arrival)) for request in requests)
        return [(request, self._jump(request, n)) for request, n in jumps if n]

    def record_plan(self, plan: Plan, causes: Iterable[tuple[str, Cause]], now_s: float) -> None:
        """A plan was carried out, and these are left waiting."""
        causes = tuple(causes)
        self.ledger.set_causes(now_s, causes, plan.segments, plan.rest)
        self._know(plan.rest)
        for _, cause in (*causes, *plan.segments):
            self._know(cause)

    def end(self, request: Request, now_s: float) -> Account:
        """A request is over, its final state and times set."""
        self.ledger.leave(request.id, now_s)
        self._push_back(request)
        waits = self.ledger.pop(request.id)
        entry = account(request, waits, now_s, self._blockers.known)
        self.accounts.add(entry)
        self.tenants.add(entry)
        return entry

    def explain(self, request: Request, now_s: float) -> Account:
        """The account of a live request."""
        waits = self.ledger.waits(request.id, now_s)
        pushed_back_s = request.pushed_back_s + self._displacements.so_far(request.arrival)
        return account(request, waits, now_s, self._blockers.known, pushed_back_s)

    def _jump(self, request: Request, n_before: int) -> dict[str, object]:
        n_tokens = len(request.tokens) - request.n_computed
        rate = self.prompt_rate.tokens_per_s or self._modelled(n_tokens)
        seconds = n_tokens / rate if rate else 0.0
        self._displacements.jump(request.arrival, seconds)
        request.n_displaced += n_before
        request.displaced_s += n_before * seconds
        self.tenants.of(request.tenant).displaced_s += n_before * seconds
        named: list[str] = []
        for other in self._queues.waiting.values():
            if other.arrival < request.arrival:
                named.append(other.id)
                if len(named) == _N_NAMED:
                    break
        return {
            "n_displaced": n_before,
            "seconds_each": seconds,
            "seconds": n_before * seconds,
            "tokens": n_tokens,
            "displaced": named,
        }

    def _push_back(self, request: Request) -> None:
        request.pushed_back_s += self._displacements.leave(request.arrival)

    def _know(self, cause: Cause) -> None:
        if cause.blocker and cause.blocker not in self._blockers.known:
            blocker = self._queues.find(cause.blocker)
            if blocker is not None:
                self._blockers.add(blocker)

    def _modelled(self, n_tokens: int) -> float | None:
        """Prompt tokens per second by the cost model; None where it says nothing."""
        n = max(n_tokens, 1)
        seconds = self._cost.estimate(StepShape(1, n, n**2 / 2))
        return n / seconds if seconds > 0 else None


class PromptReadRate:
    """Prompt tokens computed per second while requests waited; what was t ago counts e^(-t/30 s).
    `errors` are the latest starts less their forecasts (s)."""

    def __init__(self) -> None:
        self.errors: deque[float] = deque(maxlen=_KEPT)
        self._tokens = self._busy_s = 0.0
        self._at_s = float("-inf")

    def add(self, n_tokens: int, began_s: float, now_s: float) -> None:
        """A step of [began_s, now_s] computed so many prompt tokens while others waited."""
        took_s = now_s - max(began_s, self._at_s)
        faded = exp(-(now_s - self._at_s) / _MEMORY_S)
        self._tokens = self._tokens * faded + n_tokens
        self._busy_s = self._busy_s * faded + took_s
        self._at_s = now_s

    @property
    def tokens_per_s(self) -> float | None:
        if self._tokens <= 0 or self._busy_s <= 0:
            return None
        return self._tokens / self._busy_s
