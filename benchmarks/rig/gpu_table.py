"""The Markdown table of a suite's results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def markdown(content: Mapping[str, Any]) -> str:
    """Machine, goals, kernels, modes; what failed stands first."""
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
    lines += ["| target | found | goal | met | that is |", "|---|--:|--:|---|---|"]
    lines += [
        f"| {goal['name']} | {goal['value']:.3g} {goal['unit']} | {goal['goal']} | "
        f"{'yes' if goal['met'] else '**no**'} | "
        f"{goal['label'].replace('|', chr(92) + '|')} |"
        for goal in content["goals"]
    ]
    if content.get("kernels"):
        lines += ["", "| kernel | case | µs | share of its ceiling |", "|---|---|--:|--:|"]
        lines += [
            f"| {one['kernel']} | {one['case']} | {one['seconds'] * 1e6:.1f} | "
            f"{one['share']:.1%} {one['of']} |"
            for one in content["kernels"]
        ]
    modes = content.get("modes")
    if modes:
        lines += [
            "",
            f"Modes at {modes['rate_per_s']:.3g} requests/s through HTTP, the same schedule:",
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
    peer = content.get("transformers")
    if peer:
        lines += ["", "transformers, seconds per step of 8b × 32 unless it says otherwise:", ""]
        lines += [f"- {name}: {_short(value)}" for name, value in peer.items()]
    tried = content.get("experiments")
    if tried:
        lines += ["", "Tried, not judged: one layer's attention by what KV is kept in.", ""]
        lines += [
            "| KV | decode, µs | of copy | two launches, µs | one, µs |",
            "|---|--:|--:|--:|--:|",
        ]
        lines += [
            f"| {kind} | {row['decode_s'] * 1e6:.1f} | {row['decode_share']:.1%} | "
            f"{row['two_launches_s'] * 1e6:.1f} | {row['one_launch_s'] * 1e6:.1f} |"
            for kind, row in tried.get("attention", {}).items()
        ]
        parts = tried.get("parts of a GPU", "not run")
        if isinstance(parts, str):
            lines += ["", f"Parts of the GPU: {parts}."]
        else:
            lines += ["", "A copy beside a multiplication, on multiprocessors of their own:", ""]
            lines += [
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
    return "\n".join(lines) + "\n"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
