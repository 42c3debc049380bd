"""The small tables behind a run's figures: percentiles are exact, points are thinned out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import due_rows, meets_own
from loadgen.measure.catalog import METRICS
from loadgen.measure.load import mean_in_flight
from loadgen.measure.per_request import Mask, PerRequest, Samples
from loadgen.measure.server_load import points
from loadgen.measure.slo import Slo
from loadgen.measure.slo_result import SloResult
from loadgen.measure.statistics.intervals import BoundTimes
from loadgen.measure.statistics.percentiles import percentile
from loadgen.measure.statistics.population import Population
from loadgen.measure.summary import PERCENTILES, Summary
from loadgen.records import Run, Status
from reports.charts import Record, tail_position
from reports.run.failures import Failures, failures

SERVER_SERIES = ("running", "waiting", "kv_usage", "gpu_memory_bytes")
AVERAGED_SERIES = ("gpu_utilization", "gpu_power_w")  # they swing within a time bin
SPECTRUM_METRICS = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
FROM_SEND = {"ttft_s": "ttft_from_send_s", "e2e_s": "e2e_from_send_s"}
MAX_BINS = 600
MAX_POINTS = 3000
MAX_ITL_POINTS = 2500
MAX_FAILED_POINTS = 1000
N_QUANTILES = 60
ANSWERED, WITH_FAILURES = "successful requests", "all due requests, unanswered as ∞"


@dataclass(frozen=True, slots=True)
class Frames:
    """The data of the figures. Records are flat and JSON-ready; times in seconds, rates per second.

    `spectra[metric]`: tail (= log10 1/(1−q)), quantile, value, low, high, series, clock (released
    or sent). `seconds`: per time bin from_s, to_s, asked (scheduled), sent, kept (due requests that
    met their SLOs; in the bin of their scheduled send time), in_flight (mean), output_tokens.
    `server`: the server's own metrics in the same bins: from_s, to_s, running, waiting, kv_usage,
    gpu_memory_bytes (the largest of each bin), gpu_utilization, gpu_power_w (the mean; None
    without a reading); empty where it reports none.
    `points`: released_s, ttft_s (for failed requests the time from release to failure), status;
    none for a request that was cancelled, whose age is no latency.
    `itl`: at_s (arrival of the chunk), itl_s (its gap per token), status, request_id; for broken
    streams the time of the failure and the silence before it. `n_itl`: all gaps, shown or not.
    `limits[metric]`: the SLOs that a spectrum shows, tail None for limits on each request.
    """

    spectra: Mapping[str, Sequence[Record]]
    limits: Mapping[str, Sequence[Record]]
    seconds: Sequence[Record]
    points: Sequence[Record]
    n_points: int
    n_failed_points: int
    window_s: tuple[float, float]
    end_s: float
    failures: Sequence[Failures]
    server: Sequence[Record] = ()
    itl: Sequence[Record] = ()
    n_itl: int = 0
    has_slos: bool = False
    is_streamed: bool = True
    results: str = ""


def frames(run: Run, summary: Summary, columns: PerRequest) -> Frames:
    """All tables of a run; `columns` are its `per_request`."""
    due = due_rows(run)
    samples = Samples(columns, due)
    end_s = _end_s(run, summary)
    points, n_points, n_failed = _points(run, columns)
    itl, n_itl = _itl(run, columns)
    return Frames(
        spectra={name: _spectrum(samples, name, summary.confidence) for name in SPECTRUM_METRICS},
        limits=_limits(summary),
        seconds=_seconds(run, columns, rows_met(run, summary, columns, due), end_s),
        points=points,
        n_points=n_points,
        n_failed_points=n_failed,
        window_s=(summary.window.start_s, summary.window.end_s),
        end_s=end_s,
        failures=failures(run),
        server=_server(run, end_s),
        itl=itl,
        n_itl=n_itl,
        has_slos=any(r.scope == "request" for r in _all_slos(summary)),
        is_streamed=columns.is_streamed,
        results=summary.results,
    )


def _end_s(run: Run, summary: Summary) -> float:
    """End of the time axis: that of the window, of the schedule or of the last answer."""
    ends = [run.request_rows["done_s"], run.schedule_rows["scheduled_s"]]
    latest = [float(np.nanmax(e)) for e in ends if np.isfinite(e).any()]
    return max([summary.window.end_s, *latest])


def _spectrum(samples: Samples, name: str, confidence: float) -> list[Record]:
    """Counted from the scheduled send time and, for TTFT and E2E, also from the actual send
    time."""
    records = []
    clocks = {"released": name, **({"sent": FROM_SEND[name]} if name in FROM_SEND else {})}
    for clock, metric in ((clock, METRICS[n]) for clock, n in clocks.items()):
        plain, whole = samples.of(metric), samples.of(metric, with_failures=True)
        curve = _curve(plain, ANSWERED, confidence)
        if whole.n_infinite:
            curve += _curve(whole, WITH_FAILURES, confidence)
        records += [{**record, "clock": clock} for record in curve]
    return records


def _all_slos(summary: Summary) -> list[SloResult]:
    return [*summary.slo, *(r for of_class in summary.classes.values() for r in of_class.slo)]


def rows_met(run: Run, summary: Summary, columns: PerRequest, due: Mask) -> Mask:
    """Mask of the due requests that met all their SLOs."""
    own = {name: _stated(of_class.slo) for name, of_class in summary.classes.items()}
    return due & meets_own(run, columns, _stated(summary.slo), own)


def _stated(results: Sequence[SloResult]) -> list[Slo]:
    """The SLOs with a limit; limits per request, from a trace, are in the columns."""
    return [result.slo for result in results if math.isfinite(result.limit)]


def _itl(run: Run, columns: PerRequest) -> tuple[list[Record], int]:
    """A point per gap between arrivals, thinned out but with the longest gaps, and a point per
    broken stream; the number of gaps."""
    gaps, ids = columns.gaps, run.request_rows["request_id"]
    chosen = _thinned_gaps(gaps.itl_s)
    group = np.searchsorted(gaps.starts, chosen, side="right") - 1
    row, first_s = gaps.rows[group], run.request_rows["first_token_s"]
    since_s = [
        gaps.icl_s[start : gap + 1].sum()
        for start, gap in zip(gaps.starts[group].tolist(), chosen.tolist(), strict=True)
    ]
    at_s, itl_s = first_s[row] + np.array(since_s), gaps.icl_s[chosen] / gaps.tokens[chosen]
    records = [
        {"at_s": at, "itl_s": value, "status": "ok", "request_id": int(ids[number])}
        for at, value, number in zip(at_s.tolist(), itl_s.tolist(), row.tolist(), strict=True)
    ]
    return [*records, *_broken_off(run, columns)], len(gaps.icl_s)


def _thinned_gaps(itl_s: NDArray[np.float64]) -> NDArray[np.intp]:
    """`_thinned` for millions of gaps, without sorting them."""
    n = len(itl_s)
    if n <= MAX_ITL_POINTS:
        return np.arange(n)
    n_largest = MAX_ITL_POINTS // 10
    largest = np.argpartition(itl_s, n - n_largest)[n - n_largest :]
    even = np.linspace(0, n - 1, MAX_ITL_POINTS - n_largest).astype(np.intp)
    return np.unique(np.r_[largest, even])


def _broken_off(run: Run, columns: PerRequest) -> list[Record]:
    """Requests that failed after their first token: the time, and the silence before it."""
    rows = run.request_rows
    silent_s = rows["done_s"] - rows["last_token_s"]
    broken = np.flatnonzero(_has_failed(run) & columns.has_token & np.isfinite(silent_s))
    return [
        {
            "at_s": float(rows["done_s"][row]),
            "itl_s": float(silent_s[row]),
            "status": Status(rows["status"][row]).name,
            "request_id": int(rows["request_id"][row]),
        }
        for row in _thinned(broken, silent_s[broken], MAX_FAILED_POINTS).tolist()
    ]


def _curve(population: Population, series: str, confidence: float) -> list[Record]:
    """Nearest-rank percentiles with their confidence band, on a grid even on the tail axis."""
    n = population.n
    if not len(population.ordered):
        return []
    last = math.log10(2 * n)  # the grid ends at the largest sample
    marks = [tail_position(q) for q in PERCENTILES.values() if 1 - q >= 1 / n]
    tails = np.array(sorted({*np.linspace(0.0, last, N_QUANTILES).tolist(), *marks}))
    both_times = _times_along(population, tails, confidence)
    records = []
    for tail, times in zip(tails.tolist(), both_times, strict=True):
        quantile = min(max(1 - 10**-tail, 0.5 / n), 1 - 0.5 / n)
        quantile = next(
            (q for q in PERCENTILES.values() if abs(tail_position(q) - tail) < 1e-12), quantile
        )
        at = percentile(population.ordered, quantile, confidence, population.n_infinite, times)
        if math.isinf(at.value):
            break
        is_closed = at.low is not None and at.high is not None and at.high < math.inf
        records.append(
            {
                "tail": tail,
                "quantile": quantile,
                "value": at.value,
                "low": at.low if is_closed else None,
                "high": at.high if is_closed else None,
                "series": series,
            }
        )
    return records


def _times_along(
    population: Population, tails: NDArray[np.float64], confidence: float
) -> list[BoundTimes | None]:
    """Autocorrelation times: computed at the reported percentiles, interpolated between them; None
    next to a percentile for which the run is too short."""
    anchors = [tail_position(q) for q in PERCENTILES.values()]
    found = [population.dependence(q).bound_times(confidence) for q in PERCENTILES.values()]
    low, high = (
        np.interp(tails, anchors, [math.nan if times is None else times[side] for times in found])
        for side in (0, 1)
    )
    return [
        None if math.isnan(one) else (one, other)
        for one, other in zip(low.tolist(), high.tolist(), strict=True)
    ]


def _limits(summary: Summary) -> dict[str, list[Record]]:
    limits: dict[str, list[Record]] = {name: [] for name in SPECTRUM_METRICS}
    for result in summary.slo:
        if result.metric in limits and math.isfinite(result.limit):
            slo = result.slo
            limits[result.metric].append(
                {
                    "text": slo.text,
                    "limit": slo.limit,
                    "tail": None if slo.quantile is None else tail_position(slo.quantile),
                    "met": result.met,
                }
            )
    return limits


def _seconds(run: Run, columns: PerRequest, met: Mask, end_s: float) -> list[Record]:
    """Rates per time bin of at least a second; the last bin may extend beyond the end."""
    width_s, n_bins = _bins(end_s)
    rows = run.request_rows
    planned_s = np.where(
        run.schedule_rows["n_parents"] == 0, run.schedule_rows["scheduled_s"], rows["released_s"]
    )
    scheduled, sent, good = (
        _histogram(t, n_bins, width_s) for t in (planned_s, rows["sent_s"], planned_s[met])
    )
    tokens = _tokens_per_bin(run, columns, n_bins, width_s)
    has_results = bool(run.manifest.target.results)
    results = _histogram(
        rows["done_s"], n_bins, width_s, np.where(columns.is_ok, rows["results"], 0)
    )
    edges = np.arange(n_bins + 1, dtype=np.float64) * np.float64(width_s)
    flight = mean_in_flight(run, edges)
    return [
        {
            "from_s": float(edges[k]),
            "to_s": float(edges[k + 1]),
            "asked": float(scheduled[k]) / width_s,
            "sent": float(sent[k]) / width_s,
            "kept": float(good[k]) / width_s,
            "in_flight": float(flight[k]),
            "output_tokens": float(tokens[k]) / width_s,
            **({"results": float(results[k]) / width_s} if has_results else {}),
        }
        for k in range(n_bins)
    ]


def _bins(end_s: float) -> tuple[float, int]:
    """Width (s) and number of the time bins."""
    width_s = max(1.0, math.ceil(end_s / MAX_BINS))
    return width_s, max(1, math.ceil(end_s / width_s))


def _server(run: Run, end_s: float) -> list[Record]:
    """The server's queue, its memory and its GPUs per time bin."""
    series = {name: points(run, name) for name in (*SERVER_SERIES, *AVERAGED_SERIES)}
    reported = {name: readings for name, readings in series.items() if len(readings[0])}
    if not reported:
        return []
    width_s, n_bins = _bins(end_s)
    columns = {
        name: _per_bin(*readings, width_s, n_bins, is_mean=name in AVERAGED_SERIES)
        for name, readings in reported.items()
    }
    return [
        {
            "from_s": k * width_s,
            "to_s": (k + 1) * width_s,
            **dict.fromkeys(series),
            **{n: float(v[k]) if np.isfinite(v[k]) else None for n, v in columns.items()},
        }
        for k in range(n_bins)
    ]


def _per_bin(
    times_s: NDArray[np.float64],
    values: NDArray[np.float64],
    width_s: float,
    n_bins: int,
    is_mean: bool,
) -> NDArray[np.float64]:
    """The mean or the largest reading of each bin; not finite for a bin without a reading."""
    bins = np.clip((times_s / width_s).astype(np.int64), 0, n_bins - 1)
    if is_mean:
        n = np.bincount(bins, minlength=n_bins)
        total = np.bincount(bins, weights=values, minlength=n_bins)
        return np.where(n > 0, total / np.maximum(n, 1), np.nan)
    most = np.full(n_bins, -np.inf)
    np.maximum.at(most, bins, values)
    return most


def _histogram(
    instants_s: NDArray[np.float64],
    n_bins: int,
    width_s: float,
    weights: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    is_finite = np.isfinite(instants_s)
    bins = np.clip((instants_s[is_finite] / width_s).astype(np.int64), 0, n_bins - 1)
    chosen = None if weights is None else weights[is_finite]
    return np.bincount(bins, weights=chosen, minlength=n_bins).astype(np.float64)


def _tokens_per_bin(
    run: Run, columns: PerRequest, n_bins: int, width_s: float
) -> NDArray[np.float64]:
    """Output tokens per bin: those of a request are spread evenly over its chunks, at the times of
    their arrival."""
    chunks = run.chunk_rows
    if not len(chunks):
        return np.zeros(n_bins)
    row = np.searchsorted(run.request_rows["request_id"], chunks["request_id"])
    n_chunks = np.bincount(row, minlength=len(run.request_rows))
    per_chunk = columns.streamed_tokens / np.maximum(n_chunks, 1)
    return _histogram(np.ascontiguousarray(chunks["received_s"]), n_bins, width_s, per_chunk[row])


def _points(run: Run, columns: PerRequest) -> tuple[list[Record], int, int]:
    """TTFT (E2E without a stream) of each request at its release, failed requests at their time
    from release to failure; thinned out, but with the slowest."""
    rows = run.request_rows
    answered = np.flatnonzero(columns.is_ok & columns.has_token)
    failed = np.flatnonzero(np.isfinite(rows["released_s"]) & _has_failed(run))
    waits_s = columns.ttft_s if columns.is_streamed else columns.e2e_s
    shown = _thinned(answered, waits_s[answered], MAX_POINTS)
    failed_after_s = np.nan_to_num(rows["done_s"] - rows["released_s"], nan=0.0)
    shown_failed = _thinned(failed, failed_after_s[failed], MAX_FAILED_POINTS)
    records = [_point(run, row, float(waits_s[row])) for row in shown.tolist()]
    records += [_point(run, row, float(failed_after_s[row])) for row in shown_failed.tolist()]
    return records, len(answered), len(failed)


def _has_failed(run: Run) -> Mask:
    """Rows that ended without success, except those that the load generator cancelled."""
    status = run.request_rows["status"]
    failed: Mask = (status != Status.ok) & (status != Status.cancelled)
    return failed


def _point(run: Run, row: int, at_s: float) -> Record:
    return {
        "released_s": float(run.request_rows["released_s"][row]),
        "ttft_s": at_s,
        "status": Status(run.request_rows["status"][row]).name,
        "request_id": int(run.request_rows["request_id"][row]),
    }


def _thinned(rows: NDArray[np.intp], values: NDArray[np.float64], at_most: int) -> NDArray[np.intp]:
    """At most `at_most` rows: a tenth of them with the largest values, the others evenly taken."""
    if len(rows) <= at_most:
        return rows
    largest = np.argsort(values, kind="stable")[-at_most // 10 :]
    even = np.linspace(0, len(rows) - 1, at_most - len(largest)).astype(np.intp)
    thinned: NDArray[np.intp] = rows[np.unique(np.r_[largest, even])]
    return thinned
