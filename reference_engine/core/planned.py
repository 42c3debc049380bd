"""A step that only needs computing, and the record it will leave."""

from __future__ import annotations

from typing import NamedTuple

from reference_engine.state.batch import StepBatch
from reference_engine.state.cost_model import Padding
from reference_engine.state.plan import Plan
from reference_engine.state.steps import Level, StepRecord


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
