"""Continuous batching with chunked prefill: a long prompt never stops the decodes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from loadgen.fields import Seconds
from reference_engine.policies.base import Policy
from reference_engine.policies.step_budget import (
    Reserve,
    StepBudget,
    admit_in_order,
    has_no_slot,
)
from reference_engine.state.cost_model import StepShape
from reference_engine.state.plan import Plan, View
from reference_engine.state.sequence import Request

_LEAST_PREFILL = 16  # tokens
_DEFAULT_TPOT_S = 0.05
_MOST_RANKED = 128  # waiting requests; beyond, looking up prefixes takes longer than it saves


class Chunked(Policy):
    """Each step computes one token of every decoding request. The rest of `token_budget` goes to
    unfinished prompts in order of admission, then to new requests, first come first served. The
    last prompt is cut to the tokens that are left. No request is admitted in a step that must
    preempt.

    `token_budget: slo` computes as many prompt tokens as keep the step within `tpot_slo` (seconds)
    by the cost model. Without `tpot_slo`, the strictest TPOT SLO of the decoding requests counts,
    or else 50 ms. `max_num_seqs` limits the running requests and `long_prefill_tokens` a prompt's
    tokens in one step (0: no cap). `reserve` is the KV room that an admission takes at once;
    admissions leave the share `watermark` of the blocks free.

    `order: longest_prefix` admits waiting requests by the length of their cached prefix, longest
    first, so that a prefix is used before it is evicted; equal lengths in order of arrival. A
    request that has waited `starvation` (seconds) goes before all that arrived later. Of a longer
    queue, the first 128 are ranked, and all behind them stay in order of arrival.

    Source: Sarathi-Serve (OSDI'24) §4; vLLM V1 `scheduler.schedule`; for `longest_prefix` SGLang's
    cache-aware scheduling (arXiv 2312.07104 §3), without an age bound there.
    """

    kind: ClassVar[str] = "chunked"
    is_in_order: ClassVar[bool] = True
    counts_decodes: ClassVar[bool] = True

    token_budget: Annotated[int, Field(ge=1)] | Literal["slo"] = 2048
    tpot_slo: Annotated[Seconds, Field(gt=0)] | None = None
    max_num_seqs: int = Field(default=256, ge=1)
    long_prefill_tokens: int = Field(default=0, ge=0)
    reserve: Reserve = Reserve.watermark
    watermark: float = Field(default=0.01, ge=0, lt=1)
    order: Literal["arrival", "longest_prefix"] = "arrival"
    starvation: Annotated[Seconds, Field(gt=0)] = 5.0

    @property
    def keeps_order(self) -> bool:
        return self.order == "arrival"

    def plan(self, view: View) -> Plan:
        budget = StepBudget(
            view,
            tokens=self._tokens(view),
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
            is_after_decodes=True,
        )
        budget.continue_prefills(self.long_prefill_tokens)
        causes, rest = admit_in_order(
            budget, self._queue(budget, view), most=self.long_prefill_tokens, reserve=self.reserve
        )
        return Plan(tuple(budget.items), decode_all=True, causes=causes, rest=rest)

    def is_steady(self, view: View) -> bool:
        return not view.waiting or has_no_slot(view, self.max_num_seqs)

    def prompt_piece(self, view: View) -> int | None:
        if self.token_budget == "slo":
            return None
        most = min(self.token_budget, view.limits.max_step_tokens)
        return min(most, self.long_prefill_tokens or most)

    def _queue(self, budget: StepBudget, view: View) -> Iterable[Request]:
        """The waiting requests in the order of admission."""
        if self.order == "arrival" or budget.slots <= 0 or budget.tokens <= 0:
            return view.waiting
        queue = iter(view.waiting)
        late_s = view.now_s - self.starvation

        def rank(request: Request) -> tuple[float, float]:
            is_late = request.arrived_s <= late_s
            return (0, request.arrived_s) if is_late else (1, -view.kv.cached_tokens(request))

        return chain(sorted(islice(queue, _MOST_RANKED), key=rank), queue)

    def _tokens(self, view: View) -> int:
        most = view.limits.max_step_tokens
        if self.token_budget != "slo":
            return min(self.token_budget, most)
        n_decode = len(view.decoding)
        least = min(_LEAST_PREFILL, most)
        return n_decode + _prefill_tokens(view, self._tpot_s(view), most - n_decode, least)

    def _tpot_s(self, view: View) -> float:
        if self.tpot_slo is not None:
            return self.tpot_slo
        slos = (r.tpot_slo_s for r in view.decoding if r.tpot_slo_s is not None)
        return min(slos, default=_DEFAULT_TPOT_S)


def _prefill_tokens(view: View, tpot_s: float, most: int, least: int) -> int:
    """The largest n in [`least`, `most`] for which a step of all decodes and n prompt tokens takes
    at most `tpot_s` by the cost model. If none does, `least`, so that prompts still progress; if
    nothing decodes, `most`.

    The n tokens are priced as a continuation of the first prompt in prefill.

    Source: Sarathi-Serve (OSDI'24) §4.3, the token budget from profiling and the TBT SLO.
    """
    n_decode = len(view.decoding)
    if not n_decode:
        return most
    before = next((request.n_computed for request in view.prefilling), 0)
    low, high = least, max(least, most)
    while low < high:
        n = (low + high + 1) // 2
        shape = StepShape(
            n_seqs=n_decode + 1,
            prefill_tokens=n,
            prefill_attention=n * (before + n / 2),
            n_decode=n_decode,
            context_tokens=view.decode_context_tokens,
        )
        if view.cost.estimate(shape) <= tpot_s:
            low = n
        else:
            high = n - 1
    return low
