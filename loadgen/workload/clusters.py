"""Arrivals in clusters: batches, a single burst, and arrivals that trigger further arrivals."""

from __future__ import annotations

from math import log
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from loadgen.errors import ScenarioError
from loadgen.fields import Seconds
from loadgen.records import Times
from loadgen.workload.arrivals import Arrivals, StationaryArrivals, streams
from loadgen.workload.lengths import LENGTHS, Lengths
from loadgen.workload.renewal import equal_instants, poisson_instants


class Batch(StationaryArrivals):
    """Groups of simultaneous requests at Poisson instants, or at equal gaps with `instants:
    constant`; `rate` counts requests, so groups arrive at rate / E[size].

    At Poisson instants a compound Poisson process: the index of dispersion of counts is
    E[size²]/E[size] over every window. At equal gaps it tends to Var[size]/E[size] in long windows.

    Source: S. M. Ross, Introduction to Probability Models (11th ed. 2014), section 5.4.2.
    """

    kind = "batch"
    size: Annotated[Lengths, LENGTHS]
    instants: Literal["poisson", "constant"] = "poisson"

    @model_validator(mode="after")
    def _has_single_sizes(self) -> Self:
        if self.size.gives_pairs:
            raise ValueError("size: kind: joint draws pairs; for one number use kind: empirical")
        return self

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        instants_rng, sizes_rng = streams(rng, 2)
        rate = self.rate / self.size.mean
        draw = poisson_instants if self.instants == "poisson" else equal_instants
        instants = draw(instants_rng, rate, horizon_s)
        # a quantile of a uniform number each: a kind that redraws would give earlier groups other
        # sizes when the horizon adds groups
        return np.repeat(instants, self.size.ppf(sizes_rng.random(instants.size)))


class Burst(Arrivals):
    """All `requests` at t = 0, as in an offline job."""

    kind = "burst"
    requests: Annotated[int, Field(ge=1, le=20_000_000)]

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        return np.zeros(self.requests if horizon_s > 0 else 0)

    def mean_rate_per_s(self, horizon_s: float) -> float:
        return self.requests / horizon_s if horizon_s > 0 else 0.0


BLOCK = 256
"""Immigrants whose clusters are grown together. Changing it changes the arrivals of every seed."""
MISSED = 1e-9
MAX_BURN_IN = 20_000_000


class Hawkes(StationaryArrivals):
    """Self-exciting arrivals: λ(t) = μ + Σ_{t_i < t} n · β · e^{−β(t − t_i)}, μ = rate · (1 − n).

    n is `branching`, the mean number of arrivals that an arrival triggers directly, and 1/β is
    `decay`, the mean delay until then. The index of dispersion over windows of t is
    1 + n(2 − n)/(1 − n)² · (1 − (1 − e^{−θt})/(θt)), θ = β(1 − n), and tends to 1/(1 − n)².

    Drawn as clusters: immigrants arrive as a Poisson process of rate μ, and every arrival has a
    Poisson number (mean n) of children after exponential delays, generation by generation. The
    immigrants begin B before the window. B is chosen so that arrivals in the window caused by still
    earlier immigrants, rate · n/θ · e^{−θB} in expectation, are 1e-9: the law in the window differs
    from the stationary law by at most that in total variation.

    Sources: A. G. Hawkes, Biometrika 58 (1971), section 3 (covariance density); A. G. Hawkes,
    D. Oakes, J. Appl. Probab. 11 (1974) (cluster representation).
    """

    kind = "hawkes"
    branching: Annotated[float, Field(ge=0, le=0.999)]
    decay: Annotated[Seconds, Field(gt=0)]

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        base_rate_per_s = self.rate * (1 - self.branching)
        last_s = -self._burn_in_s()
        instants_s = [np.empty(0)]
        while last_s < horizon_s:
            gaps_s = rng.standard_exponential(BLOCK) / base_rate_per_s
            gaps_s[0] += last_s
            generation_s = np.cumsum(gaps_s)
            last_s = float(generation_s[-1])
            # Every cluster of a block is grown to its end, regardless of the horizon: the block
            # then uses the same random numbers, and a longer horizon only adds arrivals.
            while generation_s.size:
                is_inside = (generation_s >= 0) & (generation_s < horizon_s)
                instants_s.append(generation_s[is_inside])
                generation_s = np.repeat(
                    generation_s, rng.poisson(self.branching, generation_s.size)
                )
                generation_s += self.decay * rng.standard_exponential(generation_s.size)
        return np.sort(np.concatenate(instants_s))

    def _burn_in_s(self) -> float:
        """B. Raises ScenarioError if more than 20 million arrivals precede the window."""
        relaxation_s = self.decay / (1 - self.branching)
        burn_in_s = relaxation_s * log(max(1.0, self.rate * self.branching * relaxation_s / MISSED))
        if self.rate * burn_in_s > MAX_BURN_IN:
            raise ScenarioError(
                f"arrivals: hawkes with branching {self.branching:g} and decay {self.decay:g}s "
                f"has a memory of {relaxation_s:g}s, so the window needs "
                f"{self.rate * burn_in_s:.3g} arrivals before it, at most {MAX_BURN_IN:.0e}; lower "
                "branching or decay"
            )
        return burn_in_s
