"""Requests that arrive together: groups at random instants, or all at once."""

from __future__ import annotations

from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from loadgen.records import Times
from loadgen.units import Rate
from loadgen.workload.arrivals import Arrivals, streams
from loadgen.workload.lengths import LENGTHS, Lengths
from loadgen.workload.renewal import poisson_instants


class Batch(Arrivals):
    """Groups of simultaneous requests at Poisson instants; `rate` counts requests, so groups come
    at rate / E[size].

    A compound Poisson process: the index of dispersion of counts is E[size²]/E[size] over every
    window.

    Source: S. M. Ross, Introduction to Probability Models (11th ed. 2014), section 5.4.2.
    """

    kind = "batch"
    rate: Rate
    size: Annotated[Lengths, LENGTHS]

    @model_validator(mode="after")
    def _has_single_sizes(self) -> Self:
        if self.size.gives_pairs:
            raise ValueError("size: kind: joint draws pairs; for one number use kind: empirical")
        return self

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        instants_rng, sizes_rng = streams(rng, 2)
        instants = poisson_instants(instants_rng, self.rate / self.size.mean, horizon_s)
        # by quantiles, one uniform each: redrawing kinds would deal sizes out differently for
        # another number of groups
        return np.repeat(instants, self.size.ppf(sizes_rng.random(instants.size)))

    def mean_rate_per_s(self, horizon_s: float) -> float:
        return self.rate


class Burst(Arrivals):
    """All `requests` at t = 0: what an offline job does."""

    kind = "burst"
    requests: Annotated[int, Field(ge=1, le=20_000_000)]

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        return np.zeros(self.requests if horizon_s > 0 else 0)

    def mean_rate_per_s(self, horizon_s: float) -> float:
        return self.requests / horizon_s if horizon_s > 0 else 0.0
