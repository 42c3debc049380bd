"""Fair sharing of tokens among tenants, with budgets that bound the use of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, PrivateAttr

from reference_engine.policies.budgets import Budget, WhenOver, mapping_of_text
from reference_engine.policies.step_budget import TokenBudgetPolicy, admit_in_order
from reference_engine.policies.tenancy import Tenancy
from reference_engine.state.plan import AdmissionError, Cause, Plan, View, Why
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord

Weight = Annotated[float, Field(gt=0)]
FromText = BeforeValidator(mapping_of_text)


class TokenFair(TokenBudgetPolicy):
    """All decodes and prompts in prefill, then the first request of the least served tenant, again
    and again, until a request does not fit. A tenant's service is `input_cost` per prompt token
    computed, counted at admission, and `output_cost` per token generated, divided by its weight
    (`weights`, default 1). A tenant that comes back from idleness is lifted to the least served of
    the others, so idle time earns no credit. The service of two tenants that always have requests
    waiting differs by at most 2 · max(input_cost · longest prompt, output_cost · KV tokens).

    `budgets` bound the cost per second, per `tenant/priority`, `tenant`, `*/priority` or `*` (each
    tenant by itself). An admission reserves the predicted cost of the request, and its end settles
    the difference. Over budget, a request waits until its tenant can pay (`when_over: queue`) while
    others go on, or is refused at arrival with the seconds to wait (`refuse`, HTTP 429).
    `token_budget`, `max_num_seqs` and `watermark` are as in `chunked`.

    Source: VTC (OSDI'24, arXiv 2401.00588), Algorithm 2 and Theorem 4.4.
    """

    kind: ClassVar[str] = "token_fair"
    is_work_conserving: ClassVar[bool] = True  # without budgets

    input_cost: float = Field(default=1.0, gt=0)
    output_cost: float = Field(default=2.0, gt=0)
    weights: Annotated[dict[str, Weight], FromText] = Field(default_factory=dict)
    budgets: Annotated[dict[str, Budget], FromText] = Field(default_factory=dict)

    _tenancy: Tenancy = PrivateAttr()

    def model_post_init(self, context: object) -> None:
        self._tenancy = Tenancy(self.input_cost, self.output_cost, self.weights, self.budgets)

    def check_arrival(self, request: Request, view: View) -> None:
        due_s = self._tenancy.payable_s(request, view, WhenOver.refuse)
        if due_s > view.now_s:
            raise AdmissionError(
                f"tenant '{request.tenant}' is over its token budget; try again in "
                f"{due_s - view.now_s:.3g} s",
                "tenant_budget",
                retry_after_s=due_s - view.now_s,
            )

    def on_arrival(self, request: Request, view: View) -> None:
        self._tenancy.enter(request, view)

    def on_requeue(self, request: Request, view: View) -> None:
        self._tenancy.wait(request, view)

    def on_step_end(self, record: StepRecord, view: View) -> None:
        self._tenancy.step(view)

    def on_finish(self, request: Request, view: View) -> None:
        self._tenancy.leave(request, view)

    def plan(self, view: View) -> Plan:
        self._tenancy.settle(view)
        budget = self.budget_after_decodes(view)
        budget.continue_prefills()
        causes, rest = admit_in_order(budget, self._turns(view))
        blocked = self._tenancy.blocked
        segments = tuple(
            (queue.name, Cause(Why.tenant_budget, until_s=queue.blocked_until_s))
            for queue in blocked
        )
        until_s = min((queue.blocked_until_s or 0.0 for queue in blocked), default=None)
        return Plan(
            tuple(budget.items),
            decode_all=True,
            causes=causes,
            segments=segments,
            rest=rest,
            wait_until_s=None if budget.items or view.decoding else until_s,
        )

    def explain(self, request_id: str, view: View) -> dict[str, object]:
        request = view.find(request_id)
        return {} if request is None else self._tenancy.explain(request, view)

    def _turns(self, view: View) -> Iterator[Request]:
        """The next request of the least served tenant, each charged before the next is chosen."""
        while (head := self._tenancy.head(view)) is not None:
            yield head
            self._tenancy.charge(head, view)  # reached only if the head was admitted
