"""Exports of a run's live metrics: Prometheus at a port, OpenTelemetry to a collector."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from loadgen.live.watched import RunLabels, WatchedRun
from loadgen.manifest.sections import TargetSection
from loadgen.workload.scenario import Scenario


@dataclass(frozen=True)
class Watch:
    """The exports of a run: a Prometheus endpoint at `host:port` (0: a free port; None: no
    endpoint), and OpenTelemetry to the collector at `otlp` ("": the collector that the OTEL_…
    variables name). `show` receives the live metrics of each run where several runs share an
    endpoint (`one_endpoint`)."""

    port: int | None = None
    host: str = "127.0.0.1"
    otlp: str | None = None
    show: Callable[[WatchedRun], None] | None = None


def run_labels(scenario: Scenario, target: TargetSection, run: str) -> RunLabels:
    """Labels of a run and the per-request SLOs of its classes; `target` is the manifest's
    section."""
    return RunLabels(
        run=run,
        scenario=scenario.name,
        target=target.url,
        model=target.model,
        api=target.api or "",
        classes=scenario.names().classes,
        slos={
            name: [slo for slo in slos if slo.scope == "request"]
            for name, slos in scenario.slos_by_class().items()
        },
        horizon_s=scenario.horizon_s,
        is_closed_loop=scenario.has_closed_loop,
    )


@contextmanager
def watching(
    watched: WatchedRun | None, watch: Watch | None, note: Callable[[str], None]
) -> Iterator[None]:
    """Exports the metrics inside the `with` block; `note` receives the address, and failures."""
    if watched is None or watch is None:
        yield
        return
    if watch.show is not None:
        watch.show(watched)
    with ExitStack() as stack:
        stack.enter_context(_endpoint(lambda: watched, watch, note))
        if watch.otlp is not None:
            from loadgen.live.otlp import otlp_export

            stack.enter_context(otlp_export(watched, watch.otlp, note))
        yield


@contextmanager
def one_endpoint(watch: Watch, note: Callable[[str], None]) -> Iterator[Watch]:
    """The Watch for each of several runs that share an address.

    The endpoint is open for the length of the `with` block. Between two runs it shows the final
    values of the earlier run; a new run starts its counters at 0.
    """
    latest: deque[WatchedRun] = deque(maxlen=1)
    with _endpoint(lambda: latest[0] if latest else None, watch, note):
        yield watch if watch.port is None else replace(watch, port=None, show=latest.append)


@contextmanager
def _endpoint(
    shown: Callable[[], WatchedRun | None], watch: Watch, note: Callable[[str], None]
) -> Iterator[None]:
    """The Prometheus endpoint of `watch`, if it has one, inside the `with` block."""
    if watch.port is None:
        yield
        return
    from loadgen.live.prometheus import prometheus_endpoint

    with prometheus_endpoint(shown, watch.host, watch.port) as url:
        note(f"metrics: {url}")
        yield
