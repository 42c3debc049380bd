"""When requests arrive: every kind turns a generator and a horizon into sorted instants.

All kinds here are renewal processes *in equilibrium*: the window opens at a random instant of a
process that has been running for ever, so the first gap is the residual of a gap already under way.
Then E[N(0, t)] = rate · t holds exactly for every t, not only in the long run, and cutting off a
warm-up changes nothing. (Starting with a full gap would lose or gain (cv² − 1)/2 requests.)

Source: D. R. Cox, Renewal Theory (1962), chapter 2 (equilibrium process), 4 (mean count) and 5
(residual lifetimes).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from loadgen.records import Times
from loadgen.registry import Plugin, Registry
from loadgen.units import Rate


class Arrivals(Plugin, ABC):
    """A point process on the run's time axis."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @abstractmethod
    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        """Arrival instants: float64 seconds, sorted, in [0, horizon_s); ties are allowed.

        The same generator state gives the same instants, and a longer horizon only adds some.
        """

    @abstractmethod
    def mean_rate_per_s(self, horizon_s: float) -> float | None:
        """The expected number of arrivals in [0, horizon_s) per second, in closed form; None where
        the kind states none."""


ARRIVALS: Registry[Arrivals] = Registry("slobench.arrivals", "arrival process")


class Constant(Arrivals):
    """Equal gaps: t_k = (k + U) / rate, U uniform on [0, 1); gap cv 0.

    The random phase U is the equilibrium start. Without it the mean count would be ⌈rate · t⌉, and
    constant streams that are added up would beat in step.
    """

    kind = "constant"
    rate: Rate

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        # multiplied out, not summed up: the k-th instant carries one rounding error, not k
        instants: Times = (np.arange(np.ceil(self.rate * horizon_s) + 1) + rng.random()) / self.rate
        return instants[instants < horizon_s]

    def mean_rate_per_s(self, horizon_s: float) -> float:
        return self.rate


class Poisson(Arrivals):
    """Memoryless arrivals: independent exponential gaps with mean 1/rate; gap cv 1.

    The number in any window of length t is Poisson with mean and variance rate · t (index of
    dispersion 1). The residual of an exponential gap is exponential: nothing to correct.

    Source: J. F. C. Kingman, Poisson Processes (1993), section 4.1.
    """

    kind = "poisson"
    rate: Rate

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        def gaps_s(n: int) -> NDArray[np.float64]:
            return rng.standard_exponential(n) / self.rate

        return _renewal(0.0, gaps_s, self.rate, 1.0, horizon_s)

    def mean_rate_per_s(self, horizon_s: float) -> float:
        return self.rate


class Gamma(Arrivals):
    """Independent gamma gaps with mean 1/rate and coefficient of variation cv.

    Shape k = 1/cv², scale θ = cv²/rate, so the mean is kθ = 1/rate and the standard deviation
    √k·θ = cv/rate. cv < 1 is smoother than Poisson, cv = 1 is Poisson, cv > 1 comes in clumps; over
    long windows the index of dispersion tends to cv². vLLM's `--burstiness` is k.

    The first gap is U · G, U uniform and G gamma with shape k + 1 and scale θ: the gap that covers
    a random instant is length-biased (density ∝ x · f(x), which for gamma is shape + 1), and the
    instant is uniform within it.
    """

    kind = "gamma"
    rate: Rate
    cv: Annotated[float, Field(gt=0, le=100)]

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        shape, scale_s = self.cv**-2, self.cv**2 / self.rate

        def gaps_s(n: int) -> NDArray[np.float64]:
            return rng.gamma(shape, scale_s, n)

        first_s = float(rng.random() * rng.gamma(shape + 1, scale_s))
        instants = _renewal(first_s, gaps_s, self.rate, self.cv, horizon_s)
        return np.concatenate([[first_s], instants]) if first_s < horizon_s else instants

    def mean_rate_per_s(self, horizon_s: float) -> float:
        return self.rate


def _renewal(
    start_s: float,
    gaps_s: Callable[[int], NDArray[np.float64]],
    rate_per_s: float,
    cv: float,
    horizon_s: float,
) -> Times:
    """The renewals after `start_s` and before `horizon_s`, drawn in blocks that almost always need
    no second one (mean count plus six standard deviations)."""
    blocks, last_s = [np.empty(0)], start_s
    while last_s < horizon_s:
        expected = (horizon_s - last_s) * rate_per_s
        block = gaps_s(int(expected + 6 * cv * np.sqrt(expected)) + 16)
        block[0] += last_s  # into the running sum, so that the block size leaves no trace
        blocks.append(np.cumsum(block, out=block))
        last_s = float(block[-1])
    instants = np.concatenate(blocks)
    return instants[: np.searchsorted(instants, horizon_s)]
