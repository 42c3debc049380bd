"""Continuous batching with chunked prefill: decodes never stop for a long prompt."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from loadgen.units import Seconds
from reference_engine.policies.base import Policy
from reference_engine.policies.step_budget import Reserve, StepBudget, admit_in_order
from reference_engine.state.cost_model import StepShape
from reference_engine.state.plan import Plan, View

_LEAST_PREFILL = 16
_DEFAULT_TPOT_S = 0.05


class Chunked(Policy):
    """Each step gives one token to every decode, the rest of `token_budget` to unfinished prompts
    in order of admission, then to new requests first come first served; the last prompt is cut to
    what is left. Nobody is admitted in a step that must preempt.

    `token_budget: slo` takes, by the cost model, as many prompt tokens as keep the step within
    `tpot_slo` (default: the strictest asked by a running request, else 50 ms).
    `long_prefill_tokens` caps a prompt's share of one step (0: no cap). `reserve` is the KV room an
    admission takes at once, `watermark` the share of blocks it leaves free.

    Source: Sarathi-Serve (OSDI'24) §4; vLLM V1 `scheduler.schedule`.
    """

    kind: ClassVar[str] = "chunked"
    is_in_order: ClassVar[bool] = True

    token_budget: Annotated[int, Field(ge=1)] | Literal["slo"] = 2048
    tpot_slo: Annotated[Seconds, Field(gt=0)] | None = None
    max_num_seqs: int = Field(default=256, ge=1)
    long_prefill_tokens: int = Field(default=0, ge=0)
    reserve: Reserve = Reserve.watermark
    watermark: float = Field(default=0.01, ge=0, lt=1)

    def plan(self, view: View) -> Plan:
        budget = self._budget(view)
        room = StepBudget.beside_decodes(
            view, tokens=budget, max_num_seqs=self.max_num_seqs, watermark=self.watermark
        )
        room.resume(self.long_prefill_tokens)
        causes, rest = admit_in_order(
            room, view.waiting, most=self.long_prefill_tokens, reserve=self.reserve
        )
        return Plan(tuple(room.items), decode_all=True, causes=causes, rest=rest)

    def _budget(self, view: View) -> int:
        most = view.limits.max_step_tokens
        if self.token_budget != "slo":
            return min(self.token_budget, most)
        n_decode = len(view.decoding)
        least = min(_LEAST_PREFILL, most)
        return n_decode + prefill_within(view, self._tpot_s(view), most - n_decode, least)

    def _tpot_s(self, view: View) -> float:
        if self.tpot_slo is not None:
            return self.tpot_slo
        asked = (r.tpot_slo_s for r in view.decoding if r.tpot_slo_s is not None)
        return min(asked, default=_DEFAULT_TPOT_S)


def prefill_within(view: View, tpot_s: float, most: int, least: int) -> int:
    """The largest n in [`least`, `most`] such that a step of n prompt tokens beside all decodes
    takes at most `tpot_s` by the cost model; `least` where none does, so that prompts are read at
    all. Without decodes there is nobody to wait: `most`.

    The prompt tokens are priced as the continuation of the prompt being read now.
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
