"""Sequences of response times whose neighbours depend on each other, for simulations of coverage.

Each function returns n values in order of arrival, in units of a mean service time. Queues start
stationary (M/M/1) or after a run-in.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

Values = NDArray[np.float64]
Process = Callable[[int, np.random.Generator], Values]


def independent(n: int, rng: np.random.Generator) -> Values:
    return rng.exponential(size=n)


def autoregression(factor: float) -> Process:
    """AR(1) with standard normal values and lag-1 correlation `factor`."""

    def draw(n: int, rng: np.random.Generator) -> Values:
        steps = rng.normal(size=n) * math.sqrt(1 - factor**2)
        steps[0] = rng.normal()
        values: Values = lfilter([1.0], [1.0, -factor], steps)
        return values

    return draw


def lindley(services: Values, gaps: Values, wait: float = 0.0) -> Values:
    """Waits of a queue with one server, whose first request waits for `wait`: W[i + 1] =
    max(0, W[i] + S[i] − A[i]), as a walk over its least value. `gaps[i]` lies between arrivals i
    and i + 1; a gap after the last arrival is left out."""
    steps = services[:-1] - gaps[: len(services) - 1]
    walk = np.concatenate([[wait], np.cumsum(steps) + wait])
    waits: Values = walk - np.minimum(np.minimum.accumulate(walk), 0.0)
    return waits


def mm1(load: float, n_discarded: int | None = None) -> Process:
    """M/M/1, first come first served. With `n_discarded` it starts empty and the first values are
    left out; without, it starts stationary."""

    def draw(n: int, rng: np.random.Generator) -> Values:
        total = n + (n_discarded or 0)
        wait = 0.0
        if n_discarded is None and rng.random() < load:
            wait = rng.exponential(1 / (1 - load))
        services, gaps = rng.exponential(size=total), rng.exponential(1 / load, total)
        return (lindley(services, gaps, wait) + services)[total - n :]

    return draw


def mmpp(load: float, ratio: float = 4.0, stay: float = 20.0, n_run_in: int = 3000) -> Process:
    """One server, exponential services, arrivals from a Poisson process that switches between two
    rates (`ratio` apart, mean stay 20 services in each)."""
    fast = 2 * load * ratio / (1 + ratio)
    rates = (fast, fast / ratio)

    def draw(n: int, rng: np.random.Generator) -> Values:
        total = n + n_run_in
        times: list[Values] = []
        begin, phase, count = 0.0, 0, 0
        while count < total + 1:
            length = rng.exponential(stay)
            within = np.sort(rng.uniform(begin, begin + length, rng.poisson(length * rates[phase])))
            times.append(within)
            begin, phase, count = begin + length, 1 - phase, count + len(within)
        arrivals = np.concatenate(times)[: total + 1]
        services = rng.exponential(size=total)
        return (lindley(services, np.diff(arrivals)) + services)[n_run_in:]

    return draw


def processor_sharing(load: float, n_run_in: int = 3000) -> Process:
    """M/M/1 processor sharing: k requests are served at 1/k of the speed each."""

    def draw(n: int, rng: np.random.Generator) -> Values:
        total = n + n_run_in
        arrivals = np.cumsum(rng.exponential(1 / load, total)).tolist()
        services = rng.exponential(size=total).tolist()
        ended_s = np.zeros(total)
        active: list[tuple[float, int]] = []
        now, share = 0.0, 0.0  # share: the service that each request present so far has received
        for number in range(total + 1):
            until = arrivals[number] if number < total else math.inf
            while active and now + (active[0][0] - share) * len(active) <= until:
                now += (active[0][0] - share) * len(active)
                share, request = heapq.heappop(active)
                ended_s[request] = now
            if number < total:
                share += (until - now) / len(active) if active else 0.0
                now = until
                heapq.heappush(active, (share + services[number], number))
        responses: Values = (ended_s - np.array(arrivals))[n_run_in:]
        return responses

    return draw
