"""A plan that is always right: what an engine does when its policy's plan is not."""

from __future__ import annotations

from itertools import islice

from reference_engine.state.plan import Item, Plan, View


def first_come(view: View, *, admits: bool = True) -> Plan:
    """Every decode its token, then unfinished prompts, then (if it `admits`) the head of the
    queue, as far as the step's limit goes."""
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
