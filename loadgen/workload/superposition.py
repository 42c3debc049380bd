"""Several arrival processes at once."""

from __future__ import annotations

from typing import Annotated, Self

import numpy as np
from pydantic import model_validator

from loadgen.records import Times
from loadgen.workload.arrivals import ARRIVALS, Arrivals, streams
from loadgen.workload.lists import FILLED, FROM_LIST


class Sum(Arrivals):
    """The superposition of independent processes: every arrival of each of them.

    Rates add up, and so do the variances of counts. What a part knows beyond its instants (the
    lengths of a trace) is left aside.
    """

    kind = "sum"
    of: Annotated[tuple[Annotated[Arrivals, ARRIVALS], ...], FROM_LIST, FILLED]

    @model_validator(mode="after")
    def _is_open_loop(self) -> Self:
        for index, part in enumerate(self.of):
            if part.pause() is not None:
                raise ValueError(
                    f"of.{index} ({part.kind}) is a closed loop and cannot be part of a sum; give "
                    "it a class of its own (classes: {…: {arrivals: …}})"
                )
        return self

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        parts = zip(self.of, streams(rng, len(self.of)), strict=True)
        return np.sort(np.concatenate([part.times(own, horizon_s) for part, own in parts]))

    def mean_rate_per_s(self, horizon_s: float) -> float | None:
        total = 0.0
        for part in self.of:
            rate = part.mean_rate_per_s(horizon_s)
            if rate is None:
                return None
            total += rate
        return total
