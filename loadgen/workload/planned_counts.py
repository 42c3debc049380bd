"""Planned numbers of requests, and the percentiles of SLOs for which they are too small. Apart from
the preview, whose statistics a run does not need before its preflight."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from loadgen.measure.catalog import METRICS
from loadgen.measure.slo import Slo
from loadgen.measure.statistics.percentiles import fewest_samples, planned_for
from loadgen.records import Phase, Schedule
from loadgen.units import write_duration
from loadgen.workload.scenario import Scenario

_LOWER = (0.99, 0.95, 0.9, 0.5)


def measured_counts(rows: Schedule) -> tuple[int, int]:
    """(rows in the measured window, those of them that are cancelled on purpose)."""
    measured = rows[rows["phase"] == Phase.measure]
    return len(measured), int(np.count_nonzero(measured["cancel_after_s"]))


def missing_percentiles(scenario: Scenario, schedule: Schedule) -> list[str]:
    """A sentence for each SLO on a percentile that the planned number of requests cannot have, with
    the flag that would do. A closed loop plans more requests than it sends, so it has none."""
    sentences: list[str] = []
    if not scenario.has_closed_loop:
        n_planned = scenario.phases.requests or _n_judged(schedule)
        sentences += _too_few(scenario, scenario.slos(), n_planned)
    for k, (name, own) in enumerate(scenario.classes.items()):
        if not scenario.is_closed_loop(name) and scenario.requests_in_flow is None:
            n_planned = _n_judged(schedule[schedule["class_id"] == k])
            sentences += [f"{name}: {text}" for text in _too_few(scenario, own.slos(), n_planned)]
    return sentences


def _n_judged(rows: Schedule) -> int:
    n_measured, n_withdrawn = measured_counts(rows)
    return n_measured - n_withdrawn


def _too_few(scenario: Scenario, slos: tuple[Slo, ...], n_planned: int) -> Iterator[str]:
    for slo in slos:
        if slo.quantile is None or METRICS[slo.metric].scope != "request" or not n_planned:
            continue
        least = fewest_samples(slo.quantile)
        if n_planned < least:
            yield (
                f"{slo.text} cannot be judged: this plan sends {n_planned} requests, and a "
                f"P{100 * slo.quantile:g} needs at least {least}; "
                f"{_remedy(scenario, slo.quantile, n_planned, least)}"
            )


def _remedy(scenario: Scenario, quantile: float, n_planned: int, least: int) -> str:
    """The flag with which the plan has enough requests, or the highest percentile that it has."""
    if scenario.phases.requests is not None:
        text = f"add --num-prompts {least}"
    else:
        enough = planned_for(least)
        length_s = 5 * math.ceil(scenario.phases.measure * enough / n_planned / 5)
        text = f"add --duration {write_duration(length_s)}"
    lower = [q for q in _LOWER if q < quantile and fewest_samples(q) <= n_planned]
    return f"{text}, or state the SLO about p{100 * lower[0]:g}" if lower else text
