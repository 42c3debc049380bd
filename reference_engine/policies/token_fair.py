"""Tokens shared fairly among tenants, and budgets that bound what one may use."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, PrivateAttr

from reference_engine.policies.base import Policy
from reference_engine.policies.budgets import Budget, WhenOver, mapping_of_text
from reference_engine.policies.step_budget import StepBudget
from reference_engine.policies.tenancy import Tenancy
from reference_engine.state.plan import AdmissionError, Cause, Plan, View, Why
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord

Weight = Annotated[float, Field(gt=0)]


class TokenFair(Policy):
    """All decodes and prompts being read, then the first request of the least served tenant, again
    and again, until one does not fit. A tenant is served `input_cost` per prompt token computed,
    at admission, and `output_cost` per token written, divided by its weight (`weights`, 1 for
    those not named). One that had nothing to serve is lifted to the least served of the others
    when it comes back, so that idleness earns no credit. Two tenants that always have something
    waiting are served alike to within 2 · max(input_cost · longest prompt, output_cost · KV
    tokens), weights and speed of the engine regardless.

    `budgets` bound the cost per second, by `tenant/priority`, `tenant`, `*/priority` or `*` (every
    tenant by itself). An admission reserves what it is predicted to cost, and its end settles the
    difference. Over budget a request waits until its tenant can pay (`when_over: queue`), while
    others go on, or is refused at arrival with the seconds to wait (`refuse`, a 429).

    Source: VTC (OSDI'24, arXiv 2401.00588), Algorithm 2 and Theorem 4.4.
    """

    kind: ClassVar[str] = "token_fair"
    is_work_conserving: ClassVar[bool] = True  # without budgets

    token_budget: int = Field(default=2048, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    input_cost: float = Field(default=1.0, gt=0)
    output_cost: float = Field(default=2.0, gt=0)
    weights: Annotated[dict[str, Weight], BeforeValidator(mapping_of_text)] = Field(
        default_factory=dict
    )
    budgets: Annotated[dict[str, Budget], BeforeValidator(mapping_of_text)] = Field(
        default_factory=dict
    )

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
        tenancy = self._tenancy
        tenancy.settle(view)
        room = StepBudget.beside_decodes(
            view,
            tokens=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
        )
        room.resume()
        causes: tuple[tuple[str, Cause], ...] = ()
        rest = Cause(Why.no_token_budget)
        while (head := tenancy.head(view)) is not None:
            cause = room.admit(head)
            if cause is None:
                tenancy.charge(head, view)
                continue
            rest = cause
            if cause.why is Why.no_kv_blocks and room.blocks >= 0:
                causes, rest = ((head.id, cause),), Cause(Why.behind, head.id)
            break
        blocked = tenancy.blocked
        segments = tuple(
            (flow.name, Cause(Why.tenant_budget, until_s=flow.blocked_until_s)) for flow in blocked
        )
        is_idle = not room.items and not view.decoding
        until_s = min((flow.blocked_until_s or 0.0 for flow in blocked), default=None)
        return Plan(
            tuple(room.items),
            decode_all=True,
            causes=causes,
            segments=segments,
            rest=rest,
            wait_until_s=until_s if is_idle else None,
        )

    def explain(self, request_id: str, view: View) -> dict[str, Any]:
        request = view.find(request_id)
        return {} if request is None else self._tenancy.explain(request, view)
