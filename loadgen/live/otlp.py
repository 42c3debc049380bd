"""The run so far, sent to an OpenTelemetry collector (OTLP over HTTP) every few seconds and at its
end.

What has a name in the GenAI semantic conventions goes by it, from the send as they define it; the
rest is `slobench.…`. The numbers are those of the Prometheus endpoint: both read one tally.

Source: OpenTelemetry semantic conventions for generative AI metrics (client), status development.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from loadgen.drive.live_sample import SecondsHistogram
from loadgen.errors import UsageError
from loadgen.live.live_series import Labels, Reading
from loadgen.live.watched import RunLabels, WatchedRun
from loadgen.records import Status

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricsData

EVERY_S = 10.0
TIMEOUT_S = 5.0
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}
_PATH = "/v1/metrics"


def is_installed() -> bool:
    """Whether the optional packages are there."""
    return find_spec("opentelemetry") is not None and (
        find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    )


def metrics_url(url: str) -> str:
    """Where metrics go: the collector's address with the standard path, or the path it names.

    Raises UsageError for what is no http address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"--otlp {url}: expected an address such as http://localhost:4318")
    return url.rstrip("/") + _PATH if parts.path in ("", "/") else url


@contextmanager
def otlp_export(
    watched: WatchedRun, url: str | None, note: Callable[[str], None], every_s: float = EVERY_S
) -> Iterator[None]:
    """Sends inside the `with` block. Without `url` the library's own OTEL_… variables say where to.

    A collector that does not answer costs nothing but a `note` at the end. Raises UsageError where
    the optional packages are missing.
    """
    if not is_installed():
        raise UsageError("--otlp needs its packages: pip install 'slobench[otel]'")
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import MetricExportResult

    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())  # told by `note` instead
    exporter = OTLPMetricExporter(endpoint=metrics_url(url) if url else None, timeout=TIMEOUT_S)
    done, started_ns = threading.Event(), time.time_ns()
    results: list[bool] = []

    def send() -> None:
        data = metrics_data(watched.read(), watched.about, started_ns, time.time_ns())
        results.append(exporter.export(data) is MetricExportResult.SUCCESS)

    def keep_sending() -> None:
        while not done.wait(every_s):
            send()

    thread = threading.Thread(target=keep_sending, name="otlp", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        send()
        exporter.shutdown()
        if failed := results.count(False):
            note(f"OpenTelemetry: {failed} of {len(results)} exports were not accepted")


def metrics_data(
    readings: list[Reading], about: RunLabels, started_ns: int, now_ns: int
) -> MetricsData:
    """Readings as cumulative points since `started_ns`; instants in nanoseconds since 1970."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    resource = Resource.create(
        {
            "service.name": "slobench",
            "slobench.run": about.run,
            "slobench.scenario": about.scenario,
        }
    )
    metrics = [_metric(reading, about, started_ns, now_ns) for reading in readings]
    scope = ScopeMetrics(InstrumentationScope("slobench"), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(reading: Reading, about: RunLabels, started_ns: int, now_ns: int) -> Metric:
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        Histogram,
        HistogramDataPoint,
        Metric,
        NumberDataPoint,
        Sum,
    )

    series, since_start = reading.series, AggregationTemporality.CUMULATIVE

    def point(labels: Labels, value: float | SecondsHistogram) -> Any:
        attributes = _attributes(dict(zip(series.labels, labels, strict=True)), series.otel, about)
        if not isinstance(value, SecondsHistogram):
            return NumberDataPoint(attributes, started_ns, now_ns, value)
        counts, unknown = value.counts.tolist(), None  # the least and the greatest are not kept
        return HistogramDataPoint(
            *(attributes, started_ns, now_ns, sum(counts), value.sum_s, counts, value.bounds_s),
            *(unknown, unknown),
        )

    points = [point(labels, value) for labels, value in reading.values.items()]
    data: Any = Gauge(points)
    if series.kind == "histogram":
        data = Histogram(points, since_start)
    elif series.kind == "counter":
        data = Sum(points, since_start, is_monotonic=True)
    return Metric(series.otel, series.help, series.unit, data)


def _attributes(labels: Mapping[str, str], name: str, about: RunLabels) -> dict[str, str | int]:
    """Labels as attributes; what the conventions require stands with their metrics."""
    found: dict[str, str | int] = {}
    if "class" in labels:
        found["slobench.class"] = labels["class"]
    if not name.startswith("gen_ai."):
        return found | ({"slobench.status": labels["status"]} if "status" in labels else {})
    address = urlsplit(about.target)
    found |= {
        "gen_ai.operation.name": _OPERATIONS.get(about.api, "chat"),
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": about.model,
    }
    if address.hostname:
        found["server.address"] = address.hostname
        found["server.port"] = address.port or (443 if address.scheme == "https" else 80)
    if labels.get("status", Status.ok.name) != Status.ok.name:
        found["error.type"] = labels["status"]
    return found
