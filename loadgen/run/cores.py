"""Number of load-generating processes for a token rate, and the cores available to them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from loadgen.drive.instrument import host

EVENTS_PER_CORE = 100_000.0  # token events a second; `benchmarks/generator_ceiling.py`
CEILING_FILE = "ceiling.json"
_MARGIN = 0.5  # share of a core's rate that is planned for: arrivals come in bursts


def workers_for(
    tokens_per_s: float, events_per_core: float, cores: int, quota: float | None
) -> int:
    """Number of processes (at least 1) so that each carries half of the rate that a core sustains.
    A core of those that affinity and quota allow stays free for the rest of the machine."""
    available = cores if quota is None else min(cores, math.floor(quota))
    needed = math.ceil(tokens_per_s / (_MARGIN * events_per_core))
    return max(1, min(needed, available - 1))


def affine_cores() -> int:
    """Number of cores that this process may run on."""
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return affine or 1


def known_ceiling(cache_dir: Path | None) -> float:
    """Events per second that a core of this machine sustains: measured here by `slobench doctor`,
    else EVENTS_PER_CORE."""
    if cache_dir is None:
        return EVENTS_PER_CORE
    try:
        content = json.loads((cache_dir / CEILING_FILE).read_text())
    except (OSError, ValueError):
        return EVENTS_PER_CORE
    return stated_ceiling(content) or EVENTS_PER_CORE


def stated_ceiling(content: object) -> float | None:
    """The ceiling in a ceiling file; None if the file is of another machine or malformed."""
    if not isinstance(content, Mapping) or content.get("machine") != machine_name():
        return None
    events_per_s = content.get("events_per_s_per_core")
    if not isinstance(events_per_s, int | float) or isinstance(events_per_s, bool):
        return None
    return float(events_per_s) if 0 < events_per_s < math.inf else None


def machine_name() -> str:
    """Identifies a machine by its name, its processor and the cores that this process may use."""
    machine = host()
    return f"{machine.hostname}, {machine.cpu_model or 'unknown CPU'}, {machine.cpus} cores"


def our_quota() -> float | None:
    """The CPU quota of this process, in cores."""
    return quota_cores(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))


def quota_cores(membership: Path, root: Path) -> float | None:
    """The tightest CPU quota of this process's cgroup and its parents, in cores; None without a
    quota.

    Source: Linux cgroup-v2 `cpu.max`; of version 1, `cpu.cfs_quota_us` and `cpu.cfs_period_us`.
    """
    quotas = []
    match = re.search(r"^0::(/.*)$", _text(membership) or "", re.MULTILINE)
    group = root / (match[1] if match else "/").lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        quotas.append(quota_of(_text(folder / "cpu.max")))
    old = [_text(root / "cpu" / f"cpu.cfs_{word}_us") for word in ("quota", "period")]
    quotas.append(quota_of(" ".join(word or "" for word in old)))
    return min((quota for quota in quotas if quota is not None), default=None)


def quota_of(text: str | None) -> float | None:
    """Cores from `quota period`, both in microseconds; None for `max`, -1 and malformed text."""
    words = (text or "").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or words[1] == "0":
        return None
    return int(words[0]) / int(words[1])


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
