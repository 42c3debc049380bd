"""Prefill-first batching: each step computes either prompts or decodes."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from reference_engine.policies.base import Policy
from reference_engine.policies.step_budget import StepBudget, admit_in_order, has_no_slot
from reference_engine.state.plan import Plan, View


class PrefillFirst(Policy):
    """While the whole prompt of the next waiting request fits `max_num_batched_tokens`, a sequence
    slot and the KV memory, a step computes prompts and no decodes. Otherwise the step computes one
    token of every running request. TTFT is the lowest of all modes until saturation, but each
    arriving prompt stops every stream for the time of its prefill.

    `max_num_batched_tokens` limits the prompt tokens of a step (None: the larger of 2 048 and the
    context length), `max_num_seqs` the running requests. A prompt longer than the engine's largest
    step is prefilled in consecutive steps before the next decode. Admissions leave the share
    `watermark` of the KV blocks free. The last admitted request is preempted first.

    Source: vLLM v0 `scheduler._schedule_prefills`/`_schedule_running` (as in Sarathi-Serve's
    `vllm_scheduler.py`).
    """

    kind: ClassVar[str] = "prefill_first"
    is_in_order: ClassVar[bool] = True
    counts_decodes: ClassVar[bool] = True

    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)

    def plan(self, view: View) -> Plan:
        # Each running request needs a token in a decode step.
        most_seqs = min(self.max_num_seqs, view.limits.max_step_tokens)
        tokens = self.max_num_batched_tokens or max(2048, view.limits.max_model_len)
        budget = StepBudget(view, tokens=tokens, max_num_seqs=most_seqs, watermark=self.watermark)
        budget.continue_prefills()
        causes, rest = admit_in_order(budget, view.waiting, is_whole=True)
        is_decode = not budget.items
        return Plan(tuple(budget.items), decode_all=is_decode, causes=causes, rest=rest)

    def is_steady(self, view: View) -> bool:
        return not view.waiting or has_no_slot(view, self.max_num_seqs)
