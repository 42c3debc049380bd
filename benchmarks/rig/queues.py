"""Servers whose capacity is known: queues in virtual time, probed as `slobench capacity` probes."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.capacity.capacity_probe import Grade, Probe, in_blocks
from loadgen.measure.capacity.dispersion import clear
from loadgen.measure.capacity.next_probe import (
    NextProbe,
    Question,
    SearchState,
    fit_into,
    judge,
    next_probe,
)
from loadgen.measure.statistics.intervals import Values
from rig.processes import lindley

_LOOKS = 40  # at a probe, for an early end


@dataclass(frozen=True)
class Queue:
    """`servers` in parallel, first come first served, mean service time 1 s; a request keeps its
    promise where it waits at most `limit_s`.

    `service` is the cv of service times (0 fixed, 1 exponential, else lognormal), `gaps` that of
    the gaps between arrivals (1 Poisson, else gamma, in equilibrium enough for long probes).
    """

    servers: int = 1
    service: float = 0.0
    gaps: float = 1.0
    limit_s: float = 3.0

    def arrive(
        self, rate: float, horizon_s: float, rng: np.random.Generator
    ) -> tuple[Values, NDArray[np.bool_], Values]:
        """Instants of all arrivals before the horizon, whether each was kept, and the instants of
        their ends, from an empty system."""
        n = rate * horizon_s
        n = int(n + 8 * math.sqrt(n) * max(1.0, self.gaps)) + 50
        shape = 1 / self.gaps**2
        instants_s = np.cumsum(rng.gamma(shape, 1 / (shape * rate), n))
        instants_s = instants_s[instants_s < horizon_s]
        services_s = self._services_s(len(instants_s), rng)
        waits_s = self._waits_s(instants_s, services_s)
        return instants_s, waits_s <= self.limit_s, instants_s + waits_s + services_s

    def _services_s(self, n: int, rng: np.random.Generator) -> Values:
        if self.service == 0:
            return np.ones(n)
        if self.service == 1:
            return rng.standard_exponential(n)
        sigma = math.sqrt(math.log1p(self.service**2))
        return rng.lognormal(-(sigma**2) / 2, sigma, n)

    def _waits_s(self, instants_s: Values, services_s: Values) -> Values:
        if self.servers == 1 or self.service == 0:  # equal services: every c-th one meets the same
            waits_s = np.empty(len(instants_s))
            for first in range(self.servers):
                mine = slice(first, None, self.servers)
                if first < len(instants_s):
                    waits_s[mine] = lindley(services_s[mine], np.diff(instants_s[mine]))
            return waits_s
        free_s = [0.0] * self.servers
        found_s: list[float] = []
        for at_s, takes_s in zip(instants_s.tolist(), services_s.tolist(), strict=True):
            begins_s = max(free_s[0], at_s)
            found_s.append(begins_s - at_s)
            heapq.heapreplace(free_s, begins_s + takes_s)
        return np.array(found_s)

    def capacity(self, target: float) -> float:
        """The rate at which the share of waits within the limit is `target`, in closed form.

        M/M/c: P(W > t) = C(c, a) e^{−(c − a)t} with Erlang's C. M/D/1: P(W ≤ t) =
        (1 − λ) Σ_{k ≤ t} (λ(k − t))^k / k! · e^{λ(t − k)}.

        Source: L. Kleinrock, Queueing Systems 1 (1975), §3.5; Erlang (1909) in Tijms, A First
        Course in Stochastic Models (2003), §9.6.
        """
        assert self.gaps == 1, "no closed form"
        if self.service == 1:
            share = self._kept_mmc
        else:
            assert (self.servers, self.service) == (1, 0), "no closed form"
            share = self._kept_md1
        low, high = 0.0, float(self.servers)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if share(middle) >= target else (low, middle)
        return low

    def _kept_mmc(self, rate: float) -> float:
        terms = [math.exp(k * math.log(rate) - math.lgamma(k + 1)) for k in range(self.servers)]
        last = math.exp(self.servers * math.log(rate) - math.lgamma(self.servers + 1))
        last *= self.servers / (self.servers - rate)
        waits = last / (sum(terms) + last)
        return 1 - waits * math.exp(-(self.servers - rate) * self.limit_s)

    def _kept_md1(self, rate: float) -> float:
        t = self.limit_s
        terms = [
            (rate * (k - t)) ** k / math.factorial(k) * math.exp(rate * (t - k))
            for k in range(math.floor(t) + 1)
        ]
        return (1 - rate) * math.fsum(terms)

    def found_capacity(self, target: float, n: int, rng: np.random.Generator) -> float:
        """The same by bisection over runs of `n` arrivals each, the first tenth left out."""
        low, high = 0.02 * self.servers, 1.2 * self.servers
        for _ in range(14):
            middle = (low + high) / 2
            _, kept, _ = self.arrive(middle, n / middle, rng)
            share = kept[len(kept) // 10 :].mean()
            low, high = (middle, high) if share >= target else (low, middle)
        return (low + high) / 2


def probe(queue: Queue, ask: NextProbe, target: float, rng: np.random.Generator) -> Probe:
    """The queue probed as asked, ended early where it is clear."""
    horizon_s = ask.warmup_s + ask.measure_s
    instants_s, kept, ends_s = queue.arrive(ask.level, horizon_s, rng)
    measured = instants_s >= ask.warmup_s
    instants_s, kept = instants_s[measured], kept[measured]
    grade: Grade = "measured"
    for end_s in ask.warmup_s + ask.measure_s * np.arange(1, _LOOKS + 1) / _LOOKS:
        n = int(np.searchsorted(instants_s, end_s))
        due, met = in_blocks(instants_s[:n], kept[:n], ask.warmup_s, end_s)
        found = clear(due, met, target, ask.effect)
        if found is not None and end_s < horizon_s:
            grade = found
            break
    n_ended = int(np.count_nonzero((ends_s >= ask.warmup_s) & (ends_s < end_s)))
    took_s = end_s - ask.warmup_s
    ended_per_s = n_ended / took_s
    return Probe(ask.level, due, met, ask.warmup_s, took_s, end_s, grade, served_per_s=ended_per_s)


def search(
    queue: Queue, question: Question, rng: np.random.Generator, budget_s: float = math.inf
) -> tuple[SearchState, list[Probe]]:
    """A whole search, or what of it fits into the budget."""
    probes: list[Probe] = []
    while (ask := next_probe(question, probes)) is not None:
        left_s = budget_s - math.fsum(one.spent_s for one in probes)
        fitting = fit_into(question, probes, ask, left_s)
        if fitting is None:
            break
        probes.append(probe(queue, fitting, question.target, rng))
    return judge(question, probes), probes
