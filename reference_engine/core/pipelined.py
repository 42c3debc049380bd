"""The step of `async_depth` 1: plans the next step while the present one is computed.

The next plan is made as of the instant at which the running step began, before the running step's
tokens show which requests end with it. A row planned for a request that then ends is computed as
padding: a wasted token for each answer that stops by itself.

An executor that is `LaunchingAhead` gets the next step before the present step's tokens are read.
The records are the same: the tokens of requests that ended meanwhile are dropped, and whatever is
launched later overwrites their blocks after this step has written to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from reference_engine.core.commit import Milestones, PlannedStep
from reference_engine.executors.base import Executor, Launching, LaunchingAhead
from reference_engine.state.batch import UNKNOWN, StepBatch, StepResult, StepTokens
from reference_engine.state.cost_model import Padding

if TYPE_CHECKING:
    from reference_engine.core.core import EngineState  # which imports `pipelined_step` from here


class Launched(NamedTuple):
    """A step under way; `wait` returns the tokens of its `batch`."""

    batch: StepBatch
    wait: Callable[[], StepResult]

    def result(self, batch: StepBatch) -> StepResult:
        """Wait for the tokens; those of `batch`, which may have fewer requests."""
        result = self.wait()
        if batch is self.batch:
            return result
        wanted = set(batch.sampled_requests())
        is_wanted = [request in wanted for request in self.batch.sampled_requests()]
        tokens = list(compress(result.tokens, is_wanted))
        logprobs = result.logprobs
        if logprobs is not None:
            logprobs = list(compress(logprobs, is_wanted))
        return replace(result, tokens=tokens, logprobs=logprobs)


def pipelined_step(
    state: EngineState, executor: Executor, while_running: Callable[[], None] | None = None
) -> StepTokens:
    """Execute the step planned ahead, or plan it first if there is none, and plan the next."""
    launched, state.launched = state.launched, None
    planned, began_s = next_planned(state)
    batch = planned.batch
    if not batch.has_work:
        return state.commit(planned, StepResult())
    if isinstance(executor, Launching):
        # Planning needs the number of tokens, not their values: UNKNOWN stands in for them.
        launched = launched or Launched(batch, executor.launch(batch))
        if while_running is not None:
            while_running()
        milestones = state.append_tokens(batch, [UNKNOWN] * batch.n_tokens)
        _plan_ahead(state, began_s)
        if isinstance(executor, LaunchingAhead):
            _launch_ahead(state, executor)
        result = launched.result(batch)
        milestones = _fill_in(batch, result.tokens, milestones)
        return state.finish_step(planned, result, milestones, began_s)
    return commit_and_plan(state, planned, executor.execute(batch), began_s)


def next_planned(state: EngineState) -> tuple[PlannedStep, float]:
    """The step planned ahead, else a new plan; and the instant (s) at which the step begins."""
    if state.ahead is None:
        planned = state.place(state.plan())
        return planned, planned.placed_s
    planned, state.ahead = _without_ended(state.ahead), None
    return planned, state.view().now_s


def commit_and_plan(
    state: EngineState, planned: PlannedStep, result: StepResult, began_s: float
) -> StepTokens:
    """Commit a step and plan the next as of the instant at which it began."""
    milestones = state.append_tokens(planned.batch, result.tokens)
    _plan_ahead(state, began_s)
    return state.finish_step(planned, result, milestones, began_s)


def _plan_ahead(state: EngineState, now_s: float) -> None:
    queues = state.queues
    if not (queues.waiting or queues.decoding or queues.prefilling):
        return
    started_s = state.view().now_s
    planned = state.place(state.plan(now_s), started_s)
    state.ahead = planned if planned.batch.has_work else None


def _launch_ahead(state: EngineState, executor: LaunchingAhead) -> None:
    if state.ahead is not None and executor.can_launch_ahead(state.ahead.batch):
        batch = state.ahead.batch
        state.launched = Launched(batch, executor.launch(batch))


def _fill_in(batch: StepBatch, tokens: Sequence[int], milestones: Milestones) -> Milestones:
    """Replace UNKNOWN tokens by the sampled tokens. Returns the milestones with their tokens, and
    in addition the requests that end by a stop token, which could not be seen before."""
    at_milestone = {request for request, _ in milestones}
    filled: Milestones = []
    for request, token in zip(batch.sampled_requests(), tokens, strict=True):
        assert request.tokens[-1] == UNKNOWN, f"{request.id}: it has its token already"
        request.tokens[-1] = token
        if token in request.stop_ids or request in at_milestone:
            filled.append((request, token))
    return filled


def _without_ended(planned: PlannedStep) -> PlannedStep:
    """The step with the rows of requests that are over turned into padding."""
    batch, padding = planned.batch, planned.batch.padding
    ended_rows = [row for row in batch.rows if row.request.state.is_over]
    decodes = [request for request in batch.decodes if not request.state.is_over]
    n_ended = len(batch.decodes) - len(decodes)
    if not ended_rows and not n_ended:
        return planned
    context_tokens = sum(r.n_tokens - 1 for r in batch.decodes if r.state.is_over)
    batch = batch._replace(
        rows=tuple(row for row in batch.rows if not row.request.state.is_over),
        decodes=decodes,
        context_tokens=batch.context_tokens - context_tokens,
        padding=Padding(
            padding.prefill_tokens + sum(row.n_tokens for row in ended_rows),
            padding.decode_rows + n_ended,
            padding.decode_context_tokens + context_tokens,
        ),
    )
    return planned._replace(batch=batch)
