"""Fallback plan of the engine, for a step in which the policy's own plan cannot be carried out."""

from __future__ import annotations

from itertools import islice

from reference_engine.state.plan import Item, Plan, View


def first_come(view: View, *, admits: bool = True) -> Plan:
    """A plan that is always valid: all decodes, then unfinished prompts, then (if it `admits`) the
    head of the queue, up to the engine's step limit."""
    budget = view.limits.max_step_tokens
    if len(view.decoding) > budget:
        return Plan(tuple(Item(request.id, 1) for request in islice(view.decoding, budget)))
    budget -= len(view.decoding)
    items: list[Item] = []
    for request in view.prefilling:
        n_tokens = min(view.to_compute(request), budget)
        if n_tokens:
            items.append(Item(request.id, n_tokens))
            budget -= n_tokens
    head = next(iter(view.waiting), None) if admits else None
    if head is not None and budget and len(view.running) < view.limits.max_num_seqs:
        items.append(Item(head.id, min(view.to_compute(head), budget)))
    return Plan(tuple(items), decode_all=True, action="fallback")
