"""Costs of requests to their tenants: charges as they are served, reservations against budgets."""

from __future__ import annotations

from collections import Counter

from reference_engine.policies.budgets import Budget, WhenOver, budget_of
from reference_engine.policies.sorted_queue import Key
from reference_engine.policies.virtual_counters import BudgetQueue, TenantCounter, VirtualCounters
from reference_engine.state.plan import View
from reference_engine.state.sequence import Request


class Tenancy:
    """The requests of all tenants from arrival to end, with their charges and reservations."""

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
        self._queues: dict[str, BudgetQueue] = {}  # by request
        self._meter = OutputTokenMeter()
        self._charged: set[str] = set()  # requests whose prompt is charged
        self._reserved: dict[str, float] = {}
        self._granted: list[tuple[Request, float]] = []  # by the last plan, with their charges
        self._blocked: dict[str, tuple[TenantCounter, BudgetQueue]] = {}
        self._n_entered = 0

    @property
    def blocked(self) -> list[BudgetQueue]:
        """Queues that wait for their budget."""
        return [queue for _, queue in self._blocked.values()]

    def payable_s(self, request: Request, view: View, when_over: WhenOver) -> float:
        """The instant at which the budget of an arriving request can pay it; now if it has none of
        the kind `when_over`. Changes nothing: it adds no tenant and no bucket."""
        name, budget = budget_of(self._budgets, request.tenant, request.priority)
        if budget is None or budget.when_over is not when_over:
            return view.now_s
        tenant = self._counters.find(request.tenant)
        queue = None if tenant is None else tenant.queues.get(name)
        # An unused budget is full and pays any request.
        return view.now_s if queue is None else self._due_s(queue, request, view)

    def enter(self, request: Request, view: View) -> None:
        """Add a request that has arrived, or that is taken over from another policy."""
        self._counters.enter(self._counters.tenant(request.tenant))
        self._n_entered += 1
        self._keys[request.id] = request.arrived_s, float(self._n_entered)
        if view.is_running(request.id):  # its service under the other policy is not charged
            self._charged.add(request.id)
            self._meter.start(request)
            return
        self.wait(request, view)
        queue = self._queues[request.id]
        if queue.budget is not None and queue.budget.when_over is WhenOver.refuse:
            self._reserve(queue, request, view)

    def wait(self, request: Request, view: View) -> None:
        """File a waiting request at its place by arrival."""
        tenant = self._counters.tenant(request.tenant)
        self._serve_output(tenant, self._meter.stop(request))
        name, budget = budget_of(self._budgets, request.tenant, request.priority)
        queue = tenant.queues.get(name)
        if queue is None:
            bucket = None if budget is None else budget.bucket(view.now_s)
            queue = tenant.queues[name] = BudgetQueue(name, budget, bucket)
        before = self._queues.get(request.id)
        if before is not None and before is not queue:  # its priority was changed
            before.requests.drop(request.id)
        self._queues[request.id] = queue
        queue.requests.put(request, self._keys[request.id])
        if budget is not None and budget.when_over is WhenOver.queue:
            view.assign(request.id, queue.name)
        first = queue.requests.first(view)
        if first is not None and first[1] is request:
            self._unblock(tenant, queue)
        if queue.blocked_until_s is None:
            self._counters.activate(tenant)

    def leave(self, request: Request, view: View) -> None:
        """Remove an ended request: charge the rest of its output and settle its reservation."""
        if self._keys.pop(request.id, None) is None:
            return  # its tenant was paused, so it never entered
        tenant = self._counters.tenant(request.tenant)
        self._serve_output(tenant, self._meter.stop(request))
        self._charged.discard(request.id)
        queue = self._queues.pop(request.id, None)
        if queue is not None:
            queue.requests.drop(request.id)
            reserved = self._reserved.pop(request.id, None)
            if reserved is not None and queue.bucket is not None:
                queue.bucket.take(self._spent(request) - reserved, view.now_s)
            self._unblock(tenant, queue)  # the bucket may hold more, or the next cost less
        self._counters.leave(tenant)

    def settle(self, view: View) -> None:
        """Undo grants of the last plan that were not used, and unblock budgets that can pay
        again."""
        self._take_back(view)
        for tenant, queue in list(self._blocked.values()):
            if (queue.blocked_until_s or 0.0) <= view.now_s:
                self._unblock(tenant, queue)

    def step(self, view: View) -> None:
        """Charge the tokens that a step has generated."""
        for name, n_tokens in self._meter.read(view).items():
            self._counters.tenant(name).serve(self._output_cost * n_tokens)

    def head(self, view: View) -> Request | None:
        """The first payable request of the least served tenant; None if no tenant has any. Blocks
        the budgets that cannot pay on the way."""
        counters = self._counters
        while (tenant := counters.least()) is not None:
            head = tenant.head(view)
            if head is None:
                counters.deactivate_least()
                continue
            queue, request = head
            due_s = view.now_s
            if request.id not in self._reserved and request.id not in self._charged:
                due_s = self._due_s(queue, request, view)
            if due_s <= view.now_s:
                return request
            queue.blocked_until_s = due_s
            self._blocked[queue.name] = tenant, queue
        return None

    def charge(self, request: Request, view: View) -> None:
        """Charge the prompt of a request that the plan admits, at its first admission only, and
        reserve its predicted cost."""
        queue = self._queues[request.id]
        queue.requests.drop(request.id)
        cost = 0.0
        if request.id not in self._charged:
            cost = self._input_cost * view.to_compute(request)
            self._counters.tenant(request.tenant).serve(cost)
            self._charged.add(request.id)
            if request.id not in self._reserved:
                self._reserve(queue, request, view)
        self._meter.start(request)
        self._granted.append((request, cost))

    def explain(self, request: Request, view: View) -> dict[str, object]:
        if request.id not in self._keys:
            return {}
        tenant, least = self._counters.tenant(request.tenant), self._counters.least()
        queue = self._queues.get(request.id)
        bucket = None if queue is None else queue.bucket
        return {
            "tenant": tenant.name,
            "served": tenant.counter,
            "least_served": None if least is None else least.name,
            "ahead_of_least": 0.0 if least is None else tenant.counter - least.counter,
            "budget_left": None if bucket is None else bucket.level(view.now_s),
            "reserved": self._reserved.get(request.id, 0.0),
        }

    def _take_back(self, view: View) -> None:
        """Refund the admissions of the last plan that the core did not carry out."""
        for request, cost in self._granted:
            queue = self._queues.get(request.id)
            if queue is None or request.id in queue.requests or not view.is_waiting(request.id):
                continue
            tenant = self._counters.tenant(request.tenant)
            if request.scheduled_s is None:  # it would have been its first admission
                self._counters.refund(tenant, cost)
                self._charged.discard(request.id)
            self._meter.stop(request)
            queue.requests.put(request, self._keys[request.id])
            self._counters.activate(tenant, is_lifted=False)
        self._granted.clear()

    def _serve_output(self, tenant: TenantCounter, n_tokens: int) -> None:
        if n_tokens < 0:
            self._counters.refund(tenant, -self._output_cost * n_tokens)
        else:
            tenant.serve(self._output_cost * n_tokens)

    def _due_s(self, queue: BudgetQueue, request: Request, view: View) -> float:
        if queue.bucket is None:
            return view.now_s
        return queue.bucket.due_s(self._predicted_cost(request, view), view.now_s)

    def _reserve(self, queue: BudgetQueue, request: Request, view: View) -> None:
        if queue.bucket is not None:
            cost = self._reserved[request.id] = self._predicted_cost(request, view)
            queue.bucket.take(cost, view.now_s)

    def _predicted_cost(self, request: Request, view: View) -> float:
        n_output = view.predictor.predict(request).mean
        return self._input_cost * view.to_compute(request) + self._output_cost * n_output

    def _spent(self, request: Request) -> float:
        if request.scheduled_s is None:
            return 0.0
        n_computed = request.n_prompt - request.n_cached
        return self._input_cost * n_computed + self._output_cost * request.n_output

    def _unblock(self, tenant: TenantCounter, queue: BudgetQueue) -> None:
        if queue.blocked_until_s is not None:
            queue.blocked_until_s = None
            del self._blocked[queue.name]
            self._counters.activate(tenant)


class OutputTokenMeter:
    """Output tokens per tenant and step, without a look at every request in every step.

    Every decoding request is assumed to generate one token a step. Where a request was held or its
    step was cut, the count is corrected when the request stops.
    """

    def __init__(self) -> None:
        self._prefilling: dict[str, Request] = {}
        self._n_before: dict[str, int] = {}  # output tokens of those in prefill, at their start
        self._decoding: dict[str, int] = {}  # output tokens counted, less steps counted
        self._n_decoding: Counter[str] = Counter()  # by tenant
        self._n_steps = 0

    def start(self, request: Request) -> None:
        """Begin to count a request that may start to run."""
        self._prefilling[request.id] = request
        self._n_before[request.id] = request.n_output

    def stop(self, request: Request) -> int:
        """Stop counting a request. Returns the tokens it has generated that were not counted;
        negative if too many were."""
        if self._prefilling.pop(request.id, None) is not None:
            return request.n_output - self._n_before.pop(request.id)
        counted = self._decoding.pop(request.id, None)
        if counted is None:
            return 0
        self._n_decoding[request.tenant] -= 1
        if not self._n_decoding[request.tenant]:
            del self._n_decoding[request.tenant]
        return request.n_output - counted - self._n_steps

    def read(self, view: View) -> Counter[str]:
        """Tokens generated in the step that has just ended, by tenant. Call once per step."""
        self._n_steps += 1
        generated = Counter(self._n_decoding)
        for request in [r for r in self._prefilling.values() if view.is_decoding(r.id)]:
            del self._prefilling[request.id]
            generated[request.tenant] += request.n_output - self._n_before.pop(request.id)
            self._decoding[request.id] = request.n_output - self._n_steps
            self._n_decoding[request.tenant] += 1
        return generated
