"""Results of a GPU suite run, written to disk after every figure, and their Markdown table."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rig.gpu_ceilings import Place
from rig.machine import Goal, machine

ROOT = Path(__file__).parents[2]


@dataclass
class Results:
    """The figures so far. `parts` are those of a whole suite: until each has run or failed, the
    files are named `….partial` and list the missing parts. Without `out` nothing is written."""

    place: Place
    parts: Sequence[str]
    out: Path | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    commit: str = field(default_factory=lambda: commit())

    def add(self, name: str, value: Any) -> None:
        self.figures[name] = value
        self.write()

    def add_goal(
        self,
        name: str,
        value: float,
        limit: float,
        unit: str = "",
        *,
        is_floor: bool = True,
        label: str = "",
    ) -> None:
        """A figure with its goal; `label` is the absolute value behind a share."""
        goal = Goal(name, value, limit, unit, is_floor=is_floor)
        print(goal, label, flush=True)
        self.goals.append(goal.to_json() | {"label": label})
        self.write()

    def add_failure(self, name: str, why: str) -> None:
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
        """Write or replace both files; a kill in between leaves complete files."""
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
            **self.figures,
            "goals": self.goals,
            "failures": self.failures,
            "seconds": self.seconds,
        }


def commit() -> str:
    """$SLOBENCH_COMMIT, for a copy without its history; else git's HEAD; else `unknown`."""
    from_environment = os.environ.get("SLOBENCH_COMMIT")
    if from_environment:
        return from_environment
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:  # there is no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def markdown(content: Mapping[str, Any]) -> str:
    """Failures first, then goals, kernels, modes, the peer and the experiments."""
    versions, gpu = content["versions"], content["gpu"]
    lines = [
        f"# {gpu['name']}, {content['date']}",
        "",
        f"torch {versions['torch']}, CUDA {versions['cuda']}, commit {content['commit'][:12]}, "
        f"{sum(content['seconds'].values()):.0f} s.",
        "",
    ]
    lines += [f"- **failed**: {name}: {why}" for name, why in content["failures"].items()]
    if content["missing"]:
        lines.append(f"- **partial**: without {', '.join(content['missing'])}")
    top = content.get("ceilings")
    if top:
        lines += [
            f"Ceilings: copy {top['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
            f"matmul {top['matmul_flops'] / 1e12:.0f} TFLOP/s.",
            "",
        ]
    lines += ["| target | measured | goal | met | absolute |", "|---|--:|--:|---|---|"]
    lines += [
        f"| {goal['name']} | {goal['value']:.3g} {goal['unit']} | {goal['goal']} | "
        f"{'yes' if goal['met'] else '**no**'} | "
        f"{goal['label'].replace('|', chr(92) + '|')} |"
        for goal in content["goals"]
    ]
    if content.get("kernels"):
        lines += ["", "| kernel | case | µs | share of its ceiling |", "|---|---|--:|--:|"]
        lines += [
            f"| {timing['kernel']} | {timing['case']} | {timing['seconds'] * 1e6:.1f} | "
            f"{timing['share']:.1%} {timing['of']} |"
            for timing in content["kernels"]
        ]
    if content.get("modes"):
        lines += _mode_lines(content["modes"])
    peer = content.get("transformers")
    if peer:
        lines += ["", "transformers, seconds per step of 8b × 32 unless another unit is given:", ""]
        lines += [f"- {name}: {_short(value)}" for name, value in peer.items()]
    if content.get("experiments"):
        lines += _experiment_lines(content["experiments"])
    return "\n".join(lines) + "\n"


def _mode_lines(modes: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        f"Modes at {modes['rate_per_s']:.3g} requests/s over HTTP, with the same schedule:",
        "",
        "| mode | tok/s | TTFT p50, ms | TTFT p99, ms | TPOT p50, ms | TPOT p99, ms |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {mode} | {row['tokens_per_s']:.0f} | {row['ttft_p50_s'] * 1e3:.1f} | "
        f"{row['ttft_p99_s'] * 1e3:.1f} | {row['tpot_p50_s'] * 1e3:.2f} | "
        f"{row['tpot_p99_s'] * 1e3:.2f} |"
        for mode, row in modes["of"].items()
    ]
    return lines


def _experiment_lines(experiments: Mapping[str, Any]) -> list[str]:
    lines = ["", "Experiments, without goals: attention of a layer by the dtype of KV.", ""]
    lines += [
        "| KV | decode, µs | of copy | two launches, µs | one, µs |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {kv_dtype} | {row['decode_s'] * 1e6:.1f} | {row['decode_share']:.1%} | "
        f"{row['two_launches_s'] * 1e6:.1f} | {row['one_launch_s'] * 1e6:.1f} |"
        for kv_dtype, row in experiments.get("attention", {}).items()
    ]
    parts = experiments.get("parts of a GPU", "not run")
    if isinstance(parts, str):
        return [*lines, "", f"Parts of the GPU: {parts}."]
    lines += ["", "A copy and a multiplication at the same time, each on its own part of the GPU:"]
    lines += [
        "",
        "| of copy | of matmul | copy, TB/s (alone) | matmul, TFLOP/s (alone) | together |",
        "|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['processors'][0]} | {row['processors'][1]} | "
        f"{row['copy_bytes_per_s'] / 1e12:.2f} "
        f"({row['copy_bytes_per_s_alone'] / 1e12:.2f}) | "
        f"{row['matmul_flops'] / 1e12:.0f} ({row['matmul_flops_alone'] / 1e12:.0f}) | "
        f"{row['together']:.2f} |"
        for row in parts
    ]
    return lines


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
