"""Shortest job first by predicted lengths, with a penalty for uncertain predictions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.units import Seconds
from reference_engine.policies.ranked import BlockedRequest, Preempts, RankedPolicy
from reference_engine.state.plan import View
from reference_engine.state.sequence import Request


class Sjf(RankedPolicy):
    """All decodes, then prompts in order of

        score = E[output left] + kappa · (q90 − q50) + prompt_weight · prompt tokens − aging · wait

    lowest first, in tokens. `kappa` makes jobs of uncertain length count as longer. `aging` is in
    tokens per second of waiting; all requests age at the same rate, so the order is fixed at
    arrival. `prompt_weight` is the cost of a prompt token in output tokens of a busy batch (8B on
    an H200: 53 000 against 11 000 tokens a second); 0 ranks by outputs alone. `token_budget`,
    `max_num_seqs` and `watermark` are as in `chunked`.

    A request is overdue when it has waited `starvation` (seconds) since its arrival or its last
    preemption, or half its TTFT SLO if it sets an SLO of its own and has no token yet; overdue
    requests go first. Time spent running counts neither as wait nor towards `aging`.

    A blocked request preempts decoding requests that have more work left than itself, even less the
    cost of recomputing their tokens, and that have generated less than the share `preempt_until` of
    their predicted output, so that nearly finished work is kept. It takes their place in the same
    step. A request that was admitted because it was overdue cannot be preempted for the next
    `starvation` seconds. `preempt: never` is plain shortest job first.

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
    preempt: Preempts = True
    preempt_until: float = Field(default=0.8, ge=0, le=1)

    # Predicted total output tokens, with the penalty for uncertainty.
    _n_predicted: dict[str, float] = PrivateAttr(default_factory=dict)

    def on_arrival(self, request: Request, view: View) -> None:
        left = self._predict_left(request, view)
        size = left + self.prompt_weight * request.n_tokens
        patience_s = self.starvation
        if request.ttft_slo_s is not None and request.first_token_s is None:
            patience_s = request.ttft_slo_s / 2
        waits = self._ranking.waits
        waits.enter(request, view.now_s)
        score_at_0 = size + self.aging * waits.aged_from_s(request.id)
        self._ranking.put(request, (score_at_0,), waits.queued_s(request.id) + patience_s)

    def on_finish(self, request: Request, view: View) -> None:
        super().on_finish(request, view)
        self._n_predicted.pop(request.id, None)

    def explain(self, request_id: str, view: View) -> dict[str, object]:
        request = view.find(request_id)
        if request is None or request_id not in self._ranking:
            return {}
        at_s = view.now_s  # a running request does not age
        if view.is_running(request_id):
            at_s = self._ranking.waits.started_s(request_id, at_s)
        return {
            "score": self._ranking.key(request_id)[0] - self.aging * at_s,
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
        head_score = ranking.key(head.id)[0]
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
