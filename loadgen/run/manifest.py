"""Makes the manifest of a run before its first request, and completes it at the end."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import msgspec

from loadgen.drive.instrument import host
from loadgen.manifest.sections import (
    ClassSection,
    Ended,
    HostSection,
    InstrumentLimits,
    Manifest,
    NamesSection,
    PreflightLine,
    ScenarioSection,
    TargetSection,
    WindowSection,
    text_sha256,
)
from loadgen.records import schedule_sha256
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan
from targets.safe_text import hide_secrets, without_user_info
from targets.safe_text import redact as redact_values


class Described(Protocol):
    """A target that a manifest can describe."""

    @property
    def checks(self) -> Sequence[PreflightLine]: ...

    def to_manifest(self) -> TargetSection: ...


class Surroundings(NamedTuple):
    """The machine, the versions of the software on it, and the commit of the working directory."""

    host: HostSection
    versions: dict[str, str]
    git: str


def manifest(
    run_name: str,
    scenario: Scenario,
    plan: Plan,
    target: Described,
    salt: bytes,
    command: Sequence[str],
) -> Manifest:
    """The manifest of a run that has not begun: `ended` is "running"."""
    names, instrument, around = scenario.names(), scenario.instrument, surroundings()
    text = scenario.to_yaml()
    return Manifest(
        run=run_name,
        slobench=version(),
        command=recorded_command(command),
        scenario=ScenarioSection(
            name=scenario.name,
            source=scenario.source,
            text=text,
            resolved=scenario.resolved(),
            sha256=text_sha256(text),
        ),
        seed=scenario.seed,
        salt=salt.hex(),
        schedule_sha256=schedule_sha256(*plan),
        n_requests=len(plan.schedule),
        slo=scenario.slo_texts(),
        classes=_classes(scenario),
        requested_rate_per_s=scenario.requested_rate_per_s(),
        target=target.to_manifest(),
        preflight=tuple(target.checks),
        names=NamesSection(names.classes, names.tenants),
        window=_window(scenario),
        instrument_limits=InstrumentLimits(
            lateness_s=instrument.lateness,
            loop_lag_s=instrument.loop_lag,
            read_backlog_s=instrument.read_backlog,
            cpu_share=instrument.cpu,
            run_delay_share=instrument.run_delay,
        ),
        clock="CLOCK_MONOTONIC",
        host=around.host,
        versions=around.versions,
        git=around.git,
        started_utc=datetime.now(UTC).isoformat(),
        ended="running",
        end_reason="",
        server_ended_s=None,
    )


def surroundings() -> Surroundings:
    """The surroundings of a run. A second call takes a fifth of the first call's time."""
    return Surroundings(host(), _versions(), _git_commit())


def completed(
    manifest: Manifest,
    scenario: Scenario,
    how: Ended,
    reason: str,
    ended_s: float | None,
    epoch_ns: int,
    now_ns: int,
    now_utc: datetime,
) -> Manifest:
    """The manifest of a run that has ended. `ended_s`: when releasing stopped early, None where it
    did not; `now_ns` and `now_utc` are the same instant on the run's clock and the calendar's."""
    window = _window(scenario)
    if ended_s is not None:
        window = msgspec.structs.replace(window, ended_s=min(ended_s, scenario.horizon_s))
    epoch_utc_s = now_utc.timestamp() - (now_ns - epoch_ns) * 1e-9
    return msgspec.structs.replace(
        manifest,
        ended=how,
        end_reason=reason,
        epoch_monotonic_s=epoch_ns * 1e-9,
        epoch_utc=datetime.fromtimestamp(epoch_utc_s, UTC).isoformat(),
        window=window,
    )


def version() -> str:
    """The installed version of slobench."""
    from importlib.metadata import version as installed

    return installed("slobench")


def _classes(scenario: Scenario) -> dict[str, ClassSection]:
    requested_rates_per_s = scenario.requested_rates_per_s()
    return {
        name: ClassSection(
            slo=traffic.slo_texts(),
            priority=traffic.priority,
            tenant=traffic.tenant,
            is_closed_loop=scenario.is_closed_loop(name),
            requested_rate_per_s=requested_rates_per_s[name],
        )
        for name, traffic in scenario.traffic().items()
    }


def _window(scenario: Scenario) -> WindowSection:
    phases = scenario.phases
    return WindowSection(
        phases.warmup, phases.measure, phases.drain, requests=scenario.requests_in_flow
    )


def recorded_command(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command line as files may hold them: without keys, passwords and the user
    information of URLs."""
    from reports.redaction import redact

    shown, _ = hide_secrets([without_key(word) for word in words])
    return tuple(redact(without_user_info(word)) for word in shown)


def without_secrets(text: str, words: Sequence[str], environ: Mapping[str, str]) -> str:
    """A text without the secrets of a command line's words and of the environment."""
    assignments = [f"{name}={value}" for name, value in environ.items() if value]
    pieces = [piece for word in words for piece in (word, *word.split(","))]
    _, secrets = hide_secrets([*pieces, *assignments])
    return without_user_info(redact_values(text, secrets))


def without_key(word: str) -> str:
    """A word of the command line without the API key it may set on a server of ours."""
    return re.sub(r"(api[_-]key=)[^,]+", r"\1…", word)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    versions = {"python": sys.version.split()[0]}
    for package in ("numpy", "uvloop", "httptools", "aiohttp", "msgspec", "pyarrow", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = installed(package)
    return versions


def _git_commit() -> str:
    """The commit of the working directory, "" outside of a repository or without git."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
