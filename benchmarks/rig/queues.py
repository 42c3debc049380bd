"""Servers whose capacity is known: queues in virtual time, probed as `slobench capacity` probes."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.statistics.dependence import Load, Series, of_share
from loadgen.measure.statistics.intervals import Values
from loadgen.measure.statistics.proportions import wilson
from loadgen.studies.capacity.dispersion import clear
from loadgen.studies.capacity.next_probe import (
    NextProbe,
    Question,
    SearchState,
    fit_into,
    judge,
    next_probe,
)
from loadgen.studies.capacity.probe import LEAST_BOUNDED, Grade, Probe, Sent, in_blocks
from loadgen.studies.capacity.traffic import Traffic
from rig.processes import lindley

_LOOKS = 40  # at a probe, for an early end
_LAW_SEED = 990_017


@dataclass(frozen=True)
class Queue:
    """`servers` in parallel, first come first served, mean service time 1 s; a request meets its
    SLO where it waits at most `limit_s`.

    `service` is the cv of service times (0 fixed, 1 exponential, else lognormal), `gaps` that of
    the gaps between arrivals (1 Poisson, else gamma, in equilibrium enough for long probes). With
    `order` ps a single server is shared equally by all requests in it, and the wait is the time
    beyond a request's own service. All servers pause for the last `pause_s` of every `period_s`.
    """

    servers: int = 1
    service: float = 0.0
    gaps: float = 1.0
    limit_s: float = 3.0
    order: Literal["fcfs", "ps"] = "fcfs"
    pause_s: float = 0.0
    period_s: float = 60.0

    def arrive(
        self, rate: float, horizon_s: float, rng: np.random.Generator
    ) -> tuple[Values, NDArray[np.bool_], Values]:
        """Instants of all arrivals before the horizon, whether each met its SLO, and the instants
        of their ends, from an empty system."""
        instants_s = self.instants_s(rate, horizon_s, rng)
        services_s = self.services_s(len(instants_s), rng)
        waits_s, ends_s = self._served(instants_s, services_s)
        return instants_s, waits_s <= self.limit_s, ends_s

    def instants_s(self, rate: float, horizon_s: float, rng: np.random.Generator) -> Values:
        """Instants of all arrivals before the horizon."""
        n = rate * horizon_s
        n = int(n + 8 * math.sqrt(n) * max(1.0, self.gaps)) + 50
        shape = 1 / self.gaps**2
        instants_s = np.cumsum(rng.gamma(shape, 1 / (shape * rate), n))
        return instants_s[instants_s < horizon_s]

    def sent(
        self, rate: float, horizon_s: float, rng: np.random.Generator
    ) -> tuple[Traffic, NDArray[np.bool_], Values]:
        """`arrive`, with what a client states of its requests: nothing but their instants."""
        instants_s, met, ends_s = self.arrive(rate, horizon_s, rng)
        return plain_traffic(instants_s), met, ends_s

    def law(self, rate: float, n_requests: int) -> Traffic:
        """The traffic of a long run; its seed is that of no search."""
        rng = np.random.default_rng([_LAW_SEED, 0])
        return plain_traffic(self.instants_s(rate, n_requests / rate, rng))

    def met(self, instants_s: Values, services_s: Values) -> NDArray[np.bool_]:
        """Whether each request of these arrivals and services met its SLO."""
        return self._served(instants_s, services_s)[0] <= self.limit_s

    def _served(self, instants_s: Values, services_s: Values) -> tuple[Values, Values]:
        """Waits and instants of ends."""
        if self.order == "ps":
            assert (self.servers, self.pause_s) == (1, 0.0), "one server without pauses is shared"
            ends_s = shared_ends_s(instants_s, services_s)
            return ends_s - instants_s - services_s, ends_s
        if not self.pause_s:
            waits_s = self._waits_s(instants_s, services_s)
            return waits_s, instants_s + waits_s + services_s
        # On a clock that stands still in the pauses, the server never pauses.
        active_s = self.period_s - self.pause_s
        n_periods, inside_s = np.divmod(instants_s, self.period_s)
        worked_s = n_periods * active_s + np.minimum(inside_s, active_s)
        waits_s = self._waits_s(worked_s, services_s)
        begins_s, ends_s = (
            at_s + self.pause_s * np.floor(at_s / active_s)
            for at_s in (worked_s + waits_s, worked_s + waits_s + services_s)
        )
        return np.maximum(begins_s - instants_s, 0.0), ends_s

    def services_s(self, n: int, rng: np.random.Generator) -> Values:
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
        assert (self.gaps, self.order, self.pause_s) == (1, "fcfs", 0), "no closed form"
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


def plain_traffic(instants_s: Values) -> Traffic:
    """Requests of a single class without lengths."""
    ones = np.ones(len(instants_s))
    return Traffic(instants_s, ones, ones, ones, np.zeros(len(instants_s), np.int64))


def shared_ends_s(instants_s: Values, services_s: Values) -> Values:
    """The instants at which requests leave a server that all share equally: a request leaves when
    the service that each present request received since its arrival equals its own.

    Source: L. Kleinrock, Queueing Systems 2 (1976), §4.4.
    """
    ends_s = np.empty(len(instants_s))
    leaving: list[tuple[float, int]] = []  # (received per request at its end, row)
    now_s = received_s = 0.0
    for row, (at_s, takes_s) in enumerate(
        zip([*instants_s.tolist(), math.inf], [*services_s.tolist(), 0.0], strict=True)
    ):
        while leaving:
            left_s, first = leaving[0]
            end_s = now_s + (left_s - received_s) * len(leaving)
            if end_s > at_s:
                received_s += (at_s - now_s) / len(leaving)
                break
            heapq.heappop(leaving)
            now_s, received_s = end_s, left_s
            ends_s[first] = end_s
        now_s = at_s
        heapq.heappush(leaving, (received_s + takes_s, row))
    return ends_s


def probe(
    queue: Queue, ask: NextProbe, target: float, rng: np.random.Generator, drains: bool = False
) -> Probe:
    """The queue probed as asked, ended early where it is clear. With `drains` the time that the
    queue takes to become empty counts as spent."""
    horizon_s = ask.warmup_s + ask.measure_s
    traffic, kept, ends_s = queue.sent(ask.level, horizon_s, rng)
    all_s, all_kept = instants_s, kept = traffic.at_s, kept
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
    ended_per_s = float(n_ended / took_s)
    n_sent = int(np.searchsorted(all_s, end_s))
    spent_s = float(max([end_s, *ends_s[:n_sent].tolist()])) if drains else float(end_s)
    hits = kept[:n]
    in_flight = np.arange(len(all_s)) - np.searchsorted(np.sort(ends_s), all_s)
    load = Load(in_flight[measured][:n].astype(float))
    latencies = Series((ends_s - all_s)[measured][:n], load)
    is_bounded = n >= LEAST_BOUNDED
    times = of_share(hits, [latencies]).hit_times(0.95) if is_bounded else None
    share = wilson(int(hits.sum()), n, 0.95, times)
    return Probe(
        ask.level,
        due,
        met,
        ask.warmup_s,
        float(took_s),
        spent_s,
        grade,
        served_per_s=ended_per_s,
        low=share.low,
        high=share.high,
        sent=sent_of(traffic, ~all_kept, n_sent),
    )


def sent_of(traffic: Traffic, missed: NDArray[np.bool_], n: int) -> Sent:
    """The first n requests as a probe stores them."""
    columns = (
        np.rint(traffic.at_s * 1e6),
        traffic.input_tokens,
        traffic.new_tokens,
        traffic.output_tokens,
        traffic.class_id,
        missed,
    )
    return Sent(*(tuple(np.rint(column[:n]).astype(np.int64).tolist()) for column in columns))


def search(
    queue: Queue,
    question: Question,
    rng: np.random.Generator,
    budget_s: float = math.inf,
    drains: bool = False,
) -> tuple[SearchState, list[Probe]]:
    """A whole search, or what of it fits into the budget."""
    probes: list[Probe] = []
    while (ask := next_probe(question, probes)) is not None:
        left_s = budget_s - math.fsum(one.spent_s for one in probes)
        fitting = fit_into(question, probes, ask, left_s)
        if fitting is None:
            break
        probes.append(probe(queue, fitting, question.target, rng, drains))
    return judge(question, probes), probes
