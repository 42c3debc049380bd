"""Shortest job first, by predicted lengths, careful where the prediction is unsure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.units import Seconds
from reference_engine.policies.base import Policy
from reference_engine.policies.sharing import Blocked, causes_of, displace, share_out
from reference_engine.policies.sorted_queue import Ranking
from reference_engine.policies.step_budget import StepBudget
from reference_engine.state.plan import Plan, Preemption, View
from reference_engine.state.sequence import Request


class Sjf(Policy):
    """All decodes, then prompts in order of

        score = E[output left] + kappa · (q90 − q50) + prompt_weight · tokens to read − aging · wait

    lowest first, in tokens. `kappa` makes jobs of uncertain length count as longer. `aging` is
    tokens per second of waiting; since all age alike the order is fixed at arrival. `prompt_weight`
    is what reading a token costs of writing one in a busy batch (8B on an H200: 53 against 11
    thousand a second); 0 ranks by outputs alone.

    Whoever waited `starvation`, or half its own TTFT SLO, goes before all who came later. While a
    request is blocked, one with more left to do gives way to it, as long as that one generated less
    than `preempt_until` of its predicted output (what is nearly done is not thrown away; 0: nobody)
    and even reading all of its tokens anew is less than what is gained.

    Source: TRAIL (arXiv 2410.01035) for limited preemption; FastServe (arXiv 2305.05920) for the
    promotion; SRPT on mean plus spread as in TIE.
    """

    kind: ClassVar[str] = "sjf"
    is_aged: ClassVar[bool] = True
    is_work_conserving: ClassVar[bool] = True

    token_budget: int = Field(default=2048, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    kappa: float = Field(default=0.5, ge=0, le=1)
    aging: float = Field(default=20.0, ge=0)
    prompt_weight: float = Field(default=0.2, ge=0)
    starvation: Annotated[Seconds, Field(gt=0)] = 3.0
    preempt_until: float = Field(default=0.8, ge=0, le=1)

    _ranking: Ranking = PrivateAttr(default_factory=Ranking)
    # Where the output is predicted to end, in output tokens, uncertainty included.
    _ends: dict[str, float] = PrivateAttr(default_factory=dict)

    def on_arrival(self, request: Request, view: View) -> None:
        left = self._predict(request, view)
        size = left + self.prompt_weight * request.n_tokens
        patience_s = self.starvation
        if request.ttft_slo_s is not None and request.first_token_s is None:
            patience_s = request.ttft_slo_s / 2
        score_at_0 = size + self.aging * request.arrived_s
        self._ranking.put(request, (score_at_0,), request.arrived_s + patience_s)

    def on_finish(self, request: Request, view: View) -> None:
        self._ranking.drop(request.id)
        self._ends.pop(request.id, None)

    def plan(self, view: View) -> Plan:
        room = StepBudget.beside_decodes(
            view,
            tokens=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
        )
        ranking = self._ranking
        blocked = share_out(room, ranking.reading(view), ranking.waiting(view))
        causes, rest = causes_of(blocked)
        preempt: tuple[Preemption, ...] = ()
        if blocked is not None and blocked.is_full:
            preempt = displace(view, room, blocked, self._longer(view, blocked))
        return Plan(tuple(room.items), decode_all=True, preempt=preempt, causes=causes, rest=rest)

    def victims(self, view: View, request: Request, need_blocks: int) -> Iterable[str]:
        return self._ranking.worse(view, request)

    def explain(self, request_id: str, view: View) -> dict[str, Any]:
        request = view.find(request_id)
        if request is None or request_id not in self._ranking:
            return {}
        return {
            "score": self._ranking.key(request_id)[0] - self.aging * view.now_s,
            "predicted_output_left": max(1.0, self._ends[request_id] - request.n_output),
            "overdue_in_s": self._ranking.patience.until_s(request_id) - view.now_s,
        }

    def _predict(self, request: Request, view: View) -> float:
        """Output tokens left, and where that puts the end."""
        dist = view.predictor.predict(request)
        left = dist.mean + self.kappa * (dist.q90 - dist.q50)
        self._ends[request.id] = request.n_output + left
        return left

    def _longer(self, view: View, blocked: Blocked) -> Iterator[Request]:
        """Decoding requests worth displacing for the blocked one, the longest first. Each of them
        will rank behind it once it waits."""
        head, ends, share, now_s = blocked.request, self._ends, self.preempt_until, view.now_s
        weight, aging, patience = self.prompt_weight, self.aging, self._ranking.patience
        head_score = self._ranking.key(head.id)[0]
        size = ends[head.id] - head.n_output + weight * head.n_tokens
        longer: list[tuple[float, str, Request]] = []
        for request in view.decoding:
            n_tokens, end = len(request.tokens), ends[request.id]
            left = end - n_tokens + request.n_prompt
            if left <= 0:  # longer than predicted: predict anew, given what it wrote
                left = self._predict(request, view)
                end = ends[request.id]
            gained = left - weight * n_tokens
            if gained > size and end - left < share * end:
                score = left + weight * n_tokens + aging * request.arrived_s
                if score > head_score and patience.until_s(request.id) > now_s:
                    longer.append((gained, request.id, request))
        longer.sort(reverse=True)
        return (request for _, _, request in longer)
