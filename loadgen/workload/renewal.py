"""Renewal processes: independent gaps with the same distribution, in equilibrium.

The window opens at a random instant of a process that has always been running, so the first gap is
the residual of a gap already under way. Then E[N(0, t)] = rate · t holds exactly for every t, not
only in the long run. (Starting with a full gap would lose or gain (cv² − 1)/2 requests.)

Source: D. R. Cox, Renewal Theory (1962), chapter 2 (equilibrium process), 4 (mean count) and 5
(residual lifetimes).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gamma, sqrt
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from loadgen.records import Times
from loadgen.workload.arrivals import StationaryArrivals

Cv = Annotated[float, Field(gt=0, le=100)]


class Constant(StationaryArrivals):
    """Equal gaps: t_k = (k + U) / rate, U uniform on [0, 1); gap cv 0.

    The random phase U is the equilibrium start. Without it the mean count would be ⌈rate · t⌉, and
    the arrivals of superposed constant streams would coincide.
    """

    kind = "constant"

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        return equal_instants(rng, self.rate, horizon_s)


class Poisson(StationaryArrivals):
    """Memoryless arrivals: independent exponential gaps with mean 1/rate; gap cv 1.

    The number in any window of length t is Poisson with mean and variance rate · t (index of
    dispersion 1). The residual of an exponential gap is exponential, so the first gap needs no
    correction.

    Source: J. F. C. Kingman, Poisson Processes (1993), section 4.1.
    """

    kind = "poisson"

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        return poisson_instants(rng, self.rate, horizon_s)


class Gamma(StationaryArrivals):
    """Independent gamma gaps with mean 1/rate and coefficient of variation cv.

    Shape k = 1/cv², scale θ = cv²/rate, so the mean is kθ = 1/rate and the standard deviation
    √k·θ = cv/rate. cv < 1 is smoother than Poisson, cv = 1 is Poisson, cv > 1 is bursty; over long
    windows the index of dispersion tends to cv². vLLM's `--burstiness` is k.

    The first gap is U · G, U uniform and G gamma with shape k + 1 and scale θ: the gap that covers
    a random instant is length-biased (density ∝ x · f(x), which for gamma is shape + 1), and the
    instant is uniform within it.
    """

    kind = "gamma"
    cv: Cv

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        shape, scale_s = self.cv**-2, self.cv**2 / self.rate

        def gaps_s(n: int) -> NDArray[np.float64]:
            return rng.gamma(shape, scale_s, n)

        first_s = float(rng.random() * rng.gamma(shape + 1, scale_s))
        return _with_first(first_s, gaps_s, self.rate, self.cv, horizon_s)


class Weibull(StationaryArrivals):
    """Independent Weibull gaps with mean 1/rate: P(gap > x) = exp(−(x/λ)^shape),
    λ = 1/(rate · Γ(1 + 1/shape)).

    shape 1 is Poisson, below 1 bursty (cv 2.24 at 0.5), above 1 smoother; the gap cv is
    √(Γ(1 + 2/shape)/Γ(1 + 1/shape)² − 1), and the index of dispersion tends to its square.

    The first gap has the residual's density rate · exp(−(x/λ)^shape): λ · G^(1/shape) with G gamma
    of shape 1/shape.

    Source: N. L. Johnson, S. Kotz, N. Balakrishnan, Continuous Univariate Distributions 1 (1994),
    chapter 21 (moments).
    """

    kind = "weibull"
    shape: Annotated[float, Field(ge=0.15, le=100)]

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        scale_s = 1 / (self.rate * gamma(1 + 1 / self.shape))

        def gaps_s(n: int) -> NDArray[np.float64]:
            return scale_s * rng.weibull(self.shape, n)

        first_s = float(scale_s * rng.standard_gamma(1 / self.shape) ** (1 / self.shape))
        return _with_first(first_s, gaps_s, self.rate, self._cv, horizon_s)

    @property
    def _cv(self) -> float:
        return sqrt(max(0.0, gamma(1 + 2 / self.shape) / gamma(1 + 1 / self.shape) ** 2 - 1))


def equal_instants(rng: np.random.Generator, rate_per_s: float, horizon_s: float) -> Times:
    """Instants of `Constant` before the horizon."""
    # a product, not a running sum: the k-th instant has a single rounding error, not k
    k = np.arange(np.ceil(rate_per_s * horizon_s) + 1)
    instants: Times = (k + rng.random()) / rate_per_s
    return instants[instants < horizon_s]


def poisson_instants(rng: np.random.Generator, rate_per_s: float, horizon_s: float) -> Times:
    """Instants of `Poisson` in [0, horizon_s)."""

    def gaps_s(n: int) -> NDArray[np.float64]:
        return rng.standard_exponential(n) / rate_per_s

    return _renewals(0.0, gaps_s, rate_per_s, 1.0, horizon_s)


def _with_first(
    first_s: float,
    gaps_s: Callable[[int], NDArray[np.float64]],
    rate_per_s: float,
    cv: float,
    horizon_s: float,
) -> Times:
    instants = _renewals(first_s, gaps_s, rate_per_s, cv, horizon_s)
    return np.concatenate([[first_s], instants]) if first_s < horizon_s else instants


def _renewals(
    start_s: float,
    gaps_s: Callable[[int], NDArray[np.float64]],
    rate_per_s: float,
    cv: float,
    horizon_s: float,
) -> Times:
    """The renewals after `start_s` and before `horizon_s`. They are drawn in blocks of the mean
    count plus six standard deviations, so a second block is almost never needed."""
    blocks, last_s = [np.empty(0)], start_s
    while last_s < horizon_s:
        expected = (horizon_s - last_s) * rate_per_s
        block = gaps_s(int(expected + 6 * cv * np.sqrt(expected)) + 16)
        block[0] += last_s  # before the running sum: results do not depend on the block size
        blocks.append(np.cumsum(block, out=block))
        last_s = float(block[-1])
    instants = np.concatenate(blocks)
    return instants[: np.searchsorted(instants, horizon_s)]
