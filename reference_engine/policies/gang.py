"""A batch that is formed once and runs until its last request ends."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from reference_engine.policies.step_budget import Reserve, reserved_tokens
from reference_engine.state.cost_model import NO_PADDING, Padding
from reference_engine.state.plan import Cause, Item, Plan, View, Why
from reference_engine.state.sequence import Request
from reference_engine.state.steps import StepRecord


class FinishedRows(StrEnum):
    """What becomes of a request's row when it ends before the batch does. `masked`: it is computed
    to the end and thrown away (Hugging Face `generate`). `dropped`: it leaves the computation
    (FasterTransformer as Vidur models it)."""

    masked = "masked"
    dropped = "dropped"


class Pad(StrEnum):
    """`batch_max`: every prompt is computed as long as the longest of its batch. `none`: prompts
    are packed."""

    batch_max = "batch_max"
    none = "none"


class Gang:
    """The batch of a policy that runs batches to completion: members are read whole, together,
    before the first of them decodes, and nobody joins on the way.

    Each member's KV is reserved for all it may generate, so that nothing is preempted. A step
    takes no more tokens than the engine's limit; longer gangs are read over several steps.
    """

    def __init__(self, finished_rows: FinishedRows, pad: Pad) -> None:
        self._finished_rows, self._pad = finished_rows, pad
        self._number = 0
        self._to_start: list[str] = []
        self._members: set[str] = set()  # of the batch, and not over
        self._masked_rows = self._masked_context = 0
        self._padding_left = 0

    def is_over(self, view: View) -> bool:
        """Whether the next batch may be formed."""
        self._to_start = [name for name in self._to_start if view.is_waiting(name)]
        return not view.running and not self._to_start

    def form(self, members: Sequence[Request], view: View) -> None:
        """Begin a batch with those of `members` that fit the KV memory together."""
        self._number += 1
        self._masked_rows = self._masked_context = 0
        free, taken = view.kv.n_free, list[Request]()
        for request in members:
            room = reserved_tokens(request, Reserve.max, view)
            free -= view.kv.missing_to_admit(request, 1, room)
            if free < 0:
                break
            taken.append(request)
        self._to_start = [request.id for request in taken]
        self._members = set(self._to_start)
        self._padding_left = 0
        if self._pad is Pad.batch_max and taken:
            lengths = [view.to_compute(request) for request in taken]
            self._padding_left = max(lengths) * len(lengths) - sum(lengths)

    def plan(self, view: View) -> Plan:
        """The next step of the batch; everybody else waits for its slowest member."""
        rest = self._wait_for_slowest(view)
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
        if items:
            padding, self._padding_left = self._padding_left, 0
            return Plan(
                tuple(items), rest=rest, group=self._number, padding=Padding(prefill_tokens=padding)
            )
        return Plan(decode_all=True, rest=rest, group=self._number, padding=self._masked())

    def finished(self, request: Request, view: View) -> None:
        """A request ended; if it had a place in the batch, that is computed on with masked rows."""
        had_place = request.id in self._members and request.scheduled_s is not None
        self._members.discard(request.id)
        if had_place and self._finished_rows is FinishedRows.masked and view.running:
            self._masked_rows += 1
            self._masked_context += request.n_tokens - 1  # the last token was not read back

    def stepped(self, record: StepRecord) -> None:
        """A step was carried out: masked rows grow by a token a step like the others."""
        if record.padding_tokens and record.n_decode:
            self._masked_context += record.padding_tokens

    def _masked(self) -> Padding:
        if not self._masked_rows:
            return NO_PADDING
        return Padding(decode_rows=self._masked_rows, decode_context_tokens=self._masked_context)

    def _wait_for_slowest(self, view: View) -> Cause:
        slowest = max(view.running, key=_tokens_left, default=None)
        return Cause(Why.static_group_running, "" if slowest is None else slowest.id)


def _tokens_left(request: Request) -> int:
    return request.n_remaining + request.max_tokens - request.n_output


def wait_for_more(view: View, want: int, delay_s: float) -> Plan | None:
    """An empty plan until the oldest waiting request has waited `delay_s`; None when it has.

    The queue is first come first served, but preempted requests stand at its head, so the oldest
    is looked for.
    """
    oldest_s = min((request.arrived_s for request in view.waiting), default=view.now_s)
    until_s = oldest_s + delay_s
    if until_s <= view.now_s:
        return None
    cause = Cause(Why.window_open, until_s=until_s, have=len(view.waiting), want=want)
    return Plan(rest=cause, wait_until_s=until_s)
