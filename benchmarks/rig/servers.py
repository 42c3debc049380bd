"""Servers beside the plain queues of `rig.queues`: bursty arrivals, batching engines, classes and
rate limits. Loads and times are per service time or in seconds, as each states."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.statistics.intervals import Values
from loadgen.studies.capacity.traffic import Traffic
from rig.queues import Queue

Served = tuple[Traffic, NDArray[np.bool_], Values]
_LAW_SEED = 990_023


@dataclass(frozen=True)
class Bursty(Queue):
    """A queue whose arrivals are a Poisson process that switches between 1.5 and 0.5 times its
    rate, with a mean stay of `stay_s` in each."""

    stay_s: float = 40.0

    def instants_s(self, rate: float, horizon_s: float, rng: np.random.Generator) -> Values:
        parts: list[Values] = []
        begin_s, is_fast = 0.0, bool(rng.random() < 0.5)
        while begin_s < horizon_s:
            length_s = rng.exponential(self.stay_s)
            end_s = min(begin_s + length_s, horizon_s)
            n = rng.poisson((end_s - begin_s) * rate * (1.5 if is_fast else 0.5))
            parts.append(np.sort(rng.uniform(begin_s, end_s, n)))
            begin_s, is_fast = begin_s + length_s, not is_fast
        return np.concatenate(parts)


@dataclass(frozen=True)
class Known(Queue):
    """A server whose client states lengths. Subclasses draw the traffic and serve it."""

    def traffic(self, rate: float, horizon_s: float, rng: np.random.Generator) -> Traffic:
        raise NotImplementedError

    def serve(self, traffic: Traffic, rng: np.random.Generator) -> tuple[NDArray[np.bool_], Values]:
        """Whether each request met its SLO, and the instants of the ends."""
        raise NotImplementedError

    def sent(self, rate: float, horizon_s: float, rng: np.random.Generator) -> Served:
        traffic = self.traffic(rate, horizon_s, rng)
        return traffic, *self.serve(traffic, rng)

    def arrive(
        self, rate: float, horizon_s: float, rng: np.random.Generator
    ) -> tuple[Values, NDArray[np.bool_], Values]:
        traffic, met, ends_s = self.sent(rate, horizon_s, rng)
        return traffic.at_s, met, ends_s

    def law(self, rate: float, n_requests: int) -> Traffic:
        return self.traffic(rate, n_requests / rate, np.random.default_rng([_LAW_SEED, 0]))


@dataclass(frozen=True)
class Batching(Known):
    """An engine that serves up to 24 requests at once, each 1 + 0.08 (k − 1) times slower beside k
    − 1 others, first come first served beyond. Work (s) is lognormal, mean 0.4, cv 1; the client
    knows it up to 30 % noise. The SLO: within 0.25 s + 2.5 times the work."""

    at_once: int = 24

    def traffic(self, rate: float, horizon_s: float, rng: np.random.Generator) -> Traffic:
        at_s = self.instants_s(rate, horizon_s, rng)
        sigma = np.sqrt(np.log(2.0))
        tokens = 1000 * rng.lognormal(-(sigma**2) / 2, sigma, len(at_s))
        ones = np.ones(len(at_s))
        return Traffic(at_s, ones, ones, tokens, np.zeros(len(at_s), np.int64))

    def serve(self, traffic: Traffic, rng: np.random.Generator) -> tuple[NDArray[np.bool_], Values]:
        works_s = 0.4e-3 * traffic.output_tokens * np.exp(0.3 * rng.normal(size=len(traffic)))
        ends_s = batched_ends_s(traffic.at_s, works_s, self.at_once, 0.08)
        return ends_s - traffic.at_s <= 0.25 + 2.5 * works_s, ends_s


@dataclass(frozen=True)
class TwoClasses(Known):
    """Four servers; 80 % of the requests are short (60 tokens, wait at most 0.25 s), 20 % long (300
    tokens, wait at most 1.5 s). Services of 2 ms per token vary with a cv of 0.5."""

    servers: int = 4

    def traffic(self, rate: float, horizon_s: float, rng: np.random.Generator) -> Traffic:
        at_s = self.instants_s(rate, horizon_s, rng)
        class_id = (rng.random(len(at_s)) < 0.2).astype(np.int64)
        tokens = np.where(class_id == 1, 300.0, 60.0) * np.exp(0.4 * rng.normal(size=len(at_s)))
        ones = np.ones(len(at_s))
        return Traffic(at_s, ones, ones, tokens, class_id)

    def serve(self, traffic: Traffic, rng: np.random.Generator) -> tuple[NDArray[np.bool_], Values]:
        services_s = 2e-3 * traffic.output_tokens * rng.gamma(4.0, 0.25, len(traffic))
        waits_s = Queue(servers=self.servers, service=1)._waits_s(traffic.at_s, services_s)
        limits_s = np.where(traffic.class_id == 1, 1.5, 0.25)
        return waits_s <= limits_s, traffic.at_s + waits_s + services_s


@dataclass(frozen=True)
class RateLimited(Known):
    """A token bucket of 20 requests per second and a burst of 10; requests beyond it fail."""

    per_s: float = 20.0
    burst: float = 10.0

    def traffic(self, rate: float, horizon_s: float, rng: np.random.Generator) -> Traffic:
        at_s = self.instants_s(rate, horizon_s, rng)
        ones = np.ones(len(at_s))
        return Traffic(at_s, ones, ones, ones, np.zeros(len(at_s), np.int64))

    def serve(self, traffic: Traffic, rng: np.random.Generator) -> tuple[NDArray[np.bool_], Values]:
        left, last_s, met = self.burst, 0.0, []
        for at_s in traffic.at_s.tolist():
            left = min(self.burst, left + (at_s - last_s) * self.per_s)
            last_s = at_s
            met.append(left >= 1)
            left -= left >= 1
        return np.array(met, bool), traffic.at_s + 0.03


def batched_ends_s(at_s: Values, works_s: Values, at_once: int, slower: float) -> Values:
    """Instants at which requests leave a server that serves up to `at_once` at equal speeds 1 / (1
    + slower · (k − 1)) with k in it, first come first served beyond."""
    ends_s = np.empty(len(at_s))
    inside: list[tuple[float, int]] = []  # (received per request at its end, row)
    now_s = received_s = 0.0
    waiting: list[int] = []
    first = 0
    for row, until_s in enumerate([*at_s.tolist(), np.inf]):
        while inside:
            pace = 1 + slower * (len(inside) - 1)
            end_s = now_s + (inside[0][0] - received_s) * pace
            if end_s > until_s:
                received_s += (until_s - now_s) / pace
                break
            received_s, done = heapq.heappop(inside)
            now_s = ends_s[done] = end_s
            if first < len(waiting):
                heapq.heappush(inside, (received_s + works_s[waiting[first]], waiting[first]))
                first += 1
        now_s = until_s
        if row == len(at_s):
            break
        if len(inside) < at_once:
            heapq.heappush(inside, (received_s + works_s[row], row))
        else:
            waiting.append(row)
    return ends_s
