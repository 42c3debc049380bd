"""What a computed step changes in its requests, but for ending them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reference_engine.state.batch import Row, StepBatch
from reference_engine.state.cost_model import Padding
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Plan
from reference_engine.state.queues import Queues
from reference_engine.state.sequence import Request
from reference_engine.state.steps import Level, StepRecord

Due = list[tuple[Request, int]]  # tokens, already appended, that may be the last of their request


def book(batch: StepBatch, tokens: Sequence[int], queues: Queues, kv: KvPool) -> tuple[Due, int]:
    """Append tokens and publish full blocks; (the due ones, prompt tokens computed)."""
    n_sampled = batch.n_tokens - len(batch.decodes)
    assert len(tokens) == batch.n_tokens, f"{len(tokens)} tokens for {batch.n_tokens} rows"
    due, n_prompt = _book_rows(batch.rows, tokens, queues, kv)
    late = _book_decodes(batch.decodes, tokens[n_sampled:] if n_sampled else tokens, queues)
    n_prompt += sum(request.n_computed <= request.n_prompt for request, _ in late)
    return due + late, n_prompt


UNKNOWN = -1  # stands for a token that is being computed


def fill(batch: StepBatch, tokens: Sequence[int], due: Due) -> Due:
    """Put the tokens of a step that was booked with `UNKNOWN` ones in their places. Returns what
    booking the real ones would have returned: `due` with its tokens, and whoever stops by one."""
    requests = [row.request for row in batch.rows if row.samples]
    requests += batch.decodes
    is_due = {request for request, _ in due}
    filled: Due = []
    for request, token in zip(requests, tokens, strict=True):
        assert request.tokens[-1] == UNKNOWN, f"{request.id}: its token is known already"
        request.tokens[-1] = token
        if token in request.stop_ids or request in is_due:
            filled.append((request, token))
    return filled


def seat(request: Request, queues: Queues) -> None:
    """Put a running request where it belongs after its tokens were booked."""
    if request.n_computed >= request.n_most:
        queues.land(request)
    elif request.id in queues.decoding:
        queues.measure(request)
    elif len(request.tokens) - request.n_computed == 1:
        queues.decode(request)


def _book_rows(
    rows: Sequence[Row], tokens: Sequence[int], queues: Queues, kv: KvPool
) -> tuple[Due, int]:
    due: Due = []
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
            due.append((request, token))
        else:
            seat(request, queues)
    return due, n_prompt


def _book_decodes(decodes: Sequence[Request], tokens: Sequence[int], queues: Queues) -> Due:
    """One more token each. Nearly all only append it, so that is all the first loop does."""
    queues.context_tokens += len(decodes)
    special: Due = []
    for request, token in zip(decodes, tokens, strict=True):
        n = request.n_computed = request.n_computed + 1
        request.tokens.append(token)
        if n == request._n_milestone or token in request.stop_ids:
            special.append((request, token))
    due: Due = []
    for entry in special:
        request, token = entry
        is_last = request.n_computed == request._n_last or token in request.stop_ids
        if is_last or request.first_token_s is None:
            due.append(entry)
        else:
            queues.measure(request)  # only its room is used up
    return due


class PlanRecord(NamedTuple):
    """What a step's record says about the instant at which it was planned."""

    t_s: float
    plan_s: float
    n_running: int
    n_waiting: int
    kv_used_blocks: int
    n_preempted: int
    policy: str
    causes: tuple[tuple[str, int], ...]


class PlannedStep(NamedTuple):
    """A plan, what it became, and when."""

    plan: Plan
    batch: StepBatch
    outset: PlanRecord

    def without_ended(self) -> PlannedStep:
        """Rows planned ahead for requests that are over by now become padding."""
        batch = self.batch
        gone = [row for row in batch.rows if row.request.finished_s is not None]
        decodes = [request for request in batch.decodes if request.finished_s is None]
        n_gone = len(batch.decodes) - len(decodes)
        if not gone and not n_gone:
            return self
        context = sum(r.n_tokens - 1 for r in batch.decodes if r.finished_s is not None)
        padding = batch.padding
        batch = batch._replace(
            rows=tuple(row for row in batch.rows if row.request.finished_s is None),
            decodes=decodes,
            context_tokens=batch.context_tokens - context,
            padding=Padding(
                padding.prefill_tokens + sum(row.n_tokens for row in gone),
                padding.decode_rows + n_gone,
                padding.decode_context_tokens + context,
            ),
        )
        return self._replace(batch=batch)

    def record(
        self,
        step: int,
        level: Level,
        began_s: float,
        duration_s: float,
        end_s: float,
    ) -> StepRecord:
        plan, batch, outset = self
        shape = batch.shape()
        items: tuple[tuple[str, int], ...] = ()
        if level == "full":
            items = (
                *((row.request.id, row.n_tokens) for row in batch.rows),
                *((request.id, 1) for request in batch.decodes),
            )
        return StepRecord(
            step=step,
            t_s=outset.t_s,
            began_s=began_s,
            end_s=end_s,
            duration_s=duration_s,
            plan_s=outset.plan_s,
            n_prefill_tokens=shape.prefill_tokens,
            prefill_attention=shape.prefill_attention,
            n_decode=shape.n_decode,
            context_tokens=batch.context_tokens,
            n_running=outset.n_running,
            n_waiting=outset.n_waiting,
            kv_used_blocks=outset.kv_used_blocks,
            padding_tokens=batch.padding.prefill_tokens + batch.padding.decode_rows,
            n_preempted=outset.n_preempted,
            policy=outset.policy,
            action=plan.action,
            group=plan.group,
            items=items,
            causes=outset.causes,
        )
