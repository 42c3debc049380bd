"""What a run tells while it goes on: every series by name, and what it means."""

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
    """One series. `name` is Prometheus's, with its unit; `otel` OpenTelemetry's, with `unit` beside
    it. `bounds` are upper ends of a histogram's buckets, each inclusive."""

    name: str
    otel: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()


def _counter(name: str, unit: str, labels: tuple[str, ...], help: str) -> LiveSeries:
    return LiveSeries(f"slobench_{name}_total", f"slobench.{name}", "counter", unit, labels, help)


def _gauge(name: str, unit: str, help: str, unit_word: str = "") -> LiveSeries:
    return LiveSeries(f"slobench_{name}{unit_word}", f"slobench.{name}", "gauge", unit, (), help)


def _seconds(
    name: str, help: str, bounds: tuple[float, ...], otel: str = "", *further: str
) -> LiveSeries:
    shown = otel or f"slobench.{name}"
    labels = ("class", *further)
    return LiveSeries(f"slobench_{name}_seconds", shown, "histogram", "s", labels, help, bounds)


_ALL = (
    _counter(
        "requests",
        "{request}",
        ("class", "status"),
        "Requests that ended, or were given up, by how.",
    ),
    _counter("scheduled", "{request}", (), "Requests whose planned instant has come."),
    _counter("released", "{request}", (), "Requests released: due, or their parent has ended."),
    _counter("sent", "{request}", (), "Requests sent."),
    _counter(
        "promises_kept",
        "{request}",
        ("class",),
        "Requests that kept every per-request promise; its rate is the goodput.",
    ),
    _counter("events", "{event}", ("class",), "Stream events received that held a token."),
    _gauge("in_flight", "{request}", "Requests sent and not ended."),
    _gauge("waiting", "{request}", "Requests released that wait for a free slot."),
    _gauge("asked_rate", "{request}/s", "Mean rate of the schedule.", "_per_second"),
    _gauge("achieved_rate", "{request}/s", "Requests sent per second so far.", "_per_second"),
    _gauge("goodput", "{request}/s", "Requests per second so far that kept all.", "_per_second"),
    _gauge("elapsed", "s", "Time since the first release could fall due.", "_seconds"),
    _seconds("ttft", "Time to first token, from the planned instant.", _FIRST_TOKEN_S),
    _seconds(
        "ttft_from_send",
        "Time to first token, from the send.",
        _FIRST_TOKEN_S,
        "gen_ai.client.operation.time_to_first_chunk",
    ),
    _seconds("tpot", "Time per output token after the first, one value per request.", GAP_BOUNDS_S),
    _seconds(
        "itl",
        "Time between tokens, one value per token.",
        GAP_BOUNDS_S,
        "gen_ai.client.operation.time_per_output_chunk",
    ),
    _seconds("e2e", "From the planned instant to the last token.", _WHOLE_S),
    _seconds(
        "duration",
        "From the send to the end of the stream, failed requests too.",
        _WHOLE_S,
        "gen_ai.client.operation.duration",
        "status",
    ),
    _seconds("lateness", "Sent − released: how late the load generator was.", _LATENESS_S),
)
SERIES: Mapping[str, LiveSeries] = MappingProxyType({one.name: one for one in _ALL})
"""Every series by its Prometheus name."""
INFO = "slobench_run_info"
INFO_LABELS = ("run", "scenario", "target", "model")
"""The series that says which run this is: always 1."""

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """A series at an instant: a number or a histogram for each set of labels."""

    series: LiveSeries
    values: Mapping[Labels, float | SecondsHistogram]
