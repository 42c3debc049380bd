"""How many load-generating processes a rate needs, and how many cores there are for them."""

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
_MARGIN = 0.5  # of what a core holds: arrivals come in bursts


def workers_for(
    tokens_per_s: float, events_per_core: float, cores: int, quota: float | None
) -> int:
    """As many as the asked token rate needs at half of what a core holds, with one core left to the
    rest of the machine, of those that affinity and quota leave us; at least one."""
    available = cores if quota is None else min(cores, math.floor(quota))
    needed = math.ceil(tokens_per_s / (_MARGIN * events_per_core))
    return max(1, min(needed, available - 1))


def affine_cores() -> int:
    """Cores that this process may run on."""
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return affine or 1


def known_ceiling(cache_dir: Path | None) -> float:
    """Events a second that one core of this machine holds: as `slobench doctor` measured it here,
    else EVENTS_PER_CORE."""
    if cache_dir is None:
        return EVENTS_PER_CORE
    try:
        told = json.loads((cache_dir / CEILING_FILE).read_text())
    except (OSError, ValueError):
        return EVENTS_PER_CORE
    return stated_ceiling(told) or EVENTS_PER_CORE


def stated_ceiling(told: object) -> float | None:
    """What a ceiling file says; None if it is of another machine, or says no positive number."""
    if not isinstance(told, Mapping) or told.get("machine") != machine_name():
        return None
    events_per_s = told.get("events_per_s_per_core")
    if not isinstance(events_per_s, int | float) or isinstance(events_per_s, bool):
        return None
    return float(events_per_s) if 0 < events_per_s < math.inf else None


def machine_name() -> str:
    """What tells one machine from another: its name, its processor and the cores we may use."""
    machine = host()
    return f"{machine.hostname}, {machine.cpu_model or 'unknown CPU'}, {machine.cpus} cores"


def our_quota() -> float | None:
    """The CPU quota of this process, in cores."""
    return quota_cores(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))


def quota_cores(membership: Path, root: Path) -> float | None:
    """The tightest CPU quota of our cgroup and those around it, in cores; None without one.

    Source: Linux cgroup-v2 `cpu.max`; of version 1, `cpu.cfs_quota_us` and `cpu.cfs_period_us`.
    """
    quotas = []
    told = re.search(r"^0::(/.*)$", _text(membership) or "", re.MULTILINE)
    group = root / (told[1] if told else "/").lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        quotas.append(quota_of(_text(folder / "cpu.max")))
    old = [_text(root / "cpu" / f"cpu.cfs_{word}_us") for word in ("quota", "period")]
    quotas.append(quota_of(" ".join(word or "" for word in old)))
    return min((quota for quota in quotas if quota is not None), default=None)


def quota_of(text: str | None) -> float | None:
    """Cores from `quota period`, both in microseconds; None for `max`, -1 and what is neither."""
    words = (text or "").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or words[1] == "0":
        return None
    return int(words[0]) / int(words[1])


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
