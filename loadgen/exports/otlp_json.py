"""Runs as metrics of the GenAI semantic conventions in OTLP/JSON, a line per run, as the file
exporter of an OpenTelemetry collector writes them and its `otlpjsonfile` receiver reads them.

The histograms hold the requests due in the measured window, counted from the send, as the
conventions define them, in their buckets.

Source: OpenTelemetry semantic conventions for generative AI metrics (client), status development;
OpenTelemetry protocol, file exporter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from loadgen.exports.due_requests import DueRequest, due_requests, epoch_ns
from loadgen.manifest.sections import Manifest
from loadgen.measure.attainment import measured_window
from loadgen.measure.closed_loop import counting_start
from loadgen.records import Run, Status

_OPERATIONS = {"chat": "chat", "completions": "text_completion"}
_CUMULATIVE = 2  # AggregationTemporality
_SECONDS = tuple(0.01 * 2**k for k in range(14))
_TOKENS = tuple(4**k for k in range(14))
_TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
Attributes = Mapping[str, str | int]


class _Histogram(NamedTuple):
    """A metric of the conventions: the attributes and samples of its points."""

    name: str
    unit: str
    bounds: tuple[float, ...]
    points: Sequence[tuple[Attributes, Sequence[float]]]


def otlp_json(run: Run) -> dict[str, Any]:
    """A line of the file."""
    run = counting_start(run)
    manifest, window = run.manifest, measured_window(run)
    start_ns, end_ns = (
        str(epoch_ns(manifest) + round(1e9 * at_s)) for at_s in (window.start_s, window.end_s)
    )
    shared = _shared(manifest)
    metrics = [
        {
            "name": metric.name,
            "unit": metric.unit,
            "histogram": {
                "aggregationTemporality": _CUMULATIVE,
                "dataPoints": [
                    {
                        "attributes": _attributes({**shared, **own}),
                        "startTimeUnixNano": start_ns,
                        "timeUnixNano": end_ns,
                        **_buckets(samples, metric.bounds),
                    }
                    for own, samples in metric.points
                    if len(samples)
                ],
            },
        }
        for metric in _histograms(due_requests(run))
    ]
    resource = {
        "service.name": "slobench",
        "slobench.run": manifest.run,
        "slobench.scenario": manifest.scenario.name,
    }
    scope = {"name": "slobench", "version": manifest.slobench}
    return {
        "resourceMetrics": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeMetrics": [{"scope": scope, "metrics": metrics}],
            }
        ]
    }


def _histograms(requests: Sequence[DueRequest]) -> Iterator[_Histogram]:
    ok = [request for request in requests if request.is_ok]
    yield _Histogram("gen_ai.client.operation.duration", "s", _SECONDS, list(_durations(requests)))
    yield _Histogram(
        "gen_ai.client.token.usage",
        "{token}",
        _TOKENS,
        [
            ({"gen_ai.token.type": "input"}, [request.input_tokens for request in ok]),
            ({"gen_ai.token.type": "output"}, [request.output_tokens for request in ok]),
        ],
    )
    waits_s = np.array([request.first_token_s - request.sent_s for request in ok])
    yield _Histogram(
        "gen_ai.client.operation.time_to_first_chunk",
        "s",
        _TO_FIRST,
        [({}, waits_s[np.isfinite(waits_s)].tolist())],
    )
    yield _Histogram(
        "gen_ai.client.operation.time_per_output_chunk",
        "s",
        _BETWEEN,
        [({}, [gap_s for request in ok for gap_s in request.gaps_s])],
    )


def _durations(requests: Sequence[DueRequest]) -> Iterator[tuple[Attributes, list[float]]]:
    """The durations of the requests that were sent, by `error.type`, none for success."""
    by_status: dict[Status | None, list[float]] = {}
    for request in requests:
        lasted_s = request.done_s - request.sent_s
        if np.isfinite(lasted_s):
            by_status.setdefault(None if request.is_ok else request.status, []).append(lasted_s)
    for status, seconds in by_status.items():
        yield {} if status is None else {"error.type": status.name}, seconds


def _buckets(samples: Sequence[float], bounds: tuple[float, ...]) -> dict[str, Any]:
    """Counts of (-inf, b₀], (b₀, b₁], …, (bₙ, inf); integers of 64 bits are texts in OTLP/JSON."""
    values = np.asarray(samples, np.float64)
    counts = np.bincount(np.searchsorted(bounds, values), minlength=len(bounds) + 1)
    return {
        "count": str(len(values)),
        "sum": float(values.sum()),
        "bucketCounts": [str(count) for count in counts.tolist()],
        "explicitBounds": list(bounds),
        "min": float(values.min()),
        "max": float(values.max()),
    }


def _shared(manifest: Manifest) -> Attributes:
    """The attributes that the conventions require of every point."""
    target = manifest.target
    address = urlsplit(target.url)
    shared: dict[str, str | int] = {
        "gen_ai.operation.name": _OPERATIONS.get(target.api or "", "chat"),
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": target.model,
    }
    if address.hostname:
        shared["server.address"] = address.hostname
        shared["server.port"] = address.port or (443 if address.scheme == "https" else 80)
    return shared


def _attributes(values: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: str | int) -> dict[str, str]:
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}
