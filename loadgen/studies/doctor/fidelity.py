"""The errors of a run's timestamps and latencies, measured against the server's own log.

The server logs CLOCK_MONOTONIC instants on the same machine. An error is the client's figure minus
the server's, request by request, so it includes neither the server's own lateness nor the shape of
the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.manifest.json_section import NumberOrNull
from loadgen.measure.statistics.percentiles import has_few, nearest_rank
from loadgen.records import Run, Status, Times


@dataclass(frozen=True, slots=True)
class Truth:
    """The server's instants of every request row, seconds since the run's epoch, NaN = never; and
    the most it was late with any token of it, seconds.
    """

    read_s: Times  # the request was complete
    first_s: Times  # just before the first token was written
    last_s: Times  # just before the last token was written
    late_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, and the 99th percentile and maximum of the magnitude, seconds; NaN where n = 0.

    `few` when fewer than ten samples lie beyond the p99 (n < 1000).
    """

    n: int
    p50: NumberOrNull
    p99: NumberOrNull
    max: NumberOrNull
    few: bool


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Errors of the requests that ended well, and lateness of all that were sent.

    TTFT error = (first_token − sent) − (server: first − read): what sending, the kernel and reading
    add. TPOT error = ((last − first) − (server: last − first)) / (n − 1), for n ≥ 2. Lateness =
    sent − released; server lateness is the server's own, by its log.
    """

    ttft_error_s: Spread
    tpot_error_s: Spread
    lateness_s: Spread
    server_lateness_s: Spread


def fidelity(run: Run, truth: Truth) -> Fidelity:
    """Hold a run against the server's log."""
    rows = run.request_rows
    is_ok = rows["status"] == Status.ok
    ttft_s = rows["first_token_s"] - rows["sent_s"]
    gaps = np.maximum(rows["output_tokens"].astype(np.float64) - 1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        own_span_s = rows["last_token_s"] - rows["first_token_s"]
        tpot_error_s = (own_span_s - (truth.last_s - truth.first_s)) / gaps
    return Fidelity(
        ttft_error_s=spread((ttft_s - (truth.first_s - truth.read_s))[is_ok]),
        tpot_error_s=spread(tpot_error_s[is_ok & (gaps > 0)]),
        lateness_s=spread(rows["sent_s"] - rows["released_s"]),
        server_lateness_s=spread(truth.late_s),
    )


def spread(values_s: NDArray[np.float64]) -> Spread:
    """Nearest-rank percentiles of what is not NaN."""
    known = np.sort(values_s[~np.isnan(values_s)])
    n = len(known)
    if not n:
        return Spread(0, np.nan, np.nan, np.nan, True)
    sizes = np.sort(np.abs(known))
    p50, p99 = known[nearest_rank(n, 0.5) - 1], sizes[nearest_rank(n, 0.99) - 1]
    return Spread(n, float(p50), float(p99), float(sizes[-1]), has_few(n, 0.99))
