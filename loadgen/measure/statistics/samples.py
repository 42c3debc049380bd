"""Which samples stand behind each metric: the due requests, those that ended well, and failures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from loadgen.measure.catalog import METRICS, PASSES_UNDEFINED, Metric
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.statistics.population import Population, clustered, independent


class Samples:
    """The populations of a run, each made once.

    `of(metric)` holds requests that ended well; with failures, also one +inf per due request that
    did not (gap metrics: one gap that never ended) or that has no value though an SLO would ask for
    it. The client's own delays take every due request they exist for; failures add nothing there.
    """

    def __init__(self, columns: PerRequest, due: Mask) -> None:
        self._columns, self._due = columns, due
        self._ok = due & columns.is_ok
        self._made: dict[tuple[str, bool], Population] = {}

    def of(self, metric: Metric, with_failures: bool = False) -> Population:
        if metric.name == "itl_s" and not self._columns.gaps.has_several:
            metric = METRICS["icl_s"]  # one token per chunk: the same samples, sorted once
        key = (metric.name, with_failures)
        if key not in self._made:
            self._made[key] = self._failed(metric) if with_failures else self._plain(metric)
        return self._made[key]

    def _plain(self, metric: Metric) -> Population:
        if metric.scope != "gap":
            values = self._columns.column(metric.name)
            return independent(values[self._ok if metric.slo else self._due])
        gaps = self._columns.gaps
        kept = self._ok[gaps.rows]
        if metric.name == "icl_s":
            return clustered(gaps.icl_s, gaps.starts, kept, None)
        return clustered(gaps.itl_s, gaps.starts, kept, gaps.tokens)

    def _failed(self, metric: Metric) -> Population:
        missing = self._due & ~self._columns.is_ok
        if metric.scope != "gap":
            missing |= self._due & ~self._columns.has_token
            if metric.name not in PASSES_UNDEFINED:
                missing |= self._due & np.isnan(self._columns.column(metric.name))
        n_missing = int(np.count_nonzero(missing)) if metric.slo else 0
        plain = self.of(metric)
        return replace(plain, n_infinite=n_missing) if n_missing else plain
