"""Budget of one step: the sequence slots, tokens and KV blocks that a plan can still give out."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import islice

from pydantic import Field

from reference_engine.policies.base import Policy
from reference_engine.state.plan import Cause, Item, View, Why
from reference_engine.state.sequence import Request

Causes = tuple[tuple[str, Cause], ...]

NO_SLOT, NO_TOKENS = Cause(Why.no_seq_slot), Cause(Why.no_token_budget)


class Reserve(StrEnum):
    """KV room that an admission takes at once. Room beyond it is taken block by block as the
    request grows, if need be by preempting other requests.

    `watermark`: room for this step's tokens; admissions leave a share of the pool free (vLLM).
    `prompt`: the whole prompt. `predicted`: the prompt and the 90th percentile of the predicted
    output. `max`: the prompt and all output the request may generate, so that nothing is ever
    preempted (Orca).
    """

    watermark = "watermark"
    prompt = "prompt"
    predicted = "predicted"
    max = "max"


def reserved_tokens(request: Request, reserve: Reserve, view: View) -> int:
    """Tokens, prompt and output, to reserve KV room for at admission; 0: only this step's."""
    if reserve is Reserve.watermark:
        return 0
    if reserve is Reserve.prompt:
        return request.n_tokens
    if reserve is Reserve.max:
        return request.n_most
    return min(request.n_most, request.n_tokens + int(view.predictor.predict(request).q90))


class StepBudget:
    """Slots, tokens and KV blocks that are left while a plan is made. `items` are the grants so
    far, and `admitted` the requests admitted by them.

    The step computes at most `tokens`, and at most `max_num_seqs` requests run. An admission leaves
    the share `watermark` of all KV blocks free for running requests to grow into (`spare_blocks`),
    unless nothing else is scheduled: it would then protect no request and could block for ever.
    With `is_padded`, each prefill row costs as many tokens as the longest row. With
    `is_after_decodes`, a token for each decoding request is set aside first.
    """

    def __init__(
        self,
        view: View,
        *,
        tokens: int,
        max_num_seqs: int,
        watermark: float,
        is_padded: bool = False,
        is_after_decodes: bool = False,
    ) -> None:
        if is_after_decodes:  # with more requests than tokens, some of them could not decode
            max_num_seqs = min(max_num_seqs, tokens)
        self.items: list[Item] = []
        self.admitted: list[Request] = []
        self.tokens = min(tokens, view.limits.max_step_tokens)
        self.slots = min(max_num_seqs, view.limits.max_num_seqs) - len(view.running)
        self.blocks = view.kv.n_free
        self.spare_blocks = watermark * view.kv.n_blocks
        self._view, self._is_padded = view, is_padded
        self._is_busy = view.has_in_flight  # or whether the step computes anything yet
        if is_after_decodes:
            self.decode_all()

    def decode_all(self) -> None:
        """Set aside a token, and its KV block if it needs a new block, for each decoding
        request."""
        n_decoding = len(self._view.decoding)
        self.tokens -= n_decoding
        self.blocks -= self._view.decode_blocks
        self._is_busy = self._is_busy or n_decoding > 0

    def preempt(self, victim: Request, request: Request) -> None:
        """Add the slot, the blocks and the token of a decoding request that is preempted for the
        waiting `request`."""
        self._release(victim, request, 1)

    def keep(self, victim: Request, request: Request) -> None:
        """Undo `preempt`."""
        self._release(victim, request, -1)

    def continue_prefills(self, most: int = 0) -> None:
        """Give tokens to the running requests in prefill, in order of admission, at most `most`
        each (0: no cap). Free blocks do not limit them; the core preempts to make room."""
        for request in self._view.prefilling:
            n_tokens = min(len(request.tokens) - request.n_computed, self.tokens)
            n_tokens = min(n_tokens, most or n_tokens)
            if n_tokens > 0:
                self.blocks -= self._view.kv.missing(request, n_tokens)
                self._give(Item(request.id, n_tokens))

    def continue_prefill(self, request: Request) -> None:
        """Give tokens to a running request in prefill, as many as the free KV blocks hold."""
        n_room = max(0, self.blocks) * self._view.kv.block_tokens
        n_room += request.n_room - request.n_computed
        n_tokens = self._fitting(min(len(request.tokens) - request.n_computed, n_room))
        if n_tokens > 0:
            self.blocks -= self._view.kv.missing(request, n_tokens)
            self._give(Item(request.id, n_tokens))

    def force_first_prefill(self) -> None:
        """If nothing is scheduled yet, continue the prompt that was admitted first, by preempting
        others if need be. That prompt is never preempted itself, so it will finish."""
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
        """Take a waiting request into the step with all tokens that are left, at most `most` (0: no
        cap). Returns the cause when it cannot be admitted.

        With `is_whole`, a prompt is split only if it is the first item of the step: it is then
        longer than any step.
        """
        view = self._view
        if self.blocks < 0:  # running requests need more blocks than are free
            return Cause(Why.no_kv_blocks)
        if self.slots <= 0:
            return NO_SLOT
        if self.tokens <= 0:
            return NO_TOKENS
        n_missing = view.to_compute(request)
        n_tokens = self._fitting(min(n_missing, most or n_missing))
        if not n_tokens or (is_whole and n_tokens < n_missing and self.items):
            return NO_TOKENS
        n_reserved = reserved_tokens(request, reserve, view)
        n_blocks = view.kv.missing_to_admit(request, n_tokens, n_reserved)
        if n_blocks + (self.spare_blocks if self._is_busy else 0) > self.blocks:
            return Cause(Why.no_kv_blocks, have=self.blocks, want=n_blocks)
        self.slots, self.blocks = self.slots - 1, self.blocks - n_blocks
        self.admitted.append(request)
        self._give(Item(request.id, n_tokens, n_reserved))
        return None

    @property
    def padding_tokens(self) -> int:
        """Tokens that the prefill rows lack to the longest of them, summed."""
        lengths = [item.n_tokens for item in self.items]
        return len(lengths) * max(lengths, default=0) - sum(lengths)

    def _release(self, victim: Request, request: Request, sign: int) -> None:
        n_blocks = self._view.kv.freed_by(victim, request) + self._view.needs_block(victim.id)
        self.slots += sign
        self.tokens += sign
        self.blocks += sign * n_blocks

    def _fitting(self, n_tokens: int) -> int:
        """How many of `n_tokens` fit in another row. A padded row fits whole or not at all, unless
        it is the first."""
        if not self._is_padded or not self.items:
            return min(n_tokens, self.tokens)
        lengths = [item.n_tokens for item in self.items]
        budget = self.tokens + sum(lengths)
        return n_tokens if max(*lengths, n_tokens) * (len(lengths) + 1) <= budget else 0

    def _give(self, item: Item) -> None:
        self.items.append(item)
        self.tokens -= item.n_tokens
        self._is_busy = True


def has_no_slot(view: View, max_num_seqs: int) -> bool:
    """Whether no request can be admitted before another ends."""
    return len(view.running) >= min(max_num_seqs, view.limits.max_num_seqs)


class TokenBudgetPolicy(Policy):
    """A mode with a fixed token budget per step.

    A step computes at most `token_budget` tokens, and at most `max_num_seqs` requests run. An
    admission leaves the share `watermark` of the KV blocks free.
    """

    token_budget: int = Field(default=2048, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)

    def budget_after_decodes(self, view: View, *, is_padded: bool = False) -> StepBudget:
        return StepBudget(
            view,
            tokens=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
            is_padded=is_padded,
            is_after_decodes=True,
        )


def admit_in_order(
    budget: StepBudget,
    candidates: Iterable[Request],
    *,
    most: int = 0,
    is_whole: bool = False,
    reserve: Reserve = Reserve.watermark,
) -> tuple[Causes, Cause]:
    """Admit candidates up to the first that cannot be admitted; returns `Plan.causes` and
    `Plan.rest` for those left out.

    No request overtakes another: when the head lacks KV blocks, all others wait behind it.
    """
    for request in candidates:
        cause = budget.admit(request, most=most, is_whole=is_whole, reserve=reserve)
        if cause is None:
            continue
        if cause.why is Why.no_kv_blocks and budget.blocks >= 0:
            return ((request.id, cause),), Cause(Why.behind, request.id)
        return (), cause
    return (), NO_TOKENS
