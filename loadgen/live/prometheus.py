"""Live metrics at `http://host:port/metrics`, served by a thread of the controlling process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from loadgen.drive.live_sample import SecondsHistogram
from loadgen.errors import UsageError
from loadgen.live.live_series import INFO, INFO_LABELS, Reading
from loadgen.live.watched import WatchedRun


class RunCollector(Collector):
    """The metrics of the run that `shown` returns; none while it returns None."""

    def __init__(self, shown: Callable[[], WatchedRun | None]) -> None:
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        watched = self._shown()
        if watched is None:
            return
        info = GaugeMetricFamily(INFO, "Labels of the run; always 1.", labels=INFO_LABELS)
        info.add_metric([str(getattr(watched.labels, label)) for label in INFO_LABELS], 1)
        yield info
        for reading in watched.read():
            yield _family(reading)


def _family(reading: Reading) -> Metric:
    series = reading.series
    if series.kind == "histogram":
        histogram = HistogramMetricFamily(series.name, series.help, labels=series.labels)
        bounds = [*map(str, series.bounds), "+Inf"]
        for labels, value in reading.values.items():
            assert isinstance(value, SecondsHistogram)
            buckets = list(zip(bounds, accumulate(value.counts.tolist()), strict=True))
            histogram.add_metric(labels, buckets, value.sum_s)
        return histogram
    kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
    family = kind(series.name, series.help, labels=series.labels)
    for labels, value in reading.values.items():
        assert not isinstance(value, SecondsHistogram)
        family.add_metric(labels, value)
    return family


@contextmanager
def prometheus_endpoint(
    shown: Callable[[], WatchedRun | None], host: str, port: int
) -> Iterator[str]:
    """Serves the metrics inside the `with` block and yields their URL; port 0 takes a free port.

    Raises UsageError where the address is in use or does not belong to this machine.
    """
    registry = CollectorRegistry()
    registry.register(RunCollector(shown))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(
            f"--metrics-port {port}: cannot listen on {host}:{port}: {error.strerror or error}"
        ) from None
    try:
        address = f"[{host}]" if ":" in host else host
        yield f"http://{address}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
