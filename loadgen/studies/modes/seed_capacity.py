"""The capacity for fixed draws of traffic, and ratios of the capacities of several servers.

A draw is the traffic of a seed: its requests and, in units of the mean gap, its send times. The
same draw at another rate is the same traffic, only faster, so that its attainment falls smoothly
with the rate. `next_level` brackets the rate at which a draw meets the target; `ratios` compares
servers draw by draw, which removes the luck of the draw from the difference. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loadgen.manifest.json_section import JsonSection
from loadgen.measure.statistics.intervals import EstimateSection, mean_over

REQUESTS, WARM_SHARE = 4000, 0.25
"""Requests of the window of a draw, and those of its warm-up in proportion."""
TOLERANCE = 0.01
"""The search of a draw ends when its bracket is about this narrow, relative."""
FIRST_STEP, NEXT_STEP = math.log(2.0), 0.06
"""Logarithmic steps before both sides of the target are seen: from the scenario's rate, and from
the capacity of another draw."""
_MOST_REACH = 10 * math.log(2.0)
_MOST_TRIED = 24
_INSIDE = 0.1  # of the bracket: no level is nearer to its ends while the bracket is wide
_EPSILON = 1e-9

Outcome = Literal["found", "misses", "at_least", "open"]


@dataclass(frozen=True, slots=True)
class Tried:
    """The draw at a rate: requests due in the window, and those of them that met the SLO."""

    level: float
    n_due: int
    n_met: int

    def is_fine(self, target: float) -> bool:
        return self.n_due > 0 and self.n_met >= target * self.n_due

    @property
    def log_odds(self) -> float:
        """Of attainment; finite also where all or none met the SLO."""
        return math.log((self.n_met + 0.5) / (self.n_due - self.n_met + 0.5))


@dataclass(frozen=True, slots=True)
class SeedCapacity:
    """The capacity for a draw. found: `value` is it. misses: the SLO is missed even at `value`.
    at_least: it is met even at `value`. open: the search has not ended."""

    outcome: Outcome
    value: float


def next_level(
    tried: Sequence[Tried], target: float, start: float, first_step: float = FIRST_STEP
) -> float | None:
    """The next rate for a draw, None at the end of its search. The search leaves `start` in steps
    that double until both sides of the target are seen, then interpolates log-odds."""
    if not tried:
        return start
    below, above = _bracket(tried, target)
    if len(tried) >= _MOST_TRIED:
        return None
    if below is None or above is None:
        way = 1.0 if above is None else -1.0
        reached = max(abs(math.log(one.level / start)) for one in tried)
        if reached >= _MOST_REACH * (1 - _EPSILON):
            return None
        return start * math.exp(way * min(max(first_step, 2 * reached), reached + FIRST_STEP))
    width = math.log(above.level / below.level)
    if width <= TOLERANCE * (1 + _EPSILON):
        return None
    margin = max(min(TOLERANCE, width / 2), _INSIDE * width if width > 4 * TOLERANCE else 0.0)
    step = math.log(_crossing(below, above, target) / below.level)
    return below.level * math.exp(min(max(step, margin), width - margin))


def capacity_of(tried: Sequence[Tried], target: float) -> SeedCapacity:
    """The capacity for a draw from all rates tried."""
    assert tried, "no rate was tried"
    below, above = _bracket(tried, target)
    if below is None:
        return SeedCapacity("misses", min(one.level for one in tried))
    if above is None:
        return SeedCapacity("at_least", below.level)
    if math.log(above.level / below.level) > TOLERANCE * (1 + _EPSILON):
        return SeedCapacity("open", _crossing(below, above, target))
    return SeedCapacity("found", _crossing(below, above, target))


def _bracket(tried: Sequence[Tried], target: float) -> tuple[Tried | None, Tried | None]:
    """The lowest rate that misses the target, and the highest below it that meets it."""
    missed = [one for one in tried if not one.is_fine(target)]
    above = min(missed, key=lambda one: one.level, default=None)
    fine = [
        one for one in tried if one.is_fine(target) and (above is None or one.level < above.level)
    ]
    return max(fine, key=lambda one: one.level, default=None), above


def _crossing(below: Tried, above: Tried, target: float) -> float:
    """Where the line through both log-odds crosses that of the target."""
    goal = math.log(target / (1 - target))
    high, low = max(below.log_odds, goal), min(above.log_odds, goal)
    share = (high - goal) / (high - low) if high > low else 0.5
    return below.level * math.exp(share * math.log(above.level / below.level))


class ModeCapacity(EstimateSection, frozen=True, kw_only=True):
    """The capacity of a mode: the geometric mean over its draws."""

    mode: str


class CapacityRatio(EstimateSection, frozen=True, kw_only=True):
    """The capacity of the best mode divided by that of `mode`, over the draws that both have."""

    best: str
    mode: str


class ModeCapacities(JsonSection, frozen=True, kw_only=True):
    """Capacities, the best first, and the ratios to the best."""

    modes: list[ModeCapacity]
    ratios: list[CapacityRatio]


def compare_capacities(
    by_mode: Mapping[str, Mapping[int, float]], confidence: float
) -> ModeCapacities:
    """Capacities over draws, and their ratios to the best: `by_mode` holds the capacity of each
    mode for each draw (seed).

    Each capacity is the geometric mean over the draws of a mode with its interval (Student's t on
    the logarithms). A ratio is the geometric mean over the draws that both modes have, with its
    paired interval. The best is chosen from the same draws, so the intervals hold for all pairs
    together (Bonferroni).
    """
    modes = [
        ModeCapacity(mode=mode, **_geometric(list(values.values()), confidence))
        for mode, values in by_mode.items()
    ]
    modes.sort(key=lambda row: -(row.value or 0.0))
    ranked = [row.mode for row in modes if row.value is not None]
    n_pairs = max(1, len(ranked) * (len(ranked) - 1) // 2)
    each = 1 - (1 - confidence) / n_pairs
    ratios = []
    for mode in ranked[1:]:
        best, other = by_mode[ranked[0]], by_mode[mode]
        quotients = [best[seed] / other[seed] for seed in best if seed in other]
        ratios.append(CapacityRatio(best=ranked[0], mode=mode, **_geometric(quotients, each)))
    return ModeCapacities(modes=modes, ratios=ratios)


def _geometric(values: Sequence[float], confidence: float) -> dict[str, Any]:
    """The fields of an EstimateSection."""
    mean = mean_over([math.log(value) for value in values], confidence)
    ends = {"value": mean.value, "low": mean.low, "high": mean.high}
    return {name: None if end is None else math.exp(end) for name, end in ends.items()} | {
        "n": mean.n
    }
