"""Class, age, length and deadline as one score, each from nought to about one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.units import Seconds
from reference_engine.policies.base import Policy
from reference_engine.policies.scored_queue import ScoredQueue
from reference_engine.policies.scores import Scores, Weights
from reference_engine.policies.sharing import Blocked, causes_of, displace, share_out
from reference_engine.policies.sorted_queue import Key, Patience
from reference_engine.policies.step_budget import StepBudget
from reference_engine.state.cost_model import StepShape
from reference_engine.state.plan import Plan, Preemption, View
from reference_engine.state.sequence import Request


class Priority(Policy):
    """All decodes, then prompts in order of

        score = wait_weight · min(waited / TTFT SLO, 3) + length_weight · (1 − rank)
              + class_weight / (1 + 2^priority) + deadline_weight · urgency

    highest first. `rank` is the share of the last 512 arrivals predicted to answer shorter;
    `priority` counts as in vLLM, the lower the earlier; urgency rises from 0, `deadline_horizon`
    before the deadline, to 1 at it. Requests that name no TTFT SLO have `ttft_slo`; SLOs are
    taken in ten steps per decade. With the default weights three SLOs of waiting outweigh all the
    rest, but only so much: whoever waited `starvation` goes before all who came later.

    With `preemptive`, a blocked request displaces the running ones of the lowest score, where
    recomputing what those had (seconds, by the cost model) is less than the difference of scores
    is worth in seconds of waiting. A running request's age is what it waited for its admission.

    `weighted_naive` is the same idea without the normalisation.
    """

    kind: ClassVar[str] = "priority"
    is_aged: ClassVar[bool] = True
    is_work_conserving: ClassVar[bool] = True

    token_budget: int = Field(default=2048, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    watermark: float = Field(default=0.01, ge=0, lt=1)
    wait_weight: float = Field(default=1.0, ge=0)
    length_weight: float = Field(default=1.0, ge=0)
    class_weight: float = Field(default=1.0, ge=0)
    deadline_weight: float = Field(default=1.0, ge=0)
    ttft_slo: Annotated[Seconds, Field(gt=0)] = 1.0
    deadline_horizon: Annotated[Seconds, Field(gt=0)] = 10.0
    starvation: Annotated[Seconds, Field(gt=0)] = 60.0
    preemptive: bool = False

    _scores: Scores = PrivateAttr()
    _lanes: ScoredQueue = PrivateAttr()
    _patience: Patience = PrivateAttr(default_factory=Patience)
    _displaced: dict[str, list[str]] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: object) -> None:
        self._scores = Scores(
            Weights(
                self.wait_weight,
                self.length_weight,
                self.class_weight,
                self.deadline_weight,
                self.ttft_slo,
                self.deadline_horizon,
            )
        )
        self._lanes = ScoredQueue(self._scores.stretch)

    def on_arrival(self, request: Request, view: View) -> None:
        self._scores.enter(request, view.predictor.predict(request).mean)
        self._lanes.put(request, view.now_s)
        self._patience.put(request, request.arrived_s + self.starvation)

    def on_finish(self, request: Request, view: View) -> None:
        self._lanes.drop(request.id)
        self._patience.drop(request.id)
        self._scores.drop(request.id)
        self._displaced.pop(request.id, None)

    def plan(self, view: View) -> Plan:
        room = StepBudget.beside_decodes(
            view,
            tokens=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
        )
        blocked = share_out(room, self._reading(view), self._waiting(view))
        causes, rest = causes_of(blocked)
        preempt: tuple[Preemption, ...] = ()
        if self.preemptive and blocked is not None and blocked.is_full:
            preempt = displace(view, room, blocked, self._lower(view, blocked))
            for victim in preempt:
                self._displaced.setdefault(victim.by, []).append(victim.request_id)
        return Plan(tuple(room.items), decode_all=True, preempt=preempt, causes=causes, rest=rest)

    def victims(self, view: View, request: Request, need_blocks: int) -> Iterable[str]:
        scores, now_s = self._scores, view.now_s
        own = scores.running(request, now_s)
        ranked = sorted((scores.running(other, now_s), other.id) for other in view.running)
        return [other_id for score, other_id in ranked if score < own]

    def explain(self, request_id: str, view: View) -> dict[str, Any]:
        request, scores = view.find(request_id), self._scores
        if request is None or request_id not in self._patience:
            return {}
        score = scores.running if view.is_running(request_id) else scores.waiting
        return {
            "score": score(request, view.now_s),
            "of_length_and_class": scores.of_length_and_class(request_id),
            "overdue_in_s": self._patience.until_s(request_id) - view.now_s,
            "displaced": list(self._displaced.get(request_id, ())),
        }

    def _waiting(self, view: View) -> Iterator[tuple[Key, Request]]:
        """The overdue ones, then by score."""
        patience, lanes = self._patience, self._lanes
        for key, request in patience.walk(view):
            yield (0.0, *key), request
        lanes.turn(view)
        for key, request in lanes.walk(view):
            if patience.until_s(request.id) > view.now_s:
                yield (1.0, *key), request

    def _reading(self, view: View) -> list[tuple[Key, Request]]:
        """The running ones that still read their prompt, as the waiting ones are ranked."""
        scores, patience, now_s = self._scores, self._patience, view.now_s
        ranked: list[tuple[Key, Request]] = []
        for request in view.prefilling:
            until_s = patience.until_s(request.id)
            is_overdue = until_s <= now_s
            rank = (0.0, until_s) if is_overdue else (1.0, -scores.running(request, now_s))
            ranked.append((rank, request))
        return sorted(ranked, key=lambda entry: entry[0])

    def _lower(self, view: View, blocked: Blocked) -> Iterator[Request]:
        """Decoding requests that are worth displacing for the blocked one, lowest score first."""
        now_s, head, scores, patience = view.now_s, blocked.request, self._scores, self._patience
        own = scores.waiting(head, now_s)
        lower = []
        for request in view.decoding:
            score = scores.running(request, now_s)
            if score < own and patience.until_s(request.id) > now_s:
                lower.append((score, request.id, request))
        for score, _, request in sorted(lower):
            if _recompute_s(request, view) < scores.worth_s(own - score, head):
                yield request


def _recompute_s(request: Request, view: View) -> float:
    n = request.n_tokens
    return view.cost.estimate(StepShape(1, n, n * n / 2))
