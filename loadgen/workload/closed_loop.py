"""A closed loop: a fixed number of users, each with one request in flight or thinking."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from loadgen.records import Times
from loadgen.units import Seconds
from loadgen.workload.arrivals import Arrivals
from loadgen.workload.durations import DURATIONS, Durations


class Users(Arrivals):
    """`users` people in a closed loop: each asks, waits for the answer, thinks for `think`, and
    asks again. How much arrives depends on how fast the server answers (throughput =
    users / (E[answer] + E[think]), Little's law), so there is no rate to state.

    User k joins at ramp_up · (k + U_k)/users with U_k uniform on [0, 1); all at once without a
    ramp. `times` are these first instants; every later one is the end of the answer before plus a
    pause.

    Source: E. D. Lazowska et al., Quantitative System Performance (1984), section 3.3 (response
    time law).
    """

    kind = "users"
    users: Annotated[int, Field(ge=1, le=1_000_000)]
    think: Annotated[Durations, DURATIONS]
    ramp_up: Seconds = 0.0

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        joined = (np.arange(self.users) + rng.random(self.users)) / self.users
        instants: Times = self.ramp_up * joined
        return instants[: np.searchsorted(instants, horizon_s)]

    def mean_rate_per_s(self, horizon_s: float) -> None:
        return None

    def pause(self) -> Durations:
        return self.think
