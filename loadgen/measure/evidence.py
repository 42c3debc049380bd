"""A run with its measurements and the checks of them, and the scopes that its SLOs judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadgen.measure.attainment import (
    MeasuredWindow,
    due_rows,
    limited_rows,
    measured_window,
    meets,
    meets_own,
)
from loadgen.measure.closed_loop import ClosedLoop, closed_loop, is_closed
from loadgen.measure.judging_slos import JudgingSlos, brought, tightest_brought
from loadgen.measure.load import load_through
from loadgen.measure.per_request import Mask, PerRequest, Seconds, per_request
from loadgen.measure.scope import Scope
from loadgen.measure.slo import Slo
from loadgen.measure.summary import ValidityCheck
from loadgen.measure.trees import Trees, trees_of
from loadgen.measure.validity.checks import checks, own_lateness
from loadgen.measure.validity.error_bound import ErrorBound, error_bound
from loadgen.records import Run


@dataclass(frozen=True, slots=True)
class Evidence:
    """A run, its measurements and the checks of them. `limits` are the SLOs that were stated, and
    the strictest limit of each metric that requests brought."""

    run: Run
    slos: JudgingSlos
    window: MeasuredWindow
    columns: PerRequest
    due: Mask
    limits: Sequence[Slo]
    lateness_s: Seconds
    error: ErrorBound
    loop: ClosedLoop | None
    trees: Trees | None
    checks: tuple[ValidityCheck, ...]

    @property
    def start_up(self) -> str:
        """Why the run is mostly the start of its closed loop, "" where it is not."""
        return self.loop.start_up_text if self.loop and self.loop.is_start_up else ""

    def whole(self, confidence: float) -> Scope:
        """All traffic, judged by the SLOs that were stated for all of it or brought to it."""
        run, columns, by_class = self.run, self.columns, self.slos.by_class
        judged_by = (*self.slos.shared, *self.slos.brought_to_all(run, columns))
        everywhere = np.full(len(self.due), True)
        limits = [(slo, everywhere) for slo in (*judged_by, *brought(columns))]
        limits += [(slo, _rows_of(run, name)) for name, own in by_class.items() for slo in own]
        return Scope(
            run,
            columns,
            self.due,
            self.window,
            slos=judged_by,
            meets=lambda moved: meets_own(run, moved, judged_by, by_class),
            limited=limited_rows(run, columns, judged_by, by_class),
            limits=limits,
            error=self.error,
            confidence=confidence,
            is_closed_loop=is_closed(run),
            start_up=self.start_up,
            trees=self.trees,
        )

    def of_class(self, name: str, confidence: float) -> Scope:
        """The rows of a class, judged by its SLOs; its requests also have to meet those of all
        traffic. Their lateness is that of the whole run, because the concurrency limit that holds
        rows back is that of all classes."""
        in_class, shared = _rows_of(self.run, name), self.slos.shared
        part = _only(self.run, in_class)
        columns, due = per_request(part), due_rows(part)
        own = (*self.slos.by_class[name], *self.slos.brought_to_class(name, columns, due))
        everywhere = np.full(len(due), True)
        return Scope(
            part,
            columns,
            due,
            self.window,
            slos=own,
            meets=lambda moved: meets(moved, (*shared, *own)),
            limited=limited_rows(part, columns, shared, {name: own}),
            limits=[(slo, everywhere) for slo in (*shared, *own, *brought(columns))],
            error=error_bound(part, self.lateness_s[in_class]),
            confidence=confidence,
            is_closed_loop=self.run.manifest.classes[name].is_closed_loop,
            start_up=self.start_up,
            trees=trees_of(part),
        )


def recorded_evidence(run: Run, slos: JudgingSlos, confidence: float) -> Evidence:
    """The evidence of a run. Raises RunInvalid for tables that do not fit together."""
    window, columns, due = measured_window(run), per_request(run), due_rows(run)
    limits = [*slos.stated, *tightest_brought(columns, due)]
    load = load_through(run, columns, due, window)
    lateness_s = own_lateness(run, columns)
    waits_s = columns.ttft_s if columns.is_streamed else columns.e2e_s
    return Evidence(
        run,
        slos,
        window,
        columns,
        due,
        limits,
        lateness_s,
        error=error_bound(run, lateness_s),
        loop=closed_loop(run, waits_s, columns.is_streamed, confidence),
        trees=trees_of(run),
        checks=tuple(checks(run, columns, due, limits, load)),
    )


def _rows_of(run: Run, name: str) -> Mask:
    """The rows of a class."""
    rows: Mask = run.schedule_rows["class_id"] == run.names.classes.index(name)
    return rows


def _only(run: Run, rows: Mask) -> Run:
    ids = run.schedule_rows["request_id"][rows]
    return replace(
        run,
        schedule_rows=run.schedule_rows[rows],
        request_rows=run.request_rows[rows],
        chunk_rows=run.chunk_rows[np.isin(run.chunk_rows["request_id"], ids)],
    )
