"""What one step can still give while a plan is made: sequence slots, tokens and KV blocks."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import islice
from typing import Self

from reference_engine.state.plan import Cause, Item, View, Why
from reference_engine.state.sequence import Request

NO_SLOT, NO_BUDGET = Cause(Why.no_seq_slot), Cause(Why.no_token_budget)


class Reserve(StrEnum):
    """How much KV room an admission takes at once. What is not reserved is taken block by block,
    and may have to be taken from others by preempting them.

    `watermark`: this step's tokens, guarded by a share of the pool that admissions leave free
    (vLLM). `prompt`: the whole prompt. `predicted`: the prompt and the 90th percentile of the
    predicted output. `max`: the prompt and all it may generate, so that nothing is ever preempted
    (Orca).
    """

    watermark = "watermark"
    prompt = "prompt"
    predicted = "predicted"
    max = "max"


def reserved_tokens(request: Request, reserve: Reserve, view: View) -> int:
    """Tokens to ask KV room for at admission, prompt and output; 0 asks for the step's only."""
    if reserve is Reserve.watermark:
        return 0
    if reserve is Reserve.prompt:
        return request.n_tokens
    if reserve is Reserve.max:
        return request.n_most
    return min(request.n_most, request.n_tokens + int(view.predictor.predict(request).q90))


class StepBudget:
    """Counts down as a plan gives; `items` is what was given so far, `admitted` whom of the
    waiting requests it went to.

    `tokens` is what the step may compute in all, `max_num_seqs` how many may run. An admission
    leaves `watermark` of the KV blocks free for the running ones to grow into, unless nothing
    else is scheduled: then it would guard nobody and could block for ever. `spare` is that many
    blocks. With `is_padded` every row of prompt tokens costs as much as the longest of them.
    """

    def __init__(
        self,
        view: View,
        *,
        tokens: int,
        max_num_seqs: int,
        watermark: float = 0.0,
        is_padded: bool = False,
    ) -> None:
        self.items: list[Item] = []
        self.admitted: list[Request] = []
        self.tokens = min(tokens, view.limits.max_step_tokens)
        self.slots = min(max_num_seqs, view.limits.max_num_seqs) - len(view.running)
        self.blocks = view.kv.n_free
        self.spare = watermark * view.kv.n_blocks
        self._view, self._is_padded = view, is_padded
        self._is_busy = False

    @classmethod
    def beside_decodes(
        cls,
        view: View,
        *,
        tokens: int,
        max_num_seqs: int,
        watermark: float = 0.0,
        is_padded: bool = False,
    ) -> Self:
        """What is left after one token for each decoding request. No more may run than the step
        has tokens, or some of them could not decode."""
        room = cls(
            view,
            tokens=tokens,
            max_num_seqs=min(max_num_seqs, tokens),
            watermark=watermark,
            is_padded=is_padded,
        )
        room.decode_all()
        return room

    def decode_all(self) -> None:
        """Set aside one token for each decoding request."""
        n_decoding = len(self._view.decoding)
        self.tokens -= n_decoding
        self.blocks -= self._view.decode_blocks
        self._is_busy = self._is_busy or n_decoding > 0

    def resume(self, most: int = 0) -> None:
        """Give running requests that still read their prompt what there is, in order of admission,
        at most `most` tokens each (0: no cap)."""
        for request in self._view.prefilling:
            n_tokens = min(len(request.tokens) - request.n_computed, self.tokens)
            n_tokens = min(n_tokens, most or n_tokens)
            if n_tokens > 0:
                self.blocks -= self._view.kv.missing(request, n_tokens)
                self._give(Item(request.id, n_tokens))

    def proceed(self, request: Request, most: int = 0) -> None:
        """Give a running request that still reads its prompt what there is, at most `most` tokens
        (0: no cap), as far as the free KV blocks reach."""
        n_room = max(0, self.blocks) * self._view.kv.block_tokens
        n_room += request.n_room - request.n_computed
        n_tokens = min(len(request.tokens) - request.n_computed, n_room)
        n_tokens = self._within(min(n_tokens, most or n_tokens))
        if n_tokens > 0:
            self.blocks -= self._view.kv.missing(request, n_tokens)
            self._give(Item(request.id, n_tokens))

    def proceed_anyhow(self) -> None:
        """Where nothing could be given, the prompt that was admitted first goes on, at others'
        expense: nobody can displace it, so that it ends."""
        if not self._is_busy:
            for request in islice(self._view.prefilling, 1):
                n_tokens = len(request.tokens) - request.n_computed
                self._give(Item(request.id, min(n_tokens, self.tokens)))

    def admit(
        self,
        request: Request,
        *,
        most: int = 0,
        is_whole: bool = False,
        reserve: Reserve = Reserve.watermark,
    ) -> Cause | None:
        """Take a waiting request into the step with as many tokens as there are, at most `most`
        (0: no cap); or the cause why not.

        `is_whole`: a prompt is cut only where no other one shares the step, because it is then
        longer than any step it could get.
        """
        view = self._view
        if self.blocks < 0:  # running requests must already give way
            return Cause(Why.no_kv_blocks)
        if self.slots <= 0:
            return NO_SLOT
        if self.tokens <= 0:
            return NO_BUDGET
        wanted = view.to_compute(request)
        n_tokens = self._within(min(wanted, most or wanted))
        if not n_tokens or (is_whole and n_tokens < wanted and self.items):
            return NO_BUDGET
        room = reserved_tokens(request, reserve, view)
        n_blocks = view.kv.missing_to_admit(request, n_tokens, room)
        if n_blocks + (self.spare if self._is_busy else 0) > self.blocks:
            return Cause(Why.no_kv_blocks, have=self.blocks, want=n_blocks)
        self.slots, self.blocks = self.slots - 1, self.blocks - n_blocks
        self.admitted.append(request)
        self._give(Item(request.id, n_tokens, room))
        return None

    @property
    def padding_tokens(self) -> int:
        """Tokens that rows of prompts are shorter than the longest of them."""
        lengths = [item.n_tokens for item in self.items]
        return len(lengths) * max(lengths, default=0) - sum(lengths)

    def _within(self, n_tokens: int) -> int:
        """As many of `n_tokens` as may be given to one more row."""
        if not self._is_padded or not self.items:
            return min(n_tokens, self.tokens)
        lengths = [item.n_tokens for item in self.items]
        budget = self.tokens + sum(lengths)
        return n_tokens if max(*lengths, n_tokens) * (len(lengths) + 1) <= budget else 0

    def _give(self, item: Item) -> None:
        self.items.append(item)
        self.tokens -= item.n_tokens
        self._is_busy = True


Causes = tuple[tuple[str, Cause], ...]


def admit_in_order(
    room: StepBudget,
    candidates: Iterable[Request],
    *,
    most: int = 0,
    is_whole: bool = False,
    reserve: Reserve = Reserve.watermark,
) -> tuple[Causes, Cause]:
    """Admit candidates until the first that cannot be; (`Plan.causes`, `Plan.rest`) for the others.

    Nobody overtakes: when the head lacks KV blocks, all others wait behind it.
    """
    for request in candidates:
        cause = room.admit(request, most=most, is_whole=is_whole, reserve=reserve)
        if cause is None:
            continue
        if cause.why is Why.no_kv_blocks and room.blocks >= 0:
            return ((request.id, cause),), Cause(Why.behind, request.id)
        return (), cause
    return (), NO_BUDGET
