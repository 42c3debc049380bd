"""Request-level batching: a batch that is formed once and runs until its last request ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import islice
from typing import ClassVar

from pydantic import PrivateAttr

from reference_engine.policies.base import Policy
from reference_engine.policies.step_budget import Reserve, reserved_tokens
from reference_engine.state.cost_model import Padding
from reference_engine.state.plan import Cause, Item, Plan, View, Why
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord


class FinishedRows(StrEnum):
    """What happens to a request's row when the request ends before the batch. `masked`: the row is
    computed until the batch ends and its tokens are thrown away (Hugging Face `generate`).
    `dropped`: the row leaves the computation (FasterTransformer as Vidur models it)."""

    masked = "masked"
    dropped = "dropped"


class Pad(StrEnum):
    """`batch_max`: each prompt is computed with the length of the longest in its batch. `none`:
    prompts are packed."""

    batch_max = "batch_max"
    none = "none"


class Answers(StrEnum):
    """When the tokens of a batch are delivered. `at_end`: all together when the batch ends (Hugging
    Face `generate`). `streamed`: each when it is generated."""

    at_end = "at_end"
    streamed = "streamed"


class FixedBatch:
    """The batch of a policy that runs each batch to completion, and the window before it.

    All prompts of a batch are computed before its first decode, and no request joins later. Each
    admission reserves KV for the prompt and all output, so nothing is preempted. A batch with more
    prompt tokens than the engine's step limit is prefilled in several steps. With `pad_to`, a batch
    is filled with rows like its longest up to the next of these sizes.
    """

    def __init__(self, finished_rows: FinishedRows, pad: Pad, pad_to: Iterable[int] = ()) -> None:
        self._finished_rows, self._pad, self._pad_to = finished_rows, pad, sorted(pad_to)
        self._number = 0
        self._to_start: list[str] = []
        self._unfinished: set[str] = set()
        self._masked_rows = self._masked_context = 0
        self._padding_tokens = 0  # of the prefill; charged to its first step

    def plan(
        self, view: View, max_size: int, delay_s: float, preferred_sizes: Iterable[int] = ()
    ) -> Plan:
        """The next step of the batch, or the first step of a new batch.

        A new batch is formed when `max_size` requests wait, when as many wait as one of
        `preferred_sizes`, when the oldest has waited `delay_s`, or when no more will arrive. Until
        then the plan is empty and waits.
        """
        self._to_start = [name for name in self._to_start if view.is_waiting(name)]
        if view.running or self._to_start:
            return self._step(view)
        n_waiting = len(view.waiting)
        size = min(max_size, view.limits.max_num_seqs, view.limits.max_step_tokens)
        if n_waiting < size:
            preferred = max((n for n in preferred_sizes if n <= n_waiting), default=None)
            if preferred is None and not view.is_source_closed:
                # A preempted request stands at the head, so the oldest may be anywhere.
                oldest_s = min((request.arrived_s for request in view.waiting), default=view.now_s)
                until_s = oldest_s + delay_s
                if until_s > view.now_s:
                    window = Cause(Why.window_open, until_s=until_s, have=n_waiting, want=size)
                    return Plan(rest=window, wait_until_s=until_s)
            size = preferred or size
        self._form(list(islice(view.waiting, size)), view)
        return self._step(view)

    def on_finish(self, request: Request, view: View) -> None:
        """Mask the row of a request that ended while other rows go on."""
        had_row = request.id in self._unfinished and request.scheduled_s is not None
        self._unfinished.discard(request.id)
        if had_row and self._finished_rows is FinishedRows.masked and view.running:
            self._masked_rows += 1
            self._masked_context += request.n_tokens - 1  # the last token is never in KV

    def on_step_end(self, record: StepRecord) -> None:
        """Lengthen each masked row by the token of a decode step."""
        # Without masked rows, the padding is a row planned before its request was seen to end.
        if self._masked_rows and record.n_decode:
            self._masked_context += record.padding_tokens

    def _form(self, candidates: Sequence[Request], view: View) -> None:
        """Begin a batch of the first candidates that fit the KV memory together."""
        self._number += 1
        self._masked_rows = self._masked_context = 0
        n_free, members = view.kv.n_free, list[Request]()
        for request in candidates:
            n_reserved = reserved_tokens(request, Reserve.max, view)
            n_free -= view.kv.missing_to_admit(request, 1, n_reserved)
            if n_free < 0:
                break
            members.append(request)
        self._to_start = [request.id for request in members]
        self._unfinished = set(self._to_start)
        self._padding_tokens = 0
        if not members:
            return
        lengths = [view.to_compute(request) for request in members]
        longest, n = max(lengths), len(members)
        if self._pad is Pad.batch_max:
            self._padding_tokens = longest * n - sum(lengths)
        self._masked_rows = next((size - n for size in self._pad_to if size >= n), 0)
        self._masked_context = self._masked_rows * longest
        self._padding_tokens += self._masked_context

    def _step(self, view: View) -> Plan:
        """Prefill the rest of the prompts, then decode. All others wait for the slowest row."""
        slowest = max(view.running, key=_tokens_left, default=None)
        rest = Cause(Why.static_group_running, "" if slowest is None else slowest.id)
        tokens = view.limits.max_step_tokens
        items: list[Item] = []
        for request in view.prefilling:
            n_tokens = min(len(request.tokens) - request.n_computed, tokens)
            if n_tokens:
                items.append(Item(request.id, n_tokens))
                tokens -= n_tokens
        slots = view.limits.max_num_seqs - len(view.running)
        for name in self._to_start[: max(slots, 0)]:
            member = view.find(name)
            if not tokens or member is None:
                break
            n_tokens = min(view.to_compute(member), tokens)
            items.append(Item(name, n_tokens, reserved_tokens(member, Reserve.max, view)))
            tokens -= n_tokens
        if not items:
            padding = Padding(
                decode_rows=self._masked_rows, decode_context_tokens=self._masked_context
            )
            return Plan(decode_all=True, rest=rest, group=self._number, padding=padding)
        padding, self._padding_tokens = Padding(prefill_tokens=self._padding_tokens), 0
        return Plan(tuple(items), rest=rest, group=self._number, padding=padding)


def _tokens_left(request: Request) -> int:
    return request.n_remaining + request.max_tokens - request.n_output


class FixedBatchPolicy(Policy):
    """A mode that runs each batch to completion; its subclasses set `_batch`."""

    is_in_order: ClassVar[bool] = True

    answers: Answers = Answers.streamed

    _batch: FixedBatch = PrivateAttr()

    @property
    def is_answering_at_end(self) -> bool:
        return self.answers is Answers.at_end

    def on_step_end(self, record: StepRecord, view: View) -> None:
        self._batch.on_step_end(record)

    def on_finish(self, request: Request, view: View) -> None:
        self._batch.on_finish(request, view)
