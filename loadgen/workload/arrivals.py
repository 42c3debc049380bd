"""Arrival processes: their base class, and the kinds that combine others or close the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from loadgen.records import Times
from loadgen.registry import FILLED, FROM_LIST, Plugin, Registry
from loadgen.units import Rate, Seconds
from loadgen.workload.durations import DURATIONS, Durations

Column = NDArray[np.uint32]
Limits = NDArray[np.float64]  # seconds


@dataclass(frozen=True, slots=True)
class Traffic:
    """One entry per request, all arrays of the same length [n]; None where the source does not say
    and the scenario decides.

    `scheduled_s`: seconds, sorted, in [0, horizon). `input_tokens` counts the whole prompt, its
    `prefix_tokens` included; rows with one `prefix_id` (from 1; 0 = none) begin with the same text,
    as far as the shorter of their prefixes goes. Rows with one `session_id` belong together and are
    never split over load generators. `class_name` names a class of the scenario. `…_slo_s` is what
    each request was promised, in seconds; 0 where it was nothing of its own.
    """

    scheduled_s: Times
    input_tokens: Column | None = None
    output_tokens: Column | None = None
    prefix_id: Column | None = None
    prefix_tokens: Column | None = None
    session_id: Column | None = None
    class_name: NDArray[np.str_] | None = None
    ttft_slo_s: Limits | None = None
    tpot_slo_s: Limits | None = None
    e2e_slo_s: Limits | None = None

    def __len__(self) -> int:
        return len(self.scheduled_s)


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

    def own_slo_metrics(self) -> tuple[str, ...]:
        """The per-request metrics of which arrivals may bring a limit of their own."""
        return ()

    def pause(self) -> Durations | None:
        """Closed loop: how long each source waits after its last answer before it asks again, and
        `times` are the first instants only. None: an open loop, every instant is in `times`."""
        return None


class StationaryArrivals(Arrivals):
    """A process whose law does not change over time; `rate` is its mean number of arrivals."""

    rate: Rate

    def mean_rate_per_s(self, horizon_s: float) -> float:
        return self.rate


ARRIVALS: Registry[Arrivals] = Registry("slobench.arrivals", "arrival process")


def streams(rng: np.random.Generator, n: int) -> list[np.random.Generator]:
    """n independent generators that follow from the state of `rng`, one per thing to be drawn: how
    much is drawn of one leaves the others as they are, so a longer horizon only adds arrivals.

    Source: NumPy's SeedSequence, seeded with 128 bits for each.
    """
    words = rng.integers(0, 2**32, (n, 4), np.uint32)
    return [np.random.Generator(np.random.PCG64(row.tolist())) for row in words]


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
