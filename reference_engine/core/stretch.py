"""Steps that follow from their first: no request arrives or ends, and either each decoding request
gets its next token, or a prompt that is alone is computed in pieces.

A simulator computes the instants of all steps of a stretch at once and takes them together. The
records, the KV blocks and the instants of every token are those of single steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise, repeat
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from reference_engine.core.commit import PlannedStep, StartedStep
from reference_engine.policies.base import Policy
from reference_engine.state.batch import Row, StepBatch, StepResult
from reference_engine.state.cost_model import NO_PADDING
from reference_engine.state.steps import StepRecord

if TYPE_CHECKING:
    from reference_engine.core.core import EngineState

_MOST_STEPS, _LEAST_STEPS = 4096, 4
_RECORD = partial(tuple.__new__, StepRecord)  # a third of the price of calling the class
_MOST_TAKEN = 8  # blocks that a growing answer takes at once, at most; see `KvPool.extend`


@runtime_checkable
class Repeating(Protocol):
    """An executor whose steps return the same token for every request, in a time that follows from
    the batch."""

    @property
    def token(self) -> int: ...

    def repeated_s(self, batch: StepBatch, n: int) -> list[float]:
        """The seconds of `n` steps, or of fewer, of which the first was executed last: a batch
        without rows, each with a token more of context for each decode."""

    def pieces_s(self, batches: Sequence[StepBatch]) -> list[float]:
        """The seconds of the steps of `batches`, or of the first of them, of which the very first
        was executed last."""

    def pass_steps(self, n: int) -> None:
        """Count `n` steps as over that were not executed."""

    def execute(self, batch: StepBatch) -> StepResult: ...


class Stretch(ABC):
    """Steps under way: the first is placed, the last ends as any step does. `ends_s` are
    the ends of all, `n_done` of them are committed."""

    def __init__(
        self,
        state: EngineState,
        planned: PlannedStep,
        durations_s: list[float],
        executor: Repeating,
    ) -> None:
        self._state, self._planned, self.durations_s = state, planned, durations_s
        self._executor = executor
        self.ends_s = list(accumulate(durations_s, initial=planned.placed_s))[1:]
        self.n_done = 0

    @property
    def n_steps(self) -> int:
        return len(self.durations_s)

    def n_ended(self, until_s: float, is_inclusive: bool) -> int:
        """How many steps end before an instant, or (`is_inclusive`) by then."""
        n = bisect_left(self.ends_s, until_s)
        while is_inclusive and n < len(self.ends_s) and self.ends_s[n] == until_s:
            n += 1
        return n

    def shorten(self, n_steps: int) -> None:
        """Leave out the steps after the first `n_steps`, of which none is committed."""
        assert n_steps > self.n_done, f"{n_steps} steps of which {self.n_done} are committed"
        del self.ends_s[n_steps:], self.durations_s[n_steps:]

    def commit(self, n: int) -> None:
        """Commit the first `n` steps, and place the next."""
        if n > self.n_done:
            self._commit(n)
            self.n_done = n

    @abstractmethod
    def started(self) -> StartedStep:
        """The step that is placed and not committed, with which the stretch is left."""

    def give_up(self) -> None:
        """Leave the stretch and its present step, because its engine has failed."""
        self._executor.pass_steps(self.n_done)

    @abstractmethod
    def _commit(self, n: int) -> None: ...


class DecodeStretch(Stretch):
    """Steps of all decoding requests."""

    def started(self) -> StartedStep:
        n, planned, state = self.n_done, self._planned, self._state
        if n:
            batch = planned.batch._replace(context_tokens=state.queues.context_tokens)
            began_s = self.ends_s[n - 1]
            planned = planned._replace(
                batch=batch,
                t_s=began_s,
                plan_s=0.0,
                placed_s=began_s,
                kv_used_blocks=state.kv.n_blocks - state.kv.n_free,
            )
        lockstep = state.queues.lockstep
        assert lockstep is not None, "a stretch is taken in lockstep"
        n_tokens = len(planned.batch.decodes)
        self._executor.pass_steps(n)
        result = StepResult([lockstep.token] * n_tokens, None, self.durations_s[n])
        return StartedStep(planned, planned.placed_s, result)

    def _commit(self, n: int) -> None:
        _commit(self._state, self._planned, self, n)


class PromptStretch(Stretch):
    """Steps of a prompt that runs alone, computed in the pieces `rows`."""

    def __init__(
        self,
        state: EngineState,
        planned: PlannedStep,
        durations_s: list[float],
        rows: Sequence[Row],
        executor: Repeating,
    ) -> None:
        super().__init__(state, planned, durations_s, executor)
        self._rows = rows

    def started(self) -> StartedStep:
        n, planned, kv = self.n_done, self._planned, self._state.kv
        self._executor.pass_steps(n - 1)  # the first was executed, and is now or the n-th is
        if not n:
            return StartedStep(planned, planned.placed_s, self._executor.execute(planned.batch))
        began_s, batch = self.ends_s[n - 1], self._batch(n)
        used = kv.n_blocks - kv.n_free
        planned = planned._replace(
            batch=batch, t_s=began_s, plan_s=0.0, placed_s=began_s, kv_used_blocks=used
        )
        return StartedStep(planned, began_s, self._executor.execute(batch))

    def _batch(self, n: int) -> StepBatch:
        return self._planned.batch._replace(rows=(self._rows[n],))

    def _commit(self, n: int) -> None:
        first, state, kv, planned = self.n_done, self._state, self._state.kv, self._planned
        rows, request = self._rows, self._rows[0].request
        first_used = kv.n_blocks - kv.n_free if first else planned.kv_used_blocks
        begin, end = request.n_computed, rows[n].start
        sizes = [row.n_tokens for row in rows[first:n]]
        n_free = kv.compute_pieces(request, sizes, rows[n].n_tokens)
        state.counters.prompt_tokens += min(end, request.n_prompt) - min(begin, request.n_prompt)
        state.counters.steps += n - first
        number = state.pass_steps(self._batch(n - 1), self.ends_s[n - 1], n - first)
        level = state.log.level

        def records() -> list[StepRecord]:
            used_blocks = [first_used, *(kv.n_blocks - n for n in n_free)]
            made: list[StepRecord] = []
            for k, used in zip(range(first, n), used_blocks, strict=False):
                start_s = self.ends_s[k - 1] if k else planned.placed_s
                step = planned._replace(
                    batch=self._batch(k),
                    t_s=start_s,
                    plan_s=0.0,
                    placed_s=start_s,
                    kv_used_blocks=used,
                )
                end_s, duration_s = self.ends_s[k], self.durations_s[k]
                made.append(step.record(number + k - first, level, start_s, end_s, duration_s))
            return made

        state.log.add_steps(n - first, records)


def begin_lockstep(state: EngineState, executor: Repeating) -> None:
    """Let the decoding requests of an engine take steps together, where its mode only counts
    them."""
    policy, queues = state.policy, state.queues
    if queues.lockstep is not None or not policy.counts_decodes or state.async_depth:
        return
    if not policy.is_answering_at_end:
        queues.begin_lockstep(executor.token)


def stretch_from(state: EngineState, started: StartedStep, executor: Repeating) -> Stretch | None:
    """The stretch that begins with a step; None where other steps may follow."""
    planned, policy, queues = started.planned, state.policy, state.queues
    plan, batch = planned.plan, planned.batch
    if state.async_depth or planned.n_preempted:
        return None
    if policy.is_answering_at_end or type(policy).on_step_end is not Policy.on_step_end:
        return None
    if len(batch.rows) == 1 and len(queues.running) == 1:
        return _prompt_stretch(state, planned, executor)
    if plan.items or not batch.decodes:
        return None
    if len(batch.decodes) < len(queues.decoding):
        return None
    if batch.copies or batch.rows or not policy.is_steady(state.view()):
        return None
    lockstep = queues.lockstep
    if lockstep is None:
        left = min(request._n_last - request.n_computed for request in batch.decodes)
        if left < _LEAST_STEPS:
            return None
        lockstep = queues.begin_lockstep(executor.token)
    if lockstep.has_unanswered:
        return None
    n = min(lockstep.next_end() - lockstep.n_steps, _MOST_STEPS, _most_with_blocks(state))
    if n < 2:
        return None
    return DecodeStretch(state, planned, executor.repeated_s(batch, n), executor)


def _prompt_stretch(
    state: EngineState, planned: PlannedStep, executor: Repeating
) -> PromptStretch | None:
    """The pieces of a prompt that runs alone, the piece of this step first; None where there is no
    other or other steps may follow."""
    batch, (row,) = planned.batch, planned.batch.rows
    if row.samples or batch.decodes or batch.copies or planned.n_waiting:
        return None
    most = state.policy.prompt_piece(state.view())
    if most is None or batch.padding is not NO_PADDING:
        return None
    request, n_tokens = row.request, len(row.request.tokens)
    rows = [row]
    # A last token that is left alone is a decode.
    while (start := rows[-1].start + rows[-1].n_tokens) < n_tokens - 1:
        n = min(n_tokens - start, most)
        rows.append(Row(request, start, n, n == n_tokens - start))
    n_blocks = state.kv.blocks_for(rows[-1].start + rows[-1].n_tokens - request.n_room)
    if len(rows) < 2 or n_blocks > state.kv.n_idle:
        return None
    context_tokens = batch.context_tokens
    batches = [StepBatch((row,), context_tokens=context_tokens) for row in rows]
    durations_s = executor.pieces_s(batches)
    return PromptStretch(state, planned, durations_s, rows, executor)


def _most_with_blocks(state: EngineState) -> int:
    """Steps for which the free blocks are certainly enough."""
    kv = state.kv
    n_each = kv.n_idle // len(state.queues.decoding) - _MOST_TAKEN - 1
    return n_each * kv.block_tokens


def _commit(state: EngineState, planned: PlannedStep, stretch: DecodeStretch, n: int) -> None:
    first, queues, kv, counters = stretch.n_done, state.queues, state.kv, state.counters
    lockstep, n_decode = queues.lockstep, len(planned.batch.decodes)
    assert lockstep is not None, "a stretch is taken in lockstep"
    used = kv.n_blocks - kv.n_free if first else planned.kv_used_blocks
    used_blocks: list[int] = []
    now = lockstep.n_steps
    end = now + n - first
    while True:
        due, requests = lockstep.take_due(end)
        used_blocks += repeat(used, due - now)
        if not requests:
            break
        now, n_rooms = due, [request.n_room for request in requests]
        has_room = kv.extend(requests)
        assert has_room, "a stretch has blocks for all its steps"
        for request, n_room in zip(requests, n_rooms, strict=True):
            lockstep.postpone(request, due, n_room)
        used = kv.n_blocks - kv.n_free
    ends_s = stretch.ends_s[first:n]
    lockstep.advance(ends_s)
    n_new, n_context = n - first, queues.context_tokens
    queues.context_tokens += n_new * n_decode
    counters.output_tokens += n_new * n_decode
    counters.steps += n_new
    padding = planned.batch.padding
    counters.padding_tokens += n_new * (padding.prefill_tokens + padding.decode_rows)
    start_s = stretch.ends_s[first - 1] if first else planned.placed_s
    if planned.n_waiting:
        rate = state.accounting.prompt_rate
        for began_s, end_s in pairwise([start_s, *ends_s]):
            rate.add(0, began_s, end_s)
    number, level = state.pass_steps(planned.batch, ends_s[-1], n_new), state.log.level

    def records() -> list[StepRecord]:
        starts_s, durations_s = [start_s, *ends_s[:-1]], stretch.durations_s[first:n]
        like = planned.record(number, level, start_s, ends_s[0], durations_s[0])
        constant, rest = like[6:9], like[13:]
        running, waiting = like.n_running, like.n_waiting
        return [
            _RECORD(
                (
                    number + k,
                    began_s,
                    began_s,
                    end_s,
                    duration_s,
                    0.0,
                    *constant,
                    n_context + k * n_decode,
                    running,
                    waiting,
                    used,
                    *rest,
                )
            )
            for k, (began_s, end_s, duration_s, used) in enumerate(
                zip(starts_s, ends_s, durations_s, used_blocks, strict=True)
            )
        ]

    state.log.add_steps(n_new, records)
