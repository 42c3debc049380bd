"""Measures how often the intervals of a closed loop contain the figures of the steady state.

Run: python benchmarks/closed_loop_coverage.py [--seeds 200,100,20] [--first-seed 70000] \
         [--users 8,64,256] [--into benchmarks/results/closed_loop_coverage.json]

Each seed simulates a run of 100 requests per user on the simulated engine (8b on an H200; prompts
of 256 tokens, answers of lognormal length, median 60). Runs of 2, 5, 20 and 100 requests per user
are its beginnings: the requests released later are taken out, as if `phases.requests` had ended it.
The truth pools the releases of all seeds after the 20th request per user. `covered` counts an open
end as containing the truth on its side; `open` is the share of runs with an open end, `half` the
median half-width of the others. `whole` is the bias of the rate where the start counts
(`--window all`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rig.machine import machine_line

from loadgen.lab.sim_options import sim_options
from loadgen.lab.simulate import record
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import measured_window, with_counted_window
from loadgen.measure.closed_loop import counting_start, with_start_left_out
from loadgen.measure.per_request import per_request
from loadgen.measure.statistics.intervals import Interval
from loadgen.measure.summary import Summary
from loadgen.records import REQUESTS, Run, Status
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan

PER_USER = (2, 5, 20, 100)
SETTLED = 20  # requests per user, after which the truth is taken
LIMIT_S = 0.6  # of E2E, for the goodput
FIGURES = ("rate", "goodput", "p50(ttft)", "p90(ttft)")


def scenario(users: int, seed: int, requests: int) -> Scenario:
    lengths = {"kind": "lognormal", "median": 60, "sigma": 0.6, "max": 400}
    values = {
        "schema": 1,
        "name": "closed-loop-coverage",
        "seed": seed,
        "arrivals": {"kind": "users", "users": users, "think": "0s"},
        "requests": {"input_tokens": 256, "output_tokens": lengths},
        "phases": {"requests": requests, "at_most": "1h"},
        "slo": [f"e2e<={1e3 * LIMIT_S:g}ms"],
    }
    return Scenario.model_validate(values)


def simulated(users: int, seed: int) -> Run:
    """A run of 100 requests per user. Its plan has room for 200 requests of each user, not for all
    requests of the run: 256 users would have 6.5 million rows."""
    plan = make_plan(scenario(users, seed, 2 * PER_USER[-1]))
    options = sim_options({"shape": "8b", "hardware": "h200"})
    whole = scenario(users, seed, PER_USER[-1] * users)
    return record(whole, plan, options, Console(quiet=True), is_interruptible=False)


@dataclass(frozen=True)
class Seen:
    """A run's figures: each as an interval; its rate with the start counted; whether it is called
    mostly start-up."""

    figures: dict[str, Interval]
    whole_per_s: float
    is_start_up: bool


def beginning(run: Run, n: int) -> Run:
    """The run as `phases.requests` = n would have ended it."""
    rows = run.request_rows.copy()
    released_s = rows["released_s"]
    later = np.ones(len(rows), bool)
    later[np.argsort(released_s, kind="stable")[:n]] = False
    for name in REQUESTS.names or ():
        if name.endswith("_s"):
            rows[name][later] = np.nan
    rows["status"][later], rows["chunks"][later] = Status.not_released, 0
    kept = ~np.isin(run.chunk_rows["request_id"], rows["request_id"][later])
    window = msgspec.structs.replace(run.manifest.window, requests=n, started_s=None)
    manifest = msgspec.structs.replace(run.manifest, window=window)
    part = replace(run, manifest=manifest, request_rows=rows, chunk_rows=run.chunk_rows[kept])
    return with_start_left_out(with_counted_window(part))


def seen(run: Run) -> Seen:
    summary = summarize(run)
    loop = summary.closed_loop
    assert loop is not None, "a closed loop has users"
    return Seen(
        {
            "rate": loop.rate,
            "goodput": summary.goodput.requests_per_s,
            "p50(ttft)": _percentile(summary, "p50"),
            "p90(ttft)": _percentile(summary, "p90"),
        },
        whole_per_s=_whole_rate(run),
        is_start_up=loop.is_start_up,
    )


def _percentile(summary: Summary, name: str) -> Interval:
    found = summary.metrics["ttft_s"].percentiles[name]
    return Interval(found.value, found.low, found.high)


def _whole_rate(run: Run) -> float:
    whole = counting_start(run)
    n = np.count_nonzero(np.isfinite(whole.request_rows["released_s"]))
    return float(n) / measured_window(whole).length_s


@dataclass(frozen=True)
class Settled:
    """What a long run shows after its start: releases per second, and each release's TTFT, and
    whether it met the limit."""

    n: int
    seconds: float
    ttft_s: np.ndarray[Any, np.dtype[np.float64]]
    n_met: int


def settled(run: Run, users: int) -> Settled:
    columns, released_s = per_request(run), run.request_rows["released_s"]
    order = np.argsort(released_s, kind="stable")[: int(np.isfinite(released_s).sum())]
    kept = order[SETTLED * users :]
    seconds = float(released_s[kept[-1]] - released_s[kept[0]])
    return Settled(
        len(kept) - 1, seconds, columns.ttft_s[kept], int((columns.e2e_s[kept] <= LIMIT_S).sum())
    )


def truth(runs: Sequence[Settled]) -> dict[str, float]:
    rate = sum(run.n for run in runs) / sum(run.seconds for run in runs)
    ttft_s = np.concatenate([run.ttft_s for run in runs])
    met = sum(run.n_met for run in runs) / len(ttft_s)
    p50, p90 = np.quantile(ttft_s, (0.5, 0.9), method="inverted_cdf")
    return dict(zip(FIGURES, (rate, rate * met, float(p50), float(p90)), strict=True))


def row(users: int, per_user: int, runs: Sequence[Seen], true: dict[str, float]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "users": users,
        "requests": per_user * users,
        "runs": len(runs),
        "start_up": float(np.mean([run.is_start_up for run in runs])),
        "whole": float(np.mean([run.whole_per_s for run in runs])) / true["rate"] - 1,
        "bias": float(np.mean([r.figures["rate"].value for r in runs])) / true["rate"] - 1,
    }
    for name in FIGURES:
        found, value = [run.figures[name] for run in runs], true[name]
        closed = [f for f in found if f.low is not None and f.high is not None]
        halves = [(f.high - f.low) / 2 / value for f in closed if f.high and f.low is not None]
        result[name] = {
            "true": value,
            "covered": float(np.mean([_contains(f, value) for f in found])),
            "open": 1 - len(closed) / len(found),
            "half": float(np.median(halves)) if halves else None,
        }
    return result


def _contains(found: Interval, value: float) -> bool:
    """Open ends contain everything; half a microsecond is the resolution of recorded times."""
    return (found.low is None or found.low <= value + 5e-7) and (
        found.high is None or value - 5e-7 <= found.high
    )


def cells(users: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    runs: dict[int, list[Seen]] = {per_user: [] for per_user in PER_USER}
    long: list[Settled] = []
    for seed in seeds:
        run = simulated(users, seed)
        long.append(settled(run, users))
        for per_user in PER_USER:
            runs[per_user].append(seen(beginning(run, per_user * users)))
    true = truth(long)
    return [row(users, per_user, found, true) for per_user, found in runs.items()]


def line(cell: dict[str, Any]) -> str:
    """A row of the table in docs/decisions."""
    words = [f"{cell['users']} | {cell['requests']:,}".replace(",", " ")]
    words.append(f"{100 * cell['whole']:+.0f} | {100 * cell['bias']:+.1f}")
    words.append(f"{100 * cell['start_up']:.0f}")
    for name in FIGURES:
        found = cell[name]
        half = "" if found["half"] is None else f" / {100 * found['half']:.1f}"
        words.append(f"{100 * found['covered']:.0f} / {100 * found['open']:.0f}{half}")
    return f"| {' | '.join(words)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="200", help="of all users, or of each number of users")
    parser.add_argument("--first-seed", type=int, default=70_000)
    parser.add_argument("--users", default="8,64,256")
    parser.add_argument("--into", type=Path)
    given = parser.parse_args()
    users = [int(number) for number in given.users.split(",")]
    counts = [int(number) for number in given.seeds.split(",")]
    counts = counts if len(counts) > 1 else counts * len(users)
    rows: list[dict[str, Any]] = []
    for n_users, n_seeds in zip(users, counts, strict=True):
        found = cells(n_users, range(given.first_seed, given.first_seed + n_seeds))
        print("\n".join(map(line, found)), flush=True)
        rows += found
        if given.into:
            text = json.dumps(result(given.first_seed, rows), indent=1)
            given.into.write_text(text + "\n", encoding="utf-8")


def result(first_seed: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "benchmark": "closed_loop_coverage",
        "goal": "each interval contains the figure of the steady state in at least 92 % of runs",
        "met": min(cell[name]["covered"] for cell in rows for name in FIGURES) >= 0.92,
        "first_seed": first_seed,
        "machine": machine_line(),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
