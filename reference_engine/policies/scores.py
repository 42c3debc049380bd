"""Scores of class, age, length and deadline, each term from nought to about its weight."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import inf, log10
from typing import NamedTuple

from reference_engine.policies.scored_queue import Stretch
from reference_engine.state.sequence import Request

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
