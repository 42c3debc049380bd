"""Live metrics of a run: name, kind, unit, labels and help text of every series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from loadgen.drive.live_sample import GAP_BOUNDS_S, SecondsHistogram

Kind = Literal["counter", "gauge", "histogram"]
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_WHOLE_S = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.64, 1.0, 1.28, 2.0, 2.56, 5.12, 10.24),
    *(20.48, 40.96, 81.92, 163.84, 327.68),
)
_LATENESS_S = (*(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01), *(0.025, 0.05, 0.1, 1.0))


@dataclass(frozen=True, slots=True)
class LiveSeries:
    """A series. `name` is its Prometheus name, which ends in the unit; `otel` and `unit` are its
    OpenTelemetry name and unit. `bounds` are the inclusive upper bounds of a histogram's buckets.
    """

    name: str
    otel: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()


def _counter(name: str, help: str, *labels: str, unit: str = "{request}") -> LiveSeries:
    return LiveSeries(f"slobench_{name}_total", f"slobench.{name}", "counter", unit, labels, help)


def _gauge(name: str, help: str, unit: str = "{request}", suffix: str = "") -> LiveSeries:
    return LiveSeries(f"slobench_{name}{suffix}", f"slobench.{name}", "gauge", unit, (), help)


def _rate(name: str, help: str) -> LiveSeries:
    return _gauge(name, help, "{request}/s", "_per_second")


def _seconds(
    name: str, help: str, bounds: tuple[float, ...], otel: str = "", *labels: str
) -> LiveSeries:
    otel = f"gen_ai.client.operation.{otel}" if otel else f"slobench.{name}"
    labels = ("class", *labels)
    return LiveSeries(f"slobench_{name}_seconds", otel, "histogram", "s", labels, help, bounds)


_ALL = (
    _counter(
        "requests", "Finished requests by status, those never sent included.", "class", "status"
    ),
    _counter("scheduled", "Requests whose scheduled send time has passed."),
    _counter("released", "Requests released: due, and their parents have finished."),
    _counter("sent", "Requests sent."),
    _counter(
        "slo_met", "Requests that met every per-request SLO; its rate is the goodput.", "class"
    ),
    _counter("events", "Stream events received that carried a token.", "class", unit="{event}"),
    _gauge("in_flight", "Requests sent and not finished."),
    _gauge("waiting", "Released requests that wait for a free slot (limits.max_concurrency)."),
    _rate("asked_rate", "Mean request rate of the schedule (offered); none for a closed loop."),
    _rate("achieved_rate", "Requests sent per second so far."),
    _rate("goodput", "Requests per second so far that met every per-request SLO."),
    _gauge("elapsed", "Time since the start of the run.", "s", "_seconds"),
    _seconds("ttft", "Time to first token, from the scheduled send time.", _FIRST_TOKEN_S),
    _seconds(
        "ttft_from_send",
        "Time to first token, from the actual send.",
        _FIRST_TOKEN_S,
        "time_to_first_chunk",
    ),
    _seconds(
        "ttfat",
        "Time to first token of the answer, after any reasoning, from the scheduled send time.",
        _WHOLE_S,
    ),
    _seconds("tpot", "Time per output token after the first, one value per request.", GAP_BOUNDS_S),
    _seconds(
        "itl", "Time between tokens, one value per token.", GAP_BOUNDS_S, "time_per_output_chunk"
    ),
    _seconds("e2e", "Time from the scheduled send time to the last token.", _WHOLE_S),
    _seconds(
        "duration",
        "Time from the send to the end of the stream, failed requests included.",
        _WHOLE_S,
        "duration",
        "status",
    ),
    _seconds("lateness", "Actual minus scheduled send time.", _LATENESS_S),
)
SERIES: Mapping[str, LiveSeries] = MappingProxyType({series.name: series for series in _ALL})
"""Every series by its Prometheus name."""
INFO = "slobench_run_info"
INFO_LABELS = ("run", "scenario", "target", "model")
"""The series that identifies the run by its labels; its value is always 1."""

Labels = tuple[str, ...]
"""Values of a series' labels, in the order of `LiveSeries.labels`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The values of a series at some time: a number or a histogram for each set of labels."""

    series: LiveSeries
    values: Mapping[Labels, float | SecondsHistogram]
