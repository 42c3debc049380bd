"""Shortest job first by predicted lengths, with a penalty for uncertain predictions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.fields import Seconds
from reference_engine.policies.ranked import (
    BlockedRequest,
    LatestStarts,
    Preempts,
    RankedPolicy,
    prefill_s,
)
from reference_engine.state.plan import Plan, View
from reference_engine.state.sequence import Request

_HOPEFUL, _HOPELESS = 0.0, 1.0
_HOPELESS_WAIT = 10.0  # times `starvation`


class Sjf(RankedPolicy):
    """All decodes, then prompts in order of

        score = E[output left] + kappa · (q90 − q50) + prompt_weight · prompt tokens − aging · wait

    lowest first, in tokens. `kappa` makes jobs of uncertain length count as longer. `aging` is in
    tokens per second of waiting; all requests age at the same rate, so the order is fixed at
    arrival. `prompt_weight` is the cost of a prompt token in output tokens of a busy batch (8B on
    an H200: 53 000 against 11 000 tokens a second); 0 ranks by outputs alone. `token_budget`,
    `max_num_seqs` and `watermark` are as in `chunked`.

    A request is overdue when it has waited `starvation` (seconds) since its arrival or its last
    preemption; overdue requests go first. Time spent running counts neither as wait nor towards
    `aging`.

    A request with a TTFT SLO and no token yet is overdue earlier: when it has waited `patience`
    times its own prefill. That is soon for a short prompt, which costs the others little, and late
    for a long one. After the latest start that meets its SLO it is hopeless: it goes behind all
    that are not, and is overdue after ten times `starvation`. Otherwise long prompts that are late
    anyway would all turn overdue under overload, and the order would be that of arrival.

    A blocked request that is not hopeless preempts decoding requests that have more work left than
    itself, even less the cost of recomputing their tokens, and that have generated less than the
    share `preempt_until` of their predicted output, so that nearly finished work is kept. It takes
    their place in the same step. A request that was admitted because it was overdue cannot be
    preempted for the next `starvation` seconds. `preempt: never` is plain shortest job first.

    With known lengths, `prompt_weight`, `kappa` and `aging` 0 and `preempt_until` 1 this is SRPT.

    Source: TRAIL (arXiv 2410.01035) for limited preemption; FastServe (arXiv 2305.05920) for the
    promotion; SRPT (Schrage and Miller, Operations Research 14(4), 1966) on mean plus spread as in
    TIE.
    """

    kind: ClassVar[str] = "sjf"

    kappa: float = Field(default=0.5, ge=0, le=1)
    aging: float = Field(default=20.0, ge=0)
    prompt_weight: float = Field(default=0.2, ge=0)
    starvation: Annotated[Seconds, Field(gt=0)] = 3.0
    patience: float = Field(default=20.0, gt=0)
    preempt: Preempts = True
    preempt_until: float = Field(default=0.8, ge=0, le=1)

    _in_time: LatestStarts = PrivateAttr(default_factory=LatestStarts)
    # Predicted total output tokens, with the penalty for uncertainty.
    _n_predicted: dict[str, float] = PrivateAttr(default_factory=dict)

    def on_arrival(self, request: Request, view: View) -> None:
        left = self._predict_left(request, view)
        size = left + self.prompt_weight * request.n_tokens
        patience_s = self.starvation
        waits = self._ranking.waits
        waits.enter(request, view.now_s)
        if request.ttft_slo_s is not None and request.first_token_s is None:
            own_s = prefill_s(request.n_tokens, view.cost)
            patience_s = min(patience_s, self.patience * own_s)
            self._in_time.put(request, request.arrived_s + request.ttft_slo_s - own_s)
        score_at_0 = size + self.aging * waits.aged_from_s(request.id)
        self._ranking.put(request, (_HOPEFUL, score_at_0), waits.queued_s(request.id) + patience_s)

    def on_finish(self, request: Request, view: View) -> None:
        super().on_finish(request, view)
        self._n_predicted.pop(request.id, None)
        self._in_time.drop(request.id)

    def plan(self, view: View) -> Plan:
        ranking = self._ranking
        for request in self._in_time.take_hopeless(view, view.now_s):
            score_at_0 = ranking.key(request.id)[1]
            overdue_s = ranking.waits.queued_s(request.id) + _HOPELESS_WAIT * self.starvation
            ranking.put(request, (_HOPELESS, score_at_0), overdue_s)
        return super().plan(view)

    def explain(self, request_id: str, view: View) -> dict[str, object]:
        request = view.find(request_id)
        if request is None or request_id not in self._ranking:
            return {}
        at_s = view.now_s  # a running request does not age
        if view.is_running(request_id):
            at_s = self._ranking.waits.started_s(request_id, at_s)
        return {
            "score": self._ranking.key(request_id)[1] - self.aging * at_s,
            "hopeless": self._ranking.key(request_id)[0] == _HOPELESS,
            "predicted_output_left": max(1.0, self._n_predicted[request_id] - request.n_output),
            "overdue_in_s": self._ranking.overdue_s(request_id) - at_s,
        }

    def _predict_left(self, request: Request, view: View) -> float:
        """Predicts the output tokens left, and stores the total."""
        dist = view.predictor.predict(request)
        left = dist.mean + self.kappa * (dist.q90 - dist.q50)
        self._n_predicted[request.id] = request.n_output + left
        return left

    def candidates(self, view: View, blocked: BlockedRequest) -> Iterable[Request]:
        """Decoding requests that are worth preempting for `blocked`, the largest gain first. Each
        of them will rank behind the blocked request when it waits."""
        if not self.preempt:
            return ()
        head, totals, ranking, now_s = blocked.request, self._n_predicted, self._ranking, view.now_s
        weight, aging, share = self.prompt_weight, self.aging, self.preempt_until
        head_kind, head_score = ranking.key(head.id)
        if head_kind == _HOPELESS:
            return ()
        size = totals[head.id] - head.n_output + weight * head.n_tokens
        longer: list[tuple[float, str, Request]] = []
        for request in view.decoding:
            n_tokens, total = len(request.tokens), totals[request.id]
            left = total - n_tokens + request.n_prompt
            if left <= 0:  # longer than predicted: predict again from the present length
                left = self._predict_left(request, view)
                total = totals[request.id]
            gained = left - weight * n_tokens
            if gained > size and total - left < share * total:
                waited_s = ranking.waits.waited_s(request.id, now_s)
                score = left + weight * n_tokens + aging * (now_s - waited_s)
                if score <= head_score:
                    continue
                if not ranking.is_promoted(request.id, now_s, self.starvation):
                    longer.append((gained, request.id, request))
        longer.sort(reverse=True)
        return (request for _, _, request in longer)
