"""A probe: the scenario at a fixed load for some time, counted in blocks of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.cause import CauseKind

N_BLOCKS = 16
Array = NDArray[np.float64]
Counts = tuple[int, ...]

Grade = Literal["measured", "fine", "saturated", "untrusted", "broken", "limited"]
"""measured: ran its full time. fine, saturated: ended early because the outcome was clear, or
(saturated) its queue grew to the end. untrusted: the load generator, not the server, was the limit.
broken: no server was reachable for part of it, it counted other prompts than were sent, or requests
failed for a reason that no load changes. limited: a rate limit, not the server, decided."""
LEAST_BOUNDED = 100
"""Due requests from which a probe has bounds. Of the shorter ones, which end before a queue shows,
one in five of those that proved a pass was wrong (`benchmarks/capacity_search.py`)."""
UNUSABLE: tuple[Grade, ...] = ("untrusted", "broken", "limited")


@dataclass(frozen=True, slots=True)
class Sent:
    """The requests of a probe in order of arrival, from its idle server on, warm-up included.
    `at_us` are scheduled send times in microseconds since the start, `new_tokens` input tokens
    without a shared prefix; `missed` is 1 where a request missed an SLO."""

    at_us: Counts
    input_tokens: Counts
    new_tokens: Counts
    output_tokens: Counts
    class_id: Counts
    missed: Counts


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of a probe. `level` is its load (arrivals per second, or users).

    `due` and `met` count, for each of `N_BLOCKS` stretches of equal length of the measured window,
    the requests due in it and the requests among them that met every SLO. `spent_s` is the time the
    probe took: warm-up, window and drain. `served_per_s` are the requests that ended per second of
    the window, and of the drain while a queue was left; None where that is too near the first
    answers to show a rate. `low` and `high` are the 95 % bounds of the attainment for dependent
    requests; None where the probe was too short for one, or had fewer than 100 requests. `sent` is
    None where the schedule does not state all send times. `cause` is the kind of the cause of most
    misses, "" for none, and `passed_per_s` the rate at which requests got past a rate limit, None
    if it is unknown.
    """

    level: float
    due: Counts
    met: Counts
    warmup_s: float
    measured_s: float
    spent_s: float
    grade: Grade = "measured"
    name: str = ""
    why: str = ""
    served_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    sent: Sent | None = None
    cause: CauseKind | Literal[""] = ""
    passed_per_s: float | None = None

    def __post_init__(self) -> None:
        if not len(self.due) == len(self.met) == N_BLOCKS:
            raise ValueError(f"{len(self.due)} and {len(self.met)} blocks, expected {N_BLOCKS}")
        if not all(0 <= m <= d for m, d in zip(self.met, self.due, strict=True)):
            raise ValueError("more requests met the SLO than were due in a block")

    @property
    def n_due(self) -> int:
        return sum(self.due)

    @property
    def n_met(self) -> int:
        return sum(self.met)

    @property
    def attainment(self) -> float:
        """The share of due requests that met the SLO; NaN where none was due."""
        return self.n_met / self.n_due if self.n_due else float("nan")

    @property
    def goodput_per_s(self) -> float:
        """Requests that met the SLO per second of the window."""
        return self.n_met / self.measured_s if self.measured_s > 0 else 0.0

    @property
    def is_usable(self) -> bool:
        """Whether the result is about the server."""
        return self.grade not in UNUSABLE and self.n_due > 0


def in_blocks(
    released_s: Array, met: NDArray[np.bool_], start_s: float, end_s: float
) -> tuple[Counts, Counts]:
    """(due, met) per block of [start_s, end_s), in `N_BLOCKS` blocks. A request outside the window
    counts in the nearest block."""
    edges_s = np.linspace(start_s, end_s, N_BLOCKS + 1)
    block = np.clip(np.searchsorted(edges_s, released_s, side="right") - 1, 0, N_BLOCKS - 1)
    n_due = np.bincount(block, minlength=N_BLOCKS)
    n_met = np.bincount(block[met], minlength=N_BLOCKS)
    return tuple(n_due.tolist()), tuple(n_met.tolist())


def counts(probes: Sequence[Probe]) -> tuple[Array, Array]:
    """(due, met) as arrays [n_probes, N_BLOCKS]."""
    due = np.array([probe.due for probe in probes], np.float64).reshape(-1, N_BLOCKS)
    return due, np.array([probe.met for probe in probes], np.float64).reshape(-1, N_BLOCKS)


def overloaded(probe: Probe, target: float) -> Probe:
    """A probe whose queue grew to the end, as if it had gone on: with the attainment of its last
    quarter, and in any case clearly below the target (by a factor e in the odds).

    While a queue only grows, its first requests meet SLOs that no later request would meet.
    """
    last = N_BLOCKS // 4
    late_due, late_met = sum(probe.due[-last:]), sum(probe.met[-last:])
    missed = target / (target + (1 - target) * np.e)
    share = min(late_met / late_due if late_due else probe.attainment, float(missed))
    met = tuple(min(m, int(share * d)) for m, d in zip(probe.met, probe.due, strict=True))
    return replace(probe, met=met, grade="saturated")
