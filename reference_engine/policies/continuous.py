"""Iteration-level batching: requests join and leave the batch at every step, prompts whole."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from reference_engine.policies.base import Policy
from reference_engine.policies.step_budget import (
    Reserve,
    StepBudget,
    admit_in_order,
    has_no_slot,
)
from reference_engine.state.plan import Plan, View


class Continuous(Policy):
    """Each step computes one token of every running request and admits new requests with their
    whole prompts, first come first served, while a sequence slot and KV room are free. There is no
    token budget: a long prompt delays the next token of all other requests by the time of its
    prefill. (A prompt longer than the engine's largest step is prefilled in several steps.)

    `max_num_seqs` limits the running requests. KV is paged: `reserve` is the room that an admission
    takes at once; further room is taken as the request grows, by preempting the last admitted
    request when no block is free. Admissions leave the share `watermark` of the blocks free.

    Source: Orca (OSDI'22) §3.1 iteration-level scheduling; PagedAttention (SOSP'23) §4.
    """

    kind: ClassVar[str] = "continuous"
    is_in_order: ClassVar[bool] = True
    counts_decodes: ClassVar[bool] = True

    max_num_seqs: int = Field(default=256, ge=1)
    reserve: Reserve = Reserve.watermark
    watermark: float = Field(default=0.01, ge=0, lt=1)

    def plan(self, view: View) -> Plan:
        return plan_whole_prompts(view, self.max_num_seqs, self.reserve, self.watermark)

    def is_steady(self, view: View) -> bool:
        return not view.waiting or has_no_slot(view, self.max_num_seqs)


class Orca(Policy):
    """As `continuous`, but each admission reserves KV for its prompt and all output that it may
    generate. Nothing is ever preempted, and fewer requests run: when outputs stop early, most of
    the reserved room is never used. `max_num_seqs` limits the running requests.

    Selective batching (Orca §3.2: linear layers over all tokens at once, attention per sequence) is
    done by the torch executors for every mode.

    Source: Orca (OSDI'22) §3.1, §4.2; the `orca` schedulers of Sarathi-Serve and Vidur.
    """

    kind: ClassVar[str] = "orca"
    is_in_order: ClassVar[bool] = True
    counts_decodes: ClassVar[bool] = True

    max_num_seqs: int = Field(default=256, ge=1)

    def plan(self, view: View) -> Plan:
        return plan_whole_prompts(view, self.max_num_seqs, Reserve.max, watermark=0.0)

    def is_steady(self, view: View) -> bool:
        return not view.waiting or has_no_slot(view, self.max_num_seqs)


def plan_whole_prompts(view: View, max_num_seqs: int, reserve: Reserve, watermark: float) -> Plan:
    """A plan of all running requests and of whole prompts, first come first served."""
    budget = StepBudget(
        view,
        tokens=view.limits.max_step_tokens,
        max_num_seqs=max_num_seqs,
        watermark=watermark,
        is_after_decodes=True,
    )
    budget.continue_prefills()
    causes, rest = admit_in_order(budget, view.waiting, is_whole=True, reserve=reserve)
    return Plan(tuple(budget.items), decode_all=True, causes=causes, rest=rest)
