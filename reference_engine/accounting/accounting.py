"""Accounting of waits: causes, forecasts, displacement, and the accounts of finished requests.

The core reports arrivals, plans and ends here; nothing here decides anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import exp

from reference_engine.accounting.displacement import Displacements
from reference_engine.accounting.explain import Account, Blocker, Recent, account
from reference_engine.accounting.ledger import ARRIVED, Ledger, Ticks
from reference_engine.accounting.totals import TenantAccounts
from reference_engine.state.cost_model import CostModel, StepShape
from reference_engine.state.plan import Cause, Limits, Plan, Why
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request, StartForecast

_N_ACCOUNTS, _N_BLOCKERS, _N_ERRORS = 1024, 4096, 256  # how many of the latest are kept
_MOST_NAMED = 8  # displaced requests in the event of a jump
_MEMORY_S = 30.0


class Accounting:
    """Times are instants on the engine's clock (s)."""

    def __init__(self, queues: Queues, limits: Limits, cost: CostModel) -> None:
        self.ledger, self.prompt_rate = Ledger(), PromptReadRate()
        self.accounts, self.tenants = Recent[Account](_N_ACCOUNTS), TenantAccounts()
        self._queues, self._limits, self._cost = queues, limits, cost
        self._displacements, self._blockers = Displacements(), Recent[Blocker](_N_BLOCKERS)
        self._n_arrived = 0

    def forecast(self, n_prompt: int, now_s: float) -> StartForecast:
        """The forecast for a request of `n_prompt` tokens that would arrive now.

        The prompt tokens before it are divided by the rate at which prompts were read of late.
        That rate needs no model of the limit (budget, slots, memory) that the queue waits for. It
        assumes that the queue is served in its order; under a policy that does not, the error of
        the forecast, which is kept with every request, shows it.
        """
        queues = self._queues
        unread = sum(len(r.tokens) - r.n_computed for r in queues.prefilling.values())
        n_ahead = queues.queued_tokens + unread
        has_slot = queues.n_running < self._limits.max_num_seqs
        # Where all wait for slots, each prompt read stands for one slot that became free, and this
        # request needs one more.
        n_first = n_ahead if has_slot else n_ahead + n_prompt
        rate = self.prompt_rate.tokens_per_s or self._modelled_rate(max(n_first, n_prompt))
        if not queues.waiting and has_slot:
            return StartForecast(n_ahead, rate, now_s)
        return StartForecast(n_ahead, rate, None if rate is None else now_s + n_first / rate)

    def arrive(self, request: Request, now_s: float, running: Request | None = None) -> None:
        """A request is about to join the queue. `running` is the request whose prompt is most of
        the step during which it arrived, if any."""
        self._n_arrived += 1
        request.arrival = self._n_arrived
        request.forecast = self.forecast(request.n_prompt, now_s)
        cause = ARRIVED
        if running is not None:
            self._add_blocker(running)
            cause = Cause(Why.step_in_flight, running.id)
        self.ledger.enter(request.id, request.arrived_s, cause)
        self._displacements.enter(request.arrival)

    def hand_over(self, request: Request, now_s: float) -> Ticks:
        """A request leaves for another engine. Returns its waits so far."""
        self._push_back(request)
        return self.ledger.hand_over(request.id, now_s)

    def take_over(self, request: Request, waits: Ticks, since_s: float, cause: Cause) -> None:
        """A request of another engine is about to join the queue, with its waits so far; it has
        waited for `cause` since an instant."""
        self._n_arrived += 1
        request.arrival = self._n_arrived
        self.ledger.receive(request.id, waits)
        self.ledger.enter(request.id, since_s, cause)
        self._displacements.enter(request.arrival)

    def requeue(self, request: Request, now_s: float, cause: Cause) -> None:
        self.ledger.enter(request.id, now_s, cause)
        self._displacements.enter(request.arrival)
        self._remember_blocker(cause)

    def hold(self, request: Request, now_s: float, cause: Cause) -> None:
        self.ledger.hold(request.id, now_s, cause)
        self._push_back(request)

    def release(self, request: Request, now_s: float) -> None:
        self.ledger.release(request.id, now_s)
        self._displacements.enter(request.arrival)

    def start(
        self, requests: Sequence[Request], now_s: float
    ) -> list[tuple[Request, dict[str, object]]]:
        """Requests leave the queue together. Returns those that jumped, which is to start before
        an earlier arrival, each with the details of its `jump` event."""
        for request in requests:
            self.ledger.leave(request.id, now_s)
            self._push_back(request)
            forecast = request.forecast
            if request.scheduled_s is None and forecast and forecast.start_s is not None:
                self.prompt_rate.errors.append(now_s - forecast.start_s)
        jumps = ((request, self._displacements.n_before(request.arrival)) for request in requests)
        return [(request, self._jump(request, n)) for request, n in jumps if n]

    def record_plan(self, plan: Plan, causes: Sequence[tuple[str, Cause]], now_s: float) -> None:
        """A plan was placed. `causes` are those of the requests that wait for a cause of their
        own."""
        self.ledger.set_causes(now_s, causes, plan.segments, plan.rest)
        self._remember_blocker(plan.rest)
        for _, cause in (*causes, *plan.segments):
            self._remember_blocker(cause)

    def end(self, request: Request, now_s: float) -> None:
        """A request is over, its final state and times set."""
        self.ledger.leave(request.id, now_s)
        self._push_back(request)
        waits = self.ledger.pop(request.id)
        entry = account(request, waits, now_s, self._blockers, request.pushed_back_s)
        self.accounts.add(request.id, entry)
        self.tenants.add(entry)

    def explain(self, request: Request, now_s: float) -> Account:
        """The account of a live request."""
        waits = self.ledger.waits(request.id, now_s)
        pushed_back_s = request.pushed_back_s + self._displacements.so_far(request.arrival)
        return account(request, waits, now_s, self._blockers, pushed_back_s)

    def _jump(self, request: Request, n_before: int) -> dict[str, object]:
        n_tokens = len(request.tokens) - request.n_computed
        rate = self.prompt_rate.tokens_per_s or self._modelled_rate(n_tokens)
        seconds = n_tokens / rate if rate else 0.0
        self._displacements.jump(request.arrival, seconds)
        request.n_displaced += n_before
        request.displaced_s += n_before * seconds
        self.tenants.of(request.tenant).displaced_s += n_before * seconds
        waiting = self._queues.waiting.values()
        displaced = (other.id for other in waiting if other.arrival < request.arrival)
        return {
            "n_displaced": n_before,
            "seconds_each": seconds,
            "seconds": n_before * seconds,
            "tokens": n_tokens,
            "displaced": list(islice(displaced, min(n_before, _MOST_NAMED))),
        }

    def _push_back(self, request: Request) -> None:
        request.pushed_back_s += self._displacements.leave(request.arrival)

    def _remember_blocker(self, cause: Cause) -> None:
        if cause.blocker and cause.blocker not in self._blockers:
            blocker = self._queues.find(cause.blocker)
            if blocker is not None:
                self._add_blocker(blocker)

    def _add_blocker(self, request: Request) -> None:
        blocker = Blocker(request.id, request.n_prompt, request.tenant)
        self._blockers.add(request.id, blocker)

    def _modelled_rate(self, n_tokens: int) -> float | None:
        """Prompt tokens per second by the cost model; None where its steps cost nothing."""
        n = max(n_tokens, 1)
        seconds = self._cost.estimate(StepShape(1, n, n**2 / 2))
        return n / seconds if seconds > 0 else None


class PromptReadRate:
    """Prompt tokens computed per second while requests waited. Tokens and seconds of t seconds ago
    weigh e^(-t/30 s). `errors` are the latest actual starts minus their forecasts (s)."""

    def __init__(self) -> None:
        self.errors: deque[float] = deque(maxlen=_N_ERRORS)
        self._tokens = self._busy_s = 0.0
        self._at_s = float("-inf")

    def add(self, n_tokens: int, began_s: float, now_s: float) -> None:
        """Add a step over [began_s, now_s] that computed `n_tokens` of prompts."""
        # Steps planned ahead overlap: the time up to the end of the last step counts once.
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
