"""Latencies of a run as its tool recorded them and as the server's log has them, and the judgement
of their difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.manifest.json_section import NumberOrNull
from loadgen.measure.wording import format_value
from loadgen.records import Phase, Run, Status
from targets.truth_log import TruthLog

Rows = NDArray[np.void]
RISE = 1.2
"""The factor by which a figure must lie above that of the steady server to show the stalls."""
MAY_SHOW = {"tpot_p99_s": "p99 TPOT", "itl_p99_s": "p99 ITL", "longest_gap_s": "longest gap"}
_Z99 = 2.576  # two-sided 99 % of a normal distribution


@dataclass(frozen=True, slots=True)
class Latencies:
    """TTFT and TPOT, a value per successful request, and the gaps between consecutive chunks of a
    request, all in seconds. `gaps_s` is None where the tool records none."""

    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    gaps_s: NDArray[np.float64] | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Percentiles (linear interpolation, as `numpy.percentile`) of `n` successful requests; null:
    no value."""

    n: int
    ttft_p50_s: NumberOrNull
    ttft_p99_s: NumberOrNull
    tpot_p99_s: NumberOrNull
    itl_p99_s: NumberOrNull
    longest_gap_s: NumberOrNull


def figures_of(found: Latencies) -> Figures:
    gaps_s = np.empty(0) if found.gaps_s is None else found.gaps_s
    return Figures(
        n=len(found.ttft_s),
        ttft_p50_s=_percentile(found.ttft_s, 50),
        ttft_p99_s=_percentile(found.ttft_s, 99),
        tpot_p99_s=_percentile(found.tpot_s, 99),
        itl_p99_s=_percentile(gaps_s, 99),
        longest_gap_s=_percentile(gaps_s, 100),
    )


def recorded(run: Run) -> Latencies:
    """The latencies in a tool's own file, from where the tool itself counts: slobench from the time
    at which a request was due, the others from their send."""
    is_ours = run.manifest.imported is None
    is_counted = counted(run)
    rows = run.request_rows[is_counted]
    from_s = rows["released_s"] if is_ours else rows["sent_s"]
    n_gaps = rows["output_tokens"].astype(np.float64) - 1
    spans_s = rows["last_token_s"] - rows["first_token_s"]
    chunks = run.chunk_rows[np.isin(run.chunk_rows["request_id"], rows["request_id"])]
    chunks = chunks[np.argsort(chunks["request_id"], kind="stable")]
    is_same = np.diff(chunks["request_id"]) == 0
    gaps_s = np.diff(chunks["received_s"])[is_same]
    return Latencies(
        rows["first_token_s"] - from_s,
        spans_s[n_gaps > 0] / n_gaps[n_gaps > 0],
        gaps_s if len(chunks) else None,
    )


def counted(run: Run) -> NDArray[np.bool_]:
    """The requests that count: successful, and not of a warm-up."""
    rows = run.request_rows
    is_warmup = run.schedule_rows["phase"] == Phase.warmup
    warmup_ids = run.schedule_rows["request_id"][is_warmup]
    is_counted: NDArray[np.bool_] = rows["status"] == Status.ok
    return is_counted & ~np.isin(rows["request_id"], warmup_ids)


def rows_behind(run: Run, log: TruthLog) -> Rows:
    """The rows of the log that the counted requests of a run left: by their number if slobench sent
    them. Other tools do not number theirs: the last as many to arrive, because tests of the server
    come first."""
    is_counted = counted(run)
    if run.manifest.imported is None:
        return log.rows_of(run.request_rows["request_id"][is_counted])
    answered = log.rows[log.rows["last_ns"] > 0]
    order = np.argsort(answered["arrived_ns"], kind="stable")
    n = int(np.count_nonzero(is_counted))
    rows: Rows = answered[order[max(0, len(order) - n) :]]
    return rows


def true(rows: Rows, log: TruthLog) -> Latencies:
    """The latencies of rows of the server's log: from the last byte of a request to the write of a
    token."""
    read_ns, first_ns, last_ns = (rows[f"{name}_ns"] for name in ("read", "first", "last"))
    n_gaps = rows["sent_tokens"].astype(np.float64) - 1
    ttft_s: NDArray[np.float64] = 1e-9 * (first_ns - read_ns)  # u8: a later time less an earlier
    spans_s: NDArray[np.float64] = 1e-9 * (last_ns - first_ns)
    gaps_s = [1e-9 * np.diff(log.tokens_ns(row).astype(np.int64)) for row in rows]
    return Latencies(
        ttft_s,
        spans_s[n_gaps > 0] / n_gaps[n_gaps > 0],
        np.concatenate([np.empty(0), *gaps_s]),
    )


def held_per_s(rows: Rows) -> float:
    """The rate at which requests reached the server; NaN for fewer than two."""
    if len(rows) < 2:
        return math.nan
    return (len(rows) - 1) / (1e-9 * float(np.ptp(rows["arrived_ns"].astype(np.int64))))


def median(values: Sequence[float]) -> float:
    """Of those that are numbers; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def middle(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure over rounds."""
    names = ("ttft_p50_s", "ttft_p99_s", "tpot_p99_s", "itl_p99_s", "longest_gap_s")
    medians = {name: median([getattr(one, name) for one in rounds]) for name in names}
    return Figures(n=sum(one.n for one in rounds), **medians)


def disagreements(reported: Figures, truth: Figures, limit_s: float) -> Iterator[str]:
    """The percentiles of TTFT that are further from the truth than `limit_s`."""
    for name, words in (("ttft_p50_s", "p50"), ("ttft_p99_s", "p99")):
        error_s = getattr(reported, name) - getattr(truth, name)
        if math.isnan(error_s):
            yield f"no {words}"
        elif abs(error_s) > limit_s:
            size = format_value(abs(error_s), "s")
            yield f"{words} {size} too {'high' if error_s > 0 else 'low'}"


def rate_missed(asked_per_s: float, held: float, n: int) -> str:
    """`rate 12 % low`, if the rate of `n` requests lies beyond what a Poisson process of the asked
    rate does in 99 of 100 runs: 1 ± 2.58 / √n. "" if it does not."""
    if not n or math.isnan(held):
        return "no rate"
    off = held / asked_per_s - 1
    if abs(off) <= _Z99 / math.sqrt(n):
        return ""
    return f"rate {100 * abs(off):.3g} % {'high' if off > 0 else 'low'}"


def shown_by(reported: Figures, truth: Figures, steady: Figures) -> list[str]:
    """The names of the figures that show the stalls: `reported` and `truth` of the stalling server
    are both at least RISE times the true figure of the steady server, `steady`."""
    return [
        words
        for name, words in MAY_SHOW.items()
        if min(getattr(reported, name), getattr(truth, name)) >= RISE * getattr(steady, name)
    ]


def _percentile(values_s: NDArray[np.float64], percent: float) -> float:
    known = values_s[~np.isnan(values_s)]
    return float(np.percentile(known, percent)) if len(known) else math.nan
