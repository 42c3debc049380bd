"""Live metrics sent to an OpenTelemetry collector (OTLP over HTTP) every few seconds and at the end
of the run.

Metrics that the GenAI semantic conventions define go by those names and count from the send, as
defined there; the others are called `slobench.…`. The values are those of the Prometheus endpoint.

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
    """Whether the packages of the extra `otel` are installed."""
    return find_spec("opentelemetry") is not None and (
        find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    )


def metrics_url(url: str) -> str:
    """The URL that receives metrics: `url` itself, with `/v1/metrics` added where it has no path.

    Raises UsageError where `url` is not an HTTP address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        shown = "…@" + url.rpartition("@")[2] if "@" in url else url
        raise UsageError(f"--otlp {shown}: expected an address such as http://localhost:4318")
    return url.rstrip("/") + _PATH if parts.path in ("", "/") else url


@contextmanager
def otlp_export(
    watched: WatchedRun, url: str | None, note: Callable[[str], None], every_s: float = EVERY_S
) -> Iterator[None]:
    """Sends the metrics inside the `with` block and once at its end. Without `url` the library's
    OTEL_… variables name the collector.

    Failed exports do not affect the run; `note` receives their number at the end. Raises UsageError
    where the optional packages are missing.
    """
    if not is_installed():
        raise UsageError("--otlp needs its packages: pip install 'slobench[otel]'")
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import MetricExportResult

    # The library would log each failure; `note` reports them once instead.
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
    exporter = OTLPMetricExporter(endpoint=metrics_url(url) if url else None, timeout=TIMEOUT_S)
    done, started_ns = threading.Event(), time.time_ns()
    results: list[bool] = []

    def send() -> None:
        data = metrics_data(watched.read(), watched.labels, started_ns, time.time_ns())
        results.append(exporter.export(data) is MetricExportResult.SUCCESS)

    def send_repeatedly() -> None:
        while not done.wait(every_s):
            send()

    thread = threading.Thread(target=send_repeatedly, name="otlp", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        send()
        exporter.shutdown()
        if n_failed := results.count(False):
            note(f"OpenTelemetry: {n_failed} of {len(results)} exports failed")


def metrics_data(
    readings: list[Reading], run: RunLabels, started_ns: int, now_ns: int
) -> MetricsData:
    """Readings as cumulative points since `started_ns`; times in nanoseconds since 1970."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    names = {"slobench.run": run.run, "slobench.scenario": run.scenario}
    resource = Resource.create({"service.name": "slobench", **names})
    metrics = [_metric(reading, run, started_ns, now_ns) for reading in readings]
    scope = ScopeMetrics(InstrumentationScope("slobench"), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(reading: Reading, run: RunLabels, started_ns: int, now_ns: int) -> Metric:
    from opentelemetry.sdk.metrics import export

    series, since_start = reading.series, export.AggregationTemporality.CUMULATIVE

    def point(labels: Labels, value: float | SecondsHistogram) -> Any:
        attributes = _attributes(dict(zip(series.labels, labels, strict=True)), series.otel, run)
        if not isinstance(value, SecondsHistogram):
            return export.NumberDataPoint(attributes, started_ns, now_ns, value)
        counts, unknown = value.counts.tolist(), None  # minimum and maximum are not recorded
        return export.HistogramDataPoint(
            *(attributes, started_ns, now_ns, sum(counts), value.sum_s, counts, value.bounds_s),
            *(unknown, unknown),
        )

    points = [point(labels, value) for labels, value in reading.values.items()]
    data: Any = export.Gauge(points)
    if series.kind == "histogram":
        data = export.Histogram(points, since_start)
    elif series.kind == "counter":
        data = export.Sum(points, since_start, is_monotonic=True)
    return export.Metric(series.otel, series.help, series.unit, data)


def _attributes(labels: Mapping[str, str], name: str, run: RunLabels) -> dict[str, str | int]:
    """A point's labels as OpenTelemetry attributes; a metric of the conventions has those that they
    require, too."""
    attributes: dict[str, str | int] = {}
    if "class" in labels:
        attributes["slobench.class"] = labels["class"]
    if not name.startswith("gen_ai."):
        status = {"slobench.status": labels["status"]} if "status" in labels else {}
        return attributes | status
    address = urlsplit(run.target)
    attributes |= {
        "gen_ai.operation.name": _OPERATIONS.get(run.api, "chat"),
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": run.model,
    }
    if address.hostname:
        attributes["server.address"] = address.hostname
        attributes["server.port"] = address.port or (443 if address.scheme == "https" else 80)
    if labels.get("status", Status.ok.name) != Status.ok.name:
        attributes["error.type"] = labels["status"]
    return attributes
