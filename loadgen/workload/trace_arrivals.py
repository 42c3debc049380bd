"""Replay of a recorded trace, with its lengths, prefixes and sessions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from loadgen.errors import TraceFileError, nearest
from loadgen.fields import Rate, Seconds, Share
from loadgen.records import OWN_SLO, Times
from loadgen.registry import Strict
from loadgen.workload.arrivals import Arrivals, Traffic
from loadgen.workload.pieces import repeated, shifted
from loadgen.workload.traces.file import Auto, load_trace
from loadgen.workload.traces.trace import TRACES, Trace, TraceFormat

Index = NDArray[np.int32]  # row numbers


class Window(Strict):
    """A part of a trace, in time since its first request; `to` is exclusive."""

    from_s: Annotated[Seconds, Field(alias="from", ge=0)] = 0.0
    to_s: Annotated[Seconds | None, Field(alias="to")] = None

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.to_s is not None and self.to_s <= self.from_s:
            raise ValueError(f"is empty: to ({self.to_s:g}s) is not after from ({self.from_s:g}s)")
        return self


@dataclass(frozen=True, slots=True)
class _Cycle:
    """A round of the replay: row numbers of the trace, their instants in the replay, and the
    length of the round (0 for a single request, which has no rate)."""

    trace: Trace
    rows: Index
    times_s: Times
    period_s: float


class TraceArrivals(Arrivals):
    """Instants, lengths, shared prefixes, sessions and SLOs of a recorded trace, row by row.

    Applied in this order: `only` selects classes of the file; `window` selects a part; `thin` keeps
    each request with probability p, independently (a dispersion of I becomes 1 + p(I − 1));
    `time_scale` multiplies instants (0.5 plays twice as fast), or `rate` chooses the scale for this
    mean rate; `loop` repeats the part (each round has prefixes of its own, so that repetition
    causes no cache hits).

    The mean rate of n requests in a part of length T is n/T; without a `window`, T is the time of
    the last request · n/(n − 1), a mean gap after it. If the trace ends before the run, no more
    requests arrive. `path` is relative to the current directory.
    """

    kind = "trace"
    gives_lengths: ClassVar[bool] = True
    path: Annotated[str, Field(min_length=1)]
    format: Annotated[TraceFormat, TRACES] = Auto()
    only: Annotated[tuple[str, ...], Field(strict=False)] = ()
    window: Window | None = None
    thin: Annotated[Share, Field(gt=0)] = 1.0
    time_scale: Annotated[float, Field(gt=0, le=1e6)] | None = None
    rate: Rate | None = None
    loop: bool = False

    @model_validator(mode="after")
    def _has_one_speed(self) -> Self:
        if self.rate is not None and self.time_scale is not None:
            raise ValueError("rate and time_scale both set the speed; remove rate or time_scale")
        return self

    def times(self, rng: np.random.Generator, horizon_s: float) -> Times:
        return self.traffic(rng, horizon_s).scheduled_s

    @property
    def length_s(self) -> float:
        """Seconds of the replay of the whole part once; for a single request 1 s after it."""
        return self._cycle.period_s or float(self._cycle.times_s[-1]) + 1.0

    def mean_rate_per_s(self, horizon_s: float) -> float:
        cycle = self._cycle
        rounds, rest_s = divmod(horizon_s, cycle.period_s) if self.loop else (0.0, horizon_s)
        n_rows = rounds * len(cycle.rows) + np.searchsorted(cycle.times_s, rest_s)
        return float(self.thin * n_rows / horizon_s)

    def traffic(self, rng: np.random.Generator, horizon_s: float) -> Traffic:
        """The replayed requests before `horizon_s` with all their columns.

        Raises TraceFileError if the file cannot be read or contains nothing to replay.
        """
        cycle, trace = self._cycle, self._cycle.trace
        # 1 more round than the quotient: rounding may put another row before the horizon.
        n_rounds = int(np.ceil(horizon_s / cycle.period_s)) + 1 if self.loop else 1
        kept = [self._kept(rng, cycle) for _ in range(n_rounds)]
        places = np.concatenate(kept)
        round_of = np.repeat(np.arange(n_rounds, dtype=np.int32), [len(k) for k in kept])
        times_s = cycle.times_s[places] + round_of * cycle.period_s
        n = int(np.searchsorted(times_s, horizon_s))
        rows, round_of = cycle.rows[places[:n]], round_of[:n]
        return Traffic(
            scheduled_s=times_s[:n],
            input_tokens=trace.input_tokens[rows],
            output_tokens=trace.output_tokens[rows],
            prefix_id=shifted(trace.prefix_ids[rows], round_of * len(trace.pieces))
            if trace.prefix_ids.any()
            else None,
            prefix_tokens=trace.prefix_tokens[rows] if trace.prefix_ids.any() else None,
            pieces=repeated(trace.pieces, int(round_of.max(initial=-1)) + 1)
            if trace.prefix_ids.any()
            else None,
            session_id=_distinct_ids(trace.session_ids, rows, round_of),
            class_name=np.array(trace.classes)[trace.class_ids[rows]]
            if len(trace.classes) > 1
            else None,
            **{column: limits_s[rows] for column, limits_s in trace.slo_s.items()},
        )

    def own_slo_metrics(self) -> tuple[str, ...]:
        """The metrics with limits in the trace. Reads the file if the format cannot name them."""
        metrics = self.format.own_slo_metrics()
        return metrics or tuple(m for m, own in OWN_SLO.items() if own in self._cycle.trace.slo_s)

    def notes(self) -> tuple[str, ...]:
        """The rows that were dropped, reordered or approximated on reading."""
        return self._cycle.trace.notes

    def _kept(self, rng: np.random.Generator, cycle: _Cycle) -> Index:
        if self.thin == 1.0:
            return np.arange(len(cycle.rows), dtype=np.int32)
        return np.flatnonzero(rng.random(len(cycle.rows)) < self.thin).astype(np.int32)

    @cached_property
    def _cycle(self) -> _Cycle:
        trace = load_trace(self.path, self.format)
        if not trace.has_times:
            raise TraceFileError(f"{self.path}: {trace.format} files have no times to replay")
        rows = self._of_classes(trace)
        times_s = trace.times_s[rows]
        n, last_s = len(rows), float(trace.times_s[-1])
        window = self.window or Window()
        end_s = last_s * len(trace) / max(len(trace) - 1, 1)
        if window.to_s is not None and window.to_s > end_s:
            raise TraceFileError(f"{self.path}: window.to is after its end at {end_s:g}s")
        to_s = np.inf if window.to_s is None else window.to_s
        is_in = (times_s >= window.from_s) & (times_s < to_s)
        rows, times_s = rows[is_in], times_s[is_in] - window.from_s
        if not len(rows):
            raise TraceFileError(f"{self.path}: none of its {n} requests lies in the window")
        period_s = float(min(end_s, to_s)) - window.from_s
        if period_s <= 0 and (self.loop or self.rate is not None):
            raise TraceFileError(
                f"{self.path}: all requests at the same instant, so there is no rate"
            )
        scale = self.time_scale or 1.0
        if self.rate is not None:
            scale = self.thin * len(rows) / period_s / self.rate
        return _Cycle(trace, rows, times_s * scale, period_s * scale)

    def _of_classes(self, trace: Trace) -> Index:
        if not self.only:
            return np.arange(len(trace), dtype=np.int32)
        for name in self.only:
            if name not in trace.classes:
                hint = nearest(name, trace.classes)
                raise TraceFileError(f"{self.path}: has no class '{name}'; {hint}")
        selected = [k for k, name in enumerate(trace.classes) if name in self.only]
        return np.flatnonzero(np.isin(trace.class_ids, selected)).astype(np.int32)


def _distinct_ids(
    ids: NDArray[np.uint32], rows: Index, round_of: Index
) -> NDArray[np.uint32] | None:
    """The ids of a column (0 = none), distinct between rounds; None if the trace has none."""
    if not ids.any():
        return None
    chosen, n_ids = ids[rows], np.uint32(ids.max())
    return np.where(chosen > 0, chosen + round_of.astype(np.uint32) * n_ids, np.uint32(0))
