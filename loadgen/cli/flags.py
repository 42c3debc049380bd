"""Flags that several verbs share, and groups of them that a verb takes as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from loadgen.cli import completion
from loadgen.workload.traffic_flags import LENGTHS, Flag
from loadgen.workload.traffic_flags import TrafficFlags as TrafficFlags  # a group like those below

Plugin = Annotated[
    list[Path] | None, typer.Option(help="A Python file that registers kinds; repeatable.")
]
Slo = Annotated[
    list[str] | None,
    typer.Option(
        help="An SLO, e.g. 'p99(ttft)<=500ms', or a preset (see `slobench list presets`); "
        "repeatable.",
        autocompletion=completion.slos,
    ),
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(help="SLOs as vLLM writes them, e.g. 'ttft:500 tpot:50' (ms, from the send)."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change one scenario key, e.g. arrivals.rate=9/s; repeatable.",
        autocompletion=completion.settings,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
Full = Annotated[
    bool, typer.Option("--full", help="Print all tables and notes below the ten lines.")
]
Confidence = Annotated[
    str | None,
    typer.Option(help="E.g. 95%: no verdict if the confidence interval contains the limit."),
]
Clear = Annotated[
    bool,
    typer.Option(
        "--clear", help="No verdict (exit code 3) unless every SLO is proven or clear of its limit."
    ),
]
MinRequests = Annotated[
    int | None,
    typer.Option(
        min=1, help="No verdict (exit code 3) with fewer successful requests, e.g. 100 in CI."
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="A URL, a target file, `reference` (the bundled engine), `sim` (the same in virtual "
        "time) or `mock`. Default: the environment's OPENAI_BASE_URL.",
        autocompletion=completion.targets,
    ),
]
Model = Annotated[str, typer.Option(help="The API's model field. Default: from /v1/models.")]
WaitReady = Annotated[
    str | None,
    typer.Option(help="Wait up to this long for a server that is starting or loading, e.g. 10m."),
]
ReusePreflight = Annotated[
    str | None,
    typer.Option(
        help="Skip the preflight if the last with such requests succeeded at most this long ago, "
        "e.g. 10m, and the server still lists the same models."
    ),
]
Canary = Annotated[
    str | None,
    typer.Option(
        help="Send so many requests in addition, e.g. 2%, whose greedy answers were recorded while "
        "the server was idle, and compare their answers under load."
    ),
]
CaCert = Annotated[
    Path | None,
    typer.Option("--ca-cert", help="A PEM file with the certificate authority of an https server."),
]
Engine = Annotated[
    str,
    typer.Option(help="Settings of `reference`, `sim` or `mock`, e.g. mode=chunked,shape=tiny."),
]
RunDirectory = Annotated[
    Path | None, typer.Option(help="The run's directory. Default: runs/<scenario>-<time>.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the run in --out.")]
Workers = Annotated[
    str, typer.Option(help="Load-generating processes, or auto: as the token rate needs.")
]
Export = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FORMAT[=PATH]",
        help="Also write the run in a format of `export` (csv, parquet, vllm-bench, …), by default "
        "into the run's directory; repeatable.",
    ),
]
FailOn = Annotated[
    str | None,
    typer.Option(
        help="`worse`: exit code 1 for worse, 3 for invalid; `inconclusive`: also 3 for "
        "inconclusive. Default: worse, or as a nightly file says."
    ),
]


@dataclass(frozen=True)
class StudyFlags:
    """The directory of a study, and the form of its result."""

    out: Annotated[
        Path | None, typer.Option(help="Directory of the study. Default: runs/<verb>-….")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue the study in --out.")] = False
    json: Json = False


@dataclass(frozen=True)
class ScenarioChanges:
    """Changes to a scenario."""

    slo: Slo = None
    goodput: Goodput = None
    seed: Annotated[int | None, typer.Option(help="Another seed draws another schedule.")] = None
    set_: Set = None
    plugin: Plugin = None


@dataclass(frozen=True)
class ScenarioFlags(ScenarioChanges):
    """The scenario and changes to it."""

    scenario: Annotated[
        str | None,
        typer.Argument(
            help="A scenario file or the name of a shipped one (see `slobench list`).",
            autocompletion=completion.scenarios,
        ),
    ] = None

    def states_no_traffic(self, traffic: TrafficFlags) -> bool:
        """Whether the flags state no traffic, apart from lengths."""
        others = {**asdict(traffic), **asdict(self), "slo": None, "goodput": None, "plugin": None}
        return all(value is None for name, value in others.items() if name not in LENGTHS)


@dataclass(frozen=True)
class WatchFlags:
    """Exports of live metrics."""

    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve live metrics to Prometheus at this port while the run goes on (0: a free "
            "port).",
        ),
    ] = None
    metrics_host: Annotated[
        str, typer.Option(help="The address of --metrics-port; 0.0.0.0 is every interface.")
    ] = "127.0.0.1"
    otlp: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send OpenTelemetry metrics to a collector, e.g. http://localhost:4318. "
            "Default: the environment's OTEL_EXPORTER_OTLP_ENDPOINT.",
        ),
    ] = None


def with_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb for typer: each parameter that is a flag group (a dataclass) is replaced by the fields
    of the group."""
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(verb, include_extras=True)
    for parameter in inspect.signature(verb).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint):
            parameters.append(_keyword(parameter.name, parameter.default, hint))
            continue
        groups[parameter.name] = hint  # type: ignore[assignment]  # a type, not an instance
        of_group = get_type_hints(hint, include_extras=True)
        parameters += [_keyword(f.name, f.default, _option(of_group[f.name])) for f in fields(hint)]

    @wraps(verb)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name, f.default) for f in fields(group)})
        verb(**values)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat


def _option(hint: Any) -> Any:
    """The hint with typer's option in place of a traffic flag's declaration."""
    flag = next(
        (part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Flag)), None
    )
    if flag is None:
        return hint
    return Annotated[hint.__origin__, typer.Option(*flag.names, help=flag.help)]


def _keyword(name: str, default: object, hint: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
