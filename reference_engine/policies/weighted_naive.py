"""A weighted sum of things in different units, kept to compare `priority` with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from reference_engine.policies.base import Policy
from reference_engine.policies.sharing import causes_of, share_out
from reference_engine.policies.sorted_queue import Ranking
from reference_engine.policies.step_budget import StepBudget
from reference_engine.state.plan import Plan, View
from reference_engine.state.sequence import Request


class WeightedNaive(Policy):
    """All decodes, then prompts in order of

        score = wait_weight · seconds waited + length_weight / predicted output − priority_weight ·
        priority

    highest first (`priority` is lower for the more urgent). The formula is often seen and mixes
    units: the length term is 0.5 at most and weighs less than half a second of waiting, so the
    order is first come first served, with each priority level worth two seconds.

    Nobody can be overtaken by one who came later than `priority_weight` × (difference of
    priorities) + `length_weight` seconds after it.
    """

    kind: ClassVar[str] = "weighted_naive"
    is_aged: ClassVar[bool] = True
    is_work_conserving: ClassVar[bool] = True

    token_budget: int = Field(default=2048, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    wait_weight: float = Field(default=1.0, gt=0)
    length_weight: float = Field(default=0.5, ge=0)
    priority_weight: float = Field(default=2.0, ge=0)

    _ranking: Ranking = PrivateAttr(default_factory=Ranking)

    def on_arrival(self, request: Request, view: View) -> None:
        # All waits grow alike, so that the score at the clock's zero has the same order.
        score_at_0 = (
            self.length_weight / view.predictor.predict(request).mean
            - self.priority_weight * request.priority
            - self.wait_weight * request.arrived_s
        )
        self._ranking.put(request, (-score_at_0,))

    def on_finish(self, request: Request, view: View) -> None:
        self._ranking.drop(request.id)

    def plan(self, view: View) -> Plan:
        room = StepBudget.beside_decodes(
            view,
            tokens=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
        )
        ranking = self._ranking
        causes, rest = causes_of(share_out(room, ranking.reading(view), ranking.waiting(view)))
        return Plan(tuple(room.items), decode_all=True, causes=causes, rest=rest)

    def victims(self, view: View, request: Request, need_blocks: int) -> Iterable[str]:
        return self._ranking.worse(view, request)

    def explain(self, request_id: str, view: View) -> dict[str, Any]:
        if request_id not in self._ranking:
            return {}
        return {"score": self.wait_weight * view.now_s - self._ranking.key(request_id)[0]}
