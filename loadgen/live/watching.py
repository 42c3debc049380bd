"""Exports live metrics of a run: Prometheus at a port, OpenTelemetry to a collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from loadgen.live.watched import RunLabels, WatchedRun
from loadgen.manifest import TargetSection
from loadgen.workload.scenario import Scenario


@dataclass(frozen=True)
class Watch:
    """The exports of a run: a Prometheus endpoint at `host:port` (0: a free port; None: no
    endpoint), and OpenTelemetry to the collector at `otlp` ("": the collector that the OTEL_…
    variables name). `show` receives the live metrics of each run where several runs share one
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
        promises={
            name: [slo for slo in slos if slo.scope == "request"]
            for name, slos in scenario.slos_by_class().items()
        },
        horizon_s=scenario.horizon_s,
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
        if watch.port is not None:
            from loadgen.live.prometheus import prometheus_endpoint

            url = stack.enter_context(prometheus_endpoint(lambda: watched, watch.host, watch.port))
            note(f"metrics: {url}")
        if watch.otlp is not None:
            from loadgen.live.otlp import otlp_export

            stack.enter_context(otlp_export(watched, watch.otlp, note))
        yield


@contextmanager
def one_endpoint(watch: Watch, note: Callable[[str], None]) -> Iterator[Watch]:
    """The Watch for each of several runs that share one address.

    The endpoint is open for the length of the `with` block. Between two runs it shows the final
    values of the earlier run; a new run starts its counters at 0.
    """
    if watch.port is None:
        yield watch
        return
    from loadgen.live.prometheus import prometheus_endpoint

    shown: list[WatchedRun] = []  # the last one counts

    def show(watched: WatchedRun) -> None:
        shown[:] = [watched]

    with prometheus_endpoint(lambda: shown[0] if shown else None, watch.host, watch.port) as url:
        note(f"metrics: {url}")
        yield replace(watch, port=None, show=show)
