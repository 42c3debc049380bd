"""Flags that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Scenario = Annotated[
    str | None,
    typer.Argument(help="A scenario file or the name of a shipped one (see `slobench list`)."),
]
Rate = Annotated[str | None, typer.Option(help="Poisson arrivals per second, e.g. 8/s.")]
InputLen = Annotated[int | None, typer.Option(help="Prompt tokens of each request.")]
OutputLen = Annotated[int | None, typer.Option(help="Output tokens of each request.")]
Duration = Annotated[str | None, typer.Option(help="Length of the measured window, e.g. 60s.")]
Warmup = Annotated[str | None, typer.Option(help="Uncounted time before it, e.g. 5s.")]
Concurrency = Annotated[int | None, typer.Option(help="Requests in flight at most.")]
Slo = Annotated[
    list[str] | None, typer.Option(help="A promise, e.g. 'p99(ttft)<=500ms'; repeatable.")
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(help="Promises as vLLM writes them, e.g. 'ttft:500 tpot:50' (ms, from send)."),
]
Seed = Annotated[int | None, typer.Option(help="Another seed draws another schedule.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change one scenario key, e.g. arrivals.rate=9/s; repeatable."),
]
Plugin = Annotated[
    list[Path] | None, typer.Option(help="A Python file that registers kinds; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
Confidence = Annotated[
    float | None, typer.Option(help="Ask for proof: a verdict the interval straddles is none.")
]
Export = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FORMAT[=PATH]",
        help="Also write csv, json, jsonl, parquet or vllm-bench, by default into the run's "
        "directory; repeatable.",
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Let Prometheus read the run at this port while it goes on (0: a free one).",
    ),
]
MetricsHost = Annotated[
    str, typer.Option(help="The address that --metrics-port listens on; 0.0.0.0 is everywhere.")
]
Otlp = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send OpenTelemetry metrics to a collector, e.g. http://localhost:4318. "
        "Default: the environment's OTEL_EXPORTER_OTLP_ENDPOINT.",
    ),
]
