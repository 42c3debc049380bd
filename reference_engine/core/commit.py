"""Placed steps and their commit: appending tokens and moving requests on, short of ending them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reference_engine.state.batch import Row, StepBatch, StepResult
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Plan
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request
from reference_engine.state.steps import Level, StepRecord

# Appended tokens that are the first of their request, or may be its last.
Milestones = list[tuple[Request, int]]


class PlannedStep(NamedTuple):
    """A plan after placement, ready to be executed: the batch, and the numbers of its `StepRecord`
    that are fixed by now. `placed_s` is the instant at which planning ended."""

    plan: Plan
    batch: StepBatch
    t_s: float
    plan_s: float
    placed_s: float
    n_running: int
    n_waiting: int
    kv_used_blocks: int
    n_preempted: int
    policy: str
    causes: tuple[tuple[str, int], ...]

    def record(
        self, step: int, level: Level, began_s: float, end_s: float, duration_s: float
    ) -> StepRecord:
        batch = self.batch
        shape = batch.shape()
        items: tuple[tuple[str, int], ...] = ()
        if level == "full":
            items = (
                *((row.request.id, row.n_tokens) for row in batch.rows),
                *((request.id, 1) for request in batch.decodes),
            )
        return StepRecord(
            step=step,
            t_s=self.t_s,
            began_s=began_s,
            end_s=end_s,
            duration_s=duration_s,
            plan_s=self.plan_s,
            n_prefill_tokens=shape.prefill_tokens,
            prefill_attention=shape.prefill_attention,
            n_decode=shape.n_decode,
            context_tokens=batch.context_tokens,
            n_running=self.n_running,
            n_waiting=self.n_waiting,
            kv_used_blocks=self.kv_used_blocks,
            padding_tokens=batch.padding.prefill_tokens + batch.padding.decode_rows,
            n_preempted=self.n_preempted,
            policy=self.policy,
            action=self.plan.action,
            group=self.plan.group,
            items=items,
            causes=self.causes,
            padding_context_tokens=batch.padding.decode_context_tokens,
        )


class StartedStep(NamedTuple):
    """A step that is being computed: its plan, the instant (s) at which it began, and the result
    that it will have."""

    planned: PlannedStep
    began_s: float
    result: StepResult


def append_tokens(
    batch: StepBatch, tokens: Sequence[int], queues: Queues, kv: KvPool, now_s: float
) -> tuple[Milestones, int]:
    """Append the sampled tokens to their requests, publish full blocks and move requests between
    prefilling and decoding. Returns the milestones and the number of prompt tokens
    computed."""
    n_sampled = batch.n_tokens - len(batch.decodes)
    assert len(tokens) == batch.n_tokens, f"{len(tokens)} tokens for {batch.n_tokens} rows"
    lockstep = queues.lockstep
    if lockstep is not None and batch.decodes:
        lockstep.advance((now_s,))  # first: a row that decodes from now on joins after this step
        queues.context_tokens += len(batch.decodes)
    milestones, n_prompt = _append_to_rows(batch.rows, tokens, queues, kv)
    if lockstep is None:
        decoded = tokens[n_sampled:] if n_sampled else tokens
        decode_milestones = _append_to_decodes(batch.decodes, decoded, queues)
    else:
        due = [(request, request.tokens[-1]) for request in lockstep.pop_due()]
        decode_milestones = _milestones(due, queues)
    n_prompt += sum(request.n_computed <= request.n_prompt for request, _ in decode_milestones)
    milestones += decode_milestones
    for request, _ in milestones:
        queues.advance(request)
    return milestones, n_prompt


def _append_to_rows(
    rows: Sequence[Row], tokens: Sequence[int], queues: Queues, kv: KvPool
) -> tuple[Milestones, int]:
    milestones: Milestones = []
    n_prompt = 0
    sampled = iter(tokens)
    for request, start, n_tokens, samples in rows:
        request.n_computed += n_tokens
        n_prompt += min(max(request.n_prompt - start, 0), n_tokens)
        kv.publish(request)
        if request.id in queues.decoding:
            queues.context_tokens += n_tokens
        if samples:
            token = next(sampled)
            request.tokens.append(token)
            milestones.append((request, token))
        else:
            queues.advance(request)
    return milestones, n_prompt


def _append_to_decodes(
    decodes: Sequence[Request], tokens: Sequence[int], queues: Queues
) -> Milestones:
    """Append a token to each request. The first loop runs for every decode of every step, so it
    only appends and compares; the rare cases are handled after it."""
    queues.context_tokens += len(decodes)
    rare: Milestones = []
    for request, token in zip(decodes, tokens, strict=True):
        n = request.n_computed = request.n_computed + 1
        request.tokens.append(token)
        if n == request._n_milestone or token in request.stop_ids:
            rare.append((request, token))
    return _milestones(rare, queues)


def _milestones(rare: Milestones, queues: Queues) -> Milestones:
    milestones: Milestones = []
    for entry in rare:
        request, token = entry
        is_last = request.n_computed == request._n_last or token in request.stop_ids
        if is_last or request.first_token_s is None:
            milestones.append(entry)
        else:
            queues.set_milestone(request)  # only its blocks are full
    return milestones
