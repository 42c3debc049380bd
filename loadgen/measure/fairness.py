"""The tokens that each tenant requested and received, and how evenly they were shared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import MeasuredWindow
from loadgen.measure.catalog import METRICS
from loadgen.measure.load import per_second
from loadgen.measure.per_request import Mask, PerRequest, Samples
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.statistics.percentiles import Percentile
from loadgen.measure.statistics.proportions import wilson
from loadgen.records import Run


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The due requests of a tenant. `attainment` (with Wilson's interval) is the share that met
    every SLO; NaN, and `met` None, if none of them has a per-request limit. TTFT is of the
    successful requests. `asked` and `served` are tokens (prompt and answer) per second of the
    measured window, of all requests and of the successful requests."""

    due: int
    ok: int
    met: int | None
    attainment: float
    attainment_low: float | None
    attainment_high: float | None
    ttft_p50: Percentile
    ttft_p99: Percentile
    asked_tokens_per_s: float
    served_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Fairness:
    """The tenants, and Jain's index over the tokens served to them and over the share of their
    requested tokens that was served: 1 where all receive alike, 1/n where one tenant receives
    everything."""

    tenants: Mapping[str, TenantShare]
    jain_of_served: float
    jain_of_share: float


def fairness(
    run: Run,
    columns: PerRequest,
    due: Mask,
    met: Mask,
    limited: Mask,
    window: MeasuredWindow,
    confidence: float,
) -> Fairness | None:
    """None where all due requests belong to a single tenant. `met` are the due rows that met every
    SLO, `limited` the rows with a per-request limit."""
    tenants = {}
    for number, name in enumerate(run.names.tenants):
        of = due & (run.schedule_rows["tenant_id"] == number)
        if of.any():
            tenants[name] = _tenant(run, columns, of, met, limited, window, confidence)
    if len(tenants) < 2:
        return None
    served = [tenant.served_tokens_per_s for tenant in tenants.values()]
    shares = [t.served_tokens_per_s / t.asked_tokens_per_s for t in tenants.values()]
    return Fairness(tenants, jain_index(served), jain_index(shares))


def jain_index(allocations: Sequence[float]) -> float:
    """(Σx)² / (n Σx²) of n allocations x ≥ 0, in 1/n … 1; NaN where all are 0.

    Source: Jain, Chiu, Hawe: A Quantitative Measure of Fairness and Discrimination, DEC-TR-301,
    1984, eq. 1.
    """
    values = np.asarray(allocations, np.float64)
    squares = float(np.dot(values, values))
    return float(values.sum()) ** 2 / (len(values) * squares) if squares > 0 else math.nan


def _tenant(
    run: Run,
    columns: PerRequest,
    of: Mask,
    met: Mask,
    limited: Mask,
    window: MeasuredWindow,
    confidence: float,
) -> TenantShare:
    ok = of & columns.is_ok
    n_due, n_ok, n_met = (int(np.count_nonzero(rows)) for rows in (of, ok, met & of))
    samples = Samples(columns, of)
    attainment, has_limit = Interval(math.nan), bool((of & limited).any())
    if has_limit:
        times = samples.share(met & of).hit_times(confidence)
        attainment = wilson(n_met, n_due, confidence, times)
    ttft = samples.of(METRICS["ttft_s"])
    plan, counted = run.schedule_rows, run.request_rows["input_tokens"]
    planned: NDArray[np.float64] = plan["input_tokens"] + plan["output_tokens"].astype(np.float64)
    prompts = np.where(counted > 0, counted, plan["input_tokens"])
    return TenantShare(
        due=n_due,
        ok=n_ok,
        met=n_met if has_limit else None,
        attainment=attainment.value,
        attainment_low=attainment.low,
        attainment_high=attainment.high,
        ttft_p50=ttft.percentile(0.5, confidence),
        ttft_p99=ttft.percentile(0.99, confidence),
        asked_tokens_per_s=per_second(float(planned[of].sum()), window),
        served_tokens_per_s=per_second(
            float(prompts[ok].sum() + columns.output_tokens[ok].sum()), window
        ),
    )
