"""When requests arrive: every kind turns a generator and a horizon into sorted instants.

The kinds stand beside this file: renewal.py, modulated.py, self_exciting.py, groups.py,
rate_curves.py, rate_waves.py, superposition.py, closed_loop.py. Stationary processes begin in their
stationary state: the window opens at a random instant of a process that has been running for ever,
so E[N(0, t)] = rate · t for every t and cutting off a warm-up changes nothing. Rates that vary in
time are followed exactly (by rescaling time, never by rounding to seconds).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from loadgen.records import Times
from loadgen.registry import Plugin, Registry
from loadgen.workload.durations import Durations
from loadgen.workload.traffic import Traffic


class Arrivals(Plugin, ABC):
    """A point process on the run's time axis.

    `gives_lengths`: its `traffic` states token counts, so `requests` need not.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    gives_lengths: ClassVar[bool] = False

    @abstractmethod
    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        """Arrival instants: float64 seconds, sorted, in [0, horizon_s); ties are allowed.

        The same generator state gives the same instants, and a longer horizon only adds some.
        """

    @abstractmethod
    def mean_rate_per_s(self, horizon_s: float) -> float | None:
        """The expected number of arrivals in [0, horizon_s) per second, in closed form; None where
        the kind states none."""

    def traffic(self, rng: np.random.Generator, horizon_s: float) -> Traffic:
        """The instants with whatever more is known of each request; kinds that replay a record
        know more."""
        return Traffic(self.times(rng, horizon_s))

    def promised(self) -> tuple[str, ...]:
        """The per-request metrics of which arrivals may bring a limit of their own."""
        return ()

    def pause(self) -> Durations | None:
        """Closed loop: how long each source waits after its last answer before it asks again, and
        `times` are the first instants only. None: an open loop, every instant is in `times`."""
        return None


ARRIVALS: Registry[Arrivals] = Registry("slobench.arrivals", "arrival process")


def streams(rng: np.random.Generator, n: int) -> list[np.random.Generator]:
    """n independent generators that follow from the state of `rng`, one per thing to be drawn: how
    much is drawn of one leaves the others as they are, so a longer horizon only adds arrivals.

    Source: NumPy's SeedSequence, seeded with 128 bits for each.
    """
    words = rng.integers(0, 2**32, (n, 4), np.uint32)
    return [np.random.Generator(np.random.PCG64(row.tolist())) for row in words]
