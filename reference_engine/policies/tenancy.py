"""What requests cost their tenants: charges as they are served, reservations against budgets."""

from __future__ import annotations

from collections import Counter
from typing import Any

from reference_engine.policies.budgets import Budget, WhenOver, budget_of
from reference_engine.policies.sorted_queue import Key
from reference_engine.policies.virtual_counters import Flow, TenantCounter, VirtualCounters
from reference_engine.state.plan import View
from reference_engine.state.sequence import Request


class Tenancy:
    """Requests of many tenants from arrival to end."""

    def __init__(
        self,
        input_cost: float,
        output_cost: float,
        weights: dict[str, float],
        budgets: dict[str, Budget],
    ) -> None:
        self._input_cost, self._output_cost = input_cost, output_cost
        self._budgets = budgets
        self._counters = VirtualCounters(weights)
        self._keys: dict[str, Key] = {}
        self._flows: dict[str, Flow] = {}  # by request
        self._meter = OutputTokenMeter()
        self._admitted: set[str] = set()  # their prompts are charged
        self._reserved: dict[str, float] = {}
        self._granted: list[tuple[Request, float]] = []  # by the last plan, with what was charged
        self._blocked: dict[str, tuple[TenantCounter, Flow]] = {}
        self._n_entered = 0

    @property
    def blocked(self) -> list[Flow]:
        """Those that wait for their budget."""
        return [flow for _, flow in self._blocked.values()]

    def payable_s(self, request: Request, view: View, when_over: WhenOver) -> float:
        """The instant at which its budget, if it is of this kind, can pay the request. Asking
        leaves no trace: nobody becomes a tenant by it."""
        name, budget = budget_of(self._budgets, request.tenant, request.priority)
        if budget is None or budget.when_over is not when_over:
            return view.now_s
        tenant = self._counters.find(request.tenant)
        flow = None if tenant is None else tenant.flows.get(name)
        # A budget that nobody used yet is full, and pays for anything.
        return view.now_s if flow is None else self._due_s(flow, request, view)

    def enter(self, request: Request, view: View) -> None:
        """It arrived, or is taken over from another policy."""
        self._counters.enter(self._counters.of(request.tenant))
        self._n_entered += 1
        self._keys[request.id] = request.arrived_s, float(self._n_entered)
        if view.is_running(request.id):  # what was before is not charged
            self._admitted.add(request.id)
            self._meter.start(request)
            return
        self.wait(request, view)
        flow = self._flows[request.id]
        if flow.budget is not None and flow.budget.when_over is WhenOver.refuse:
            self._reserve(flow, request, view)

    def wait(self, request: Request, view: View) -> None:
        """It waits, in its place by arrival."""
        tenant = self._counters.of(request.tenant)
        self._serve(tenant, self._meter.stop(request))
        name, budget = budget_of(self._budgets, request.tenant, request.priority)
        flow = self._flow(tenant, name, budget, view)
        before = self._flows.get(request.id)
        if before is not None and before is not flow:  # its priority changed
            before.line.drop(request.id)
        self._flows[request.id] = flow
        flow.line.put(request, self._keys[request.id])
        if budget is not None and budget.when_over is WhenOver.queue:
            view.assign(request.id, flow.name)
        first = flow.line.first(view)
        if first is not None and first[1] is request:
            self._unblock(tenant, flow)
        if flow.blocked_until_s is None:
            self._counters.activate(tenant)

    def leave(self, request: Request, view: View) -> None:
        """It is over: charge the rest, settle the reservation."""
        if self._keys.pop(request.id, None) is None:
            return  # it was never shown to us: its tenant was paused
        tenant = self._counters.of(request.tenant)
        self._serve(tenant, self._meter.stop(request))
        self._admitted.discard(request.id)
        flow = self._flows.pop(request.id, None)
        if flow is not None:
            flow.line.drop(request.id)
            reserved = self._reserved.pop(request.id, None)
            if reserved is not None and flow.bucket is not None:
                flow.bucket.take(self._spent(request) - reserved, view.now_s)
            self._unblock(tenant, flow)  # there may be more, or less to pay
        self._counters.leave(tenant)

    def settle(self, view: View) -> None:
        """Take back what the last plan granted in vain, and look who can pay again."""
        self._take_back(view)
        for tenant, flow in list(self._blocked.values()):
            if (flow.blocked_until_s or 0.0) <= view.now_s:
                self._unblock(tenant, flow)

    def step(self, view: View) -> None:
        """A step is over: charge what it wrote."""
        for name, n_tokens in self._meter.read(view).items():
            self._counters.of(name).serve(self._output_cost * n_tokens)

    def head(self, view: View) -> Request | None:
        """The first request of the least served tenant that can pay it; None when nobody has
        one."""
        counters = self._counters
        while (tenant := counters.least()) is not None:
            head = tenant.head(view)
            if head is None:
                counters.deactivate_least()
                continue
            flow, request = head
            due_s = view.now_s
            if request.id not in self._reserved and request.id not in self._admitted:
                due_s = self._due_s(flow, request, view)
            if due_s <= view.now_s:
                return request
            flow.blocked_until_s = due_s
            self._blocked[flow.name] = tenant, flow
        return None

    def charge(self, request: Request, view: View) -> None:
        """It was granted admission: charge its prompt, the first time, and reserve its cost."""
        flow = self._flows[request.id]
        flow.line.drop(request.id)
        cost = 0.0
        if request.id not in self._admitted:
            cost = self._input_cost * view.to_compute(request)
            self._counters.of(request.tenant).serve(cost)
            self._admitted.add(request.id)
            if request.id not in self._reserved:
                self._reserve(flow, request, view)
        self._meter.start(request)
        self._granted.append((request, cost))

    def explain(self, request: Request, view: View) -> dict[str, Any]:
        if request.id not in self._keys:
            return {}
        tenant, least = self._counters.of(request.tenant), self._counters.least()
        flow = self._flows.get(request.id)
        bucket = None if flow is None else flow.bucket
        return {
            "tenant": tenant.name,
            "served": tenant.counter,
            "least_served": None if least is None else least.name,
            "ahead_of_least": 0.0 if least is None else tenant.counter - least.counter,
            "budget_left": None if bucket is None else bucket.level(view.now_s),
            "reserved": self._reserved.get(request.id, 0.0),
        }

    def _take_back(self, view: View) -> None:
        for request, cost in self._granted:
            flow = self._flows.get(request.id)
            if flow is None or request.id in flow.line or not view.is_waiting(request.id):
                continue
            tenant = self._counters.of(request.tenant)
            if request.scheduled_s is None:  # it was its first admission
                self._counters.refund(tenant, cost)
                self._admitted.discard(request.id)
            self._meter.stop(request)
            flow.line.put(request, self._keys[request.id])
            self._counters.activate(tenant, is_lifted=False)
        self._granted.clear()

    def _serve(self, tenant: TenantCounter, n_written: int) -> None:
        if n_written < 0:
            self._counters.refund(tenant, -self._output_cost * n_written)
        else:
            tenant.serve(self._output_cost * n_written)

    def _flow(self, tenant: TenantCounter, name: str, budget: Budget | None, view: View) -> Flow:
        flow = tenant.flows.get(name)
        if flow is None:
            flow = tenant.flows[name] = Flow(name, budget, view.now_s)
        return flow

    def _due_s(self, flow: Flow, request: Request, view: View) -> float:
        if flow.bucket is None:
            return view.now_s
        return flow.bucket.due_s(self._expected(request, view), view.now_s)

    def _reserve(self, flow: Flow, request: Request, view: View) -> None:
        if flow.bucket is not None:
            cost = self._reserved[request.id] = self._expected(request, view)
            flow.bucket.take(cost, view.now_s)

    def _expected(self, request: Request, view: View) -> float:
        n_output = view.predictor.predict(request).mean
        return self._input_cost * view.to_compute(request) + self._output_cost * n_output

    def _spent(self, request: Request) -> float:
        if request.scheduled_s is None:
            return 0.0
        n_read = request.n_prompt - request.n_cached
        return self._input_cost * n_read + self._output_cost * request.n_output

    def _unblock(self, tenant: TenantCounter, flow: Flow) -> None:
        if flow.blocked_until_s is not None:
            flow.blocked_until_s = None
            del self._blocked[flow.name]
            self._counters.activate(tenant)


class OutputTokenMeter:
    """Counts that every decoding request writes one token a step, and puts right at each one's end
    what it counted wrongly because a request was held or its step was cut."""

    def __init__(self) -> None:
        self._reading: dict[str, Request] = {}
        self._n_before: dict[str, int] = {}  # output tokens at the start, of those reading
        self._decoding: dict[str, int] = {}  # output tokens counted, less steps counted
        self._n_decoding: Counter[str] = Counter()  # by tenant
        self._n_steps = 0

    def start(self, request: Request) -> None:
        """It may begin to run."""
        self._reading[request.id] = request
        self._n_before[request.id] = request.n_output

    def stop(self, request: Request) -> int:
        """It runs no more: tokens it wrote and that were not counted, or minus those counted and
        not written."""
        if self._reading.pop(request.id, None) is not None:
            return request.n_output - self._n_before.pop(request.id)
        counted = self._decoding.pop(request.id, None)
        if counted is None:
            return 0
        self._n_decoding[request.tenant] -= 1
        if not self._n_decoding[request.tenant]:
            del self._n_decoding[request.tenant]
        return request.n_output - counted - self._n_steps

    def read(self, view: View) -> Counter[str]:
        """At the end of a step: tokens that the requests of each tenant wrote in it."""
        self._n_steps += 1
        written = Counter(self._n_decoding)
        for request in [other for other in self._reading.values() if view.is_decoding(other.id)]:
            del self._reading[request.id]
            written[request.tenant] += request.n_output - self._n_before.pop(request.id)
            self._decoding[request.id] = request.n_output - self._n_steps
            self._n_decoding[request.tenant] += 1
        return written
