"""The exports that an OpenTelemetry collector receives, decoded by the protocol's own classes."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from loadgen.errors import UsageError
from loadgen.live.live_series import SERIES
from loadgen.live.otlp import metrics_url, otlp_export
from tests.live.test_watched import watched

protocol = pytest.importorskip(
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2",
    reason="needs the extra `otel`",
)
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra `otel`")


class Collector:
    """Accepts exports on a free loopback port, and keeps them decoded."""

    def __init__(self, status=200):
        received: list[tuple[str, Any]] = []
        twice = threading.Event()
        self.received, self.twice = received, twice

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                request = protocol.ExportMetricsServiceRequest.FromString(body)
                received.append((self.path, request))
                if len(received) > 1:
                    twice.set()
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metrics(request):
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def attributes(point):
    return {one.key: one.value.string_value or one.value.int_value for one in point.attributes}


def test_a_collector_receives_every_series_by_its_name_in_the_conventions():
    notes: list[str] = []
    with Collector() as collector, otlp_export(watched(), collector.url, notes.append):
        pass
    ((path, request),) = collector.received
    assert (path, notes) == ("/v1/metrics", [])
    found = metrics(request)
    assert set(found) == {one.otel for one in SERIES.values()}
    first = found["gen_ai.client.operation.time_to_first_chunk"]
    assert first.unit == "s"
    (point,) = (p for p in first.histogram.data_points if attributes(p)["slobench.class"] == "chat")
    assert attributes(point) == {
        "slobench.class": "chat",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": 'tiny "llama"',
        "server.address": "10.0.0.7",
        "server.port": 8000,
    }
    assert (point.count, point.sum) == (2, pytest.approx(0.298))
    assert sum(point.bucket_counts) == 2
    assert list(point.explicit_bounds) == list(SERIES["slobench_ttft_seconds"].bounds)
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert not point.HasField("min")
    assert 0 < point.start_time_unix_nano <= point.time_unix_nano
    chunks = found["gen_ai.client.operation.time_per_output_chunk"].histogram.data_points
    assert sum(point.count for point in chunks) == 40
    durations = found["gen_ai.client.operation.duration"].histogram.data_points
    errors = [attributes(point).get("error.type") for point in durations]
    assert sorted(errors, key=str) == [None, None, "timeout"]
    sent = found["slobench.sent"].sum
    assert sent.is_monotonic
    assert sent.aggregation_temporality == 2  # cumulative
    assert sent.data_points[0].as_double == 7
    assert found["slobench.in_flight"].gauge.data_points[0].as_double == 2
    resource = request.resource_metrics[0].resource
    assert attributes(resource)["service.name"] == "slobench"
    assert attributes(resource)["slobench.run"] == "evening-1"


def test_metrics_are_sent_repeatedly_and_once_at_the_end():
    with Collector() as collector, otlp_export(watched(), collector.url, print, every_s=0.01):
        assert collector.twice.wait(30)
        n_before = len(collector.received)
    assert len(collector.received) > n_before >= 2


def test_refused_exports_are_counted_in_one_note():
    notes: list[str] = []
    with Collector(status=400) as collector, otlp_export(watched(), collector.url, notes.append):
        pass
    assert notes == ["OpenTelemetry: 1 of 1 exports failed"]


def test_the_path_for_metrics_is_added_where_the_address_has_none():
    assert metrics_url("http://localhost:4318") == "http://localhost:4318/v1/metrics"
    assert metrics_url("https://c.example/") == "https://c.example/v1/metrics"
    assert metrics_url("http://c/otlp/v1/metrics") == "http://c/otlp/v1/metrics"
    for wrong in ("localhost:4318", "grpc://c:4317", "http://"):
        with pytest.raises(UsageError, match="--otlp"):
            metrics_url(wrong)
