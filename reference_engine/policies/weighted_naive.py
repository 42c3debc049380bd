"""Priority batching by a weighted sum of unlike units, for comparison with `priority`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from reference_engine.policies.ranked import RankedPolicy
from reference_engine.state.plan import View
from reference_engine.state.sequence import Request


class WeightedNaive(RankedPolicy):
    """All decodes, then prompts in order of

        score = wait_weight · seconds waited + length_weight / predicted output − priority_weight ·
        priority

    highest first; a lower `priority` goes first. The formula is common and mixes units: the length
    term is at most 0.5, less than half a second of waiting, so the order is first come first
    served, with two seconds per level of priority. `token_budget`, `max_num_seqs` and `watermark`
    are as in `chunked`.

    No request is overtaken by another that arrived more than (`priority_weight` · difference of
    priorities + `length_weight`) / `wait_weight` seconds later.
    """

    kind: ClassVar[str] = "weighted_naive"

    wait_weight: float = Field(default=1.0, gt=0)
    length_weight: float = Field(default=0.5, ge=0)
    priority_weight: float = Field(default=2.0, ge=0)

    def on_arrival(self, request: Request, view: View) -> None:
        # All scores grow at the same rate, so the score at t = 0 gives the same order.
        score_at_0 = (
            self.length_weight / view.predictor.predict(request).mean
            - self.priority_weight * request.priority
            - self.wait_weight * request.arrived_s
        )
        self._ranking.waits.enter(request, view.now_s)
        self._ranking.put(request, (-score_at_0,))

    def explain(self, request_id: str, view: View) -> dict[str, object]:
        if request_id not in self._ranking:
            return {}
        return {"score": self.wait_weight * view.now_s - self._ranking.key(request_id)[0]}
