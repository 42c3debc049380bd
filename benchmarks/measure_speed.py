"""How long `summarize` takes: 10⁵ requests of 60 chunks should stay within a second on one core.

Run: python benchmarks/measure_speed.py [n_requests] [n_chunks]; prints one JSON line to keep in
benchmarks/results. The run is made up: Poisson arrivals, lognormal latencies, 1 % failures.
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time

import numpy as np

from loadgen.measure.aggregate import summarize
from loadgen.records import CHUNKS, SCHEDULE, Phase, Run, Status, TokenSource, empty_requests

SLO = ["ttft <= 500ms", "tpot <= 50ms", "p99(ttft) <= 500ms", "p99(itl) <= 50ms"]


def made_up_run(n_requests: int, n_chunks: int, rate_per_s: float = 100.0) -> Run:
    rng = np.random.default_rng(1)
    schedule = np.zeros(n_requests, SCHEDULE)
    schedule["request_id"] = np.arange(n_requests)
    schedule["scheduled_s"] = np.cumsum(rng.exponential(1 / rate_per_s, n_requests))
    schedule["input_tokens"], schedule["output_tokens"] = 200, n_chunks
    schedule["phase"] = Phase.measure
    rows = empty_requests(schedule)
    rows["released_s"], rows["sent_s"] = schedule["scheduled_s"], schedule["scheduled_s"] + 1e-4
    received_s = np.cumsum(rng.lognormal(-4.5, 0.3, (n_requests, n_chunks)), axis=1)
    received_s += rows["sent_s"][:, None]
    rows["first_token_s"] = rows["first_answer_s"] = received_s[:, 0]
    rows["last_token_s"], rows["done_s"] = received_s[:, -1], received_s[:, -1] + 1e-4
    rows["status"] = np.where(rng.random(n_requests) < 0.01, Status.stream_error, Status.ok)
    rows["output_tokens"], rows["chunks"] = n_chunks, n_chunks
    rows["token_source"], rows["reused_connection"] = TokenSource.usage, True
    chunks = np.zeros(n_requests * n_chunks, CHUNKS)
    chunks["request_id"] = np.repeat(schedule["request_id"], n_chunks)
    chunks["received_s"] = received_s.ravel()
    window = {"warmup_s": 0.0, "measure_s": n_requests / rate_per_s, "drain_s": 60.0}
    return Run({"run": "speed", "window": window, "slo": SLO}, schedule, rows, chunks)


def main() -> None:
    n_requests, n_chunks = (int(word) for word in (*sys.argv[1:], "100000", "60")[:2])
    run = made_up_run(n_requests, n_chunks)
    elapsed_s = []
    for _ in range(3):
        started_s = time.perf_counter()
        summary = summarize(run)
        elapsed_s.append(round(time.perf_counter() - started_s, 3))
    print(
        json.dumps(
            {
                "benchmark": "measure_speed",
                "requests": n_requests,
                "chunks": n_requests * n_chunks,
                "summarize_s": elapsed_s,
                "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "verdict": summary.verdict,
                "machine": f"{platform.machine()}, Python {platform.python_version()}",
            }
        )
    )


if __name__ == "__main__":
    main()
