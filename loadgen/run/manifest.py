"""Makes the manifest of a run before its first request, and completes it at the end."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from loadgen import __version__
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
    names, around = scenario.names(), surroundings()
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
        prompt_sharing="exact" if len(plan.pieces) else "",
        n_requests=len(plan.schedule),
        slo=scenario.slo_texts(),
        classes=_classes(scenario),
        requested_rate_per_s=scenario.requested_rate_per_s(),
        target=target.to_manifest(),
        preflight=tuple(target.checks),
        names=NamesSection(names.classes, names.tenants),
        window=_window(scenario),
        instrument_limits=instrument_limits(scenario),
        clock="CLOCK_MONOTONIC",
        host=around.host,
        versions=around.versions,
        git=around.git,
        started_utc=datetime.now(UTC).isoformat(),
        ended="running",
        end_reason="",
        server_ended_s=None,
    )


def instrument_limits(scenario: Scenario) -> InstrumentLimits:
    """The limits of a scenario for the load generator's own delays."""
    instrument = scenario.instrument
    return InstrumentLimits(
        lateness_s=instrument.lateness,
        loop_lag_s=instrument.loop_lag,
        read_backlog_s=instrument.read_backlog,
        cpu_share=instrument.cpu,
        run_delay_share=instrument.run_delay,
    )


def surroundings() -> Surroundings:
    """The surroundings of a run. The first call imports modules for it."""
    return Surroundings(host(), _versions(), git_commit(Path.cwd()))


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
    """The version of slobench."""
    return __version__


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


def git_commit(directory: Path) -> str:
    """The commit of a directory, "" outside of a repository. Reads git's files, because a process
    costs more than all other surroundings; runs git where these do not hold the commit."""
    for folder in (directory, *directory.parents):
        dot_git = folder / ".git"
        try:
            if not dot_git.is_dir():
                pointer = dot_git.read_text().removeprefix("gitdir:").strip()
                dot_git = folder / pointer  # a worktree or a submodule
            return _head_commit(dot_git) or _commit_by_git(directory)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return _commit_by_git(directory)
    return ""


def _head_commit(git_dir: Path) -> str:
    """The commit of HEAD, "" if neither HEAD nor a file of its reference holds it."""
    head = (git_dir / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return _as_commit(head)
    name = head.removeprefix("ref:").strip()
    common = git_dir / "commondir"
    shared = git_dir / common.read_text().strip() if common.is_file() else git_dir
    for loose in (git_dir / name, shared / name):
        if loose.is_file():
            return _as_commit(loose.read_text().strip())
    packed = shared / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((_as_commit(line.split()[0]) for line in lines if line.endswith(f" {name}")), "")


def _as_commit(text: str) -> str:
    return text if re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", text) else ""


def _commit_by_git(directory: Path) -> str:
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if not result.returncode else ""
