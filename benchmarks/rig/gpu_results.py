"""Results of the GPU suite: the file that a part writes row by row, and the Markdown table of the
merged result."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rig.machine import Goal


def replace_file(path: Path, text: str) -> None:
    """Write or replace a file; a kill in between leaves the earlier file."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def to_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, default=float) + "\n"


@dataclass
class PartResult:
    """The figures, goals and failures of a part, on disk in `path` after every addition."""

    path: Path
    versions: Mapping[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        self.figures[name] = value
        self.write()

    def add_row(self, name: str, row: Any) -> None:
        """Append a row to a table."""
        self.add(name, [*self.figures.get(name, []), row])

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

    def add_failure(self, name: str, reason: str) -> None:
        self.failures[name] = reason
        self.write()

    def write(self) -> None:
        content = {
            "versions": dict(self.versions),
            "figures": self.figures,
            "goals": self.goals,
            "failures": self.failures,
        }
        replace_file(self.path, to_json(content))


_TIMINGS = ("kernels", "mixed_contexts", "sweep")


def combined(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The `figures` or the `failures` of all parts of a merged result."""
    return {key: value for part in content["parts"].values() for key, value in part[name].items()}


def markdown(content: Mapping[str, Any]) -> str:
    """The table of a merged result: failures first, then goals, devices, kernels, steps, modes, the
    peer, the sweep and the experiments."""
    parts, figures = content["parts"], combined(content, "figures")
    lines = [f"# {content['device']}, {content['date']}", ""]
    lines += [f"- **failed**: {name}: {why}" for name, why in combined(content, "failures").items()]
    if content["missing"]:
        lines.append(f"- **missing**: {', '.join(content['missing'])}")
    top = figures.get("ceilings")
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
        for part in parts.values()
        for goal in part["goals"]
    ]
    lines += _part_lines(parts)
    timings = [row for name in _TIMINGS for row in figures.get(name, [])]
    if timings:
        lines += ["", "| kernel | case | µs | share of its ceiling |", "|---|---|--:|--:|"]
        lines += [
            f"| {timing['kernel']} | {timing['case']} | {timing['seconds'] * 1e6:.1f} | "
            f"{timing['share']:.1%} {timing['of']} |"
            for timing in timings
        ]
    if figures.get("tuning"):
        lines += ["", f"Proposed for `tiles.TUNINGS`: `{figures['tuning']['entry']}`"]
    if figures.get("modes"):
        lines += _mode_lines(figures["modes"])
    peer = {**figures.get("generate_batch", {}), **figures.get("generate", {})}
    if peer:
        lines += ["", "transformers, seconds per step of 8b × 32 unless another unit is given:", ""]
        lines += [f"- {name}: {_short(value)}" for name, value in peer.items()]
    if figures.get("experiments"):
        lines += _experiment_lines(figures["experiments"])
    return "\n".join(lines) + "\n"


def _part_lines(parts: Mapping[str, Any]) -> list[str]:
    """A line per part: when, on which commit, and the clocks, power and temperature meanwhile."""
    lines = ["", "| part | date | commit | s | state | SM, MHz | power, W | °C | driver |"]
    lines += ["|---|---|---|--:|---|--:|--:|--:|---|"]
    for name, part in parts.items():
        readings = part["readings"]
        cells = (
            _range(readings.get(key)) for key in ("clocks.sm", "power.draw", "temperature.gpu")
        )
        lines.append(
            f"| {name} | {part['date']} | {part['commit'][:12]} | {part['seconds']:.0f} | "
            f"{part['state']} | {' | '.join(cells)} | {readings.get('driver_version', '–')} |"
        )
    return lines


def _range(reading: Mapping[str, float] | None) -> str:
    if reading is None:
        return "–"
    low, median, high = (f"{reading[key]:.0f}" for key in ("min", "median", "max"))
    return f"{median} [{low}, {high}]"


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
