"""Iteration-level batching: requests join and leave the batch at every step, prompts whole."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from reference_engine.policies.base import Policy
from reference_engine.policies.step_budget import Reserve, StepBudget, admit_in_order
from reference_engine.state.plan import Plan, View


class Continuous(Policy):
    """Each step gives one token to every running request and takes in new ones, first come first
    served, with their whole prompt, while there is a sequence slot and KV room. There is no token
    budget: a long prompt stretches the step, and everybody's next token, by all it takes to read
    it. (One longer than the engine's largest step is read in several.)

    KV is paged: `reserve` is how much an admission takes at once; what it does not take is found
    by preempting the last admitted. `watermark` is the share of blocks an admission leaves free.

    Source: Orca (OSDI'22) §3.1 iteration-level scheduling; PagedAttention (SOSP'23) §4.
    """

    kind: ClassVar[str] = "continuous"
    is_in_order: ClassVar[bool] = True

    max_num_seqs: int = Field(default=256, ge=1)
    reserve: Reserve = Reserve.watermark
    watermark: float = Field(default=0.01, ge=0, lt=1)

    def plan(self, view: View) -> Plan:
        return plan_whole_prompts(view, self.max_num_seqs, self.reserve, self.watermark)


class Orca(Policy):
    """As `continuous`, but each admission reserves KV for its prompt and all it may generate, so
    that nothing is ever preempted and fewer run: with outputs that stop early, most of the
    reserved room is never used.

    Selective batching (Orca §3.2: linear layers over all tokens at once, attention per sequence) is
    what the torch executors do for every mode.

    Source: Orca (OSDI'22) §3.1, §4.2; Sarathi-Serve's and Vidur's `orca` schedulers.
    """

    kind: ClassVar[str] = "orca"
    is_in_order: ClassVar[bool] = True

    max_num_seqs: int = Field(default=256, ge=1)

    def plan(self, view: View) -> Plan:
        return plan_whole_prompts(view, self.max_num_seqs, Reserve.max, watermark=0.0)


def plan_whole_prompts(view: View, max_num_seqs: int, reserve: Reserve, watermark: float) -> Plan:
    """All running requests, and whole prompts first come first served."""
    room = StepBudget.beside_decodes(
        view,
        tokens=view.limits.max_step_tokens,
        max_num_seqs=max_num_seqs,
        watermark=watermark,
    )
    room.resume()
    causes, rest = admit_in_order(room, view.waiting, is_whole=True, reserve=reserve)
    return Plan(tuple(room.items), decode_all=True, causes=causes, rest=rest)
