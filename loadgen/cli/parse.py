"""What was typed, read: the scenario, the promises, flags; errors name the flag."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from loadgen.errors import UsageError, nearest
from loadgen.plugins import load_plugin
from loadgen.run.run_options import NOBODY, Watch
from loadgen.units import parse_duration_s, parse_share

if TYPE_CHECKING:
    from loadgen.workload.scenario import Scenario


_FLAG_KEYS = {
    "rate": "arrivals.rate",
    "input_len": "requests.input_tokens",
    "output_len": "requests.output_tokens",
    "duration": "phases.measure",
    "warmup": "phases.warmup",
    "max_concurrency": "limits.max_concurrency",
    "slo": "slo",
    "seed": "seed",
}
_NEEDED_FLAGS = ("rate", "input_len", "output_len", "duration")


def choose_scenario(
    source: str | None, settings: Sequence[str], plugins: Sequence[Path], **flags: Any
) -> Scenario:
    """A file with flags and settings on top, or, without a file, the flags themselves."""
    from loadgen.workload.scenario import load_scenario, scenario_from_flags

    for plugin in plugins:
        load_plugin(plugin)
    given = {name: value for name, value in flags.items() if value is not None}
    if source is not None:
        on_top = [f"{_FLAG_KEYS[name]}={json.dumps(value)}" for name, value in given.items()]
        return load_scenario(source, [*on_top, *settings])
    missing = ", ".join("--" + n.replace("_", "-") for n in _NEEDED_FLAGS if n not in given)
    if missing:
        raise UsageError(
            f"which traffic? Name a scenario (see `slobench list scenarios`), or add {missing}"
        )
    return scenario_from_flags(**given, overrides=list(settings))


def slo_flags(slo: Sequence[str] | None, goodput: Sequence[str] | None) -> list[str] | None:
    """What `--slo` and `--goodput` ask together; None where neither is given."""
    from loadgen.measure.slo import from_goodput

    if not slo and not goodput:
        return None
    try:
        return [*(slo or ()), *from_goodput(goodput or ())]
    except ValueError as error:
        raise UsageError(f"--goodput {error}") from None


def read_budget_s(text: str) -> float:
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"--budget: {error}") from None
    if not 1.0 <= seconds <= 3600.0:
        raise UsageError(f"--budget {text}: expected 1s to 1h")
    return seconds


def read_workers(text: str) -> int:
    """0 means: as many as needed."""
    if text == "auto":
        return 0
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--workers {text}: expected a positive number or auto")


def read_share(flag: str, text: str) -> float:
    try:
        return parse_share(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def read_duration_s(flag: str, text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def read_transport(word: str) -> Literal["fast", "aiohttp"]:
    known: tuple[Literal["fast"], Literal["aiohttp"]] = ("fast", "aiohttp")
    for transport in known:
        if word == transport:
            return transport
    raise UsageError(f"--transport {word}: {nearest(word, known)}")


def read_confidence(value: float | None) -> float | None:
    if value is not None and not 0.5 <= value < 1:
        raise UsageError(f"--confidence {value}: expected a value from 0.5 to below 1, e.g. 0.95")
    return value


def watch_flags(port: int | None, host: str, otlp: str | None) -> Watch:
    """The flags as they were typed, for `watched_together`."""
    return Watch(port, host, otlp)


@contextlib.contextmanager
def watched_together(flags: Watch, targets: Iterable[str]) -> Iterator[Watch]:
    """How each of several runs, one after the other, is watched: as the `flags` say and the
    environment, at one endpoint for all. Raises UsageError where a flag asks for it and every
    target is simulated."""
    from loadgen.live.watching import one_endpoint

    if all(target == "sim" for target in targets):
        if flags.is_on:
            raise UsageError(
                "--metrics-port and --otlp: the simulator runs in virtual time, which nobody can "
                "watch"
            )
        yield NOBODY
        return
    watch = read_watch(flags.port, flags.host, flags.otlp, os.environ)
    with one_endpoint(watch, lambda line: typer.echo(line, err=True)) as each:
        yield each


def read_watch(port: int | None, host: str, otlp: str | None, environ: Mapping[str, str]) -> Watch:
    """Who may watch the run: as the flags say, and for OpenTelemetry its own variables."""
    if otlp is None and not _asks_for_otlp(environ):
        return Watch(port, host, None)
    from loadgen.live.otlp import is_installed, metrics_url

    if otlp is not None:
        metrics_url(otlp)  # refused now rather than after the preflight
        if not is_installed():
            raise UsageError("--otlp needs its packages: pip install 'slobench[otel]'")
    elif is_installed():
        otlp = ""
    return Watch(port, host, otlp)


def _asks_for_otlp(environ: Mapping[str, str]) -> bool:
    """Whether the standard variables name a collector. Source: OpenTelemetry specification,
    OTLP exporter configuration and general SDK configuration."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environ.get("OTEL_METRICS_EXPORTER", "otlp") != "otlp":
        return False
    prefix = "OTEL_EXPORTER_OTLP_"
    return any(environ.get(prefix + word) for word in ("METRICS_ENDPOINT", "ENDPOINT"))


def cache_dir(environ: Mapping[str, str]) -> Path | None:
    """Where things that are slow to make are kept. Source: XDG Base Directory Specification."""
    base = environ.get("XDG_CACHE_HOME") or (
        f"{environ['HOME']}/.cache" if environ.get("HOME") else ""
    )
    return Path(base) / "slobench" if base else None
