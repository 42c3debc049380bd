"""manifest.json: under which circumstances a run was made. Written before the first request, and
completed at the end."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from loadgen.drive.instrument import host
from loadgen.records import SCHEMA
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan, schedule_sha256


class Described(Protocol):
    """A target as far as the manifest knows it."""

    @property
    def checks(self) -> Sequence[dict[str, Any]]: ...

    def to_manifest(self) -> dict[str, Any]: ...


def manifest(
    run_name: str,
    scenario: Scenario,
    plan: Plan,
    target: Described,
    salt: bytes,
    command: Sequence[str],
) -> dict[str, Any]:
    """What is known of a run before it begins; `ended` says that it has not."""
    names, instrument = scenario.names(), scenario.instrument
    return {
        "schema": SCHEMA,
        "run": run_name,
        "slobench": version(),
        "command": [without_key(word) for word in command],
        "scenario": {
            "name": scenario.name,
            "text": scenario.to_yaml(),
            "resolved": scenario.resolved(),
        },
        "seed": scenario.seed,
        "salt": salt.hex(),
        "schedule_sha256": schedule_sha256(*plan),
        "n_requests": len(plan.schedule),
        "slo": list(scenario.slo_texts()),
        "classes": _classes(scenario),
        "target": target.to_manifest(),
        "preflight": list(target.checks),
        "names": {"classes": list(names.classes), "tenants": list(names.tenants)},
        "window": _window(scenario),
        "instrument_limits": {
            "lateness_s": instrument.lateness,
            "loop_lag_s": instrument.loop_lag,
            "read_backlog_s": instrument.read_backlog,
            "cpu_share": instrument.cpu,
            "run_delay_share": instrument.run_delay,
        },
        "clock": "CLOCK_MONOTONIC",
        **surroundings(),
        "started_utc": datetime.now(UTC).isoformat(),
        "ended": "running",
        "end_reason": "",
    }


def surroundings() -> dict[str, Any]:
    """The machine and the software; looked at a second time, it takes a fifth as long."""
    return {"host": host(), "versions": _versions(), "git": _git_commit()}


def ending(
    scenario: Scenario,
    how: str,
    reason: str,
    ended_s: float | None,
    epoch_ns: int,
    now_ns: int,
    now_utc: datetime,
) -> dict[str, Any]:
    """What the manifest can only say afterwards. `ended_s`: when releasing stopped early, None if
    it did not; `now_ns` and `now_utc` are one instant on the run's clock and the calendar's."""
    window = _window(scenario)
    if ended_s is not None:
        window["ended_s"] = min(ended_s, scenario.horizon_s)
    epoch_utc_s = now_utc.timestamp() - (now_ns - epoch_ns) * 1e-9
    return {
        "ended": how,
        "end_reason": reason,
        "epoch_monotonic_s": epoch_ns * 1e-9,
        "epoch_utc": datetime.fromtimestamp(epoch_utc_s, UTC).isoformat(),
        "window": window,
    }


def version() -> str:
    """The installed version of slobench."""
    from importlib.metadata import version as installed

    return installed("slobench")


def _classes(scenario: Scenario) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "slo": list(asked.slo_texts()),
            "priority": asked.priority,
            "tenant": asked.tenant,
            "is_closed_loop": scenario.is_closed_loop(name),
        }
        for name, asked in scenario.traffic().items()
    }


def _window(scenario: Scenario) -> dict[str, float]:
    phases = scenario.phases
    return {"warmup_s": phases.warmup, "measure_s": phases.measure, "drain_s": phases.drain}


def without_key(word: str) -> str:
    """A word of the command line without the API key it may set on a server of ours."""
    return re.sub(r"(api[_-]key=)[^,]+", r"\1…", word)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    found = {"python": sys.version.split()[0]}
    for package in ("numpy", "uvloop", "httptools", "aiohttp", "msgspec", "pyarrow", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = installed(package)
    return found


def _git_commit() -> str:
    """The commit of the working directory, "" outside of a repository or without git."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
