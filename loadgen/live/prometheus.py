"""The run so far at `http://host:port/metrics`, for Prometheus to read. A thread of the controlling
process answers; the load-generating processes know nothing of it."""

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
    """Readings of a run as that library's metrics; `shown` says of which, None for none yet."""

    def __init__(self, shown: Callable[[], WatchedRun | None]) -> None:
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        watched = self._shown()
        if watched is None:
            return
        about = watched.about
        info = GaugeMetricFamily(INFO, "Which run this is.", labels=INFO_LABELS)
        info.add_metric([str(getattr(about, label)) for label in INFO_LABELS], 1)
        yield info
        for reading in watched.read():
            yield _family(reading)


def _family(reading: Reading) -> Metric:
    series = reading.series
    if series.kind == "histogram":
        histogram = HistogramMetricFamily(series.name, series.help, labels=series.labels)
        for labels, tally in reading.values.items():
            assert isinstance(tally, SecondsHistogram)
            ends = [*map(str, series.bounds), "+Inf"]
            buckets = list(zip(ends, accumulate(tally.counts), strict=True))
            histogram.add_metric(labels, buckets, tally.sum_s)
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
    """Serves inside the `with` block and yields the URL; port 0 takes a free one.

    Raises UsageError where the address cannot be had.
    """
    registry = CollectorRegistry()
    registry.register(RunCollector(shown))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(
            f"--metrics-port {port}: {host}:{port} cannot be had: {error.strerror or error}"
        ) from None
    try:
        address = f"[{host}]" if ":" in host else host
        yield f"http://{address}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
