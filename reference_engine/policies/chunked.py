"""Continuous batching with chunked prefill: decodes never stop for a long prompt."""

from __future__ import annotations

from itertools import islice
from typing import ClassVar

from pydantic import Field

from reference_engine.plan import Cause, Item, Plan, View, Why
from reference_engine.policies.base import Policy
from reference_engine.sequence import Request


class Chunked(Policy):
    """Each step gives one token to every decode, the rest of `token_budget` to unfinished prompts
    in order of admission, then to new requests first come first served; the last prompt is cut to
    what is left. Nobody is admitted in a step that must preempt.

    `watermark` is the share of KV blocks an admission leaves free for the running ones to grow
    into; `long_prefill_tokens` caps a prompt's share of one step (0: no cap).

    Source: Sarathi-Serve (OSDI'24) §4; vLLM V1 `scheduler.schedule`.
    """

    kind: ClassVar[str] = "chunked"

    token_budget: int = Field(default=2048, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    long_prefill_tokens: int = Field(default=0, ge=0)

    def plan(self, view: View) -> Plan:
        budget = min(self.token_budget, view.limits.max_step_tokens)
        n_decoding = len(view.decoding)
        if n_decoding > budget:  # taken over from a policy with more sequences
            return Plan(tuple(Item(request.id, 1) for request in islice(view.decoding, budget)))
        budget -= n_decoding
        free, items = view.kv.n_free - view.decode_blocks, []
        cap = self.long_prefill_tokens or budget
        for request in view.prefilling:
            n_tokens = min(len(request.tokens) - request.n_computed, budget, cap)
            if n_tokens:
                items.append(Item(request.id, n_tokens))
                budget -= n_tokens
                free -= view.kv.missing(request, n_tokens)
        if free < 0:
            return Plan(tuple(items), decode_all=True, rest=Cause(Why.no_kv_blocks))
        return self._admit(view, items, budget, free)

    def _admit(self, view: View, items: list[Item], budget: int, free: int) -> Plan:
        # One decode token for each running sequence must always fit into a step.
        slots = min(self.max_num_seqs, view.limits.max_num_seqs, self.token_budget)
        slots -= len(view.running)
        for request in view.waiting:
            if slots <= 0:
                return Plan(tuple(items), decode_all=True, rest=Cause(Why.no_seq_slot))
            cap = self.long_prefill_tokens or budget
            n_tokens = min(view.to_compute(request), budget, cap)
            if not n_tokens:
                return Plan(tuple(items), decode_all=True)
            n_blocks = view.kv.missing_to_admit(request, n_tokens)
            # With nothing scheduled yet the watermark would guard nobody and could block for ever.
            spare = self.watermark * view.kv.n_blocks if items or view.decoding else 0
            if n_blocks + spare > free:
                return self._head_without_blocks(request, items)
            items.append(Item(request.id, n_tokens))
            slots, budget, free = slots - 1, budget - n_tokens, free - n_blocks
        return Plan(tuple(items), decode_all=True)

    def _head_without_blocks(self, head: Request, items: list[Item]) -> Plan:
        return Plan(
            tuple(items),
            decode_all=True,
            causes=((head.id, Cause(Why.no_kv_blocks)),),
            rest=Cause(Why.behind, head.id),
        )
