"""Measures how often one run against one equal run is called worse or better: M/M/1 at loads from
0.5 to 0.9, response times as TTFT, with own schedules, and with the same arrivals on both sides.

    python benchmarks/compare_pairs.py [pairs]

At most 5 % of equal pairs may be worse, and 1 % better. `judged` is the share of pairs in which
p50(ttft) was judged at all: a run that is short against the memory of its queue is not. Results:
benchmarks/results/compare_pairs.json.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import msgspec
import numpy as np
from rig.machine import keep
from rig.made_up import made_up_manifest
from rig.nights import MEASURES
from rig.processes import Values, lindley

from loadgen.manifest.self_report import ClientReport
from loadgen.measure.measures import Measured
from loadgen.records import (
    CHUNKS,
    SCHEDULE,
    Names,
    Phase,
    Run,
    Status,
    TokenSource,
    empty_requests,
)
from loadgen.studies.compare.judgement import Options, decide, overall
from loadgen.studies.compare.single_pair import judge_pair

LOADS, SIZES, SEED = (0.5, 0.7, 0.9), (1000, 4000), 25


def queue_run(name: str, schedule: str, gaps: Values, rng: np.random.Generator) -> Run:
    """A run whose TTFTs are the response times of a queue with these gaps between arrivals, and
    whose TPOTs are independent."""
    n = len(gaps)
    service_s = rng.exponential(size=n)
    response_s = lindley(service_s, gaps) + service_s
    rows = np.zeros(n, SCHEDULE)
    rows["request_id"] = rows["session_id"] = np.arange(n)
    rows["scheduled_s"] = np.concatenate([[0.0], np.cumsum(gaps)[:-1]])
    rows["input_tokens"], rows["output_tokens"], rows["phase"] = 100, 2, Phase.measure
    requests = empty_requests(rows)
    released_s = rows["scheduled_s"]
    first_s = released_s + response_s
    last_s = first_s + 0.02 * rng.lognormal(0, 0.2, n)
    for column in ("released_s", "sent_s", "connected_s", "headers_s"):
        requests[column] = released_s
    for column in ("first_chunk_s", "first_token_s", "first_answer_s"):
        requests[column] = first_s
    requests["last_token_s"] = requests["done_s"] = last_s
    requests["status"], requests["http_status"] = Status.ok, 200
    requests["output_tokens"] = requests["chunks"] = 2
    requests["token_source"], requests["input_tokens"] = TokenSource.usage, 100
    chunks = np.zeros(2 * n, CHUNKS)
    chunks["request_id"] = np.repeat(np.arange(n), 2)
    chunks["received_s"] = np.column_stack([first_s, last_s]).ravel()
    manifest = made_up_manifest(name, float(released_s[-1]) + 1, n, (), ("default",))
    return Run(
        manifest=msgspec.structs.replace(manifest, schedule_sha256=schedule),
        schedule_rows=rows,
        request_rows=requests,
        chunk_rows=chunks,
        names=Names(classes=("default",), errors=("",), remotes=("",)),
        instrument=ClientReport(()),
    )


def pairs(load: float, n: int, is_paired: bool, n_pairs: int) -> dict[str, float]:
    """Shares of the pairs called worse and better, and judged."""
    rng = np.random.default_rng((SEED, int(100 * load), n, is_paired))
    counted = {"worse": 0.0, "better": 0.0, "judged": 0.0}
    for _ in range(n_pairs):
        gaps = [rng.exponential(1 / load, n + n) for _ in range(2)]  # half of it is run-in
        names = ("same", "same") if is_paired else ("a", "b")
        gaps[1] = gaps[0] if is_paired else gaps[1]
        a, b = (
            Measured(after_run_in(queue_run(name, name, own, rng)))
            for name, own in zip(names, gaps, strict=True)
        )
        rows = [
            dataclasses.replace(judge_pair(one, a, b, Options())[1], is_gated=True)
            for one in MEASURES
        ]
        verdict = overall(decide(rows, 0.95))
        counted["judged"] += np.isfinite(rows[0].p)
        if verdict in counted:
            counted[verdict] += 1
    return {key: value / n_pairs for key, value in counted.items()}


def after_run_in(run: Run) -> Run:
    """The run with its first half as warm-up."""
    rows = run.schedule_rows.copy()
    half = len(rows) // 2
    rows["phase"][:half] = Phase.warmup
    window = msgspec.structs.replace(
        run.manifest.window,
        warmup_s=float(rows["scheduled_s"][half]),
        measure_s=float(rows["scheduled_s"][-1] - rows["scheduled_s"][half]) + 1,
    )
    manifest = msgspec.structs.replace(run.manifest, window=window)
    return dataclasses.replace(run, manifest=manifest, schedule_rows=rows)


def main(n_pairs: int = 80) -> None:
    table: dict[str, Any] = {}
    for load in LOADS:
        for n in SIZES:
            for word, is_paired in (("own schedules", False), ("the same arrivals", True)):
                key = f"M/M/1 at {load:g}, {n} requests, {word}"
                table[key] = pairs(load, n, is_paired, n_pairs)
                print(key, table[key], flush=True)
    keep("compare_pairs", {"pairs": n_pairs, "seed": SEED}, table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
