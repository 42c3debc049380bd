"""Prompts before decodes: a step is either all prompts or all decodes."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from reference_engine.policies.base import Policy
from reference_engine.policies.step_budget import StepBudget, admit_in_order
from reference_engine.state.plan import Plan, View


class PrefillFirst(Policy):
    """While a waiting request's whole prompt fits `max_num_batched_tokens`, a sequence slot and KV
    room, a step reads prompts and nobody decodes; only when none can be taken do all running
    requests get their next token. TTFT is the lowest there is until saturation; every prompt that
    arrives stops everybody's stream for as long as it takes to read.

    `max_num_batched_tokens` None is the longer of 2 048 and the context. A prompt longer than the
    engine's largest step is read in several, one after the other, before anybody decodes.
    `watermark` is the share of KV blocks an admission leaves free. The last admitted is preempted
    first.

    Source: vLLM v0 `scheduler._schedule_prefills`/`_schedule_running` (as in Sarathi-Serve's
    `vllm_scheduler.py`).
    """

    kind: ClassVar[str] = "prefill_first"
    is_in_order: ClassVar[bool] = True

    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)

    def plan(self, view: View) -> Plan:
        most_seqs = min(self.max_num_seqs, view.limits.max_step_tokens)
        tokens = self.max_num_batched_tokens or max(2048, view.limits.max_model_len)
        room = StepBudget(view, tokens=tokens, max_num_seqs=most_seqs, watermark=self.watermark)
        room.resume()
        causes, rest = admit_in_order(room, view.waiting, is_whole=True)
        if room.items:
            return Plan(tuple(room.items), causes=causes, rest=rest)
        return Plan(decode_all=True, causes=causes, rest=rest)
