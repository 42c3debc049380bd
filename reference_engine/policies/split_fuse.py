"""Dynamic SplitFuse: steps of a constant size, with prompts split to fill them."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from reference_engine.policies.step_budget import TokenBudgetPolicy, admit_in_order, has_no_slot
from reference_engine.state.cost_model import Padding
from reference_engine.state.plan import Plan, View


class SplitFuse(TokenBudgetPolicy):
    """As `chunked`, with smaller steps and `pad`. Each step computes exactly `token_budget` tokens
    while there is that much to compute: one token of every decoding request, the rest from prompts,
    long or short, split where the budget ends; this rule is also that of `chunked`. `pad: budget`
    fills an incomplete step with padding, as an engine with a single captured
    step size does; all steps then take the same time. `max_num_seqs` limits the running requests;
    admissions leave the share `watermark` of the KV blocks free.

    Source: DeepSpeed-FastGen (arXiv 2401.08671) §3.2 Dynamic SplitFuse.
    """

    kind: ClassVar[str] = "split_fuse"
    is_in_order: ClassVar[bool] = True
    counts_decodes: ClassVar[bool] = True

    token_budget: int = Field(default=512, ge=1)
    pad: Literal["none", "budget"] = "none"

    def plan(self, view: View) -> Plan:
        budget = self.budget_after_decodes(view)
        budget.continue_prefills()
        causes, rest = admit_in_order(budget, view.waiting)
        n_left = max(0, budget.tokens) if self.pad == "budget" else 0
        padding = Padding(prefill_tokens=n_left)
        return Plan(tuple(budget.items), decode_all=True, causes=causes, rest=rest, padding=padding)

    def is_steady(self, view: View) -> bool:
        return not view.waiting or has_no_slot(view, self.max_num_seqs)
