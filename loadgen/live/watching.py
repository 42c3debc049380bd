"""A run made visible to others while it goes on, as its options ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from loadgen.live.watched import RunLabels, WatchedRun
from loadgen.run.run_options import Watch
from loadgen.run.target import Target
from loadgen.workload.scenario import Scenario


def about(scenario: Scenario, target: Target, run: str) -> RunLabels:
    """Which run this is, and what its classes were promised of each request."""
    told = target.to_manifest()
    return RunLabels(
        run=run,
        scenario=scenario.name,
        target=str(told["url"]),
        model=str(told["model"]),
        api=str(told["api"]),
        classes=scenario.names().classes,
        promises={
            name: [slo for slo in slos if slo.scope == "request"]
            for name, slos in scenario.slos_by_class().items()
        },
        horizon_s=scenario.horizon_s,
    )


@contextmanager
def watching(
    watched: WatchedRun | None, watch: Watch, note: Callable[[str], None]
) -> Iterator[None]:
    """Readable inside the `with` block; `note` says where, and what did not work."""
    if watched is None:
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
    """How each of several runs is to be watched, so that all are read at one address.

    The endpoint stands for the length of the `with` block. Between two runs it shows the one before
    to its end, so that a reader misses nothing; a new run starts its counters at 0.
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
