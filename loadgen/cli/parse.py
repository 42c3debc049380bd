"""Reads flags: the scenario, SLOs, durations, exports; each error names the flag."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import typer

from loadgen.errors import UsageError, nearest
from loadgen.system.cache_directory import cache_dir as cache_dir
from loadgen.system.plugins import load_plugin
from loadgen.units import is_bare_number, parse_duration_s, parse_share
from loadgen.workload.flag_values import slo_flags as slo_flags
from loadgen.workload.flag_values import with_unit as with_unit
from loadgen.workload.flag_values import with_units

if TYPE_CHECKING:
    from loadgen.cli.flags import ScenarioFlags, TrafficFlags, WatchFlags
    from loadgen.live.watching import Watch
    from loadgen.run.run_options import RunOptions
    from loadgen.workload.scenario import Scenario

T = TypeVar("T", bound=str)

_CONFIDENCE = 0.95
_MOST_CANARIES = 0.5  # of the requests
NO_DEFAULTS: Mapping[str, object] = {}


def choose_scenario(
    flags: ScenarioFlags,
    traffic: TrafficFlags | None = None,
    *,
    source: str | None = None,
    settings: Sequence[str] = (),
    defaults: Mapping[str, object] = NO_DEFAULTS,
) -> Scenario:
    """The scenario of the flags, from a file with the flags on top, or from the flags alone.
    `source` takes the place of `flags.scenario`; `settings` come before those of `--set`. Without a
    file, `defaults` hold the values of flags that the verb can do without."""
    from loadgen.workload.scenario import load_scenario, scenario_from_flags
    from loadgen.workload.traffic_flags import LENGTHS, LOADS, flag_of

    load_plugins(flags.plugin)
    source = source or flags.scenario
    values = {**(asdict(traffic) if traffic else {}), "seed": flags.seed}
    values["slo"] = slo_flags(flags.slo, flags.goodput)
    values = {name: value for name, value in values.items() if value is not None}
    values = with_units(values)
    settings = [*settings, *(flags.set_ or ())]
    if source is not None:
        return load_scenario(source, settings, flags=values)
    has_trace = "trace" in values or _sets(settings, "arrivals")
    has_lengths = has_trace or "dataset" in values or _sets(settings, "prompts")
    if not has_trace and not any(name in values for name in LOADS):
        values |= {name: value for name, value in defaults.items() if name in LOADS}
    left_out = (*LOADS, *(LENGTHS if has_lengths else ()))
    others = {name: value for name, value in defaults.items() if name not in left_out}
    if "num_prompts" in values:
        others.pop("duration", None)  # it would limit the time for them
    values = {**others, **values}
    missing = [flag_of(name) for name in LENGTHS if name not in values and not has_lengths]
    if not has_trace and not any(name in values for name in LOADS):
        missing = ["--rate (or --concurrency)", *missing]
    if missing:
        flags_too = f", or add {', '.join(missing)}" if traffic else ""
        raise UsageError(f"no scenario: name one (see `slobench list scenarios`){flags_too}")
    if not any(name in values for name in ("duration", "num_prompts", "trace")) and not any(
        _sets(settings, f"phases{key}") for key in ("", ".measure", ".requests")
    ):
        values["duration"] = _length_for(values)
        typer.echo(
            f"length: {values['duration']}, as no flag states one (--duration, --num-prompts)",
            err=True,
        )
    return scenario_from_flags(**values, overrides=settings)


def _length_for(values: Mapping[str, Any]) -> str:
    """The length of a window with enough requests to be clear of the limits without a late answer,
    20 s to 2 minutes; a minute for a closed loop, whose rate follows from the server."""
    from loadgen.measure.slo import parse_slo, with_implied
    from loadgen.measure.statistics.percentiles import planned_for
    from loadgen.measure.statistics.proportions import least_n
    from loadgen.units import parse_rate_per_s, write_duration

    try:
        rate_per_s = parse_rate_per_s(values.get("rate"))
    except ValueError:  # no rate, or a wrong one, which the validation of the scenario names
        return "60s"
    shares = [0.95]
    for slo, _ in with_implied([parse_slo(text) for text in values.get("slo", ())]):
        share = slo.limit if slo.metric == "attainment" else slo.quantile
        shares += [] if share is None or share == 1 else [share]
    enough = planned_for(least_n(0, max(shares), _CONFIDENCE))
    length_s = 5 * math.ceil(enough / rate_per_s / 5)
    return write_duration(min(120, max(20, length_s)))


def _sets(settings: Sequence[str], key: str) -> bool:
    """Whether a setting replaces the block of a scenario's key."""
    return any(setting.partition("=")[0].strip() == key for setting in settings)


def with_limits(scenario: Scenario, attainment: float | None) -> tuple[Scenario, float | None]:
    """The scenario with a limit per request in place of its percentile SLOs, if it has none, and
    the attainment that they state. The search counts requests that meet their limits."""
    from loadgen.measure.search_command import per_request_limits
    from loadgen.workload.scenario import varied

    limits, share = per_request_limits(scenario.slos())
    if scenario.has_per_request_limit or scenario.classes or not limits:
        return scenario, attainment
    share = share if attainment is None else attainment
    others = [slo.text for slo in scenario.slos() if not per_request_limits([slo])[0]]
    typer.echo(
        f"searching the load at which {100 * share:g} % of the requests meet {', '.join(limits)}"
        + (
            f"; without a value per request, so not searched: {', '.join(others)}" if others else ""
        ),
        err=True,
    )
    return varied(scenario, {"slo": limits}, "--slo"), share


def load_plugins(paths: Sequence[Path] | None) -> None:
    for path in paths or ():
        load_plugin(path)


def read_target(target: str | None, choices: str = "a target file, reference, sim or mock") -> str:
    """`--target`, else the environment's OPENAI_BASE_URL."""
    target = target or os.environ.get("OPENAI_BASE_URL")
    if not target:
        raise UsageError(
            f"no target: add --target URL, {choices} (OPENAI_BASE_URL is not set either)"
        )
    return target


def target_settings(ca_cert: Path | None) -> list[str]:
    """`--ca-cert` as a setting on top of the target. Raises UsageError for no such file."""
    if ca_cert is None:
        return []
    if not ca_cert.is_file():
        raise UsageError(f"--ca-cert {ca_cert}: no such file")
    return [f"ca_cert={json.dumps(str(ca_cert.resolve()))}"]


def base_options(plugins: Sequence[Path] | None, **options: Any) -> RunOptions:
    """Run options with this process's command line, environment and cache directory."""
    from loadgen.run.manifest import recorded_command
    from loadgen.run.run_options import RunOptions

    return RunOptions(
        command=recorded_command(["slobench", *sys.argv[1:]]),
        environ=dict(os.environ),
        cache_dir=cache_dir(os.environ),
        plugins=plugins or [],
        **options,
    )


def read_wait_s(text: str | None) -> float:
    """Seconds of `--wait-ready`; 0 without it."""
    return 0.0 if text is None else read_duration_s("--wait-ready", text)


def read_reuse_s(text: str | None) -> float:
    """Seconds of `--reuse-preflight`; 0 without it."""
    return 0.0 if text is None else read_duration_s("--reuse-preflight", text)


def read_budget_s(text: str) -> float:
    seconds = read_duration_s("--budget", text)
    if not 1.0 <= seconds <= 3600.0:
        raise UsageError(f"--budget {text}: expected 1s to 1h")
    return seconds


def read_workers(text: str) -> int:
    """Number of processes; 0: as many as needed."""
    if text == "auto":
        return 0
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--workers {text}: expected a positive number or auto")


def read_canary(text: str | None) -> float:
    """The share of `--canary`; 0 without it."""
    share = 0.0 if text is None else read_share("--canary", text)
    if text is not None and not 0 < share <= _MOST_CANARIES:
        raise UsageError(f"--canary {text}: expected above 0 % and at most {_MOST_CANARIES:.0%}")
    return share


def read_share(flag: str, text: str) -> float:
    try:
        return parse_share(in_per_cent(text))
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def in_per_cent(text: str) -> str:
    """A share with its unit: a number above 1 can only be per cent."""
    return f"{text.strip()}%" if is_bare_number(text) and 1 < float(text) <= 100 else text


def read_duration_s(flag: str, text: str) -> float:
    try:
        return parse_duration_s(with_unit(text, "s"))
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def read_choice(flag: str, word: str, choices: Sequence[T]) -> T:
    """One of the choices of a flag."""
    for choice in choices:
        if word == choice:
            return choice
    raise UsageError(f"{flag} {word}: {nearest(word, choices)}")


def read_transport(word: str) -> Literal["fast", "aiohttp"]:
    transports: tuple[Literal["fast"], Literal["aiohttp"]] = ("fast", "aiohttp")
    return read_choice("--transport", word, transports)


def read_confidence(text: str | None) -> float | None:
    """The confidence level of `95%`, `95` or `0.95`."""
    value = None if text is None else read_share("--confidence", text)
    if value is not None and not 0.5 < value < 1:
        raise UsageError(
            f"--confidence {text}: expected above 50 % and below 100 %; write e.g. 95% or 0.95"
        )
    return value


def read_watch(flags: WatchFlags, environ: Mapping[str, str]) -> Watch | None:
    """The exports of live metrics by the flags, and of OpenTelemetry by the environment; None
    without any."""
    otlp = flags.otlp
    if otlp is not None or _names_collector(environ):
        from loadgen.live.otlp import is_installed, metrics_url

        if otlp is not None:
            metrics_url(otlp)  # refused here rather than after the preflight
            if not is_installed():
                raise UsageError("--otlp needs its packages: pip install 'slobench[otel]'")
        elif is_installed():
            otlp = ""
    if flags.metrics_port is None and otlp is None:
        return None
    from loadgen.live.watching import Watch

    return Watch(flags.metrics_port, flags.metrics_host, otlp)


@contextlib.contextmanager
def shared_watch(flags: WatchFlags, targets: Iterable[str]) -> Iterator[Watch | None]:
    """The exports of consecutive runs, at a single endpoint. Raises UsageError if a flag requests
    an export and every target is simulated."""
    from loadgen.live.watching import one_endpoint
    from loadgen.run.execute import SIMULATED, VIRTUAL_TIME

    if all(target == SIMULATED for target in targets):
        if flags.metrics_port is not None or flags.otlp is not None:
            raise UsageError(VIRTUAL_TIME)
        yield None
        return
    watch = read_watch(flags, os.environ)
    if watch is None:
        yield None
        return
    with one_endpoint(watch, lambda line: typer.echo(line, err=True)) as each:
        yield each


def _names_collector(environ: Mapping[str, str]) -> bool:
    """Whether the standard variables name an OpenTelemetry collector. Source: OpenTelemetry
    specification, OTLP exporter configuration and general SDK configuration."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environ.get("OTEL_METRICS_EXPORTER", "otlp") != "otlp":
        return False
    prefix = "OTEL_EXPORTER_OTLP_"
    return any(environ.get(prefix + word) for word in ("METRICS_ENDPOINT", "ENDPOINT"))
