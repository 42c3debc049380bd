"""Arrival processes: the base class, the superposition of several processes, and the closed loop.

Every kind turns a random generator and a horizon into sorted instants. The other kinds are in
renewal.py, modulated.py, clusters.py, rate_curves.py and trace_arrivals.py.

Stationary processes begin in their stationary state: the window opens at a random instant of a
process that has always been running, so E[N(0, t)] = rate · t for every t, and cutting off a
warm-up changes nothing. Rates that vary in time are followed exactly (by rescaling time, not by
rounding to seconds).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from loadgen.fields import Rate, Seconds
from loadgen.records import Pieces, Times
from loadgen.registry import FILLED, FROM_LIST, Plugin, Registry
from loadgen.workload.durations import DURATIONS, Durations

Column = NDArray[np.uint32]
LimitColumn = NDArray[np.float64]  # seconds


@dataclass(frozen=True, slots=True)
class Traffic:
    """The arriving requests, as columns of the same length [n]. A column is None if the source does
    not state it; the scenario then decides.

    `scheduled_s`: seconds, sorted, in [0, horizon). `input_tokens` counts the whole prompt,
    including its `prefix_tokens`. `prefix_id` (0 = none) names the last of the `pieces` in them, a
    table with rows of its own. Rows with the same `session_id` are never
    split over shards. `class_name` names a class of the scenario. `…_slo_s` is the limit of each
    request in seconds; 0 for a request without a limit of its own.
    """

    scheduled_s: Times
    input_tokens: Column | None = None
    output_tokens: Column | None = None
    prefix_id: Column | None = None
    prefix_tokens: Column | None = None
    pieces: Pieces | None = None
    session_id: Column | None = None
    class_name: NDArray[np.str_] | None = None
    ttft_slo_s: LimitColumn | None = None
    tpot_slo_s: LimitColumn | None = None
    e2e_slo_s: LimitColumn | None = None

    def __len__(self) -> int:
        return len(self.scheduled_s)


def selected(whole: Traffic, mask: NDArray[np.bool_]) -> Traffic:
    """The requests at which `mask` is true, with all their columns."""
    columns: dict[str, Any] = {
        field.name: column[mask]
        for field in fields(whole)
        if field.name != "pieces" and (column := getattr(whole, field.name)) is not None
    }
    return Traffic(**columns, pieces=whole.pieces)


class Arrivals(Plugin, ABC):
    """A point process on the run's time axis.

    `gives_lengths`: `traffic` states token counts, so `requests` may leave them out.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    gives_lengths: ClassVar[bool] = False

    @abstractmethod
    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        """Arrival instants: float64 seconds, sorted, in [0, horizon_s); ties are allowed.

        The same generator state gives the same instants; a longer horizon only adds instants.
        """

    @abstractmethod
    def mean_rate_per_s(self, horizon_s: float) -> float | None:
        """The expected number of arrivals in [0, horizon_s) per second, in closed form; None if the
        kind has no such number."""

    def traffic(self, rng: np.random.Generator, horizon_s: float) -> Traffic:
        """The instants, and further columns for kinds that replay a recorded trace."""
        return Traffic(self.times(rng, horizon_s))

    def own_slo_metrics(self) -> tuple[str, ...]:
        """The per-request metrics for which requests may carry limits of their own."""
        return ()

    def pause(self) -> Durations | None:
        """Closed loop: the pause of each source between the end of a response and its next request;
        `times` then holds the first instants only. None: an open loop, `times` holds all."""
        return None


class StationaryArrivals(Arrivals):
    """A process whose law does not change in time; `rate` is its mean rate."""

    rate: Rate

    def mean_rate_per_s(self, horizon_s: float) -> float:
        return self.rate


ARRIVALS: Registry[Arrivals] = Registry("slobench.arrivals", "arrival process")


def streams(rng: np.random.Generator, n: int) -> list[np.random.Generator]:
    """n independent generators derived from the state of `rng`, each seeded with 128 bits.

    With a generator per quantity, drawing more of one quantity does not change the others, so a
    longer horizon only adds arrivals.
    """
    words = rng.integers(0, 2**32, (n, 4), np.uint32)
    return [np.random.Generator(np.random.PCG64(row.tolist())) for row in words]


class Sum(Arrivals):
    """The superposition of independent processes: all arrivals of all parts.

    Rates add up, and so do the variances of counts. Only the instants of a part are used, not the
    lengths of a trace.
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
        return total_rate_per_s(self.of, horizon_s)


def total_rate_per_s(parts: Iterable[Arrivals], horizon_s: float) -> float | None:
    """The sum of the mean rates; None if a part has none."""
    rates = [part.mean_rate_per_s(horizon_s) for part in parts]
    stated = [rate for rate in rates if rate is not None]
    return sum(stated) if len(stated) == len(rates) else None


def window_rate_per_s(arrivals: Arrivals, start_s: float, end_s: float) -> float | None:
    """The expected number of arrivals in [start_s, end_s) per second; None if the kind has no mean
    rate."""
    before, whole = (arrivals.mean_rate_per_s(at_s) if at_s else 0.0 for at_s in (start_s, end_s))
    if before is None or whole is None:
        return None
    return (whole * end_s - before * start_s) / (end_s - start_s)


class Users(Arrivals):
    """`users` people in a closed loop: each sends a request, waits for the response, pauses for
    `think`, and sends the next. The rate depends on the server's speed (throughput =
    users / (E[response time] + E[think]), Little's law).

    User k joins at ramp_up · (k + U_k)/users with U_k uniform on [0, 1); without a ramp all users
    join at 0. `times` holds these first instants; each later request follows the response before it
    after a pause.

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
