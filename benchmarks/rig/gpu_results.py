"""What a run of the GPU suite found, on disk after every figure."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rig.gpu_ceilings import Place
from rig.gpu_table import markdown
from rig.machine import Goal, machine

ROOT = Path(__file__).parents[2]


@dataclass
class Results:
    """`parts` are those of a whole suite: until each has run or failed, the files are named
    `….partial` and say what is missing. Without `out` nothing is kept."""

    place: Place
    parts: Sequence[str]
    out: Path | None = None
    found: dict[str, Any] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    commit: str = field(default_factory=lambda: commit())

    def keep(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.write()

    def aim(
        self,
        name: str,
        value: float,
        limit: float,
        unit: str = "",
        *,
        is_floor: bool = True,
        label: str = "",
    ) -> None:
        """A figure against its goal; `label` is what a share comes to on this GPU."""
        goal = Goal(name, value, limit, unit, is_floor=is_floor)
        print(goal, label, flush=True)
        self.goals.append(goal.to_json() | {"label": label})
        self.write()

    def failed(self, name: str, why: str) -> None:
        self.failures[name] = why
        self.write()

    @property
    def missing(self) -> list[str]:
        return [name for name in self.parts if name not in {*self.seconds, *self.failures}]

    @property
    def all_met(self) -> bool:
        return not self.failures and all(goal["met"] for goal in self.goals)

    def table(self) -> str:
        return markdown(self._content())

    def write(self) -> None:
        """Both files, or what they were before: a kill in between leaves no half of one."""
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        content = self._content()
        text = json.dumps(content, indent=2, default=float) + "\n"
        stem = f"gpu-{content['gpu']['name'].split()[-1].lower()}-{content['date']}"
        for suffix, written in (("json", text), ("md", markdown(content))):
            partial = self.out / f"{stem}.partial.{suffix}"
            new = self.out / f"{stem}.new.{suffix}"
            new.write_text(written, encoding="utf-8")
            if self.missing:
                os.replace(new, partial)
            else:
                os.replace(new, self.out / f"{stem}.{suffix}")
                partial.unlink(missing_ok=True)

    def _content(self) -> dict[str, Any]:
        gpu = self.place.cuda.get_device_properties(0)
        return {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine(),
            "gpu": {"name": gpu.name, "memory_bytes": gpu.total_memory},
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
            "commit": self.commit,
            "missing": self.missing,
            **self.found,
            "goals": self.goals,
            "failures": self.failures,
            "seconds": self.seconds,
        }


def commit() -> str:
    """As $SLOBENCH_COMMIT says, for a copy without its history; else as git does; else unknown."""
    told = os.environ.get("SLOBENCH_COMMIT")
    if told:
        return told
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:  # there is no git
        return "unknown"
    return done.stdout.strip() or "unknown"
