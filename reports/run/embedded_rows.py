"""Due requests as compressed columns inside a page, which checks them against other SLOs without
the run's files.

A column is deflated byte plane by byte plane (the first bytes of all values, then the second, …)
and written in base64. Durations that SLOs limit keep all their bits, so that the page and
`slobench rescore` count the same requests.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.attainment import due_rows
from loadgen.measure.catalog import METRICS, NEEDS_STREAM, PASSES_UNDEFINED
from loadgen.measure.per_request import PerRequest
from loadgen.measure.statistics.dependence import Dependence
from loadgen.measure.statistics.intervals import BoundTimes
from loadgen.measure.summary import ClassSummary, Summary
from loadgen.records import Run, Status
from reports.redaction import redact

ALWAYS = ("ttft_s", "tpot_s", "e2e_s")
MOST_BYTES = 4_600_000  # of base64; 100 000 requests need less
_TYPES = {"<f8": "f8", "<f4": "f4", "<u4": "u4", "<u2": "u2", "|u1": "u1"}


def embedded_rows(
    run: Run, summary: Summary, columns: PerRequest, waited: Mapping[int, str] | None = None
) -> dict[str, Any] | None:
    """`columns` by name, the range of each limit (`limits`, in ms), the constants behind rates and
    confidence intervals, and, if there is room, `why`: a line per row from `waited` (by request
    id). None where no request was due, or where the columns would make the page too large.
    """
    due = due_rows(run)
    if not due.any():
        return None
    stated_s = _stated_limits(summary)
    metrics = sorted({*ALWAYS, *stated_s}, key=list(METRICS).index)
    if not columns.is_streamed:
        metrics = [name for name in metrics if name not in NEEDS_STREAM]
    packed = {
        "request_id": _packed(run.request_rows["request_id"][due].astype("<u4")),
        "class_id": _packed(run.schedule_rows["class_id"][due].astype("<u2")),
        "status": _packed(run.request_rows["status"][due].astype("u1")),
        "answered": _packed((columns.is_ok & columns.has_token)[due].astype("u1")),
        "released_s": _packed(run.request_rows["released_s"][due].astype("<f4")),
        "output_tokens": _packed(columns.output_tokens[due].astype("<u4")),
        **{name: _packed(columns.column(name)[due].astype("<f8")) for name in metrics},
    }
    n_bytes = sum(len(column["data"]) for column in packed.values())
    if n_bytes > MOST_BYTES:
        return None
    ids = run.request_rows["request_id"][due].tolist()
    why = _lines([(waited or {}).get(request_id, "") for request_id in ids])
    ok = due & columns.is_ok & columns.has_token
    return {
        "run": redact(summary.run),
        "n": int(np.count_nonzero(due)),
        "length_s": summary.window.length_s,
        "z": NormalDist().inv_cdf((1 + summary.confidence) / 2),
        "times": _times(summary, summary.confidence),
        "classes": [redact(name) for name in run.names.classes],
        "class_times": [
            _times(summary.classes.get(name, summary), summary.confidence)
            for name in run.names.classes
        ],
        "statuses": [status.name for status in Status],
        "limits": [_limit(name, stated_s.get(name), columns.column(name)[ok]) for name in metrics],
        "columns": packed,
        **({"why": why} if waited and n_bytes + len(why) <= MOST_BYTES else {}),
    }


def _times(part: Summary | ClassSummary, confidence: float) -> BoundTimes | None:
    """The autocorrelation times of the attainment, for its lower and its upper bound. The page
    takes them for other limits, too. Without a per-request limit in the run they are the longest of
    the percentiles of its latencies."""
    share = part.attainment
    if not share.due:
        return 1.0, 1.0
    time_requests = share.due / share.n_effective if share.n_effective else _longest(part)
    return Dependence(share.due, time_requests).hit_times(confidence)


def _longest(part: Summary | ClassSummary) -> float:
    shown = [part.metrics[name] for name in ALWAYS]
    times = [
        found.n / percentile.n_effective
        for found in shown
        for percentile in found.percentiles.values()
        if percentile.n_effective
    ]
    return max(times, default=1.0)


def _lines(texts: Sequence[str]) -> str:
    """A text per row, deflated, in base64."""
    shown = {text: " ".join(redact(text).split()) for text in set(texts)}  # most are equal
    lines = "\n".join(shown[text] for text in texts)
    return base64.b64encode(zlib.compress(lines.encode(), 6)).decode()


def _packed(values: NDArray[Any]) -> dict[str, str]:
    planes = values.view(np.uint8).reshape(len(values), values.itemsize).T
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(planes).tobytes(), 6))
    return {"type": _TYPES[values.dtype.str], "data": data.decode()}


def _stated_limits(summary: Summary) -> Mapping[str, float]:
    """The tightest limit on every request, by metric (s)."""
    stated_s: dict[str, float] = {}
    for result in summary.slo:
        is_stated = result.scope == "request" and np.isfinite(result.limit)
        if is_stated and METRICS[result.metric].direction == "lower":
            stated_s[result.metric] = min(result.limit, stated_s.get(result.metric, np.inf))
    return stated_s


def _limit(name: str, stated_s: float | None, values_s: NDArray[np.float64]) -> dict[str, Any]:
    """The range of a slider: from half the smallest to twice the largest value, measured or
    stated."""
    positive = values_s[values_s > 0]
    values = [float(positive.min()), float(positive.max())] if len(positive) else []
    values += [] if stated_s is None else [stated_s]
    least, most = (min(values), max(values)) if values else (0.01, 1.0)
    metric = METRICS[name]
    return {
        "metric": name,
        "word": metric.slo,
        "title": metric.title,
        "asked_ms": None if stated_s is None else stated_s * 1e3,
        "least_ms": least * 0.5e3,
        "most_ms": most * 2e3,
        "passes_undefined": name in PASSES_UNDEFINED,
    }
