"""Results of a run that is mostly the start of a closed loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loadgen.measure.catalog import METRICS
from loadgen.measure.slo_result import SloResult
from loadgen.measure.summary import Attainment, Distribution


def of_start_up(results: Sequence[SloResult], reason: str) -> tuple[SloResult, ...]:
    """The results without those that the start can have decided.

    Many users at once make latencies longer and move rates in either direction: a latency or an
    attainment that was missed, and every rate, has no result. A latency that was met and an error
    rate stand, but prove nothing about the time after the start.
    """
    return tuple(_of_start_up(result, reason) for result in results)


def _of_start_up(result: SloResult, reason: str) -> SloResult:
    unproven = replace(result, low=None, high=None, n_needed=None, seconds_needed=None, margin=None)
    if result.met is None:
        return unproven if result.scope == "request" else result
    if result.metric == "error_rate":
        return result
    is_rate = METRICS[result.metric].unit == "per_s"
    if is_rate or not result.met:
        return replace(
            unproven, met=None, proven=None, survives=None, note=reason, note_kind="start_up"
        )
    return replace(unproven, proven=None if result.proven is None else False)


def open_distribution(found: Distribution) -> Distribution:
    """The distribution with open intervals."""
    return replace(
        found,
        percentiles={k: replace(p, low=None, high=None) for k, p in found.percentiles.items()},
        with_failures={k: replace(p, low=None, high=None) for k, p in found.with_failures.items()},
    )


def without_bounds(found: Attainment) -> Attainment:
    """The attainment with open intervals."""
    bound = None if found.bound is None else replace(found.bound, value=None)
    return replace(found, low=None, high=None, bound=bound)
