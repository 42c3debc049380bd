"""Requests that count and requests that met their SLOs: the measured window, the due rows,
attainment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.catalog import PASSES_UNDEFINED
from loadgen.measure.per_request import Mask, PerRequest, per_request
from loadgen.measure.slo import Slo, own_slo, parse_slo
from loadgen.measure.stalls import stalled_rows
from loadgen.records import Phase, Run, Status


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """The measured window [start_s, end_s), seconds since the run epoch."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def measured_window(run: Run) -> MeasuredWindow:
    """From the end of warm-up for `measure_s`, or until the run stopped releasing, whichever came
    first."""
    window = run.manifest.window
    start_s = window.warmup_s
    end_s, ended_s = start_s + window.measure_s, window.ended_s
    return MeasuredWindow(start_s, end_s if ended_s is None else max(start_s, min(end_s, ended_s)))


def warmup_rows(run: Run) -> Mask:
    """Rows of the warm-up: by their schedule, or, for rows that waited for parents, by their
    release."""
    schedule = run.schedule_rows
    planned: Mask = schedule["phase"] == Phase.warmup
    moved = schedule["n_parents"] > 0
    if not moved.any():
        return planned
    released_s = run.request_rows["released_s"]
    moved &= np.isfinite(released_s)
    warmup: Mask = np.where(moved, released_s < measured_window(run).start_s, planned)
    return warmup


def due_rows(run: Run) -> Mask:
    """Rows that had to be served in the measured window.

    Not due: warm-up; a row whose parents failed or did not finish, so that it was never released; a
    row planned after an interrupted run had stopped releasing; a withdrawn row.
    """
    return came_due(run) & ~_is_drawn(run)


def withdrawn_rows(run: Run) -> Mask:
    """Rows of the measured window that were to be cancelled (`requests.cancel`), however they
    ended: counting those that ended before their cancel would count only the quick ones."""
    drawn = _is_drawn(run)
    return drawn & came_due(run) if drawn.any() else drawn


def came_due(run: Run) -> Mask:
    """`due_rows` and `withdrawn_rows` together."""
    schedule, status = run.schedule_rows, run.request_rows["status"]
    unreleased = status == Status.not_released
    came: Mask = ~warmup_rows(run)
    if unreleased.any():
        waited = schedule["n_parents"] > 0
        after_end = schedule["scheduled_s"] >= measured_window(run).end_s
        came &= ~(unreleased & (waited | after_end))
    return came


def _is_drawn(run: Run) -> Mask:
    drawn: Mask = run.schedule_rows["cancel_after_s"] > 0
    return drawn


def slos_met(columns: PerRequest, slo: Slo) -> Mask:
    """Rows that met one per-request SLO, by its limit or by a limit that the request brought
    itself.

    Only a successful answer with a token meets any. An undefined metric is a miss, except for
    metrics that an answer may be too short to have (`PASSES_UNDEFINED`).
    """
    values, limit = columns.column(slo.metric), _limits(columns, slo)
    within = values <= limit if slo.operator == "<=" else values >= limit
    if slo.metric in PASSES_UNDEFINED:
        within |= np.isnan(values)
    met: Mask = within & columns.is_ok & columns.has_token
    return met


def _limits(columns: PerRequest, slo: Slo) -> float | NDArray[np.float64]:
    own_s = columns.own_slo_s.get(slo.metric)
    return slo.limit if own_s is None else np.where(own_s > 0, own_s, slo.limit)


def meets(columns: PerRequest, slos: Sequence[Slo]) -> Mask:
    """Rows that met every per-request SLO in `slos` and the limits that they brought themselves;
    without any, the successful rows."""
    met = columns.is_ok & columns.has_token
    for slo in (*slos, *map(own_slo, columns.own_slo_s)):
        if slo.scope == "request":
            met = met & slos_met(columns, slo)
    return met


def slos_by_class(run: Run) -> dict[str, list[Slo]]:
    """The SLOs of each class alone; empty for a run of one class without SLOs of its own."""
    own = {
        name: [parse_slo(text) for text in run.manifest.class_slos(name)]
        for name in run.names.classes
    }
    return own if len(own) > 1 or any(own.values()) else {}


def meets_own(
    run: Run, columns: PerRequest, slos: Sequence[Slo], by_class: Mapping[str, Sequence[Slo]]
) -> Mask:
    """Rows that met every per-request SLO of all traffic and of their class."""
    met = meets(columns, slos)
    for number, name in enumerate(run.names.classes):
        elsewhere = run.schedule_rows["class_id"] != number
        met = met & (elsewhere | meets(columns, by_class.get(name, ())))
    return met


def derived(run: Run) -> dict[str, NDArray[np.generic]]:
    """The computed columns of requests.parquet: `ttft_s tpot_s e2e_s`, `slo_met` by the run's own
    SLOs, and `client_stalled` where one of their times fell into a stall of the load generator."""
    columns = per_request(run)
    slos = [parse_slo(text) for text in run.manifest.slo]
    return {
        "ttft_s": columns.ttft_s,
        "tpot_s": columns.tpot_s,
        "e2e_s": columns.e2e_s,
        "slo_met": meets_own(run, columns, slos, slos_by_class(run)),
        "client_stalled": stalled_rows(run),
    }
