"""Priority batching: age, length, class and deadline as terms of a score, each from 0 to 1."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from math import inf, log10
from typing import Annotated, ClassVar

from pydantic import Field, PrivateAttr

from loadgen.fields import Seconds
from loadgen.manifest.json_section import JsonObject
from reference_engine.policies.ranked import BlockedRequest, plan_by_rank, prefill_s
from reference_engine.policies.sorted_queue import (
    Key,
    OverdueQueue,
    ScoredQueue,
    ScoreSegment,
    ranked_prefills,
)
from reference_engine.policies.step_budget import TokenBudgetPolicy
from reference_engine.policies.waiting_times import WaitingTimes
from reference_engine.state.plan import Plan, View
from reference_engine.state.sequence import Request

_MOST_WAITING = 3.0  # TTFT SLOs
_N_RECENT = 512  # arrivals


class Priority(TokenBudgetPolicy):
    """All decodes, then prompts in order of

        score = wait_weight · min(waited / TTFT SLO, 3) + length_weight · (1 − rank)
              + class_weight / (1 + 2^priority) + deadline_weight · urgency

    highest first. `rank` is the share of the last 512 arrivals with a shorter predicted output. A
    lower `priority` goes first, as in vLLM. `urgency` rises from 0, `deadline_horizon` (seconds)
    before the request's deadline, to 1 at the deadline. Requests without a TTFT SLO get `ttft_slo`
    (seconds); SLOs are rounded to ten steps per decade. With the default weights, three SLOs of
    waiting outweigh all other terms, but waiting counts no more than that: a request that has
    waited `starvation` (seconds) goes before all that arrived later.

    Age is time spent waiting: it stands still while a request runs, and goes on when the request is
    preempted. `starvation` counts from the arrival or the last preemption.

    With `preemptive`, a blocked request preempts the decoding requests with the lowest scores and
    takes their place in the same step, if recomputing them takes less time (by the cost model;
    doubled for each time that the request was preempted before) than the waiting time that the
    difference of the scores is worth. In this difference age is left out, or waiting and running
    requests would preempt each other in turn. A request that was admitted because it had waited
    `starvation` cannot be preempted for that long.
    `token_budget`, `max_num_seqs` and `watermark` are as in `chunked`.

    `weighted_naive` is the same idea without the normalisation.
    """

    kind: ClassVar[str] = "priority"
    is_aged: ClassVar[bool] = True
    is_work_conserving: ClassVar[bool] = True

    wait_weight: float = Field(default=1.0, ge=0)
    length_weight: float = Field(default=1.0, ge=0)
    class_weight: float = Field(default=1.0, ge=0)
    deadline_weight: float = Field(default=1.0, ge=0)
    ttft_slo: Annotated[Seconds, Field(gt=0)] = 1.0
    deadline_horizon: Annotated[Seconds, Field(gt=0)] = 10.0
    starvation: Annotated[Seconds, Field(gt=0)] = 60.0
    preemptive: bool = False

    _waits: WaitingTimes = PrivateAttr(default_factory=WaitingTimes)
    _scores: Scores = PrivateAttr()
    _queue: ScoredQueue = PrivateAttr()
    _overdue: OverdueQueue = PrivateAttr(default_factory=OverdueQueue)
    _preempted_for: dict[str, list[str]] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: object) -> None:
        self._scores = Scores(self, self._waits)
        self._queue = ScoredQueue(self._scores.segment)

    def on_arrival(self, request: Request, view: View) -> None:
        self._waits.enter(request, view.now_s)
        self._scores.put(request, view.predictor.predict(request).mean)
        self._queue.put(request, view.now_s)
        self._overdue.put(request, self._waits.queued_s(request.id) + self.starvation)

    def on_finish(self, request: Request, view: View) -> None:
        self._queue.drop(request.id)
        self._overdue.drop(request.id)
        self._scores.drop(request.id)
        self._waits.drop(request.id)
        self._preempted_for.pop(request.id, None)

    def plan(self, view: View) -> Plan:
        scores, now_s = self._scores, view.now_s

        def rank(request: Request) -> Key:
            started_s = self._waits.started_s(request.id, now_s)
            return self._overdue.rank(request.id, (-scores.running(request, now_s),), started_s)

        self._queue.refile(view)
        budget = self.budget_after_decodes(view)
        plan = plan_by_rank(
            budget,
            view,
            ranked_prefills(view, rank),
            self._overdue.overdue_first(self._queue.walk(view), view),
            self.candidates if self.preemptive else None,
        )
        self._waits.start(budget.admitted, now_s)
        for victim in plan.preempt:
            self._preempted_for.setdefault(victim.by, []).append(victim.request_id)
        return plan

    def is_steady(self, view: View) -> bool:
        return not view.waiting

    def victims(self, view: View, request: Request, need_blocks: int) -> Iterable[str]:
        scores, now_s = self._scores, view.now_s
        own = scores.running(request, now_s)
        ranked = sorted((scores.running(other, now_s), other.id) for other in view.running)
        return [other_id for score, other_id in ranked if score < own]

    def explain(self, request_id: str, view: View) -> JsonObject:
        request, scores = view.find(request_id), self._scores
        if request is None or request_id not in self._overdue:
            return {}
        score = scores.running if view.is_running(request_id) else scores.waiting
        return {
            "score": score(request, view.now_s),
            "of_length_and_class": scores.of_length_and_class(request_id),
            "overdue_in_s": self._overdue.overdue_s(request_id) - view.now_s,
            "displaced": list(self._preempted_for.get(request_id, ())),
        }

    def candidates(self, view: View, blocked: BlockedRequest) -> Iterator[Request]:
        """Decoding requests that are worth preempting for `blocked`, lowest score first."""
        now_s, head, scores, overdue = view.now_s, blocked.request, self._scores, self._overdue
        own, own_merit = scores.waiting(head, now_s), scores.merit(head, now_s)
        lower = []
        for request in view.decoding:
            score = scores.running(request, now_s)
            if score < own:
                lower.append((score, request.id, request))
        for _, request_id, request in sorted(lower):
            overdue_s = overdue.overdue_s(request_id)
            if self._waits.is_promoted(request_id, overdue_s, now_s, self.starvation):
                continue
            difference = own_merit - scores.merit(request, now_s)
            again_s = prefill_s(request.n_tokens, view.cost) * 2.0**request.n_preemptions
            if again_s < scores.worth_s(difference, head):
                yield request


class Scores:
    """The scores of live requests with a policy's weights (formula: see `Priority`).

    The length and class terms are fixed at arrival. The other two make the score a continuous,
    piecewise linear function of time.
    """

    def __init__(self, weights: Priority, waits: WaitingTimes) -> None:
        self._weights, self._waits = weights, waits
        self._fixed: dict[str, float] = {}
        self._recent: deque[float] = deque()  # predicted outputs of the last arrivals, tokens
        self._by_size: list[float] = []  # `_recent`, sorted

    def put(self, request: Request, predicted_tokens: float) -> None:
        """Fix the length and class terms of a request, given its predicted output."""
        rank, weights = self._rank(predicted_tokens), self._weights
        class_ = 1 / (1 + 2.0 ** max(-64, min(64, request.priority)))
        self._fixed[request.id] = weights.length_weight * (1 - rank) + weights.class_weight * class_

    def drop(self, request_id: str) -> None:
        self._fixed.pop(request_id, None)

    def of_length_and_class(self, request_id: str) -> float:
        return self._fixed[request_id]

    def slo_s(self, request: Request) -> float:
        """The TTFT SLO in which waiting is measured, rounded to ten steps per decade so that the
        scores have few different slopes."""
        slo_s = request.ttft_slo_s or self._weights.ttft_slo
        return float(10.0 ** (round(10 * log10(slo_s)) / 10))

    def segment(self, request: Request, now_s: float) -> ScoreSegment:
        """The linear piece of a waiting request's score that begins at `now_s`."""
        weights, fixed = self._weights, self._fixed[request.id]
        slo_s, aged_from_s = self.slo_s(request), self._waits.aged_from_s(request.id)
        capped_s = aged_from_s + _MOST_WAITING * slo_s
        if now_s < capped_s:
            slope = weights.wait_weight / slo_s
            at_0, until_s = fixed - slope * aged_from_s, capped_s
        else:
            at_0, slope, until_s = fixed + _MOST_WAITING * weights.wait_weight, 0.0, inf
        deadline_s = request.deadline_s
        if deadline_s is None:
            return ScoreSegment(at_0, slope, until_s)
        near_s = deadline_s - weights.deadline_horizon
        if now_s < near_s:
            return ScoreSegment(at_0, slope, min(until_s, near_s))
        if now_s >= deadline_s:
            return ScoreSegment(at_0 + weights.deadline_weight, slope, until_s)
        rise = weights.deadline_weight / weights.deadline_horizon
        return ScoreSegment(at_0 - rise * near_s, slope + rise, min(until_s, deadline_s))

    def waiting(self, request: Request, now_s: float) -> float:
        """The score of a waiting request."""
        at_0, slope, _ = self.segment(request, now_s)
        return at_0 + slope * now_s

    def running(self, request: Request, now_s: float) -> float:
        """The score of a running request, whose age stands still."""
        waited = self._waits.waited_s(request.id, now_s) / self.slo_s(request)
        return self.merit(request, now_s) + self._weights.wait_weight * min(_MOST_WAITING, waited)

    def merit(self, request: Request, now_s: float) -> float:
        """The score without the term of age."""
        weights, deadline_s = self._weights, request.deadline_s
        if deadline_s is None:
            return self._fixed[request.id]
        urgency = 1 - (deadline_s - now_s) / weights.deadline_horizon
        return self._fixed[request.id] + weights.deadline_weight * max(0.0, min(1.0, urgency))

    def worth_s(self, difference: float, request: Request) -> float:
        """Seconds of waiting that raise the score of `request` by `difference`; infinity if waiting
        has no weight."""
        wait = self._weights.wait_weight
        return difference / wait * self.slo_s(request) if wait else inf

    def _rank(self, n_tokens: float) -> float:
        """The share of the recent arrivals that were predicted to be shorter; 0.5 without any."""
        recent, by_size = self._recent, self._by_size
        rank = bisect_left(by_size, n_tokens) / len(by_size) if by_size else 0.5
        if len(recent) == _N_RECENT:
            del by_size[bisect_left(by_size, recent.popleft())]
        recent.append(n_tokens)
        insort(by_size, n_tokens)
        return rank
