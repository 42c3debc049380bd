"""Class, age, length and deadline as one score, each from nought to about one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from math import inf, log10
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field, PrivateAttr

from loadgen.units import Seconds
from reference_engine.policies.base import Policy
from reference_engine.policies.sharing import Blocked, causes_of, displace, share_out
from reference_engine.policies.sorted_queue import Key, Patience, ScoredQueue, Stretch
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


_MOST_WAITING = 3.0  # TTFT SLOs
_REMEMBERED = 512  # arrivals


class Weights(NamedTuple):
    """Of the terms, and what they are measured in (s)."""

    wait: float
    length: float
    class_: float
    deadline: float
    ttft_slo_s: float
    deadline_horizon_s: float


class Scores:
    """score(t) = wait · min(waited / TTFT SLO, 3) + length · (1 − rank) + class / (1 + 2^priority)
    + deadline · urgency, highest first; see `priority.Priority`.

    The terms of length and class are fixed at arrival. The others make it a continuous function of
    time of a few straight stretches.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._fixed: dict[str, float] = {}
        self._recent: deque[float] = deque()
        self._by_size: list[float] = []  # `_recent`, sorted

    def enter(self, request: Request, predicted_tokens: float) -> None:
        """Score a request, whose output is predicted to be so long."""
        rank = self._rank(predicted_tokens)
        class_ = 1 / (1 + 2.0 ** max(-64, min(64, request.priority)))
        weights = self._weights
        self._fixed[request.id] = weights.length * (1 - rank) + weights.class_ * class_

    def drop(self, request_id: str) -> None:
        self._fixed.pop(request_id, None)

    def of_length_and_class(self, request_id: str) -> float:
        """The two terms that do not change."""
        return self._fixed[request_id]

    def slo_s(self, request: Request) -> float:
        """The TTFT SLO that waiting is measured in, in ten steps per decade, so that there are few
        different speeds of ageing."""
        slo_s = request.ttft_slo_s or self._weights.ttft_slo_s
        return float(10.0 ** (round(10 * log10(slo_s)) / 10))

    def stretch(self, request: Request, now_s: float) -> Stretch:
        """The score from now until one of its terms bends."""
        weights, fixed = self._weights, self._fixed[request.id]
        slo_s = self.slo_s(request)
        capped_s = request.arrived_s + _MOST_WAITING * slo_s
        if now_s < capped_s:
            slope = weights.wait / slo_s
            at_0, until_s = fixed - slope * request.arrived_s, capped_s
        else:
            at_0, slope, until_s = fixed + _MOST_WAITING * weights.wait, 0.0, inf
        deadline_s = request.deadline_s
        if deadline_s is None:
            return Stretch(at_0, slope, until_s)
        near_s = deadline_s - weights.deadline_horizon_s
        if now_s < near_s:
            return Stretch(at_0, slope, min(until_s, near_s))
        if now_s >= deadline_s:
            return Stretch(at_0 + weights.deadline, slope, until_s)
        rise = weights.deadline / weights.deadline_horizon_s
        return Stretch(at_0 - rise * near_s, slope + rise, min(until_s, deadline_s))

    def waiting(self, request: Request, now_s: float) -> float:
        """The score of a waiting request."""
        at_0, slope, _ = self.stretch(request, now_s)
        return at_0 + slope * now_s

    def running(self, request: Request, now_s: float) -> float:
        """The score with the age at which it was first admitted: running does not earn any."""
        weights, deadline_s = self._weights, request.deadline_s
        scheduled_s = now_s if request.scheduled_s is None else request.scheduled_s
        waited = (scheduled_s - request.arrived_s) / self.slo_s(request)
        score = self._fixed[request.id] + weights.wait * min(_MOST_WAITING, waited)
        if deadline_s is None:
            return score
        urgency = 1 - (deadline_s - now_s) / weights.deadline_horizon_s
        return score + weights.deadline * max(0.0, min(1.0, urgency))

    def worth_s(self, difference: float, request: Request) -> float:
        """Seconds of the request's waiting that raise its score by so much."""
        wait = self._weights.wait
        return difference / wait * self.slo_s(request) if wait else inf

    def _rank(self, n_tokens: float) -> float:
        """The share of the last arrivals that were predicted to be shorter; half without any."""
        recent, by_size = self._recent, self._by_size
        rank = bisect_left(by_size, n_tokens) / len(by_size) if by_size else 0.5
        if len(recent) == _REMEMBERED:
            del by_size[bisect_left(by_size, recent.popleft())]
        recent.append(n_tokens)
        insort(by_size, n_tokens)
        return rank
