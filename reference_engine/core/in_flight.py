"""Batches in flight: the steps of an engine that begins a batch before the tokens of the batches
before it are there, as the scheduler of a pipeline does.

    start_batch   plan ─▶ place ─▶ pieces of prompts count as computed, requests with a token to
                                   come are in flight: no plan sees them
    end_batch     land ─▶ append the tokens ─▶ finish the step

The next piece of a prompt may follow while its predecessor is in flight, because every stage
computes the batches in their order. Sources: vLLM V1 `EngineCore.step_with_batch_queue`, and
`BaseReplicaScheduler.on_schedule` of Vidur, which waits for each piece.
"""

from __future__ import annotations

from dataclasses import replace

from reference_engine.core.commit import StartedStep
from reference_engine.core.core import EngineState, start_step
from reference_engine.executors.base import Executor
from reference_engine.state.batch import StepTokens


def start_batch(state: EngineState, executor: Executor, most_seqs: int) -> StartedStep:
    """Begin a batch of the requests that are not in flight, which admits requests while it has
    fewer than `most_seqs`. A batch without work is over at once (`end_step`)."""
    limits, queues = state.limits, state.queues
    n_left = limits.max_num_seqs - len(queues.in_flight)
    state.view().limits = replace(limits, max_num_seqs=min(most_seqs, n_left))
    started = start_step(state, executor)
    batch = started.planned.batch
    if batch.has_work:
        pieces = tuple(row for row in batch.rows if not row.samples)
        state.append_tokens(batch._replace(rows=pieces, decodes=(), context_tokens=0), ())
        queues.take_off(batch.sampled_requests())
    return started


def end_batch(state: EngineState, started: StartedStep) -> StepTokens:
    """Commit the first of the batches in flight, and return its tokens."""
    planned, began_s, result = started
    batch = planned.batch
    state.queues.land(batch.sampled_requests())
    last_pieces = tuple(row for row in batch.rows if row.samples)
    milestones = state.append_tokens(batch._replace(rows=last_pieces), result.tokens)
    return state.finish_step(planned, result, milestones, began_s)
